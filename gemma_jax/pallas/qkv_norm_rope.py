"""Splits a fused q|k|v projection, norms each head, rotates q and k, stores k and v in the cache.

For one token and KV head, with G query heads, head width H and rows c of `qkv`:

    q_g = rope(rms_norm(qkv_g) · q_weight)      k = rope(rms_norm(qkv_G) · k_weight)
    v   = rms_norm(qkv_{G+1})                   or of the raw k head where the layer has no v head

RoPE pairs channel j with j + H/2; rows have their own tables, so a batch may be padded or packed. A
proportional RoPE is a table whose tail is cos 1, sin 0: such channels come out as the norm left
them. A KV-shared layer has the query heads only. Rounding points: docs/numerics.md.

The kernel is bound by memory: a program takes a few tokens, issues the loads of all its heads
before the first use, and reads the two halves of a head as two slices. Query heads and the pair
k, v are separate programs, so that decode has more of them.

Limits: H a power of two, bfloat16 or float32, compute capability 8.0 or a CPU (interpreted). Tokens
of one call must not share a slot.
Source of the formulas: transformers 5.17 `Gemma4TextAttention`.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model.layers import rms_norm
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)
from gemma_jax.pallas.kernel_math import Halves, inverse_root, rotate


class CacheWrite(NamedTuple):
    """Where k and v go: `slots` [N] int32 = page · page_size + offset, negative = nowhere."""

    k: jax.Array  # [pages, page, K, H]
    v: jax.Array
    slots: jax.Array


class QkvOutput(NamedTuple):
    """q [N, K, G, H]; k and v [N, K, H] of an owner layer; the caches after the write."""

    q: jax.Array
    k: jax.Array | None = None
    v: jax.Array | None = None
    k_cache: jax.Array | None = None
    v_cache: jax.Array | None = None


# --- reference -----------------------------------------------------------------------------------


def qkv_norm_rope_reference(
    qkv: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_groups: int,
    has_v: bool,
    eps: float,
    numerics: Numerics,
    cache: CacheWrite | None = None,
) -> QkvOutput:
    """The op in plain jnp; float64 arguments give the exact result."""
    rope = functools.partial(apply_rope, tables=(cos, sin), numerics=numerics)
    q = rope(rms_norm(qkv[:, :, :num_groups], q_weight, eps, numerics))
    if k_weight is None:
        return QkvOutput(q)
    raw_k, raw_v = qkv[:, :, num_groups], qkv[:, :, -1]  # the same head without a v head
    k = rope(rms_norm(raw_k, k_weight, eps, numerics))
    v = rms_norm(raw_v, None, eps, numerics)
    written = (None, None)
    if cache is not None:
        written = write_slots(cache.k, k, cache.slots), write_slots(cache.v, v, cache.slots)
    return QkvOutput(q, k, v, *written)


def write_slots(pages: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """pages [pages, page, K, H] with values [N, K, H] at the slots of a `CacheWrite`."""
    flat = _flat(pages)
    where = jnp.where(slots < 0, flat.shape[0], slots)  # past the end: dropped
    return flat.at[where].set(values, mode="drop", unique_indices=True).reshape(pages.shape)


def _flat(pages: jax.Array) -> jax.Array:
    """[pages, page, K, H] as [slots, K, H]."""
    return pages.reshape(-1, *pages.shape[2:])


# --- kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Tile of a program.

    Attributes:
      block_tokens: tokens, a power of two.
      block_heads: query heads, a divisor of G; k and v together are one more program.
      num_warps: warps of a program.
    """

    block_tokens: int
    block_heads: int
    num_warps: int


