"""Prefill attention on Hopper: wgmma and TMA through Pallas' Mosaic GPU back end (sm_90).

    out[i] = sum_j softmax_j(q[i] · k[j]) v[j]   over keys j <= p_i, and j > p_i - window

with p_i = k_length - q_length + i, no scale, float32 scores, softmax and accumulation, weights
rounded to bf16 before the second product. Shapes: q [N, K, G, H], k and v [M, K, H], bf16, H 256 or
512. `prefill_attention.py` has the reference and the public op.

A block owns 64-row tiles: 64/G tokens times the G query heads of one key/value head, so that a
causal or window edge wastes few products. Two designs:

- `split` (H = 512): one warpgroup computes scores and softmax, H/256 others each accumulate 256
  output columns (64x256 float32 is half of a warpgroup's registers); weights and row scales pass
  through shared memory. Scores are computed once although the output needs two warpgroups.
- `joined` (H = 256): each warpgroup does both for its own 64 rows, two of them sharing keys.

One more warpgroup issues the loads. In a cluster of two blocks each loads half of every key tile
for both: at 64 rows a block L2 bandwidth would otherwise bound the kernel. TMA needs row addresses
that are multiples of 8, so tiles start at rows rounded down to 8 and the rows before a sequence are
masked like those behind it.

Limits: N and M are multiples of 8 and at least 64, G divides 64, jax below 0.12 on a GPU. Rows of
no sequence are written as zeros, except those before the first sequence, which are undefined.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gemma_jax.errors import UnsupportedError
from gemma_jax.numerics import Numerics
from gemma_jax.pallas.device import SHARED_MEMORY, Device, current_device
from gemma_jax.pallas.segments import Segments

ROWS = 64
"""Rows of a wgmma product."""
HALF = 256
"""Output columns of one warpgroup: the widest wgmma, and 128 accumulator registers a thread."""
ALIGN = 8
"""Rows of a swizzled tile: what a TMA row address must divide by."""
LOG2E = math.log2(math.e)
LOWEST = -1e30
"""First running maximum: finite, so that a row whose first keys are all masked has no NaN."""


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      design: "split" or "joined", see the module.
      groups: 64-row tiles of a block.
      block_kv: keys of a tile, a multiple of 64.
      k_columns, k_slots: split: columns and number of the pieces in which a key tile is streamed.
      v_columns, v_slots: split: the same of 64 values, for each 256 columns.
      turns: split: softmax warpgroups of a 64-row tile, which take key tiles in turn.
      p_slots: split: tiles of weights in flight between the warpgroups, a multiple of `turns`.
      stages: joined: key and value tiles in flight.
      ping_pong: joined: one warpgroup's softmax runs under the other's products by a barrier.
      cluster: blocks that share their loads, 1 or 2.
      auto_barriers: the compiler orders each access of shared memory by a barrier of its own.
      tile_major: last query tiles of all sequences first, rather than one sequence after another.
    """

    design: Literal["split", "joined"]
    groups: int = 1
    block_kv: int = 64
    k_columns: int = 128
    k_slots: int = 4
    v_columns: int = 128
    v_slots: int = 2
    turns: int = 1
    p_slots: int = 2
    stages: int = 2
    ping_pong: bool = False
    cluster: int = 1
    tile_major: bool = True
    auto_barriers: bool = True


def default_config(head_dim: int) -> Config:
    if head_dim == 512:
        return Config("split", cluster=2)
    return Config("joined", groups=2)


