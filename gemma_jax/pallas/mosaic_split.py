"""Split design of the Mosaic prefill kernel (H = 512): softmax and output in different warpgroups.

One warpgroup of each 64-row tile computes scores and softmax, H/256 others accumulate 256 output
columns each, and one more issues the loads. Keys and values come in pieces through rings of slots;
weights, and the factors of what was summed before them, pass through shared memory.
"""

import functools
from dataclasses import dataclass
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
from gemma_jax.pallas.mosaic_work import HALF, ROWS, Shape, Work, div, group_token, own_work, rem

_REGISTERS = {3: (152, 208, 24), 4: (144, 168, 24), 5: (72, 152, 24)}
"""By warpgroups of a block: registers a thread of the softmax, output and load warpgroups.

Together a block's warpgroups may not take more than they were launched with: one that waits for
registers that nobody gives back waits forever.
"""


class Memory(NamedTuple):
    """Shared memory and barriers of a block: their types, then in the kernel they themselves."""

    queries: Any
    k: Any
    v: Any
    p: Any
    factor: Any
    total: Any
    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    p_full: Any
    p_empty: Any
    total_full: Any


def scratch(shape: Shape) -> Memory:
    c = shape.config
    halves, groups = shape.halves, c.groups
    return Memory(
        queries=query_memory(shape),
        k=tiled(c.k_slots, c.block_kv, c.k_columns),
        v=tiled(halves, c.v_slots, ROWS, c.v_columns),
        p=tiled(groups, c.p_slots, ROWS, c.block_kv),
        factor=plgpu.SMEM((groups, c.p_slots, ROWS), jnp.float32),
        total=plgpu.SMEM((groups, ROWS), jnp.float32),
        q_full=queries_full(shape),
        k_full=plgpu.Barrier(num_barriers=c.k_slots),
        k_empty=freed(shape, groups, c.k_slots),
        v_full=plgpu.Barrier(num_barriers=halves * c.v_slots),
        v_empty=freed(shape, groups, halves * c.v_slots),
        p_full=plgpu.Barrier(num_barriers=groups * c.p_slots),
        p_empty=plgpu.Barrier(num_arrivals=halves, num_barriers=groups * c.p_slots),
        total_full=plgpu.Barrier(num_barriers=groups),
    )


@dataclass(frozen=True)
class _Block:
    """What the warpgroups of a block share."""

    shape: Shape
    work: Work
    memory: Memory
    interpret: bool

    @property
    def k_pieces(self) -> int:
        return self.shape.head_dim // self.shape.config.k_columns

    @property
    def v_pieces(self) -> int:
        c = self.shape.config
        return (c.block_kv // ROWS) * (HALF // c.v_columns)

    def value_piece(self, piece: int) -> tuple[int, int]:
        """(first key row of the tile, first of the 256 columns) of a piece of values."""
        columns = self.shape.config.v_columns
        across = HALF // columns
        return piece // across * ROWS, piece % across * columns


def _slot(step: jax.Array, pieces: int, piece: Any, slots: int) -> jax.Array:
    """Slot of a tile's piece in a ring."""
    return rem(step * pieces + piece, slots)


def kernel(meta, q, k, v, out, *memory, shape: Shape, interpret: bool) -> None:
    """[N, heads, H] queries, [M, K, H] keys and values; the body of one warpgroup."""
    block = _Block(shape, own_work(shape, meta), Memory(*memory), interpret)
    wg = lax.axis_index("wg")
    groups = shape.config.groups
    outputs = groups * shape.halves

    @pl.when(wg < groups)
    def _():
        _take_registers(shape, 0)
        _softmax_warpgroup(block, wg)

    @pl.when((wg >= groups) & (wg < groups + outputs))
    def _():
        _take_registers(shape, 1)
        _output_warpgroup(
            block, div(wg - groups, shape.halves), rem(wg - groups, shape.halves), out
        )

    @pl.when(wg == groups + outputs)
    def _():
        _take_registers(shape, 2)
        _load_warpgroup(block, q, k, v)


def _take_registers(shape: Shape, role: int) -> None:
    count = _REGISTERS[shape.warpgroups][role]
    at_launch = 65536 // (128 * shape.warpgroups) // 8 * 8
    plgpu.set_max_registers(count, action="increase" if count >= at_launch else "decrease")


# --- softmax --------------------------------------------------------------------------------------


def _softmax_warpgroup(block: _Block, group: jax.Array) -> None:
    """Gives out weights tile by tile, and their sums at the end."""
    memory, steps, slots = block.memory, block.work.steps, block.shape.config.p_slots

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_wait(memory.q_full.at[group])

    def body(step, carry):
        m, total = carry
        p, m, factor = softmax(_scores(block, group, step), m)
        slot = rem(step, slots)

        @pl.when(step >= slots)
        def _():
            plgpu.barrier_wait(memory.p_empty.at[group * slots + slot])

        memory.factor[group, slot] = factor
        memory.p[group, slot] = p.astype(memory.p.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.p_full.at[group * slots + slot])
        return m, total * factor + p.sum(axis=1)

    _, total = lax.fori_loop(0, steps, body, (row_array(LOWEST), row_array(0.0)))
    memory.total[group] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.total_full.at[group])
    drain(memory.p_empty, slots, steps, group * slots)


