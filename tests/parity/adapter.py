"""How parity tests run this package: free-running with `LLM`, teacher-forced for whole logits."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gemma_jax.buckets import chunk_buckets, pick
from gemma_jax.llm import LLM
from gemma_jax.model.cache import CacheLayout, init_cache
from gemma_jax.model.context import PrefillContext
from gemma_jax.outputs import CompletionOutput
from gemma_jax.program import Program, make_program
from gemma_jax.sampling_params import SamplingParams

MAX_TOKENS = 2048
PAGE_SIZE = 128
ROWS = 7


def free_run(llm: LLM, prompts: Sequence[np.ndarray], max_tokens: int) -> list[CompletionOutput]:
    """Greedy completions of all prompts in one call, EOS ignored, with five logprobs a token."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
    requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise AssertionError(errors)
    return [output.outputs[0] for output in outputs]


def teacher_force(llm: LLM, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, V] float32 of every row of every sequence, `ROWS` sequences a forward."""
    length = pick(max(map(len, sequences)), chunk_buckets(MAX_TOKENS), "tokens")
    rows = min(ROWS, len(sequences))
    layout = CacheLayout.plan(llm.model_config, rows, length, length, PAGE_SIZE)
    program = make_program(llm.model_config, llm.runner.numerics, layout)
    logits: list[np.ndarray] = []
    for first in range(0, len(sequences), rows):
        part = sequences[first : first + rows]
        ids = np.zeros((rows, length), np.int32)
        for row, sequence in enumerate(part):
            ids[row, : len(sequence)] = sequence
        lengths = np.array([*map(len, part)] + [0] * (rows - len(part)), np.int32)
        batch = np.asarray(_forward(program, llm.runner.leaves, ids, lengths))
        logits += [batch[row, : len(sequence)] for row, sequence in enumerate(part)]
    return logits


@partial(jax.jit, static_argnums=0)
def _forward(program: Program, leaves, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    model, numerics = program.model(leaves), program.numerics
    rows, length = ids.shape
    cache = init_cache(program.config, program.layout, numerics.jnp_dtype)
    context = PrefillContext(
        program.config, numerics, program.kernels, program.layout, cache,
        jnp.zeros_like(lengths), lengths, length, False,
    )  # fmt: skip
    every_row = jnp.broadcast_to(jnp.arange(length), (rows, length))
    hidden = model.prefill(ids, context, every_row, fast=False)
    return model.logits(hidden, program.ops).astype(jnp.float32)
