"""The jitted programs: prefill a chunk, decode several steps, score a chunk.

Each is a pure function of (parameter leaves, cache, inputs); cache and row state are donated and
given back. `Runner` binds them to one model; everything above it (LLM, server) calls only these.

The row state has one entry a slot. A call names the slots and the pages of its rows, so that a
request keeps its place while others come and go.

A program is compiled anew for each combination of static sizes: rows, chunk length, cache layout,
`SamplingStatics`, and whether a chunk has a past or wants logits. All come from `buckets.py`.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gemma_jax.call_arrays import Chunk, DecodeRows, PageTables, StepOutput
from gemma_jax.config import ModelConfig
from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model.cache import CacheLayout, KVCache, init_pages
from gemma_jax.model.row_blocks import map_blocks
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.program import (
    Drawn,
    Program,
    draw_tokens,
    log_probabilities,
    make_program,
    new_rows,
    prompt_rows,
)
from gemma_jax.sampling import (
    NO_ID,
    Logprobs,
    RowState,
    SamplingStatics,
    SamplingTable,
    advance,
    empty_state,
)
from gemma_jax.sharding import named_parameters

SCORE_BLOCK = 64
"""Most rows a step of the all-rows head, which bounds the memory of its float32 logits."""


STEP_BLOCK = 4
"""Decode steps between two looks at whether any row goes on.