def _scores(block: _Block, group: jax.Array, step: jax.Array) -> jax.Array:
    """Masked scores of a tile of keys, whose pieces go back as soon as they are multiplied."""
    memory, c, pieces = block.memory, block.shape.config, block.k_pieces
    token = group_token(block.shape, block.work, group)
    queries = memory.queries[0]

    def multiply(acc):
        @pl.loop(0, pieces)
        def _(piece):
            slot = _slot(step, pieces, piece, c.k_slots)
            plgpu.barrier_wait(memory.k_full.at[slot])
            plgpu.wgmma(acc, queries.at[group, piece], memory.k.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(piece > 0)
            def _():
                plgpu.barrier_arrive(memory.k_empty.at[_slot(step, pieces, piece - 1, c.k_slots)])

        return acc[...]

    s = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, c.block_kv), jnp.float32))
    plgpu.barrier_arrive(memory.k_empty.at[_slot(step, pieces, pieces - 1, c.k_slots)])
    return mask_edges(block.shape, block.work, token, step, s)


# --- output ---------------------------------------------------------------------------------------


def _output_warpgroup(block: _Block, group: jax.Array, half: jax.Array, out: Any) -> None:
    """Accumulates and stores 256 columns of the output."""
    memory, c = block.memory, block.shape.config
    _, o_tiled, o_plain = memory.queries

    def body(step, acc):
        slot = rem(step, c.p_slots)
        plgpu.barrier_wait(memory.p_full.at[group * c.p_slots + slot])
        rows = plgpu.Layout.WGMMA.reduce(1)
        factor = plgpu.load(memory.factor.at[group, slot], layout=rows)
        acc = acc * lax.broadcast_in_dim(factor, acc.shape, [0])
        multiply = functools.partial(_multiply_values, block, step, half, memory.p.at[group, slot])
        acc = accumulate(acc, multiply, block.interpret)
        last = _slot(step, block.v_pieces, block.v_pieces - 1, c.v_slots)
        plgpu.barrier_arrive(memory.v_empty.at[half * c.v_slots + last])
        plgpu.barrier_arrive(memory.p_empty.at[group * c.p_slots + slot])
        return acc

    acc = lax.fori_loop(0, block.work.steps, body, zero_output())
    plgpu.barrier_wait(memory.total_full.at[group])
    total = plgpu.load(memory.total.at[group], layout=plgpu.Layout.WGMMA.reduce(1))
    store(
        block.shape, block.work, group_token(block.shape, block.work, group), half, acc, total,
        o_tiled.at[group, half], o_plain.at[group, half], out,
    )  # fmt: skip


def _multiply_values(block: _Block, step: jax.Array, half: jax.Array, p: Any, acc: Any) -> None:
    """Issues the products of weights p [64, block_kv] and a tile of values."""
    memory, c = block.memory, block.shape.config
    for piece in range(block.v_pieces):
        slot = _slot(step, block.v_pieces, piece, c.v_slots)
        rows, column = block.value_piece(piece)
        plgpu.barrier_wait(memory.v_full.at[half * c.v_slots + slot])
        v_part = memory.v.at[half, slot]
        first = block.work.k_position + step * c.block_kv + rows
        clear_outside(block.shape, block.work, first, v_part)
        plgpu.wgmma(acc.at[:, column : column + c.v_columns], p.at[:, rows : rows + ROWS], v_part)
        if piece:
            plgpu.wgmma_wait(1)
            previous = _slot(step, block.v_pieces, piece - 1, c.v_slots)
            plgpu.barrier_arrive(memory.v_empty.at[half * c.v_slots + previous])


# --- loads ----------------------------------------------------------------------------------------


def _load_warpgroup(block: _Block, q: Any, k: Any, v: Any) -> None:
    """Loads queries, and keys one tile ahead of values."""
    shape, work, memory, c = block.shape, block.work, block.memory, block.shape.config
    k_pieces, v_pieces = block.k_pieces, block.v_pieces

    @pl.when(work.steps > 0)
    def _():
        for piece in range(k_pieces):
            _load_keys(block, k, piece, jnp.int32(0))
        load_queries(shape, work, q, memory.queries[0], memory.q_full)

    @pl.loop(1, work.steps + 1)
    def _(step):
        for piece in range(max(k_pieces, v_pieces)):
            if piece < k_pieces:
                pl.when(step < work.steps)(functools.partial(_load_keys, block, k, piece, step))
            if piece < v_pieces:
                _load_values(block, v, piece, step - 1)

    drain(memory.k_empty, c.k_slots, work.steps * k_pieces)
    for half in range(shape.halves):
        drain(memory.v_empty, c.v_slots, work.steps * v_pieces, half * c.v_slots)


def _load_keys(block: _Block, k: Any, piece: int, step: jax.Array) -> None:
    work, memory, c = block.work, block.memory, block.shape.config
    index = step * block.k_pieces + piece
    slot = _slot(step, block.k_pieces, piece, c.k_slots)
    source = k.at[
        pl.ds(work.k_row + step * c.block_kv, c.block_kv),
        work.kv_head,
        piece * c.k_columns : (piece + 1) * c.k_columns,
    ]
    load(
        block.shape, source, memory.k.at[slot], memory.k_full.at[slot], memory.k_empty.at[slot],
        index >= c.k_slots,
    )  # fmt: skip


def _load_values(block: _Block, v: Any, piece: int, step: jax.Array) -> None:
    work, memory, c = block.work, block.memory, block.shape.config
    index = step * block.v_pieces + piece
    slot = _slot(step, block.v_pieces, piece, c.v_slots)
    rows, column = block.value_piece(piece)
    for half in range(block.shape.halves):
        first = half * HALF + column
        source = v.at[
            pl.ds(work.k_row + step * c.block_kv + rows, ROWS),
            work.kv_head,
            first : first + c.v_columns,
        ]
        barrier = half * c.v_slots + slot
        load(
            block.shape, source, memory.v.at[half, slot], memory.v_full.at[barrier],
            memory.v_empty.at[barrier], index >= c.v_slots,
        )  # fmt: skip
