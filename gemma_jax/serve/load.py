"""Makes the engine of a model in the process that runs it, and compiles what it will need."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gemma_jax.buckets import chunk_buckets, decode_row_buckets
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.serve.engine_process import LoadedEngine
from gemma_jax.serve.request import EngineRequest

if TYPE_CHECKING:
    from gemma_jax.llm import LLM


SERVING: dict[str, Any] = {"mixed_batched_tokens": 4096, "decode_steps": 8}
"""Settings of a server unless it asks for others: streams go on soon, and tokens come often."""


def load_engine(settings: Mapping[str, Any], warm: bool = True) -> LoadedEngine:
    """The engine of `LLM(**settings)` with `SERVING` under them, by default after `warm_up`."""
    from gemma_jax.llm import LLM  # JAX, in this process only

    llm = LLM(**SERVING | dict(settings))
    if warm:
        warm_up(llm)
    return LoadedEngine(llm.engine, llm.max_num_seqs)


def warm_up(llm: "LLM") -> None:
    """Compile the programs of usual traffic and run some, so that the first requests find them.

    On a GPU those of `usual_batches`, several at a time. Then one request runs alone, and as many
    as run together, with the sampling of the checkpoint and greedily. What is missing, on a CPU
    every other batch size, compiles at its first use.
    """
    import jax

    if jax.default_backend() == "gpu":
        llm.engine.compile_for(usual_batches(llm))
    for params in _usual_params(llm):
        for count in (1, llm.max_num_seqs):
            for request in _requests(llm, count, [0], params):
                llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()


def usual_batches(llm: "LLM") -> Iterator[list[EngineRequest]]:
    """Requests for every number of decoding rows, and a prompt of every length of a chunk."""
    from gemma_jax.engine_config import MAX_CHUNK  # JAX again

    longest = min(llm.engine_config.mixed_tokens(), MAX_CHUNK)
    other = itertools.count()  # a prompt that the prefix cache knows would be cut shorter
    for params in _usual_params(llm):
        for count in decode_row_buckets(llm.max_num_seqs):
            yield _requests(llm, count, [next(other)], params)
        for length in chunk_buckets(longest):
            if length + 2 * llm.engine_config.decode_steps <= llm.max_model_len:
                yield _requests(llm, 1, [next(other)] * length, params)


def _usual_params(llm: "LLM") -> list[SamplingParams]:
    """The checkpoint's sampling, and greedy."""
    usual = llm.generation_defaults.sampling_params(ignore_eos=True)
    usual = usual.replace(max_tokens=2 * llm.engine_config.decode_steps)
    return [usual, usual.replace(temperature=0.0)]


def _requests(
    llm: "LLM", count: int, prompt: list[int], params: SamplingParams
) -> list[EngineRequest]:
    return [llm.make_request(prompt, params, f"warm-up-{i}") for i in range(count)]