def unsupported(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, device: Device
) -> str | None:
    """Why this kernel cannot take these inputs; None if it can. A CPU interprets it."""
    rows, _, group, head_dim = q.shape
    if device.is_gpu and device.capability != (9, 0):
        return f"needs compute capability 9.0, {device.kind} has another"
    if device.is_gpu and jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} does not find its layouts in minutes; 0.11.2 does in seconds"
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"needs bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if head_dim not in (256, 512):
        return f"needs a head width of 256 or 512, got {head_dim}"
    if ROWS % group:
        return f"needs query heads per key head that divide {ROWS}, got {group}"
    if rows % ALIGN or k.shape[0] % ALIGN:
        return f"needs multiples of {ALIGN} query and key rows, got {rows} and {k.shape[0]}"
    if min(rows, k.shape[0]) < ROWS:
        return f"needs {ROWS} query and key rows, got {rows} and {k.shape[0]}"
    if window is not None and window < 1:
        return f"needs a positive window, got {window}"
    return None


# --- geometry ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """Static facts of one call."""

    batch: int
    kv_heads: int
    group: int
    fold: int
    head_dim: int
    window: int | None
    max_q_len: int
    config: Config

    @property
    def halves(self) -> int:
        return self.head_dim // HALF

    @property
    def q_columns(self) -> int:
        """Columns of a product of queries and keys."""
        return self.config.k_columns if self.config.design == "split" else HALF

    @property
    def tokens(self) -> int:
        """Tokens of one 64-row tile."""
        return ROWS // self.group

    @property
    def cluster_tokens(self) -> int:
        return self.tokens * self.config.groups * self.config.cluster

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.max_q_len + ALIGN - 1, self.cluster_tokens)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.fold

    @property
    def clusters(self) -> int:
        return self.tiles * self.heads * self.batch


@dataclass(frozen=True)
class _Work:
    """Where a block's rows and keys lie; all traced int32.

    Token t of a sequence counts from `q_row`, the query row rounded down to 8; its position is
    `position + t`. Key tile i has rows from `k_row + i·block_kv`, the first at position
    `k_position + i·block_kv`.
    """

    head: jax.Array
    kv_head: jax.Array
    first_token: jax.Array
    q_row: jax.Array
    position: jax.Array
    live_from: jax.Array
    live_to: jax.Array
    store_to: jax.Array
    k_row: jax.Array
    k_position: jax.Array
    k_length: jax.Array
    steps: jax.Array


def _div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x, jnp.int32(y))


def _rem(x: jax.Array, y: int) -> jax.Array:
    return lax.rem(x, jnp.int32(y))


def _floor8(x: jax.Array) -> jax.Array:
    return _div(x, ALIGN) * ALIGN


def _meta(segments: Segments, rows: int) -> jax.Array:
    """[5, B]: the segments, and where the rows that each must write end."""
    ends = jnp.concatenate([segments.q_offsets[1:], jnp.full((1,), rows, jnp.int32)])
    return jnp.stack([*segments, ends]).astype(jnp.int32)


def _own_work(shape: _Shape, meta: Any) -> _Work:
    block = lax.axis_index("block") if shape.config.cluster > 1 else jnp.int32(0)
    return _work(shape, meta, lax.axis_index("tile"), block)


def _work(shape: _Shape, meta: Any, index: jax.Array, block: jax.Array) -> _Work:
    """The work of a block of cluster `index`: heaviest query tiles first."""
    pairs = shape.heads * shape.batch
    if shape.config.tile_major:
        tile, pair = shape.tiles - 1 - _div(index, pairs), _rem(index, pairs)
    else:
        tile, pair = shape.tiles - 1 - _rem(index, shape.tiles), _div(index, shape.tiles)
    head, b = _rem(pair, shape.heads), _div(pair, shape.heads)
    q_offset, q_length, k_offset, k_length, q_end = (meta[i, b] for i in range(5))
    q_base, k_base = _floor8(q_offset), _floor8(k_offset)
    q_shift, k_shift = q_offset - q_base, k_offset - k_base
    position = k_length - q_length - q_shift

    first = tile * shape.cluster_tokens
    low = jnp.maximum(first, q_shift)
    high = jnp.minimum(first + shape.cluster_tokens, q_shift + q_length) - 1
    window = shape.window
    first_key = 0 if window is None else jnp.maximum(position + low - window + 1, 0)
    k_low = _floor8(k_shift + first_key)
    keys = k_shift + position + high + 1 - k_low
    steps = _div(keys + shape.config.block_kv - 1, shape.config.block_kv)
    steps = jnp.where(low <= high, jnp.maximum(steps, 0), 0)  # nothing to do past the sequence
    return _Work(
        head=head,
        kv_head=_div(head, shape.fold),
        first_token=first + block * (shape.tokens * shape.config.groups),
        q_row=q_base,
        position=position,
        live_from=q_shift,
        live_to=q_shift + q_length,
        store_to=q_end - q_base,
        k_row=k_base + k_low,
        k_position=k_low - k_shift,
        k_length=k_length,
        steps=jnp.where(high >= low, steps, 0),
    )


