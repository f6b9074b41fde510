"""Engines over tiny random models, driven request by request."""

from gemma_jax.engine_config import EngineConfig
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.serve.collect import Collector
from gemma_jax.serve.engine import Engine
from gemma_jax.serve.request import EngineRequest

MAX_LEN = 128
MEMORY = 2**26
NO_TOKEN = 999
"""An EOS outside the vocabulary: never drawn, and the shapes are those of a real one."""


def make_engine(runner, *, memory=MEMORY, max_len=MAX_LEN, **settings):
    defaults = {
        "dtype": "float32", "max_num_seqs": 4, "page_size": 32, "decode_steps": 8,
        "max_num_batched_tokens": 128, "mixed_batched_tokens": 32,
    }  # fmt: skip
    return Engine(runner, EngineConfig(**defaults | settings), max_len, memory)


def request(prompt, steps=40, name=None, eos=(NO_TOKEN,), seed=7, **params):
    """A request that samples, because the greedy streams of so few layers soon repeat."""
    limit = steps or None
    params = SamplingParams(**{"temperature": 1.0, "logprobs": 1, "max_tokens": limit} | params)
    name = name or f"request of {len(prompt)}"
    return EngineRequest(name, list(prompt), params, steps, tuple(eos), seed)


def complete(engine, requests, on_step=None):
    """Runs the requests to their ends; their outputs in order."""
    collectors = {}
    for i, one in enumerate(requests):
        engine.add(one)
        assert one.request_id not in collectors, i
        collectors[one.request_id] = Collector(one)
    while engine.has_work:
        for delta in engine.step():
            collectors[delta.request_id].add(delta)
        if on_step is not None:
            on_step(engine)
    return [collector.output() for collector in collectors.values()]
