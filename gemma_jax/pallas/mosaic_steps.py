"""Steps that both designs of the Mosaic prefill kernel share: loads, masks, softmax, output."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gemma_jax.pallas.mosaic_work import ALIGN, HALF, ROWS, Shape, Work, div, group_token

LOG2E = math.log2(math.e)
LOWEST = -1e30
"""First running maximum: finite, so that a row whose first keys are all masked has no NaN."""


# --- registers and shared memory ------------------------------------------------------------------


def tiled(*shape: int) -> Any:
    """bf16 shared memory in the swizzled tiles that wgmma reads."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tiling((ALIGN, 64)), swizzle(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def query_memory(shape: Shape) -> Any:
    """Queries, and in their place at the end the output: tiled, or plain to store single rows."""
    groups, columns = shape.config.groups, shape.q_columns
    size = (groups, shape.halves, ROWS, HALF)
    queries = tiled(groups, shape.head_dim // columns, ROWS, columns)
    return plgpu.RefUnion(queries, tiled(*size), plgpu.SMEM(size, jnp.bfloat16))


def queries_full(shape: Shape) -> Any:
    """The barriers that count the copies of `load_queries`."""
    copies = shape.group * (shape.head_dim // shape.q_columns)
    return plgpu.Barrier(num_arrivals=copies, num_barriers=shape.config.groups)


def freed(shape: Shape, arrivals: int, count: int) -> Any:
    """Barriers by which all readers of the cluster give slots back."""
    if shape.config.cluster > 1:
        return plgpu.ClusterBarrier(
            collective_axes=("block",), num_arrivals=arrivals, num_barriers=count
        )
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def zero_output() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), plgpu.Layout.WGMMA)


def row_array(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


# --- scores and output ----------------------------------------------------------------------------


def mask_edges(
    shape: Shape, work: Work, token: jax.Array, step: jax.Array, s: jax.Array
) -> jax.Array:
    """Scores with -inf for keys before the sequence, behind the query or left of its window."""
    keys = shape.config.block_kv
    window = shape.window
    k_first = work.k_position + step * keys
    q_first = work.position + token
    inside = (k_first >= 0) & (k_first + keys - 1 <= q_first)
    if window is not None:
        inside &= k_first > q_first + shape.tokens - 1 - window

    def masked(s):
        column = _iota((ROWS, keys), 1)
        row = lax.rem(_iota((ROWS, keys), 0), jnp.int32(shape.tokens))
        ahead = (row + (q_first - k_first)) - column
        seen = (ahead >= 0) & (column >= -k_first)
        if window is not None:
            seen &= ahead < window
        return jnp.where(seen, s, -jnp.inf)

    return lax.cond(inside, lambda s: s, masked, s)


def softmax(s: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, new maximum · log2 e, factor of what was summed before)."""
    new = jnp.maximum(m, s.max(axis=1) * LOG2E)
    p = jnp.exp2(s * LOG2E - lax.broadcast_in_dim(new, s.shape, [0]))
    return p, new, jnp.exp2(m - new)


def clear_outside(shape: Shape, work: Work, first: jax.Array, v: Any) -> None:
    """Zeroes the rows of a value tile [64, columns] that are not the sequence's: 0 · NaN is NaN."""
    rows, columns = v.shape

    @pl.when((first < 0) | (first + rows > work.k_length))
    def _():
        position = _iota((rows, ROWS), 0) + first
        own = (position >= 0) & (position < work.k_length)
        for c in range(0, columns, ROWS):
            part = v.at[:, c : c + ROWS]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            part[...] = jnp.where(own, x, 0.0).astype(v.dtype)
        plgpu.commit_smem()


def accumulate(acc: Any, multiply: Any, interpret: bool) -> Any:
    """`acc` plus the products that `multiply` issues on an accumulator, in place on a GPU."""
    if interpret:  # The interpreter has no initialised accumulators.

        def fresh(ref):
            multiply(ref)
            return ref[...]

        return acc + pl.run_scoped(fresh, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))
    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))


