"""The kernel of `decode_attention` and `decode_attention_step`: one program's walk over its keys.

A program loads its queries, in a step norms and rotates them and makes the new key and value, and
goes through its share of the tiles of cached keys with a running softmax.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.numerics import MASK_VALUE
from gemma_jax.pallas import triton_api as tt
from gemma_jax.pallas.decode_attention_plan import (
    Plan,
    Program,
    half_columns,
    load_rows,
    program_of,
    query_rows,
)
from gemma_jax.pallas.decode_attention_splits import State, combine, finish
from gemma_jax.pallas.kernel_math import Halves, inverse_root, rotate

LOG2E = 1.4426950408889634


# --- queries and the new key -------------------------------------------------------------------


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


def _load_raw(plan: Plan, p: Program, refs: dict[str, Any]) -> _Raw:
    raw, first = refs["qkv"], (p.row * plan.kv_heads + p.head) * plan.raw_heads
    low, high = half_columns(plan)
    rows = first + jnp.arange(plan.config.rows, dtype=jnp.int32)
    _, valid, _ = query_rows(plan, p)
    q = tuple(load_rows(raw, rows, half, valid).astype(jnp.float32) for half in (low, high))

    def halves(ref: Any, *row: Any) -> Halves:
        return ref[(*row, low)].astype(jnp.float32), ref[(*row, high)].astype(jnp.float32)

    cos, sin = (refs[x][p.row, :].astype(jnp.float32) for x in ("cos", "sin"))
    k = k_weight = v = None
    q_weight = halves(refs["q_weight"])
    if plan.is_owner:
        k, k_weight = halves(raw, first + plan.groups), halves(refs["k_weight"])
        v = raw[first + plan.raw_heads - 1, :].astype(jnp.float32)
    return _Raw((q[0], q[1]), q_weight, (cos, sin), k, k_weight, v)


def _load_queries(plan: Plan, p: Program, refs: dict[str, Any], raw: _Raw | None) -> _Queries:
    """The queries, ready to attend."""
    rows, valid, position = query_rows(plan, p)
    if raw is None:
        low, high = (load_rows(refs["q"], rows, half, valid) for half in half_columns(plan))
    else:
        low, high = _norm_and_rotate(plan, raw.q, raw.q_weight, raw.tables)
    return _Queries(low, high, position)


def _norm_and_rotate(plan: Plan, x: Halves, weight: Halves, tables: Halves) -> Halves:
    """`rms_norm` and `apply_rope` of float32 halves [..., H/2]; in the compute dtype."""
    numerics = plan.numerics
    square = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=-1)
    root = inverse_root(square, plan.head_dim, plan.eps)[..., None]
    low, high = (tt.rounded(a * root * w, numerics) for a, w in zip(x, weight, strict=True))
    low, high = rotate((low, high), tables, numerics)
    return low.astype(numerics.jnp_dtype), high.astype(numerics.jnp_dtype)


def _new_key_value(plan: Plan, raw: _Raw) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The halves of the step's own key [H/2], and its value [H]."""
    assert raw.k is not None  # an owner's
    assert raw.k_weight is not None
    assert raw.v is not None
    k_low, k_high = _norm_and_rotate(plan, raw.k, raw.k_weight, raw.tables)
    root = inverse_root(jnp.sum(raw.v * raw.v, axis=-1), plan.head_dim, plan.eps)
    return k_low, k_high, (raw.v * root).astype(plan.numerics.jnp_dtype)


# --- the loop over keys ------------------------------------------------------------------------


def _empty_state(plan: Plan) -> State:
    rows = plan.config.rows
    return (
        jnp.full((rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, plan.head_dim), jnp.float32),
    )


def _state_of_new_key(plan: Plan, q: _Queries, new: Any, mine: jax.Array) -> State:
    """The state after the step's own key if it is `mine` (traced), else the empty state."""
    k_low, k_high, v = (x.astype(jnp.float32) for x in new)
    score = jnp.sum(q.low.astype(jnp.float32) * k_low[None], axis=1)
    score += jnp.sum(q.high.astype(jnp.float32) * k_high[None], axis=1)
    shape = (plan.config.rows, plan.head_dim)
    weight = jnp.broadcast_to(mine.astype(jnp.float32), shape[:1])
    top = jnp.where(weight > 0, score * LOG2E, jnp.full(shape[:1], MASK_VALUE))
    return top, weight, jnp.broadcast_to(v[None], shape) * weight[:, None]


def _cache_rows(plan: Plan, p: Program, refs: dict[str, Any], start: jax.Array) -> jax.Array:
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


def _load_tile(plan: Plan, p: Program, refs: dict[str, Any], t: jax.Array) -> _Tile:
    start = p.origin + t * plan.config.tile
    rows = _cache_rows(plan, p, refs, start)
    key = start + jnp.arange(plan.config.tile, dtype=jnp.int32)
    seen = (key >= p.low) & (key < p.end)
    k_low, k_high = (load_rows(refs["k"], rows, half, seen) for half in half_columns(plan))
    return _Tile(
        key, seen, k_low, k_high, load_rows(refs["v"], rows, pl.ds(0, plan.head_dim), seen)
    )


def _attend_tile(plan: Plan, q: _Queries, tile: _Tile, state: State) -> State:
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


def _attention_kernel(*args: Any, plan: Plan, names: tuple[str, ...]) -> None:
    """One program: the queries of a block against one share of the keys.

    Refs by name, whole arrays. Scalars: lengths [B], page_table [B, pages]. Inputs: q [rows, H], or
    qkv [heads, H] with q_weight, k_weight [H], cos, sin [B, H/2]; k, v [heads, H]; counters.
    Outputs: out [rows, H] and/or top, total [P, splits, rows], partial [P, splits, rows, H]; new_k,
    new_v alias k and v. No program reads what another one writes into the cache.
    """
    refs = dict(zip(names, args, strict=True))
    split = pl.program_id(1)
    p = program_of(plan, pl.program_id(0), refs["lengths"])
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
        finish(plan, p, refs, split, state)

    if plan.config.splits == 1:
        run()
    else:
        pl.when(split < p.live)(run)


def _share(plan: Plan, p: Program, refs: dict[str, Any], split: Any) -> tuple[Any, Any]:
    """First tile of a split, and the one past its last.

    Asks for the first page early: the loop, whose first loads wait for its number, finds it in the
    L1 cache. A negative page, which no table holds, makes the number one that counts.
    """
    first, stop = split * p.tiles // p.live, (split + 1) * p.tiles // p.live
    if not plan.paged:
        return first, stop
    slot = (p.origin + first * plan.config.tile) % plan.slots
    return first, jnp.where(refs["page_table"][p.row, slot // plan.page] < 0, first, stop)


def _write_cache(plan: Plan, p: Program, refs: dict[str, Any], new: Any) -> None:
    slot = (p.length - 1) % plan.slots
    if plan.paged:
        page = refs["page_table"][p.row, slot // plan.page]
        row = page * plan.page + slot % plan.page
    else:
        row = p.row * plan.slots + slot
    row = row * plan.kv_heads + p.head
    k_low, k_high, v = new
    low, high = half_columns(plan)
    refs["new_k"][row, low] = k_low
    refs["new_k"][row, high] = k_high
    refs["new_v"][row, :] = v


# --- call --------------------------------------------------------------------------------------


def call(plan: Plan, inputs: dict[str, jax.Array], out_rows: int) -> dict[str, jax.Array]:
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
        found["out"] = combine(plan, inputs["lengths"], found, out)
    return found
