"""What compiled programs are made of: their static context, and the passes through the network.

A batch-invariant program on a CPU takes rows a block at a time (`model/row_blocks.py`), prompts and
generated tokens alike; every other program takes all rows of a call at once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from gemma_jax.config import ModelConfig
from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model.cache import CacheLayout, KVCache
from gemma_jax.model.invariant import rows_of_sequences
from gemma_jax.model.kernel_context import decode_context, prefill_context
from gemma_jax.model.residual import Ops
from gemma_jax.model.row_blocks import fold_blocks, map_blocks
from gemma_jax.model.transformer import Gemma4, abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.sampling import (
    Logprobs,
    RowState,
    SamplingStatics,
    SamplingTable,
    sample,
    token_logprobs,
)


@dataclass(frozen=True, eq=False)
class Program:
    """Static context of compiled programs: the model, its numerics and the cache layout.

    Hashed by identity, because jit hashes it on every call: take it from `make_program`.
    """

    graphdef: Any
    treedef: Any
    config: ModelConfig
    numerics: Numerics
    layout: CacheLayout
    kernels: Kernels

    @property
    def ops(self) -> Ops:
        return Ops(self.numerics, self.kernels, self.config.rms_norm_eps)

    @property
    def runs_in_blocks(self) -> bool:
        """Whether rows pass through the network a fixed number at a time."""
        return self.numerics.batch_invariant and not self.ops.fixes_sums

    def model(self, leaves: Sequence[jax.Array]) -> Gemma4:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


@functools.lru_cache
def make_program(
    config: ModelConfig, numerics: Numerics, layout: CacheLayout, kernels: Kernels = AUTO
) -> Program:
    """The one `Program` of these settings in this process."""
    graphdef, state = nnx.split(abstract_model(config, numerics))
    return Program(graphdef, jax.tree.structure(state), config, numerics, layout, kernels)


class PromptRows(NamedTuple):
    """Consecutive prompt tokens of G sequences: ids [G, T], right-padded, start and lengths [G]."""

    ids: jax.Array
    start: jax.Array
    lengths: jax.Array


def prompt_rows(
    program: Program,
    model: Gemma4,
    cache: KVCache,
    part: PromptRows,
    has_past: bool,
    rows: jax.Array | None,
    fast: bool,
) -> tuple[KVCache, jax.Array | None]:
    """The cache with K and V of `part`, and final-normed states [G, R, D] of its `rows` [G, R]."""
    if program.runs_in_blocks:
        return _prompt_rows_in_blocks(program, model, cache, part, rows)
    context = prefill_context(
        program.config, program.numerics, program.kernels, program.layout, cache,
        part.start, part.lengths, part.ids.shape[1], has_past,
    )  # fmt: skip
    hidden = model.prefill(part.ids, context, rows, fast)
    return KVCache(context.cache.k, context.cache.v), hidden


def _prompt_rows_in_blocks(
    program: Program, model: Gemma4, cache: KVCache, part: PromptRows, rows: jax.Array | None
) -> tuple[KVCache, jax.Array | None]:
    groups, length = part.ids.shape
    step = jnp.arange(length, dtype=part.start.dtype)
    position = (part.start[:, None] + step).reshape(-1)
    valid = (step < part.lengths[:, None]).reshape(-1)
    every = rows_of_sequences(cache, jnp.repeat(jnp.arange(groups), length))
    every, hidden = new_rows(program, model, every, part.ids.reshape(-1), position, valid)
    cache = KVCache(every.k, every.v)
    if rows is None:
        return cache, None
    hidden = hidden.reshape(groups, length, -1)
    return cache, jnp.take_along_axis(hidden, rows[..., None], axis=1)


def new_rows(
    program: Program,
    model: Gemma4,
    cache: KVCache,
    ids: jax.Array,
    position: jax.Array,
    active: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """The cache with one new token a row, and the final-normed states [B, D]."""
    numerics, kernels = program.numerics, program.kernels

    def forward(kv, rows):
        ids, position, active, full, window = rows
        cache = KVCache(kv[0], kv[1], full, window)
        context = decode_context(
            program.config, numerics, kernels, program.layout, cache, position, active
        )
        hidden = model.decode(ids, context)
        return (context.cache.k, context.cache.v), hidden

    rows = ids, position, active, cache.full_table, cache.window_table
    if program.runs_in_blocks:
        (k, v), hidden = fold_blocks(forward, (cache.k, cache.v), rows, active)
    else:
        (k, v), hidden = forward((cache.k, cache.v), rows)
    return dataclasses.replace(cache, k=k, v=v), hidden


@jax.tree_util.register_dataclass
@dataclass
class Drawn:
    """Tokens [B] of every row, and their `Logprobs` if asked for."""

    tokens: jax.Array
    logprobs: Logprobs | None


def draw_tokens(
    program: Program,
    model: Gemma4,
    hidden: jax.Array,
    row: RowState,
    table: SamplingTable,
    statics: SamplingStatics,
    allowed: jax.Array | None,
    due: jax.Array,
) -> Drawn:
    """The next token of each row that is `due` [B], from final-normed states [B, D]."""

    def choose(rows):
        logits, row, table, allowed = rows
        tokens = sample(logits, table, row, statics, program.kernels, allowed)
        logprobs = None
        if statics.logprobs is not None:
            logprobs = log_probabilities(program, logits, tokens, statics.logprobs)
        return Drawn(tokens, logprobs)

    def draw(rows):
        logits = model.logits(rows[0], program.ops)
        if program.numerics.batch_invariant:
            logits = lax.optimization_barrier(logits)
        return choose((logits, *rows[1:]))

    rows = hidden, row, table, allowed
    if program.runs_in_blocks:
        return map_blocks(draw, rows, due)
    if program.numerics.batch_invariant:
        return map_blocks(choose, (model.logits(hidden, program.ops), *rows[1:]), None)
    return draw(rows)


def log_probabilities(program: Program, logits: jax.Array, tokens: jax.Array, k: int) -> Logprobs:
    """`token_logprobs`, in a batch-invariant program untouched by what surrounds it."""
    if not program.numerics.batch_invariant:
        return token_logprobs(logits, tokens, k)
    logits, tokens = lax.optimization_barrier((logits, tokens))
    return lax.optimization_barrier(token_logprobs(logits, tokens, k))