def _group_token(shape: _Shape, work: _Work, group: Any) -> jax.Array:
    """First token of one of the block's 64-row tiles."""
    return work.first_token + group * shape.tokens


# --- steps of a warpgroup -------------------------------------------------------------------------


def _row_array(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _mask_edges(
    shape: _Shape, work: _Work, token: jax.Array, step: jax.Array, s: jax.Array
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


def _softmax(s: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, new maximum · log2 e, factor of what was summed before)."""
    new = jnp.maximum(m, s.max(axis=1) * LOG2E)
    p = jnp.exp2(s * LOG2E - lax.broadcast_in_dim(new, s.shape, [0]))
    return p, new, jnp.exp2(m - new)


def _clear_outside(shape: _Shape, work: _Work, first: jax.Array, v: Any) -> None:
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


def _accumulate(acc: Any, multiply: Any, interpret: bool) -> Any:
    """`acc` plus the products that `multiply` issues on an accumulator, in place on a GPU."""
    if interpret:  # The interpreter has no initialised accumulators.

        def fresh(ref):
            multiply(ref)
            return ref[...]

        return acc + pl.run_scoped(fresh, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))
    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))


def _store(
    shape: _Shape, work: _Work, token: jax.Array, half: Any, acc: jax.Array, total: jax.Array,
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

    # Padding that the tiles of the longest sequence do not reach is shared out among them.
    stride = shape.tiles * shape.cluster_tokens

    @pl.when(token + stride < work.store_to)
    def _():
        plain[...] = plgpu.layout_cast(jnp.zeros(acc.shape, out.dtype), plgpu.Layout.WGMMA)
        plgpu.commit_smem()

        @pl.loop(0, _div(work.store_to - token - 1, stride))
        def _(i):
            first = token + (i + 1) * stride
            store_rows(first, jnp.minimum(first + tokens, work.store_to), lambda g, t: 0)


def _load_queries(shape: _Shape, work: _Work, q: Any, q_smem: Any, barrier: Any) -> None:
    for group in range(shape.config.groups):
        row = work.q_row + _group_token(shape, work, group)
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


def _load(shape: _Shape, source: Any, target: Any, full: Any, empty: Any, wait: Any) -> None:
    """One piece of keys or values, for all blocks of the cluster, once its slot is free."""

    @pl.when(wait)
    def _():
        plgpu.barrier_wait(empty)

    axes = "block" if shape.config.cluster > 1 else None
    plgpu.copy_gmem_to_smem(source, target, full, collective_axes=axes)


def _drain(empty: Any, slots: int, used: jax.Array, first: Any = 0) -> None:
    """Waits until every used slot was given back: a block must outlive what others send it."""
    for slot in range(slots):

        @pl.when(slot < used)
        def _(slot=slot):
            plgpu.barrier_wait(empty.at[first + slot])


# --- split design ---------------------------------------------------------------------------------


def _split_kernel(
    meta, q, k, v, out,
    q_union, k_smem, v_smem, p_smem, alpha_smem, m_smem, total_smem,
    q_full, k_full, k_empty, v_full, v_empty, p_full, p_empty, m_full, total_full,
    *, shape: _Shape, interpret: bool,
):  # fmt: skip
    c = shape.config
    q_smem, o_smem, o_plain = q_union
    work = _own_work(shape, meta)
    wg = lax.axis_index("wg")
    k_pieces = shape.head_dim // c.k_columns
    v_pieces = (c.block_kv // ROWS) * (HALF // c.v_columns)
    softmax_wgs, output_wgs = c.groups * c.turns, c.groups * shape.halves

    @pl.when(wg < softmax_wgs)
    def _softmax_warpgroup():
        _take_registers(shape, 0)
        group, turn = _div(wg, c.turns), _rem(wg, c.turns)
        token = _group_token(shape, work, group)

        @pl.when(work.steps > 0)
        def _():
            plgpu.barrier_wait(q_full.at[group])

        def scores(step):
            def multiply(acc):
                @pl.loop(0, k_pieces)
                def _(piece):
                    slot = _slot(step, k_pieces, piece, c.k_slots)
                    plgpu.barrier_wait(k_full.at[turn * c.k_slots + slot])
                    plgpu.wgmma(acc, q_smem.at[group, piece], k_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)

                    @pl.when(piece > 0)
                    def _():
                        previous = _slot(step, k_pieces, piece - 1, c.k_slots)
                        plgpu.barrier_arrive(k_empty.at[previous])

                return acc[...]

            s = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, c.block_kv), jnp.float32))
            plgpu.barrier_arrive(k_empty.at[_slot(step, k_pieces, k_pieces - 1, c.k_slots)])
            return _mask_edges(shape, work, token, step, s)

        def pass_on(m, wanted):
            """Gives the running maximum to the warpgroup of the next tile."""
            m_smem[group, turn] = m
            plgpu.commit_smem()

            @pl.when(wanted)
            def _():
                plgpu.barrier_arrive(m_full.at[group * c.turns + turn])

        def maximum_before():
            plgpu.barrier_wait(m_full.at[group * c.turns + 1 - turn])
            return plgpu.load(m_smem.at[group, 1 - turn], layout=plgpu.Layout.WGMMA.reduce(1))

        @pl.when((turn == 1) & (work.steps > 0))
        def _():
            pass_on(_row_array(LOWEST), True)

        def body(index, carry):
            m_own, total = carry
            step = index * c.turns + turn
            s = scores(step)
            m = s.max(axis=1) * LOG2E
            before = m_own if c.turns == 1 else maximum_before()
            m = jnp.maximum(before, m)
            if c.turns > 1:
                pass_on(m, step + 1 < work.steps)
            p = jnp.exp2(s * LOG2E - lax.broadcast_in_dim(m, s.shape, [0]))
            slot = _rem(step, c.p_slots)

            @pl.when(step >= c.p_slots)
            def _():
                plgpu.barrier_wait(p_empty.at[group * c.p_slots + slot])

            alpha_smem[group, slot] = jnp.exp2(before - m)
            p_smem[group, slot] = p.astype(p_smem.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full.at[group * c.p_slots + slot])
            return m, total * jnp.exp2(m_own - m) + p.sum(axis=1)

        own_steps = _div(work.steps - turn + c.turns - 1, c.turns)
        m, total = lax.fori_loop(0, own_steps, body, (_row_array(LOWEST), _row_array(0.0)))
        m_smem[group, turn] = m
        total_smem[group, turn] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(total_full.at[group])
        for slot in range(c.p_slots):

            @pl.when((slot < work.steps) & (slot % c.turns == turn))
            def _(slot=slot):
                plgpu.barrier_wait(p_empty.at[group * c.p_slots + slot])

    @pl.when((wg >= softmax_wgs) & (wg < softmax_wgs + output_wgs))
    def _output_warpgroup():
        _take_registers(shape, 1)
        group, half = _div(wg - softmax_wgs, shape.halves), _rem(wg - softmax_wgs, shape.halves)

        def body(step, acc):
            p_slot = _rem(step, c.p_slots)
            plgpu.barrier_wait(p_full.at[group * c.p_slots + p_slot])
            alpha = plgpu.load(alpha_smem.at[group, p_slot], layout=plgpu.Layout.WGMMA.reduce(1))
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

            def multiply(ref):
                for piece in range(v_pieces):
                    slot = _slot(step, v_pieces, piece, c.v_slots)
                    rows, column = _value_piece(shape, piece)
                    plgpu.barrier_wait(v_full.at[half * c.v_slots + slot])
                    v_part = v_smem.at[half, slot]
                    first = work.k_position + step * c.block_kv + rows
                    _clear_outside(shape, work, first, v_part)
                    plgpu.wgmma(
                        ref.at[:, column : column + c.v_columns],
                        p_smem.at[group, p_slot, :, rows : rows + ROWS],
                        v_part,
                    )
                    if piece:
                        plgpu.wgmma_wait(1)
                        previous = _slot(step, v_pieces, piece - 1, c.v_slots)
                        plgpu.barrier_arrive(v_empty.at[half * c.v_slots + previous])

            acc = _accumulate(acc, multiply, interpret)
            last = _slot(step, v_pieces, v_pieces - 1, c.v_slots)
            plgpu.barrier_arrive(v_empty.at[half * c.v_slots + last])
            plgpu.barrier_arrive(p_empty.at[group * c.p_slots + p_slot])
            return acc

        def denominator():
            rows = plgpu.Layout.WGMMA.reduce(1)
            m = [plgpu.load(m_smem.at[group, turn], layout=rows) for turn in range(c.turns)]
            last = functools.reduce(jnp.maximum, m)
            parts = [
                plgpu.load(total_smem.at[group, turn], layout=rows) * jnp.exp2(m[turn] - last)
                for turn in range(c.turns)
            ]
            return functools.reduce(jnp.add, parts)

        zero = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), plgpu.Layout.WGMMA)
        acc = lax.fori_loop(0, work.steps, body, zero)
        plgpu.barrier_wait(total_full.at[group])
        _store(
            shape, work, _group_token(shape, work, group), half, acc, denominator(),
            o_smem.at[group, half], o_plain.at[group, half], out,
        )  # fmt: skip

    @pl.when(wg == softmax_wgs + output_wgs)
    def _load_warpgroup():
        _take_registers(shape, 2)

        def keys(step, piece):
            index = step * k_pieces + piece
            slot = _slot(step, k_pieces, piece, c.k_slots)
            source = k.at[
                pl.ds(work.k_row + step * c.block_kv, c.block_kv),
                work.kv_head,
                piece * c.k_columns : (piece + 1) * c.k_columns,
            ]
            _load(
                shape, source, k_smem.at[slot], k_full.at[_rem(step, c.turns) * c.k_slots + slot],
                k_empty.at[slot], index >= c.k_slots,
            )  # fmt: skip

        def values(step, piece):
            index = step * v_pieces + piece
            slot = _slot(step, v_pieces, piece, c.v_slots)
            rows, column = _value_piece(shape, piece)
            for half in range(shape.halves):
                first = half * HALF + column
                source = v.at[
                    pl.ds(work.k_row + step * c.block_kv + rows, ROWS),
                    work.kv_head,
                    first : first + c.v_columns,
                ]
                _load(
                    shape, source, v_smem.at[half, slot], v_full.at[half * c.v_slots + slot],
                    v_empty.at[half * c.v_slots + slot], index >= c.v_slots,
                )  # fmt: skip

        @pl.when(work.steps > 0)
        def _():
            for piece in range(k_pieces):
                keys(jnp.int32(0), piece)
            _load_queries(shape, work, q, q_smem, q_full)

        @pl.loop(1, work.steps + 1)
        def _(step):
            for piece in range(max(k_pieces, v_pieces)):
                if piece < k_pieces:
                    pl.when(step < work.steps)(functools.partial(keys, step, piece))
                if piece < v_pieces:
                    values(step - 1, piece)

        _drain(k_empty, c.k_slots, work.steps * k_pieces)
        for half in range(shape.halves):
            _drain(v_empty, c.v_slots, work.steps * v_pieces, half * c.v_slots)


def _slot(step: jax.Array, pieces: int, piece: Any, slots: int) -> jax.Array:
    """Slot of a tile's piece in a ring."""
    return _rem(step * pieces + piece, slots)


def _value_piece(shape: _Shape, piece: int) -> tuple[int, int]:
    """(first key row of the tile, first of the 256 columns) of a piece of values."""
    across = HALF // shape.config.v_columns
    return piece // across * ROWS, piece % across * shape.config.v_columns


_REGISTERS = {3: (152, 208, 24), 4: (144, 168, 24), 5: (72, 152, 24)}
"""By warpgroups of a block: registers a thread of the softmax, output and load warpgroups.

Together a block's warpgroups may not take more than they were launched with: one that waits for
registers that nobody gives back waits forever.
"""


def _take_registers(shape: _Shape, role: int) -> None:
    warpgroups = _warpgroups(shape)
    count = _REGISTERS[warpgroups][role]
    at_launch = 65536 // (128 * warpgroups) // 8 * 8
    plgpu.set_max_registers(count, action="increase" if count >= at_launch else "decrease")


# --- joined design --------------------------------------------------------------------------------


def _joined_kernel(
    meta, q, k, v, out,
    q_union, k_smem, v_smem,
    q_full, k_full, k_empty, v_full, v_empty, turn,
    *, shape: _Shape, interpret: bool,
):  # fmt: skip
    c = shape.config
    q_smem, o_smem, o_plain = q_union
    work = _own_work(shape, meta)
    wg = lax.axis_index("wg")

    def take_turn():
        if c.ping_pong:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    @pl.when(wg < c.groups)
    def _compute_warpgroup():
        plgpu.set_max_registers(240, action="increase")
        group = wg
        token = _group_token(shape, work, group)

        @pl.when(work.steps > 0)
        def _():
            plgpu.barrier_wait(q_full.at[group])

        pl.when(wg == 1)(take_turn)

        def body(step, carry):
            acc, m, total = carry
            slot = _rem(step, c.stages)

            def scores(ref):
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.wgmma(ref, q_smem.at[group, 0], k_smem.at[slot].transpose((1, 0)))
                take_turn()
                return ref[...]

            s = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, c.block_kv), jnp.float32))
            plgpu.barrier_arrive(k_empty.at[slot])
            s = _mask_edges(shape, work, token, step, s)
            p, m, alpha = _softmax(s, m)
            total = total * alpha + p.sum(axis=1)
            p = p.astype(v_smem.dtype)
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            if c.ping_pong:
                plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full.at[slot])
            if c.ping_pong:
                plgpu.barrier_wait(turn)
            v_part = v_smem.at[slot]
            for rows in range(0, c.block_kv, ROWS):
                first = work.k_position + step * c.block_kv + rows
                _clear_outside(shape, work, first, v_part.at[rows : rows + ROWS])
            if interpret:  # The interpreter has no operands in registers.
                acc += jnp.dot(p, v_part[...], preferred_element_type=jnp.float32)
            else:
                acc = _accumulate(acc, lambda ref: plgpu.wgmma(ref, p, v_part), interpret)
            plgpu.barrier_arrive(v_empty.at[slot])
            return acc, m, total

        zero = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), plgpu.Layout.WGMMA)
        acc, _, total = lax.fori_loop(
            0, work.steps, body, (zero, _row_array(LOWEST), _row_array(0.0))
        )
        pl.when(wg == 0)(take_turn)
        _store(
            shape, work, token, 0, acc, total, o_smem.at[group, 0], o_plain.at[group, 0], out,
        )  # fmt: skip

    @pl.when(wg == c.groups)
    def _load_warpgroup():
        plgpu.set_max_registers(24, action="decrease")

        def load(source, target, full, empty, step):
            slot = _rem(step, c.stages)
            rows = pl.ds(work.k_row + step * c.block_kv, c.block_kv)
            _load(
                shape, source.at[rows, work.kv_head], target.at[slot], full.at[slot],
                empty.at[slot], step >= c.stages,
            )  # fmt: skip

        keys = functools.partial(load, k, k_smem, k_full, k_empty)
        values = functools.partial(load, v, v_smem, v_full, v_empty)

        @pl.when(work.steps > 0)
        def _():
            keys(jnp.int32(0))
            _load_queries(shape, work, q, q_smem, q_full)

        @pl.loop(1, work.steps + 1)
        def _(step):
            pl.when(step < work.steps)(functools.partial(keys, step))
            values(step - 1)

        _drain(k_empty, c.stages, work.steps)
        _drain(v_empty, c.stages, work.steps)