def store(
    shape: Shape, work: Work, token: jax.Array, half: Any, acc: jax.Array, total: jax.Array,
    tiled: Any, plain: Any, out: Any,
) -> None:  # fmt: skip
    """Writes a tile [64, 256]: at once, or row by row where other sequences own some rows."""
    o = acc * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), acc.shape, [0])
    tokens, columns = shape.tokens, pl.ds(half * HALF, HALF)
    low = jnp.maximum(token, work.live_from)
    high = jnp.minimum(token + tokens, work.store_to)
    whole = (token >= work.live_from) & (token + tokens <= jnp.minimum(work.live_to, work.store_to))
    heads = [work.head * shape.group + g for g in range(shape.group)]

    @pl.when(whole)
    def _():
        tiled[...] = o.astype(out.dtype)
        plgpu.commit_smem()
        for g, head in enumerate(heads):
            for part in range(0, tokens, ALIGN):
                plgpu.copy_smem_to_gmem(
                    tiled.at[g * tokens + part : g * tokens + part + ALIGN],
                    out.at[pl.ds(work.q_row + token + part, ALIGN), head, columns],
                )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store_rows(first, end, row_of):
        @pl.loop(first, end)
        def _(t):
            for g, head in enumerate(heads):
                plgpu.copy_smem_to_gmem(
                    plain.at[pl.ds(row_of(g, t), 1)],
                    out.at[pl.ds(work.q_row + t, 1), head, columns],
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(jnp.logical_not(whole) & (low < high))
    def _():
        row = lax.rem(_iota(acc.shape, 0), jnp.int32(tokens)) + token
        live = (row >= work.live_from) & (row < work.live_to)
        plain[...] = jnp.where(live, o, 0.0).astype(out.dtype)
        plgpu.commit_smem()
        store_rows(low, high, lambda g, t: g * tokens + t - token)

    _zero_padding(shape, work, token, plain, store_rows, out.dtype)


def _zero_padding(
    shape: Shape, work: Work, token: jax.Array, plain: Any, store_rows: Callable[..., None],
    dtype: Any,
) -> None:  # fmt: skip
    """Writes zeros where the tiles of the longest sequence do not reach, shared among them."""
    stride = shape.tiles * shape.cluster_tokens

    @pl.when(token + stride < work.store_to)
    def _():
        plain[...] = plgpu.layout_cast(jnp.zeros((ROWS, HALF), dtype), plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        @pl.loop(0, div(work.store_to - token - 1, stride))
        def _(i):
            first = token + (i + 1) * stride
            store_rows(first, jnp.minimum(first + shape.tokens, work.store_to), lambda g, t: 0)


# --- loads ----------------------------------------------------------------------------------------


def load_queries(shape: Shape, work: Work, q: Any, q_smem: Any, barrier: Any) -> None:
    """Copies the block's queries, head by head, and arrives at the barrier of their tile."""
    for group in range(shape.config.groups):
        row = work.q_row + group_token(shape, work, group)
        for g in range(shape.group):
            for piece in range(shape.head_dim // shape.q_columns):
                plgpu.copy_gmem_to_smem(
                    q.at[
                        pl.ds(row, shape.tokens),
                        work.head * shape.group + g,
                        piece * shape.q_columns : (piece + 1) * shape.q_columns,
                    ],
                    q_smem.at[group, piece, g * shape.tokens : (g + 1) * shape.tokens],
                    barrier.at[group],
                )


def load(shape: Shape, source: Any, target: Any, full: Any, empty: Any, wait: Any) -> None:
    """One piece of keys or values, for all blocks of the cluster, once its slot is free."""

    @pl.when(wait)
    def _():
        plgpu.barrier_wait(empty)

    axes = "block" if shape.config.cluster > 1 else None
    plgpu.copy_gmem_to_smem(source, target, full, collective_axes=axes)


def drain(empty: Any, slots: int, used: jax.Array, first: Any = 0) -> None:
    """Waits until every used slot was given back: a block must outlive what others send it."""
    for slot in range(slots):

        @pl.when(slot < used)
        def _(slot=slot):
            plgpu.barrier_wait(empty.at[first + slot])