A look costs a kernel or two; the steps of a block are unrolled.
"""

ONE_GRAPH: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_command_buffer_unroll_loops": True,
}
"""XLA's options that make a whole decode call one CUDA graph, loops included: the device decides
by itself whether it goes on. Not for batch-invariant steps: XLA cannot record the loop inside of
them (`model/row_blocks.py`) once for every step that it unrolls."""

Call = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]
"""Takes a jitted program, its static arguments and its arrays, and gives what the program gives."""


def prefill(
    program: Program,
    has_past: bool,
    wants_token: bool,
    fast: bool,
    statics: SamplingStatics,
    leaves: Sequence[jax.Array],
    cache: KVCache,
    state: RowState,
    chunk: Chunk,
    tables: PageTables,
    table: SamplingTable,
) -> tuple[KVCache, RowState, StepOutput | None]:
    """Stores the chunk's K and V; with `wants_token` samples the next token where a prompt ends.

    `table` has the chunk's rows; the output covers them, one token each.
    """
    model = program.model(leaves)
    last = jnp.maximum(chunk.lengths - 1, 0)[:, None] if wants_token else None
    cache = KVCache(cache.k, cache.v, tables.full, tables.window)
    cache, hidden = prompt_rows(program, model, cache, chunk.part, has_past, last, fast)
    if hidden is None:
        return cache, state, None
    row = RowState(
        token=jnp.zeros_like(chunk.rows),
        position=chunk.start + chunk.lengths,
        count=chunk.counts,
        finished=jnp.zeros_like(chunk.ends),
        prompt_seen=chunk.prompt_seen,
        output_counts=chunk.output_counts,
    )
    drawn = draw_tokens(
        program, model, hidden[:, 0], row, table, statics, chunk.allowed, chunk.ends
    )
    row = advance(row, table, drawn.tokens, chunk.ends)
    slots = jnp.where(chunk.ends, chunk.rows, state.token.shape[0])
    state = jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), state, row)
    return cache, state, _one_step(drawn, chunk.ends)


def decode(
    program: Program,
    max_steps: int,
    statics: SamplingStatics,
    leaves: Sequence[jax.Array],
    cache: KVCache,
    state: RowState,
    rows: DecodeRows,
    tables: PageTables,
    table: SamplingTable,
) -> tuple[KVCache, RowState, StepOutput]:
    """Up to `max_steps` tokens for every row that has not finished, without leaving the device.

    Ends early when no row goes on. The output has `max_steps` columns.
    """
    model = program.model(leaves)
    block = math.gcd(max_steps, STEP_BLOCK)
    cache = KVCache(cache.k, cache.v, tables.full, tables.window)

    def step(i, carry):
        cache, row, output = carry
        active = ~row.finished & (i < rows.limits)
        cache, hidden = new_rows(program, model, cache, row.token, row.position, active)
        row = dataclasses.replace(row, position=row.position + active.astype(jnp.int32))
        drawn = draw_tokens(program, model, hidden, row, table, statics, rows.allowed, active)
        row = advance(row, table, drawn.tokens, active)
        output = jax.tree.map(
            lambda full, x: lax.dynamic_update_slice_in_dim(full, x, i, axis=1),
            output,
            _one_step(drawn, active),
        )
        return cache, row, output

    def steps(carry):
        i, *rest = carry
        rest = lax.fori_loop(0, block, lambda j, rest: step(i + j, rest), tuple(rest))
        return i + block, *rest

    def unfinished(carry):
        i, _, row, _ = carry
        return (i < max_steps) & jnp.any(~row.finished & (i < rows.limits))

    row = jax.tree.map(lambda x: x.at[rows.rows].get(mode="clip"), state)
    output = _empty_output(rows.rows.shape[0], max_steps, statics)
    _, cache, row, output = lax.while_loop(unfinished, steps, (jnp.int32(0), cache, row, output))
    state = jax.tree.map(lambda x, y: x.at[rows.rows].set(y, mode="drop"), state, row)
    return KVCache(cache.k, cache.v), state, output


def score(
    program: Program,
    has_past: bool,
    k: int,
    leaves: Sequence[jax.Array],
    cache: KVCache,
    chunk: Chunk,
    tables: PageTables,
    targets: jax.Array,
) -> tuple[KVCache, Logprobs]:
    """Log-probabilities of `targets` [G, T] (the token after each position) at every row.

    Fast prefill does not apply: every layer runs on every row. Results are [G, T, …].
    """
    model = program.model(leaves)
    groups, length = chunk.ids.shape
    every_row = jnp.broadcast_to(jnp.arange(length), (groups, length))
    cache = KVCache(cache.k, cache.v, tables.full, tables.window)
    cache, hidden = prompt_rows(program, model, cache, chunk.part, has_past, every_row, fast=False)

    def head(rows):
        hidden, targets = rows
        return log_probabilities(program, model.logits(hidden, program.ops), targets, k)

    if program.numerics.batch_invariant:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, targets))
        valid = (every_row < chunk.lengths[:, None]).reshape(-1)
        scored = map_blocks(head, flat, valid)
        return cache, jax.tree.map(lambda x: x.reshape(groups, length, *x.shape[1:]), scored)
    block = math.gcd(SCORE_BLOCK, length)  # a chunk need not be a multiple of SCORE_BLOCK
    blocks = jax.tree.map(lambda x: _split_rows(x, block), (hidden, targets))
    scored = lax.map(head, blocks)
    return cache, jax.tree.map(lambda x: _join_rows(x, groups), scored)


def _one_step(drawn: Drawn, due: jax.Array) -> StepOutput:
    logprobs = jax.tree.map(lambda x: x[:, None], drawn.logprobs)
    return StepOutput(jnp.where(due, drawn.tokens, NO_ID)[:, None], logprobs)


def _empty_output(rows: int, steps: int, statics: SamplingStatics) -> StepOutput:
    tokens = jnp.full((rows, steps), NO_ID, jnp.int32)
    if statics.logprobs is None:
        return StepOutput(tokens, None)
    k = statics.logprobs
    return StepOutput(
        tokens,
        Logprobs(
            sampled=jnp.zeros((rows, steps), jnp.float32),
            rank=jnp.zeros((rows, steps), jnp.int32),
            top_ids=jnp.zeros((rows, steps, k), jnp.int32),
            top=jnp.zeros((rows, steps, k), jnp.float32),
        ),
    )


def _split_rows(x: jax.Array, block: int) -> jax.Array:
    """[G, T, …] -> [T / block, G, block, …]."""
    groups, length, *rest = x.shape
    return jnp.moveaxis(x.reshape(groups, length // block, block, *rest), 1, 0)


def _join_rows(x: jax.Array, groups: int) -> jax.Array:
    """The inverse of `_split_rows`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(groups, -1, *x.shape[3:])


_prefill = jax.jit(prefill, static_argnums=range(5), donate_argnames=("cache", "state"))
_decode = jax.jit(decode, static_argnums=range(3), donate_argnames=("cache", "state"))
_decode_on_gpu = jax.jit(
    decode,
    static_argnums=range(3),
    donate_argnames=("cache", "state"),
    compiler_options=ONE_GRAPH,
)
_score = jax.jit(score, static_argnums=range(3), donate_argnames=("cache",))