# --- call -----------------------------------------------------------------------------------------


def _tiled(*shape: int) -> Any:
    """bf16 shared memory in the swizzled tiles that wgmma reads."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tiling((ALIGN, 64)), swizzle(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def _query_memory(shape: _Shape) -> Any:
    """Queries, and in their place at the end the output: tiled, or plain to store single rows."""
    groups, columns = shape.config.groups, shape.q_columns
    size = (groups, shape.halves, ROWS, HALF)
    queries = _tiled(groups, shape.head_dim // columns, ROWS, columns)
    return plgpu.RefUnion(queries, _tiled(*size), plgpu.SMEM(size, jnp.bfloat16))


def _q_full(shape: _Shape) -> Any:
    copies = shape.group * (shape.head_dim // shape.q_columns)
    return plgpu.Barrier(num_arrivals=copies, num_barriers=shape.config.groups)


def _freed(shape: _Shape, arrivals: int, count: int) -> Any:
    """Barriers by which all readers of the cluster give slots back."""
    if shape.config.cluster > 1:
        return plgpu.ClusterBarrier(
            collective_axes=("block",), num_arrivals=arrivals, num_barriers=count
        )
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def _split_scratch(shape: _Shape) -> list[Any]:
    c = shape.config
    halves, groups = shape.halves, c.groups
    return [
        _query_memory(shape),
        _tiled(c.k_slots, c.block_kv, c.k_columns),
        _tiled(halves, c.v_slots, ROWS, c.v_columns),
        _tiled(groups, c.p_slots, ROWS, c.block_kv),
        plgpu.SMEM((groups, c.p_slots, ROWS), jnp.float32),
        plgpu.SMEM((groups, c.turns, ROWS), jnp.float32),
        plgpu.SMEM((groups, c.turns, ROWS), jnp.float32),
        _q_full(shape),
        plgpu.Barrier(num_barriers=c.turns * c.k_slots),
        _freed(shape, groups, c.k_slots),
        plgpu.Barrier(num_barriers=halves * c.v_slots),
        _freed(shape, groups, halves * c.v_slots),
        plgpu.Barrier(num_barriers=groups * c.p_slots),
        plgpu.Barrier(num_arrivals=halves, num_barriers=groups * c.p_slots),
        plgpu.Barrier(num_barriers=groups * c.turns),
        plgpu.Barrier(num_arrivals=c.turns, num_barriers=groups),
    ]


def _joined_scratch(shape: _Shape) -> list[Any]:
    c = shape.config
    tiles = (c.stages, c.block_kv, HALF)
    return [
        _query_memory(shape),
        _tiled(*tiles),
        _tiled(*tiles),
        _q_full(shape),
        plgpu.Barrier(num_barriers=c.stages),
        _freed(shape, c.groups, c.stages),
        plgpu.Barrier(num_barriers=c.stages),
        _freed(shape, c.groups, c.stages),
        plgpu.Barrier(num_arrivals=2),
    ]


def _warpgroups(shape: _Shape) -> int:
    """Warpgroups of a block, the loading one included."""
    c = shape.config
    softmax = c.groups * c.turns if c.design == "split" else 0
    return softmax + shape.config.groups * shape.halves + 1


def _check_config(shape: _Shape) -> None:
    c, problem = shape.config, None
    if c.design == "joined" and shape.head_dim != HALF:
        problem = f"the joined design takes a head width of {HALF}, not {shape.head_dim}"
    elif c.design == "joined" and c.groups != 2:
        problem = f"the joined design has two groups, not {c.groups}"
    elif c.design == "split" and c.k_slots * c.k_columns < shape.head_dim:
        problem = f"{c.k_slots} slots of {c.k_columns} columns do not hold {shape.head_dim}"
    elif c.block_kv % ROWS or HALF % c.k_columns or c.k_columns % 64:
        problem = f"{c.block_kv} keys and {c.k_columns} columns: not whole 64x64 tiles of {HALF}"
    elif HALF % c.v_columns or c.v_columns % 64 or c.p_slots % c.turns:
        problem = f"{c.v_columns} columns must divide {HALF}, {c.turns} turns {c.p_slots} slots"
    elif _shared_bytes(shape) > SHARED_MEMORY[9, 0]:
        problem = f"needs {_shared_bytes(shape)} bytes of shared memory"
    if problem is not None:
        raise UnsupportedError(f"prefill_attention: mosaic config: {problem}")


def _shared_bytes(shape: _Shape) -> int:
    """Shared memory of the large buffers, and 5 KB for the rest."""
    c = shape.config
    rows = c.groups * ROWS * shape.head_dim
    if c.design == "joined":
        rows += 2 * c.stages * c.block_kv * shape.head_dim
    else:
        rows += c.k_slots * c.block_kv * c.k_columns + c.groups * c.p_slots * ROWS * c.block_kv
        rows += shape.halves * c.v_slots * ROWS * c.v_columns
    return 2 * rows + 5 * 1024


def prefill_attention_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    window: int | None,
    max_q_len: int,
    numerics: Numerics,
    config: Config | None = None,
) -> jax.Array:
    """Attention of packed or padded sequences, [N, K, G, H] bf16; see the module.

    Args:
      q, k, v: [N, K, G, H], [M, K, H] and [M, K, H] bf16.
      segments: rows of each sequence, in ascending order.
      window: keys a query sees, itself included; None for all before it.
      max_q_len: static bound of `q_lengths`; sets the grid.
      numerics: bf16; both rounding rules agree on this op.
      config: how the work is cut; None takes `default_config`.
    """
    device = current_device()
    reason = unsupported(q, k, v, window, device)
    if reason is not None or numerics.is_float32:
        raise UnsupportedError(f"prefill_attention: mosaic {reason or 'needs bfloat16 numerics'}")
    rows, kv_heads, group, head_dim = q.shape
    fold = max(1, group // ALIGN)
    shape = _Shape(
        batch=segments.q_offsets.shape[0], kv_heads=kv_heads, group=group // fold, fold=fold,
        head_dim=head_dim, window=window, max_q_len=max_q_len,
        config=config or default_config(head_dim),
    )  # fmt: skip
    _check_config(shape)
    split = shape.config.design == "split"
    cluster = {"cluster": (2,), "cluster_names": ("block",)} if shape.config.cluster > 1 else {}
    out = plgpu.kernel(
        functools.partial(
            _split_kernel if split else _joined_kernel, shape=shape, interpret=not device.is_gpu
        ),
        out_type=jax.ShapeDtypeStruct((rows, kv_heads * group, head_dim), q.dtype),
        scratch_types=_split_scratch(shape) if split else _joined_scratch(shape),
        grid=(shape.clusters,),
        grid_names=("tile",),
        num_threads=_warpgroups(shape),
        thread_name="wg",
        kernel_name="prefill_attention_mosaic",
        interpret=None if device.is_gpu else plgpu.InterpretGPUParams(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not shape.config.auto_barriers
        ),
        **cluster,
    )(_meta(segments, rows), q.reshape(rows, kv_heads * group, head_dim), k, v)
    return out.reshape(q.shape)
