"""Joined design of the Mosaic prefill kernel (H = 256): a warpgroup does all for its own 64 rows.

Two warpgroups share the tiles of keys and values that a third one loads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gemma_jax.pallas.mosaic_steps import (
    LOWEST,
    accumulate,
    clear_outside,
    drain,
    freed,
    load,
    load_queries,
    mask_edges,
    queries_full,
    query_memory,
    row_array,
    softmax,
    store,
    tiled,
    zero_output,
)
from gemma_jax.pallas.mosaic_work import HALF, ROWS, Shape, Work, group_token, own_work, rem


class Memory(NamedTuple):
    """Shared memory and barriers of a block: their types, then in the kernel they themselves."""

    queries: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def scratch(shape: Shape) -> Memory:
    c = shape.config
    tile = (c.stages, c.block_kv, HALF)
    return Memory(
        queries=query_memory(shape),
        k=tiled(*tile),
        v=tiled(*tile),
        q_full=queries_full(shape),
        k_full=plgpu.Barrier(num_barriers=c.stages),
        k_empty=freed(shape, c.groups, c.stages),
        v_full=plgpu.Barrier(num_barriers=c.stages),
        v_empty=freed(shape, c.groups, c.stages),
    )


def kernel(meta, q, k, v, out, *memory, shape: Shape, interpret: bool) -> None:
    """[N, heads, H] queries, [M, K, H] keys and values; the body of one warpgroup."""
    work, refs = own_work(shape, meta), Memory(*memory)
    wg = lax.axis_index("wg")

    @pl.when(wg < shape.config.groups)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _compute_warpgroup(shape, work, refs, wg, out, interpret)

    @pl.when(wg == shape.config.groups)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _load_warpgroup(shape, work, refs, q, k, v)


def _compute_warpgroup(
    shape: Shape, work: Work, memory: Memory, group: jax.Array, out: Any, interpret: bool
) -> None:
    """Scores, softmax and output of one 64-row tile."""
    token = group_token(shape, work, group)
    _, o_tiled, o_plain = memory.queries

    @pl.when(work.steps > 0)
    def _():
        plgpu.barrier_wait(memory.q_full.at[group])

    def body(step, carry):
        acc, m, total = carry
        slot = rem(step, shape.config.stages)
        s = _scores(shape, memory, group, slot)
        plgpu.barrier_arrive(memory.k_empty.at[slot])
        p, m, factor = softmax(mask_edges(shape, work, token, step, s), m)
        total = total * factor + p.sum(axis=1)
        p = p.astype(memory.v.dtype)
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
        acc = _add_values(shape, work, memory, step, p, acc, interpret)
        plgpu.barrier_arrive(memory.v_empty.at[slot])
        return acc, m, total

    acc, _, total = lax.fori_loop(
        0, work.steps, body, (zero_output(), row_array(LOWEST), row_array(0.0))
    )
    store(
        shape, work, token, 0, acc, total, o_tiled.at[group, 0], o_plain.at[group, 0], out
    )  # fmt: skip


def _scores(shape: Shape, memory: Memory, group: jax.Array, slot: jax.Array) -> jax.Array:
    def multiply(acc):
        plgpu.barrier_wait(memory.k_full.at[slot])
        plgpu.wgmma(acc, memory.queries[0].at[group, 0], memory.k.at[slot].transpose((1, 0)))
        return acc[...]

    size = (ROWS, shape.config.block_kv)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(size, jnp.float32))


def _add_values(
    shape: Shape, work: Work, memory: Memory, step: jax.Array, p: jax.Array, acc: jax.Array,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """acc [64, 256] plus weights p [64, block_kv] times a tile of values."""
    slot, keys = rem(step, shape.config.stages), shape.config.block_kv
    plgpu.barrier_wait(memory.v_full.at[slot])
    v = memory.v.at[slot]
    for rows in range(0, keys, ROWS):
        first = work.k_position + step * keys + rows
        clear_outside(shape, work, first, v.at[rows : rows + ROWS])
    if interpret:  # The interpreter has no operands in registers.
        return acc + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
    return accumulate(acc, lambda ref: plgpu.wgmma(ref, p, v), interpret)


def _load_warpgroup(shape: Shape, work: Work, memory: Memory, q: Any, k: Any, v: Any) -> None:
    """Loads queries, and keys one tile ahead of values."""
    c = shape.config

    def tile(source, target, full, empty, step):
        slot = rem(step, c.stages)
        rows = pl.ds(work.k_row + step * c.block_kv, c.block_kv)
        load(
            shape, source.at[rows, work.kv_head], target.at[slot], full.at[slot], empty.at[slot],
            step >= c.stages,
        )  # fmt: skip

    keys = functools.partial(tile, k, memory.k, memory.k_full, memory.k_empty)
    values = functools.partial(tile, v, memory.v, memory.v_full, memory.v_empty)

    @pl.when(work.steps > 0)
    def _():
        keys(jnp.int32(0))
        load_queries(shape, work, q, memory.queries[0], memory.q_full)

    @pl.loop(1, work.steps + 1)
    def _(step):
        pl.when(step < work.steps)(functools.partial(keys, step))
        values(step - 1)

    drain(memory.k_empty, c.stages, work.steps)
    drain(memory.v_empty, c.stages, work.steps)