def run_program(program: Any, static: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """The `Call` that runs the program."""
    return program(*static, *arrays)


class Runner:
    """The three programs bound to one model's leaves.

    Args:
      config: the network.
      numerics: compute dtype and rounding.
      leaves: path → array of every weight, as the checkpoint loader gives them.
      fast_prefill: run KV-shared layers only on the rows whose logits are wanted.
      kernels: the implementation of each op.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        leaves: Mapping[str, jax.Array],
        fast_prefill: bool = True,
        kernels: Kernels = AUTO,
    ):
        self.config, self.numerics, self.fast_prefill = config, numerics, fast_prefill
        self.kernels = kernels
        self._call: Call = run_program
        names = named_parameters(abstract_model(config, numerics))
        self._leaves = [leaves[path] for path in names]
        self._replicated = _replicated_like(self._leaves[0])

    def calling(self, call: Call) -> Self:
        """This runner with `call` in the place of running a program; they share the weights."""
        other = copy.copy(self)
        other._call = call
        return other

    @property
    def leaves(self) -> list[jax.Array]:
        """The flat weights, in the order that the programs take them."""
        return self._leaves

    def new_cache(self, num_full_pages: int, num_window_pages: int, page_size: int) -> KVCache:
        """An empty cache of pages on the device."""
        sizes = num_full_pages, num_window_pages, page_size
        return self.place(_new_cache(self.config, *sizes, self.numerics.dtype))

    def new_state(self, slots: int, penalties: bool = False) -> RowState:
        """The state of `slots` empty slots on the device; with penalties it counts ids too."""
        return self.place(_new_state(slots, self.config.vocab_size if penalties else None))

    def prefill(
        self,
        layout: CacheLayout,
        cache: KVCache,
        state: RowState,
        chunk: Chunk,
        tables: PageTables,
        table: SamplingTable,
        statics: SamplingStatics,
        *,
        has_past: bool,
        wants_token: bool,
    ) -> tuple[KVCache, RowState, StepOutput | None]:
        """See `prefill`; `cache` and `state` are consumed."""
        has_past |= self.numerics.batch_invariant  # one program for both
        return self._call(
            _prefill,
            (self._program(layout), has_past, wants_token, self.fast_prefill, statics),
            (self._leaves, cache, state, chunk, tables, table),
        )

    def decode(
        self,
        layout: CacheLayout,
        cache: KVCache,
        state: RowState,
        rows: DecodeRows,
        tables: PageTables,
        table: SamplingTable,
        statics: SamplingStatics,
        *,
        max_steps: int,
    ) -> tuple[KVCache, RowState, StepOutput]:
        """See `decode`; `cache` and `state` are consumed."""
        return self._call(
            _decode_on_gpu if self.is_one_graph(max_steps) else _decode,
            (self._program(layout), max_steps, statics),
            (self._leaves, cache, state, rows, tables, table),
        )

    def score(
        self,
        layout: CacheLayout,
        cache: KVCache,
        chunk: Chunk,
        tables: PageTables,
        targets: jax.Array,
        *,
        has_past: bool,
        k: int,
    ) -> tuple[KVCache, Logprobs]:
        """See `score`; `cache` is consumed."""
        has_past |= self.numerics.batch_invariant
        return self._call(
            _score,
            (self._program(layout), has_past, k),
            (self._leaves, cache, chunk, tables, targets),
        )

    def is_one_graph(self, max_steps: int) -> bool:
        """Whether a decode call of so many steps is one CUDA graph."""
        on_gpu = jax.default_backend() == "gpu"
        return on_gpu and max_steps > 1 and not self.numerics.batch_invariant

    def _program(self, layout: CacheLayout) -> Program:
        return make_program(self.config, self.numerics, layout, self.kernels)

    def place[T](self, tree: T) -> T:
        """Arrays where the programs leave theirs; placed otherwise they would compile again."""
        return jax.device_put(tree, self._replicated)


def _replicated_like(leaf: jax.Array) -> jax.sharding.Sharding:
    """Whole arrays on the devices of `leaf`."""
    if isinstance(leaf.sharding, NamedSharding):
        return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return leaf.sharding


@partial(jax.jit, static_argnums=range(5))
def _new_cache(
    config: ModelConfig, full_pages: int, window_pages: int, page_size: int, dtype: str
) -> KVCache:
    return init_pages(config, full_pages, window_pages, page_size, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=range(2))
def _new_state(slots: int, vocab_size: int | None) -> RowState:
    return empty_state(slots, vocab_size)


def compiled_programs() -> int:
    """Number of programs compiled so far in this process, over all runners."""
    programs: tuple[Any, ...] = (_prefill, _decode, _decode_on_gpu, _score)
    return sum(f._cache_size() for f in programs)
