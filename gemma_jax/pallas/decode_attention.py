"""Attention of the newest 1…8 tokens of each sequence over its cached keys and values.

    out[b, r, k, g] = softmax_j( q[b, r, k, g] · K[b, j, k] ) V[b, j, k],   p - window < j <= p,
    p = lengths[b] - R + r

over the cache of `gemma_jax/model/cache.py`: contiguous rows, rings, pages. Scores, softmax and
sums are float32; the weights are rounded to the cache's dtype for their product with V; one
rounding on the output. `decode_attention_step` puts the norms and RoPE of the raw projection and
the cache write in front of it, in the same kernel.

The key axis is cut into `splits` contiguous shares of the tiles that a row really has; the last
program of a row to finish merges the shares (`combine="last"`), or a second kernel does
("kernel"). Loop bounds come from `lengths` on the device, so one executable serves every length,
and a window starts at its edge. Written for float32 and bfloat16, sm_80 and newer, through Triton.

Formulas: FlashAttention-2 (arXiv:2307.08691) for the running softmax, Flash-Decoding
(https://pytorch.org/blog/flash-decoding) for the split.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.errors import UnsupportedError
from gemma_jax.model import cache as kv
from gemma_jax.model.attention import causal_mask
from gemma_jax.model.layers import rms_norm
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import MASK_VALUE, Numerics
from gemma_jax.pallas import triton_api as tt
from gemma_jax.pallas.device import Device, current_device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)
from gemma_jax.pallas.kernel_math import Halves, inverse_root, rotate

MAX_QUERIES = 8
LOG2E = 1.4426950408889634
_MIN_ROWS = 16
"""Rows of the smallest tensor-core product; fewer query rows are padded."""


def decode_attention_reference(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
) -> jax.Array:
    """The definition, without tiles or splits; float64 in, float64 out."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (kv.read_rows(x, page_table, slots).astype(wide) for x in (k_cache, v_cache))
    queries = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1], dtype=lengths.dtype)
    mask = causal_mask(queries, kv.slot_positions(lengths, slots), window)
    used = jnp.any(mask, axis=1)[..., None, None]
    k, v = jnp.where(used, k, 0), jnp.where(used, v, 0)  # what is not used may be NaN
    exact = lax.Precision.HIGHEST
    scores = jnp.einsum("btkgh,bskh->bkgts", q.astype(wide), k, precision=exact)
    scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
    weights = jnp.where(mask[:, None, None], jax.nn.softmax(scores, axis=-1), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=exact)
    return numerics.cast(out)