def default_config(num_tokens: int, num_groups: int, head_dim: int) -> Config:
    """Prefill: 16 bytes a thread and load, 2,048 channels in flight. Decode: one head."""
    if num_tokens < 512:
        return Config(1, 1, 1)
    heads = 8 if head_dim <= 256 else 4
    return Config(max(512 // head_dim, 1), max(math.gcd(num_groups, heads), 1), 1)


@dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    num_tokens: int
    num_groups: int
    head_dim: int
    v_head: int | None
    config: Config
    eps: float
    numerics: Numerics
    num_slots: int

    @property
    def parts(self) -> int:
        """Programs of one token block and KV head."""
        return self.num_groups // self.config.block_heads + (self.v_head is not None)


Refs = dict[str, Any]


class _Tile(NamedTuple):
    """The part of the arrays that a program works on."""

    rows: Any  # slice of tokens
    inside: jax.Array | None  # [T, 1], which of them exist, if some do not
    kv_head: jax.Array


def _kernel(*refs: Any, names: tuple[str, ...], plan: _Plan) -> None:
    """One block of tokens of one KV head: some of its query heads, or its k and v."""
    ref = dict(zip(names, refs, strict=True))
    part, block = pl.program_id(2), plan.config.block_tokens
    start = pl.program_id(0) * block
    inside = None
    if plan.num_tokens % block:
        inside = (start + lax.iota(jnp.int32, block) < plan.num_tokens)[:, None]
    tile = _Tile(pl.ds(start, block), inside, pl.program_id(1))
    if plan.v_head is None:
        return _queries(ref, tile, part, plan)
    if plan.num_groups == 0:
        return _keys(ref, tile, plan)
    pl.when(part < plan.parts - 1)(lambda: _queries(ref, tile, part, plan))
    pl.when(part == plan.parts - 1)(lambda: _keys(ref, tile, plan))


def _queries(ref: Refs, tile: _Tile, part: jax.Array, plan: _Plan) -> None:
    first = part * plan.config.block_heads
    heads = [first + i for i in range(plan.config.block_heads)]
    tables = _tables(ref, tile)
    raw = [_load_head(ref["qkv"], tile, c, plan) for c in heads]
    weight = _load_weight(ref["q_weight"], plan)
    for c, halves in zip(heads, raw, strict=True):
        rotated = rotate(_normalise(halves, weight, plan), tables, plan.numerics)
        _store_rows(ref["q"], tile, (tile.kv_head, c), rotated, plan)


def _keys(ref: Refs, tile: _Tile, plan: _Plan) -> None:
    tables = _tables(ref, tile)
    raw_k = _load_head(ref["qkv"], tile, jnp.int32(plan.num_groups), plan)
    raw_v = raw_k
    if plan.v_head != plan.num_groups:
        raw_v = _load_head(ref["qkv"], tile, jnp.int32(plan.v_head), plan)
    weight = _load_weight(ref["k_weight"], plan)
    k = rotate(_normalise(raw_k, weight, plan), tables, plan.numerics)
    v = _normalise(raw_v, None, plan)
    for name, halves in (("k", k), ("v", v)):
        _store_rows(ref[name], tile, (tile.kv_head,), halves, plan)
        if f"{name}_cache" in ref:
            _store_slots(ref[f"{name}_cache"], ref["slots"], tile, halves, plan)


def _normalise(halves: Halves, weight: Halves | None, plan: _Plan) -> Halves:
    """The norm of float32 halves [T, H/2] of a head, rounded."""
    low, high = halves
    squares = jnp.sum(low * low + high * high, axis=1, keepdims=True)
    root = inverse_root(squares, plan.head_dim, plan.eps)
    low, high = low * root, high * root
    if weight is not None:
        low, high = low * weight[0], high * weight[1]
    return triton.rounded(low, plan.numerics), triton.rounded(high, plan.numerics)


def _half_slices(plan: _Plan) -> tuple[Any, Any]:
    half = plan.head_dim // 2
    return pl.ds(0, half), pl.ds(half, half)


def _load_head(qkv_ref: Any, tile: _Tile, c: jax.Array, plan: _Plan) -> Halves:
    low, high = _half_slices(plan)
    at = (tile.rows, tile.kv_head, c)
    return _load(qkv_ref.at[(*at, low)], tile), _load(qkv_ref.at[(*at, high)], tile)


def _tables(ref: Refs, tile: _Tile) -> Halves:
    return _load(ref["cos"].at[tile.rows, :], tile), _load(ref["sin"].at[tile.rows, :], tile)


def _load_weight(weight_ref: Any, plan: _Plan) -> Halves:
    low, high = (triton.load(weight_ref.at[part]) for part in _half_slices(plan))
    return low.astype(jnp.float32)[None], high.astype(jnp.float32)[None]


def _load(ref: Any, tile: _Tile) -> jax.Array:
    """float32 values; zero in rows that do not exist."""
    other = None if tile.inside is None else 0.0
    return triton.load(ref, mask=tile.inside, other=other).astype(jnp.float32)


def _store_rows(
    ref: Any, tile: _Tile, head: tuple[jax.Array, ...], halves: Halves, plan: _Plan
) -> None:
    for columns, half in zip(_half_slices(plan), halves, strict=True):
        triton.store(ref.at[(tile.rows, *head, columns)], half.astype(ref.dtype), mask=tile.inside)


def _store_slots(ref: Any, slots_ref: Any, tile: _Tile, halves: Halves, plan: _Plan) -> None:
    other = None if tile.inside is None else -1
    slots = triton.load(slots_ref.at[tile.rows, :], mask=tile.inside, other=other)
    written = (slots >= 0) & (slots < plan.num_slots)
    # Masked rows point past the end: the interpreter drops those, but does not mask.
    slots = jnp.where(written, slots, plan.num_slots)
    columns = lax.iota(jnp.int32, plan.head_dim // 2)[None]
    for start, half in zip((0, plan.head_dim // 2), halves, strict=True):
        where = ref.at[slots, tile.kv_head, columns + start]
        triton.store(where, half.astype(ref.dtype), mask=written)


# --- wrapper -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("num_groups", "has_v", "eps", "numerics", "config"))
def _qkv_norm_rope_pallas(
    qkv: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_groups: int,
    has_v: bool,
    eps: float,
    numerics: Numerics,
    cache: CacheWrite | None = None,
    config: Config | None = None,
) -> QkvOutput:
    n, num_kv_heads, _, h = qkv.shape
    tokens = 1 if numerics.batch_invariant else n  # the tile decides in which order a norm adds
    config = config or default_config(tokens, num_groups, h)
    v_head = None if k_weight is None else num_groups + has_v
    num_slots = 0 if cache is None else cache.k.shape[0] * cache.k.shape[1]
    plan = _Plan(n, num_groups, h, v_head, config, eps, numerics, num_slots)
    inputs = {"qkv": qkv, "q_weight": q_weight, "cos": cos, "sin": sin}
    shape = jax.ShapeDtypeStruct
    outputs = {}
    if num_groups:
        outputs["q"] = shape((n, num_kv_heads, num_groups, h), qkv.dtype)
    aliases = {}
    if k_weight is not None:
        inputs["k_weight"] = k_weight
        outputs |= {name: shape((n, num_kv_heads, h), qkv.dtype) for name in ("k", "v")}
        if cache is not None:
            inputs |= {
                "slots": cache.slots[:, None],
                "k_in": _flat(cache.k),
                "v_in": _flat(cache.v),
            }
            for name in ("k", "v"):
                aliases[list(inputs).index(f"{name}_in")] = len(outputs)
                flat = inputs[f"{name}_in"]
                outputs[f"{name}_cache"] = shape(flat.shape, flat.dtype)
    call = triton.pallas_call(
        functools.partial(_kernel, names=(*inputs, *outputs), plan=plan),
        name="qkv_norm_rope",
        out_shape=list(outputs.values()),
        grid=(pl.cdiv(n, config.block_tokens), num_kv_heads, plan.parts),
        in_specs=[triton.whole() for _ in inputs],
        out_specs=[triton.whole() for _ in outputs],
        num_warps=config.num_warps,
        num_stages=1,
        input_output_aliases=aliases,
    )
    out = {"q": qkv[:, :, :num_groups]} | dict(zip(outputs, call(*inputs.values()), strict=True))
    if cache is not None and k_weight is not None:
        out["k_cache"] = out["k_cache"].reshape(cache.k.shape)
        out["v_cache"] = out["v_cache"].reshape(cache.v.shape)
    return QkvOutput(**out)


# --- public op -----------------------------------------------------------------------------------


def qkv_norm_rope(
    qkv: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_groups: int,
    has_v: bool,
    eps: float,
    numerics: Numerics,
    cache: CacheWrite | None = None,
    implementation: Implementation | None = None,
) -> QkvOutput:
    """Normed and rotated q and k, normed v, of a fused projection.

    Args:
      qkv: [N, K, C, H], the G query heads of a KV head, then its k head, then its v head.
      q_weight, k_weight: [H]; `k_weight` is None for a KV-shared layer, where C = G.
      cos, sin: [N, H/2] in the compute dtype.
      num_groups: G; 0 where only k and v are wanted.
      has_v: whether an owner layer has a v head; otherwise v is made of the raw k head.
      eps: of the norms.
      cache: also stores k and v in place: donate its arrays, or XLA copies them first.
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    _check(qkv, k_weight, cos, num_groups, has_v, cache)
    choices = {
        "triton": Choice(_qkv_norm_rope_pallas, functools.partial(_unsupported, qkv, numerics)),
        "reference": Choice(qkv_norm_rope_reference),
    }
    run = dispatch("qkv_norm_rope", implementation, choices, _describe(qkv, cache))
    return run(
        qkv, q_weight, k_weight, cos, sin, num_groups=num_groups, has_v=has_v, eps=eps,
        numerics=numerics, cache=cache,
    )  # fmt: skip


def _check(qkv, k_weight, cos, num_groups: int, has_v: bool, cache) -> None:
    n, _, heads, h = qkv.shape
    owner = k_weight is not None
    expected = num_groups + (1 + has_v if owner else 0)
    if heads != expected:
        raise ValueError(f"qkv{list(qkv.shape)}: expected {expected} heads on axis 2, got {heads}")
    if cos.shape != (n, h // 2):
        raise ValueError(f"cos{list(cos.shape)}: expected [{n}, {h // 2}] for qkv{list(qkv.shape)}")
    if cache is not None and not owner:
        raise ValueError("cache: a KV-shared layer has no k and v to store")


def _unsupported(qkv: jax.Array, numerics: Numerics, device: Device) -> str | None:
    h = qkv.shape[-1]
    if qkv.dtype != numerics.jnp_dtype:
        return f"dtype {qkv.dtype}, compute dtype {numerics.dtype}"
    if h < 2 or h & (h - 1):
        return f"head width {h} is not a power of two"
    return needs_gpu_or_interpreter((8, 0))(device)


def _describe(qkv: jax.Array, cache: CacheWrite | None) -> str:
    return f"{qkv.dtype}{list(qkv.shape)}{'' if cache is None else ' with cache'}"
