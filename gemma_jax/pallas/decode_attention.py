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
The tile table is in `decode_attention_config`, the kernel in `decode_attention_kernel`.

Formulas: FlashAttention-2 (arXiv:2307.08691) for the running softmax, Flash-Decoding
(https://pytorch.org/blog/flash-decoding) for the split.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.errors import UnsupportedError
from gemma_jax.model import cache as kv
from gemma_jax.model.attention import causal_mask
from gemma_jax.model.layers import rms_norm
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import MASK_VALUE, Numerics
from gemma_jax.pallas.decode_attention_config import (
    MAX_QUERIES,
    Config,
    default_config,
    invariant_config,
)
from gemma_jax.pallas.decode_attention_kernel import call
from gemma_jax.pallas.decode_attention_plan import Plan
from gemma_jax.pallas.device import Device, current_device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)

# --- references --------------------------------------------------------------------------------


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


# --- kernels -----------------------------------------------------------------------------------


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
    plan = Plan(
        config, numerics, batch, queries, kv_heads, groups, head_dim, slots, k_cache.shape[1],
        window, page_table is not None,
    )  # fmt: skip
    inputs = {"lengths": lengths, "q": _heads(q), "k": _heads(k_cache), "v": _heads(v_cache)}
    if page_table is not None:
        inputs["page_table"] = page_table
    return call(plan, inputs, math.prod(q.shape[:-1]))["out"].reshape(q.shape)


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
    plan = Plan(
        config, numerics, batch, 1, kv_heads, groups, head_dim, slots, k_cache.shape[1],
        window, page_table is not None, raw_heads, eps,
    )  # fmt: skip
    inputs = {"lengths": lengths, "qkv": _heads(qkv), "q_weight": q_weight, "cos": cos, "sin": sin}
    inputs |= {"k": _heads(k_cache), "v": _heads(v_cache)}
    if k_weight is not None:
        inputs["k_weight"] = k_weight
    if page_table is not None:
        inputs["page_table"] = page_table
    found = call(plan, inputs, batch * kv_heads * groups)
    out = found["out"].reshape(batch, kv_heads, groups, head_dim)
    if not plan.is_owner:
        return out, k_cache, v_cache
    return out, found["new_k"].reshape(k_cache.shape), found["new_v"].reshape(v_cache.shape)


# --- ops ---------------------------------------------------------------------------------------


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