def decode_attention_step_reference(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    groups: int,
    eps: float,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm, RoPE, cache write, attention: one after the other."""
    rope = functools.partial(apply_rope, tables=(cos, sin), numerics=numerics)
    q = rope(rms_norm(qkv[:, :, :groups], q_weight, eps, numerics))
    if qkv.shape[2] > groups:
        k = rope(rms_norm(qkv[:, :, groups], k_weight, eps, numerics))[:, None]
        v = rms_norm(qkv[:, :, -1], None, eps, numerics)[:, None]
        position, valid = jnp.maximum(lengths - 1, 0)[:, None], (lengths > 0)[:, None]
        at = (position, valid, page_table, slots)
        k_cache = kv.write(k_cache, k, *at)
        v_cache = kv.write(v_cache, v, *at)
    out = decode_attention_reference(
        q[:, None],
        k_cache,
        v_cache,
        lengths,
        slots=slots,
        window=window,
        page_table=page_table,
        numerics=numerics,
    )
    return out[:, 0], k_cache, v_cache


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
      tile: keys a loop iteration.
      num_warps, num_stages: of the Triton compiler.
      splits: programs that share the keys of a row; 1 = one pass.
      combine: who merges the splits: "last" = the last of them, "kernel" = a second kernel.
      rows: query rows (tokens times heads of a group) a program, at least 16.
    """

    tile: int
    num_warps: int
    num_stages: int
    splits: int = 1
    combine: Literal["last", "kernel"] = "last"
    rows: int = _MIN_ROWS


def default_config(
    programs: int,
    rows: int,
    head_dim: int,
    span: int,
    itemsize: int,
    device: Device,
    paged: bool = False,
) -> Config:
    """The tile table.

    The compiler keeps num_stages - 1 tiles in shared memory and loads the next one after it has
    used the present one: with two stages only other programs on the same core hide the memory's
    latency. Width 512 needs three stages, so tiles of 32. At width 256 few programs do better with
    long tiles, many with short ones. Pages cost twice the stages for the same tiles, as the number
    of a page is loaded ahead of it; many programs of width 512 do better without, and with four
    warps, so that more of them share a core.

    Args:
      programs: rows of the batch times KV heads, each a program of its own without splits.
      rows: query tokens times heads of a group.
      head_dim: width of a head.
      span: the most keys that one row can have to read: its window or its slots.
      itemsize: bytes of a cached number.
      device: what it will run on.
      paged: whether there is a page table.
    """
    wide, many = head_dim > 256, programs >= 16
    packed = min(max(_MIN_ROWS, pl.next_power_of_2(rows)), 2 * _MIN_ROWS)
    tile, stages = (64, 2) if not wide and not many else (32, 3)
    if itemsize == 4:
        tile, stages = 16, 2
    if wide and not device.at_least(9):
        packed, stages = _MIN_ROWS, min(stages, 2 if rows > _MIN_ROWS else 3)  # more spill
    splits = _splits(programs * -(-rows // packed), -(-span // tile), device)
    combine = "last" if splits <= 16 else "kernel"
    light = not wide or (many and packed == _MIN_ROWS and device.at_least(9))
    if paged and not (wide and light):
        stages = 2 * stages - 1
    return Config(tile, 4 if light else 8, stages, splits, combine, packed)


def invariant_config(groups: int, head_dim: int, itemsize: int, device: Device) -> Config:
    """The one tile of batch-invariant attention: neither rows nor lengths change a sum's order.

    One program goes through the keys of a query in order, tiles at multiples of `tile`.
    """
    wide = head_dim > 256
    tile = 16 if itemsize == 4 else 32
    stages = 2 if itemsize == 4 or (wide and not device.at_least(9)) else 3
    rows = max(_MIN_ROWS, pl.next_power_of_2(groups))
    if not wide or device.at_least(9):
        rows = max(rows, 2 * _MIN_ROWS)
    return Config(tile, 8 if wide else 4, stages, 1, "last", rows)


def queries_a_program(groups: int) -> int:
    """Queries of one sequence that a batch-invariant call may hand in together."""
    return max(1, min(MAX_QUERIES, 2 * _MIN_ROWS // groups))


def _splits(programs: int, tiles: int, device: Device) -> int:
    """Enough programs for the device, none without a tile.

    With many rows two a core, so that one long row does not hold up the others.
    """
    cores = device.num_cores if device.is_gpu else 4
    wanted = (2 if programs >= 16 else 1) * cores
    return max(1, min(tiles, wanted // programs, 64))


@dataclass(frozen=True)
class _Plan:
    """Everything static about one call."""

    config: Config
    numerics: Numerics
    batch: int
    queries: int
    kv_heads: int
    groups: int
    head_dim: int
    slots: int
    page: int
    window: int | None
    paged: bool
    raw_heads: int = 0  # heads a KV head of the raw projection; 0 = q is ready to attend
    eps: float = 0.0

    @property
    def is_owner(self) -> bool:
        """Whether the step brings a key and a value of its own."""
        return self.raw_heads > self.groups

    @property
    def blocks(self) -> int:
        """Programs that share the query rows of one KV head."""
        return -(-self.queries * self.groups // self.config.rows)

    @property
    def programs(self) -> int:
        """Programs of one split."""
        return self.batch * self.kv_heads * self.blocks

    @property
    def kept_rows(self) -> int:
        """Rows of a block that are stored between the passes: a power of two."""
        return min(self.config.rows, pl.next_power_of_2(self.queries * self.groups))

    @property
    def merged_rows(self) -> int:
        """Query rows that the last program merges at a time: half of its registers."""
        registers = self.config.num_warps * 32 * 128
        fitting = registers // (self.head_dim * self.kept_splits)
        return min(self.kept_rows, max(1, fitting))

    @property
    def kept_splits(self) -> int:
        """Splits that the arrays between the passes have room for: a power of two."""
        return pl.next_power_of_2(self.config.splits)


@dataclass(frozen=True)
class _Program:
    """Which query rows this program has and which keys they see; traced scalars."""

    row: Any  # of the batch
    head: Any  # KV head
    block: Any  # of query rows
    index: Any  # of (row, head, block)
    length: Any
    low: Any  # first visible position
    end: Any  # one past the last position to be read from the cache
    origin: Any  # position of the first key of tile 0
    tiles: Any
    live: Any  # splits that have work, at least 1


def _program(plan: _Plan, index: jax.Array, lengths_ref: Any) -> _Program:
    c = plan.config
    block, pair = index % plan.blocks, index // plan.blocks
    row, head = pair // plan.kv_heads, pair % plan.kv_heads
    length = lengths_ref[row]
    end = jnp.maximum(length - 1, 0) if plan.is_owner else length
    low = jnp.int32(0)
    if plan.window is not None:
        low = jnp.maximum(length - plan.queries - plan.window + 1, 0)
    aligned = plan.paged or plan.numerics.batch_invariant  # a tile stays inside its page
    origin = low // c.tile * c.tile if aligned else low
    tiles = (jnp.maximum(end - origin, 0) + c.tile - 1) // c.tile
    live = jnp.clip(tiles, 1, c.splits)
    return _Program(row, head, block, index, length, low, end, origin, tiles, live)


# --- queries and the new key -------------------------------------------------------------------


def _query_rows(
    plan: _Plan, p: _Program, first: Any = 0, count: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For `count` rows of the block from `first`: row in q, whether it is real, its position."""
    rows = plan.config.rows
    i = p.block * rows + first + jnp.arange(count or rows, dtype=jnp.int32)
    valid = i < plan.queries * plan.groups
    query, group = i // plan.groups, i % plan.groups
    row = ((p.row * plan.queries + query) * plan.kv_heads + p.head) * plan.groups + group
    return row, valid, p.length - plan.queries + query


def _halves(plan: _Plan) -> tuple[Any, Any]:
    half = plan.head_dim // 2
    return pl.ds(0, half), pl.ds(half, half)


def _load_rows(ref: Any, rows: jax.Array, columns: Any, mask: jax.Array) -> jax.Array:
    """[rows, columns] of a matrix, zero where masked."""
    return tt.load(ref.at[_grid(rows, columns)], mask=_wide(mask, columns.size), other=0.0)


def _grid(rows: jax.Array, columns: Any) -> tuple[jax.Array, jax.Array]:
    """Index pair of a block of a matrix; masked accesses take no mixture of vectors and slices."""
    shape = (rows.shape[0], columns.size)
    steps = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(steps[None], shape)


def _wide(mask: jax.Array, width: int) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], width))


class _Queries(NamedTuple):
    """The queries of a program, padded rows zero."""

    low: jax.Array  # [rows, H/2], channels of the first half
    high: jax.Array
    position: jax.Array  # [rows]


class _Raw(NamedTuple):
    """Raw heads and what norms and rotates them, float32 in halves of channels.

    All of it is loaded before any of it is used: the sums of a norm are barriers between warps, and
    no later load would be issued before them.
    """

    q: Halves  # [rows, H/2]
    q_weight: Halves  # [H/2]
    tables: Halves  # cos and sin, [H/2]
    k: Halves | None  # [H/2], of an owner
    k_weight: Halves | None
    v: jax.Array | None  # [H]


def _load_raw(plan: _Plan, p: _Program, refs: dict[str, Any]) -> _Raw:
    raw, first = refs["qkv"], (p.row * plan.kv_heads + p.head) * plan.raw_heads
    low, high = _halves(plan)
    rows = first + jnp.arange(plan.config.rows, dtype=jnp.int32)
    _, valid, _ = _query_rows(plan, p)
    q = tuple(_load_rows(raw, rows, half, valid).astype(jnp.float32) for half in (low, high))

    def halves(ref: Any, *row: Any) -> Halves:
        return ref[(*row, low)].astype(jnp.float32), ref[(*row, high)].astype(jnp.float32)

    cos, sin = (refs[x][p.row, :].astype(jnp.float32) for x in ("cos", "sin"))
    k = k_weight = v = None
    q_weight = halves(refs["q_weight"])
    if plan.is_owner:
        k, k_weight = halves(raw, first + plan.groups), halves(refs["k_weight"])
        v = raw[first + plan.raw_heads - 1, :].astype(jnp.float32)
    return _Raw((q[0], q[1]), q_weight, (cos, sin), k, k_weight, v)


def _load_queries(plan: _Plan, p: _Program, refs: dict[str, Any], raw: _Raw | None) -> _Queries:
    """The queries, ready to attend."""
    rows, valid, position = _query_rows(plan, p)
    if raw is None:
        low, high = (_load_rows(refs["q"], rows, half, valid) for half in _halves(plan))
    else:
        low, high = _norm_and_rotate(plan, raw.q, raw.q_weight, raw.tables)
    return _Queries(low, high, position)


def _norm_and_rotate(plan: _Plan, x: Halves, weight: Halves, tables: Halves) -> Halves:
    """`rms_norm` and `apply_rope` of float32 halves [..., H/2]; in the compute dtype."""
    numerics = plan.numerics
    square = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=-1)
    root = inverse_root(square, plan.head_dim, plan.eps)[..., None]
    low, high = (tt.rounded(a * root * w, numerics) for a, w in zip(x, weight, strict=True))
    low, high = rotate((low, high), tables, numerics)
    return low.astype(numerics.jnp_dtype), high.astype(numerics.jnp_dtype)


def _new_key_value(plan: _Plan, raw: _Raw) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The halves of the step's own key [H/2], and its value [H]."""
    assert raw.k is not None  # an owner's
    assert raw.k_weight is not None
    assert raw.v is not None
    k_low, k_high = _norm_and_rotate(plan, raw.k, raw.k_weight, raw.tables)
    root = inverse_root(jnp.sum(raw.v * raw.v, axis=-1), plan.head_dim, plan.eps)
    return k_low, k_high, (raw.v * root).astype(plan.numerics.jnp_dtype)


# --- the loop over keys ------------------------------------------------------------------------

State = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [rows] (base 2), sum [rows] and output [rows, H], float32."""


def _empty_state(plan: _Plan) -> State:
    rows = plan.config.rows
    return (
        jnp.full((rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, plan.head_dim), jnp.float32),
    )


def _state_of_new_key(plan: _Plan, q: _Queries, new: Any, mine: jax.Array) -> State:
    """The state after the step's own key if it is `mine` (traced), else the empty state."""
    k_low, k_high, v = (x.astype(jnp.float32) for x in new)
    score = jnp.sum(q.low.astype(jnp.float32) * k_low[None], axis=1)
    score += jnp.sum(q.high.astype(jnp.float32) * k_high[None], axis=1)
    shape = (plan.config.rows, plan.head_dim)
    weight = jnp.broadcast_to(mine.astype(jnp.float32), shape[:1])
    top = jnp.where(weight > 0, score * LOG2E, jnp.full(shape[:1], MASK_VALUE))
    return top, weight, jnp.broadcast_to(v[None], shape) * weight[:, None]


def _cache_rows(plan: _Plan, p: _Program, refs: dict[str, Any], start: jax.Array) -> jax.Array:
    """Rows of the cache, seen as a matrix of heads, that hold the keys of the tile at `start`."""
    tile = plan.config.tile
    first, step = start % plan.slots, jnp.arange(tile, dtype=jnp.int32)
    if plan.paged and plan.page % tile == 0:
        page = refs["page_table"][p.row, first // plan.page]
        slot = page * plan.page + first % plan.page + step
        return slot * plan.kv_heads + p.head
    slot = first + step
    if plan.slots % tile or not plan.paged:
        slot = slot % plan.slots if tile > plan.slots else _wrapped(slot, plan.slots)
    if plan.paged:
        page = tt.load(refs["page_table"].at[p.row, slot // plan.page])
        return (page * plan.page + slot % plan.page) * plan.kv_heads + p.head
    return (p.row * plan.slots + slot) * plan.kv_heads + p.head


def _wrapped(slot: jax.Array, slots: int) -> jax.Array:
    return jnp.where(slot >= slots, slot - slots, slot)


class _Tile(NamedTuple):
    """Keys and values of a tile, zero where not `seen` by any query."""

    key: jax.Array  # positions [tile]
    seen: jax.Array  # [tile]
    k_low: jax.Array  # [tile, H/2]
    k_high: jax.Array
    v: jax.Array  # [tile, H]


def _load_tile(plan: _Plan, p: _Program, refs: dict[str, Any], t: jax.Array) -> _Tile:
    start = p.origin + t * plan.config.tile
    rows = _cache_rows(plan, p, refs, start)
    key = start + jnp.arange(plan.config.tile, dtype=jnp.int32)
    seen = (key >= p.low) & (key < p.end)
    k_low, k_high = (_load_rows(refs["k"], rows, half, seen) for half in _halves(plan))
    return _Tile(
        key, seen, k_low, k_high, _load_rows(refs["v"], rows, pl.ds(0, plan.head_dim), seen)
    )


def _attend_tile(plan: _Plan, q: _Queries, tile: _Tile, state: State) -> State:
    """One step of the online softmax."""
    top, total, out = state
    precision = plan.numerics.precision
    scores = tt.dot(q.low, tile.k_low, trans_b=True, precision=precision)
    scores += tt.dot(q.high, tile.k_high, trans_b=True, precision=precision)
    mask = jnp.broadcast_to(tile.seen[None], scores.shape)
    if plan.queries > 1:
        mask &= tile.key[None] <= q.position[:, None]
        if plan.window is not None:
            mask &= tile.key[None] > q.position[:, None] - plan.window
    scores = jnp.where(mask, scores * LOG2E, MASK_VALUE)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(mask, jnp.exp2(scores - new_top[:, None]), 0.0)
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=1)
    out = out * shrink[:, None]
    out += tt.dot(weights.astype(tile.v.dtype), tile.v, precision=precision)
    return new_top, total, out


# --- kernels -----------------------------------------------------------------------------------


def _attention_kernel(*args: Any, plan: _Plan, names: tuple[str, ...]) -> None:
    """One program: the queries of a block against one share of the keys.

    Refs by name, whole arrays. Scalars: lengths [B], page_table [B, pages]. Inputs: q [rows, H], or
    qkv [heads, H] with q_weight, k_weight [H], cos, sin [B, H/2]; k, v [heads, H]; counters.
    Outputs: out [rows, H] and/or top, total [P, splits, rows], partial [P, splits, rows, H]; new_k,
    new_v alias k and v. No program reads what another one writes into the cache.
    """
    refs = dict(zip(names, args, strict=True))
    split = pl.program_id(1)
    p = _program(plan, pl.program_id(0), refs["lengths"])
    raw = _load_raw(plan, p, refs) if plan.raw_heads else None  # before lengths are waited for

    def run() -> None:
        first, stop = _share(plan, p, refs, split)
        q = _load_queries(plan, p, refs, raw)
        state = _empty_state(plan)
        if raw is not None and plan.is_owner:
            new = _new_key_value(plan, raw)
            mine = (split == p.live - 1) & (p.length > 0)
            state = _state_of_new_key(plan, q, new, mine)
            pl.when(mine)(lambda: _write_cache(plan, p, refs, new))

        def body(t: jax.Array, state: State) -> State:
            return _attend_tile(plan, q, _load_tile(plan, p, refs, t), state)

        state = lax.fori_loop(first, stop, body, state)
        _finish(plan, p, refs, split, state)

    if plan.config.splits == 1:
        run()
    else:
        pl.when(split < p.live)(run)


def _share(plan: _Plan, p: _Program, refs: dict[str, Any], split: Any) -> tuple[Any, Any]:
    """First tile of a split, and the one past its last.

    Asks for the first page early: the loop, whose first loads wait for its number, finds it in the
    L1 cache. A negative page, which no table holds, makes the number one that counts.
    """
    first, stop = split * p.tiles // p.live, (split + 1) * p.tiles // p.live
    if not plan.paged:
        return first, stop
    slot = (p.origin + first * plan.config.tile) % plan.slots
    return first, jnp.where(refs["page_table"][p.row, slot // plan.page] < 0, first, stop)


def _write_cache(plan: _Plan, p: _Program, refs: dict[str, Any], new: Any) -> None:
    slot = (p.length - 1) % plan.slots
    if plan.paged:
        page = refs["page_table"][p.row, slot // plan.page]
        row = page * plan.page + slot % plan.page
    else:
        row = p.row * plan.slots + slot
    row = row * plan.kv_heads + p.head
    k_low, k_high, v = new
    low, high = _halves(plan)
    refs["new_k"][row, low] = k_low
    refs["new_k"][row, high] = k_high
    refs["new_v"][row, :] = v


def _finish(plan: _Plan, p: _Program, refs: dict[str, Any], split, state: State) -> None:
    """Stores the output, or this split's part of it."""
    top, total, out = state
    every = pl.ds(0, plan.head_dim)
    if plan.config.splits == 1:
        rows, valid, _ = _query_rows(plan, p)
        _store_output(refs, out, total, rows, valid, every)
        return
    kept = jnp.arange(plan.config.rows, dtype=jnp.int32)
    mask = kept < plan.kept_rows
    tt.store(refs["top"].at[p.index, split, kept], top, mask=mask)
    tt.store(refs["total"].at[p.index, split, kept], total, mask=mask)
    where = (p.index, split, *_grid(kept, every))
    tt.store(refs["partial"].at[where], out, mask=_wide(mask, plan.head_dim))
    if plan.config.combine == "kernel":
        return
    if current_device().is_gpu:
        tt.debug_barrier()  # every thread's part is stored before one thread counts it
    arrived = tt.atomic_add(refs["counters"], p.index, jnp.int32(1))

    @pl.when(arrived == p.live - 1)
    def _merge() -> None:
        count = plan.merged_rows
        firsts = range(0, plan.kept_rows, count)
        merged = [_merged_rows(plan, p, refs, first, count, every) for first in firsts]
        for first, (out, total) in zip(firsts, merged, strict=True):  # after all loads
            rows, valid, _ = _query_rows(plan, p, first, count)
            _store_output(refs, out, total, rows, valid, every)
        refs["counters"][p.index] = 0  # as the next call expects it


def _merged_rows(
    plan: _Plan, p: _Program, refs: dict[str, Any], first: Any, count: int, columns: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [count, columns] and sum [count] over the live splits, of rows of a block."""
    splits, some = plan.kept_splits, pl.ds(first, count)
    live = jnp.broadcast_to(jnp.arange(splits)[:, None] < p.live, (splits, count))
    each = pl.ds(0, splits)
    top = tt.load(refs["top"].at[p.index, each, some], mask=live, other=MASK_VALUE)
    total = tt.load(refs["total"].at[p.index, each, some], mask=live, other=0.0)
    scale = jnp.exp2(top - jnp.max(top, axis=0)[None])
    wide = (splits, count, columns.size)
    mask = jnp.broadcast_to(live[:, :, None], wide)
    part = tt.load(refs["partial"].at[p.index, each, some, columns], mask=mask, other=0.0)
    return jnp.sum(part * scale[:, :, None], axis=0), jnp.sum(total * scale, axis=0)


def _store_output(refs: dict[str, Any], out, total, rows, valid, columns) -> None:
    out = out / jnp.where(total == 0.0, 1.0, total)[:, None]
    ref = refs["out"]
    tt.store(ref.at[_grid(rows, columns)], out.astype(ref.dtype), mask=_wide(valid, columns.size))


def _combine_kernel(*args: Any, plan: _Plan, width: int) -> None:
    """Merges the splits of one query row, `width` of its columns."""
    names = ("lengths", "top", "total", "partial", "out")
    refs: dict[str, Any] = dict(zip(names, args, strict=True))
    p = _program(plan, pl.program_id(0), refs["lengths"])
    first, columns = pl.program_id(1), pl.ds(pl.program_id(2) * width, width)
    out, total = _merged_rows(plan, p, refs, first, 1, columns)
    rows, valid, _ = _query_rows(plan, p, first, 1)
    _store_output(refs, out, total, rows, valid, columns)


def _problem(
    dtypes: set[Any], head_dim: int, queries: int, numerics: Numerics, device: Device
) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if dtypes != {numerics.jnp_dtype}:
        found = sorted(str(x) for x in dtypes)
        return f"needs every array in the compute dtype {numerics.dtype}, got {found}"
    if head_dim < 32 or head_dim & (head_dim - 1):
        return f"needs a head width that is a power of two of 32 or more, got {head_dim}"
    if not 1 <= queries <= MAX_QUERIES:
        return f"takes 1 to {MAX_QUERIES} queries a row, got {queries}"
    if numerics.matches_vllm and not numerics.is_float32:
        return 'rounds the weights against its own tiles, not as rounding="vllm" does'
    return needs_gpu_or_interpreter((8, 0))(device)


def _run(plan: _Plan, inputs: dict[str, jax.Array], out_rows: int) -> dict[str, jax.Array]:
    """Calls the kernels on flattened inputs: {out, and new_k, new_v of an owner}."""
    c = plan.config
    f32 = jnp.float32
    split = c.splits > 1
    kept = (plan.programs, plan.kept_splits, plan.kept_rows)
    out = jax.ShapeDtypeStruct((out_rows, plan.head_dim), plan.numerics.jnp_dtype)
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    if not split or c.combine == "last":
        outputs["out"] = out
    if split:
        outputs["top"] = outputs["total"] = jax.ShapeDtypeStruct(kept, f32)
        outputs["partial"] = jax.ShapeDtypeStruct((*kept, plan.head_dim), f32)
    if split and c.combine == "last":
        # Counted up and set back to zero by the kernel: XLA fills one such array for all layers of
        # a step. Two calls that share it must not overlap; those of one stream do not.
        inputs = {**inputs, "counters": jnp.zeros((plan.programs,), jnp.int32)}
    if plan.is_owner:
        outputs |= {f"new_{x}": jax.ShapeDtypeStruct.like(inputs[x]) for x in "kv"}
    names, out_names = list(inputs), list(outputs)
    aliases = {names.index(x): out_names.index(f"new_{x}") for x in "kv" if plan.is_owner}
    results = tt.pallas_call(
        functools.partial(_attention_kernel, plan=plan, names=(*names, *out_names)),
        name=f"decode_attention{'_step' if plan.raw_heads else ''}_{plan.head_dim}",
        out_shape=list(outputs.values()),
        grid=(plan.programs, c.splits),
        in_specs=[tt.whole() for _ in names],
        out_specs=[tt.whole() for _ in out_names],
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        input_output_aliases=aliases,
    )(*inputs.values())
    found = dict(zip(out_names, results, strict=True))
    if "out" not in found:
        found["out"] = _combine(plan, inputs["lengths"], found, out)
    return found


def _combine(plan: _Plan, lengths: jax.Array, found: dict[str, jax.Array], out: Any) -> jax.Array:
    width = min(128, plan.head_dim)
    return tt.pallas_call(
        functools.partial(_combine_kernel, plan=plan, width=width),
        name=f"decode_attention_combine_{plan.head_dim}",
        out_shape=out,
        grid=(plan.programs, plan.kept_rows, plan.head_dim // width),
        in_specs=[tt.whole() for _ in range(4)],
        out_specs=tt.whole(),
        num_warps=4,
        num_stages=1,
    )(lengths, found["top"], found["total"], found["partial"])


def _heads(x: jax.Array) -> jax.Array:
    """Any array of heads as a matrix [heads, H]."""
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.jit, static_argnames=("slots", "window", "numerics", "config"))
def _attention_pallas(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
    config: Config | None = None,
) -> jax.Array:
    batch, queries, kv_heads, groups, head_dim = q.shape
    device = current_device()
    if problem := _problem(
        {q.dtype, k_cache.dtype, v_cache.dtype}, head_dim, queries, numerics, device
    ):
        raise UnsupportedError(f"decode_attention: the kernel {problem}")
    span = min(slots, (window or slots) + queries - 1)
    if config is None and numerics.batch_invariant:
        config = invariant_config(groups, head_dim, q.dtype.itemsize, device)
    config = config or default_config(
        batch * kv_heads,
        queries * groups,
        head_dim,
        span,
        q.dtype.itemsize,
        device,
        page_table is not None,
    )
    plan = _Plan(
        config, numerics, batch, queries, kv_heads, groups, head_dim, slots, k_cache.shape[1],
        window, page_table is not None,
    )  # fmt: skip
    inputs = {"lengths": lengths, "q": _heads(q), "k": _heads(k_cache), "v": _heads(v_cache)}
    if page_table is not None:
        inputs["page_table"] = page_table
    return _run(plan, inputs, math.prod(q.shape[:-1]))["out"].reshape(q.shape)


@functools.partial(
    jax.jit, static_argnames=("groups", "eps", "slots", "window", "numerics", "config")
)
def _step_pallas(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    groups: int,
    eps: float,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, kv_heads, raw_heads, head_dim = qkv.shape
    device = current_device()
    dtypes = {qkv.dtype, k_cache.dtype, v_cache.dtype, cos.dtype, sin.dtype}
    if problem := _problem(dtypes, head_dim, 1, numerics, device):
        raise UnsupportedError(f"decode_attention_step: the kernel {problem}")
    config = config or default_config(
        batch * kv_heads,
        groups,
        head_dim,
        min(slots, window or slots),
        qkv.dtype.itemsize,
        device,
        page_table is not None,
    )
    plan = _Plan(
        config, numerics, batch, 1, kv_heads, groups, head_dim, slots, k_cache.shape[1],
        window, page_table is not None, raw_heads, eps,
    )  # fmt: skip
    inputs = {"lengths": lengths, "qkv": _heads(qkv), "q_weight": q_weight, "cos": cos, "sin": sin}
    inputs |= {"k": _heads(k_cache), "v": _heads(v_cache)}
    if k_weight is not None:
        inputs["k_weight"] = k_weight
    if page_table is not None:
        inputs["page_table"] = page_table
    found = _run(plan, inputs, batch * kv_heads * groups)
    out = found["out"].reshape(batch, kv_heads, groups, head_dim)
    if not plan.is_owner:
        return out, k_cache, v_cache
    return out, found["new_k"].reshape(k_cache.shape), found["new_v"].reshape(v_cache.shape)


def decode_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention of the last R cached positions of each row: [B, R, K, G, H] in the compute dtype.

    Args:
      q: [B, R, K, G, H], R of 1 to 8, at positions lengths - R … lengths - 1.
      k_cache: [pages, page, K, H].
      v_cache: as `k_cache`.
      lengths: int32 [B], cached tokens with the newest; a query before position 0 gives zeros.
      slots: tokens that a row can hold; position p is at slot p mod slots.
      window: a query sees its own position and the window - 1 before it; None = all.
      page_table: int32 [B, slots // page]; None = row b owns pages b·n … b·n + n - 1.
      numerics: compute dtype and rounding.
      implementation: None picks the fastest that takes the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs; says which and why.
    """
    dtypes = {q.dtype, k_cache.dtype, v_cache.dtype}
    check = functools.partial(_problem, dtypes, q.shape[-1], q.shape[1], numerics)
    choices = {
        "triton": Choice(_attention_pallas, check),
        "reference": Choice(decode_attention_reference),
    }
    shape = f"q{list(q.shape)} slots {slots} window {window} {q.dtype}"
    run = dispatch("decode_attention", implementation, choices, shape)
    return run(
        q,
        k_cache,
        v_cache,
        lengths,
        slots=slots,
        window=window,
        page_table=page_table,
        numerics=numerics,
    )


def decode_attention_step(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    groups: int,
    eps: float,
    slots: int,
    window: int | None = None,
    page_table: jax.Array | None = None,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One decode step of an attention layer between its projections: norms, RoPE, cache, attention.

    Args:
      qkv: [B, K, C, H], the projection of the newest token: for each KV head its G query heads,
        then for an owner layer its k head, then its v head (C = G + 1: k is v, too).
      k_cache: [pages, page, K, H]; donate it, or it is copied.
      v_cache: as `k_cache`.
      lengths: int32 [B], tokens with the newest; 0 = an idle row: writes nothing, gives zeros.
      q_weight: [H].
      k_weight: [H]; None for a layer that owns no keys (C = G).
      cos: [B, H/2], of position lengths - 1, compute dtype.
      sin: as `cos`.
      groups: G.
      eps: of the norms.
      slots, window, page_table, numerics, implementation: as in `decode_attention`.
    Returns:
      The output [B, K, G, H] and both caches, written in place by an owner layer.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs; says which and why.
    """
    dtypes = {qkv.dtype, k_cache.dtype, v_cache.dtype, cos.dtype, sin.dtype}
    check = functools.partial(_problem, dtypes, qkv.shape[-1], 1, numerics)
    choices = {
        "triton": Choice(_step_pallas, check),
        "reference": Choice(decode_attention_step_reference),
    }
    shape = f"qkv{list(qkv.shape)} slots {slots} window {window} {qkv.dtype}"
    run = dispatch("decode_attention_step", implementation, choices, shape)
    return run(
        qkv,
        k_cache,
        v_cache,
        lengths,
        q_weight,
        k_weight,
        cos,
        sin,
        groups=groups,
        eps=eps,
        slots=slots,
        window=window,
        page_table=page_table,
        numerics=numerics,
    )
