"""Prefill attention: many queries a sequence, causal, optionally within a window.

    out[n] = sum_j w_nj · v[j],   w_n = softmax_j(q[n] · k[j])

over the keys j of n's sequence with max(p - window + 1, 0) <= j <= p, where p is the position of
query n among those keys. The scale is 1. Axes: q and out [N, K, G, H] (rows, key heads, query heads
that share one, head width), k and v [M, K, H]; `Segments` says which rows belong together, in a
packed or padded batch, and how much context comes before the first query of each.

Source: transformers 5.17 eager attention (rounding "hf"), and `unified_attention` of vLLM 0.25.1
(rounding "vllm"). The reference rounds where they do. The kernels keep scores in float32 and round
weights before they are normalised; under "vllm" only those run whose weights are then the same.

Padding rows of q, k and v may hold anything, NaN included. Output rows of no sequence are zero,
except those before the first sequence, which are undefined.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.errors import ConfigError
from gemma_jax.model.attention import VLLM_PREFILL_TILE, causal_mask, first_maximum
from gemma_jax.numerics import MASK_VALUE, Numerics
from gemma_jax.pallas import prefill_attention_mosaic as mosaic
from gemma_jax.pallas import prefill_attention_triton as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import Choice, Implementation, dispatch
from gemma_jax.pallas.segments import Segments

__all__ = ["Segments", "prefill_attention", "prefill_attention_reference"]


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    window: int | None,
    max_q_len: int,
    numerics: Numerics,
    max_k_len: int | None = None,
    uniform: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """softmax(q kᵀ) v of each sequence under the causal (windowed) mask: [N, K, G, H].

    Args:
      q: [N, K, G, H], bf16 or float32.
      k, v: [M, K, H] of the same dtype.
      segments: where the sequences lie; k_lengths >= q_lengths.
      window: keys that a query sees, itself included; None for all up to itself.
      max_q_len: bound of q_lengths.
      numerics: the compute dtype and whose rounding.
      max_k_len: bound of k_lengths, M if None; saves `reference` and `xla` memory and time, the
        kernels read the lengths.
      uniform: a promise that sequence b starts at row b · N/B of q, k and v and that no context
        comes before its queries: what cuDNN needs.
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs; says which and why.
      ConfigError: shapes or dtypes that make no batch.
    """
    _check_inputs(q, k, v, segments, max_q_len, uniform, numerics)
    if max_k_len is None:
        max_k_len = k.shape[0] // segments.q_offsets.shape[0] if uniform else k.shape[0]
    choices = _choices(q, k, v, window, numerics, max_k_len, uniform)
    run = dispatch("prefill_attention", implementation, choices, _shape(q, k, segments, window))
    return run(q, k, v, segments, window=window, max_q_len=max_q_len, numerics=numerics)


def prefill_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    window: int | None,
    max_q_len: int,
    numerics: Numerics,
    max_k_len: int | None = None,
) -> jax.Array:
    """The definition, one sequence after the other; float64 arrays give float64 throughout."""
    if q.dtype == jnp.float64:
        numerics = Numerics("float32")

    def one(segment: Segments) -> jax.Array:
        q_rows = _gather(q, segment.q_offsets, segment.q_lengths, max_q_len)
        size = max_k_len or k.shape[0]
        k_rows, v_rows = (_gather(x, segment.k_offsets, segment.k_lengths, size) for x in (k, v))
        positions = segment.k_lengths - segment.q_lengths + jnp.arange(max_q_len)
        return _attend(q_rows, k_rows, v_rows, positions, window, numerics)

    return _scatter(lax.map(one, segments), q, segments)


def _gather(x: jax.Array, offset: jax.Array, length: jax.Array, size: int) -> jax.Array:
    """[size, ...]: rows of x from `offset`; zeros from `length` on."""
    index = jnp.arange(size)
    rows = x.at[offset + index].get(mode="clip")
    return jnp.where((index < length).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


def _scatter(out: jax.Array, q: jax.Array, segments: Segments) -> jax.Array:
    """Rows [B, T, ...] of the sequences back where they lie in q; zeros elsewhere."""
    index = jnp.arange(out.shape[1])
    rows = segments.q_offsets[:, None] + index
    rows = jnp.where(index < segments.q_lengths[:, None], rows, q.shape[0])
    return jnp.zeros_like(q).at[rows].set(out, mode="drop")


def _attend(q, k, v, positions, window: int | None, numerics: Numerics) -> jax.Array:
    """One sequence: q [T, K, G, H] at `positions` [T] among keys [S, K, H]."""
    mask = causal_mask(positions, jnp.arange(k.shape[0]), window)
    if numerics.matches_vllm and not numerics.is_float32:
        first = jnp.full(positions.shape, MASK_VALUE, jnp.float32)
        if window is not None:
            first = first_maximum(positions, window, q.shape[2], MASK_VALUE)
        return _attend_in_tiles(q, k, v, mask, first)
    return _attend_whole(q, k, v, mask, numerics)


def _attend_whole(q, k, v, mask, numerics: Numerics) -> jax.Array:
    """Scores are rounded, weights are normalised before they are."""
    scores = numerics.einsum("tkgh,skh->kgts", q, k)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    weights = jax.nn.softmax(jnp.where(mask, scores, MASK_VALUE), axis=-1)
    weights = numerics.round(weights).astype(v.dtype)
    return numerics.einsum("kgts,skh->tkgh", weights, v).astype(q.dtype)


def _attend_in_tiles(q, k, v, mask, first) -> jax.Array:
    """vLLM's order: a tile of keys at a time, weights rounded against the running maximum."""
    f32, tile = jnp.float32, VLLM_PREFILL_TILE
    padding = -k.shape[0] % tile
    k, v = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0), (0, padding)))

    def step(state, tiles):
        top, total, out = state
        k, v, mask = tiles
        scores = jnp.einsum("tkgh,skh->tkgs", q, k, preferred_element_type=f32)
        scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(mask[:, None, None], jnp.exp(scores - new_top[..., None]), 0.0)
        rescale = jnp.exp(top - new_top)
        rounded = lax.reduce_precision(weights, 8, 7).astype(v.dtype)
        part = jnp.einsum("tkgs,skh->tkgh", rounded, v, preferred_element_type=f32)
        total = total * rescale + jnp.sum(weights, axis=-1)
        return (new_top, total, out * rescale[..., None] + part), None

    tiles = (
        k.reshape(-1, tile, *k.shape[1:]),
        v.reshape(-1, tile, *v.shape[1:]),
        jnp.moveaxis(mask.reshape(mask.shape[0], -1, tile), 1, 0),
    )
    top = jnp.broadcast_to(first[:, None, None], q.shape[:3])
    state = (top, jnp.zeros(q.shape[:3], f32), jnp.zeros(q.shape, f32))
    (_, total, out), _ = lax.scan(step, state, tiles)
    out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
    return lax.reduce_precision(out, 8, 7).astype(q.dtype)


# --- without a kernel of ours --------------------------------------------------------------------

XLA_BLOCK = 256
"""Queries a block: more waste work outside the window, fewer make thin products."""


def _xla(
    q, k, v, segments: Segments, *, window, max_q_len, numerics: Numerics, max_k_len, uniform
) -> jax.Array:
    """A block of queries at a time, against the keys that any of them can see."""
    block = min(XLA_BLOCK if window is not None else 2 * XLA_BLOCK, max_q_len)

    def attend_block(start: int, q_offset, q_length, k_offset, k_length) -> jax.Array:
        past = k_length - q_length
        low, size = jnp.int32(0), min(max_k_len, start + block) if uniform else max_k_len
        if window is not None:
            low, size = past + start - window + 1, block + window - 1
        queries = _gather(q, q_offset + start, q_length - start, block)
        keys = low + jnp.arange(size)
        inside = ((keys >= 0) & (keys < k_length))[:, None, None]
        k_rows, v_rows = (
            jnp.where(inside, x.at[k_offset + keys].get(mode="clip"), 0) for x in (k, v)
        )
        mask = causal_mask(past + start + jnp.arange(block), keys, window)
        return _attend_whole(queries, k_rows, v_rows, mask, numerics)

    blocks = [
        jax.vmap(functools.partial(attend_block, start))(*segments)
        for start in range(0, max_q_len, block)
    ]
    return _scatter(jnp.concatenate(blocks, axis=1)[:, :max_q_len], q, segments)


def _cudnn(q, k, v, segments: Segments, *, window, max_q_len, numerics: Numerics) -> jax.Array:
    """NVIDIA's flash attention; padding rows of k and v must not hold NaN, so they are zeroed."""
    del max_q_len, numerics
    batch = segments.q_offsets.shape[0]
    rows, num_kv, groups, head_dim = q.shape
    length = rows // batch
    valid = (jnp.arange(length) < segments.q_lengths[:, None])[..., None, None]
    keys = [jnp.where(valid, x.reshape(batch, length, num_kv, head_dim), 0) for x in (k, v)]
    out = jax.nn.dot_product_attention(
        q.reshape(batch, length, num_kv * groups, head_dim),
        *keys,
        scale=1.0,
        is_causal=True,
        query_seq_lengths=segments.q_lengths,
        key_value_seq_lengths=segments.k_lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return jnp.where(valid, out, 0).reshape(q.shape)


def _cudnn_unsupported(q, uniform: bool, numerics: Numerics, device: Device) -> str | None:
    if device.capability is None:
        return f"needs an NVIDIA GPU, this is {device.kind}"
    if numerics.matches_vllm or q.dtype != jnp.bfloat16:
        return "takes bfloat16 with rounding 'hf' only"
    if not uniform:
        return "takes padded batches without context only (uniform=True)"
    widest = 256 if device.at_least(9) else 128
    if q.shape[-1] > widest or q.shape[-1] % 8:
        return f"head width {q.shape[-1]}: needs a multiple of 8 up to {widest} on {device.kind}"
    return None


# --- choice --------------------------------------------------------------------------------------


def _choices(q, k, v, window, numerics: Numerics, max_k_len: int, uniform: bool):
    vllm = numerics.matches_vllm and not numerics.is_float32
    wrong_rounding = "rounds otherwise than vLLM" if vllm else None
    lengths = {"max_k_len": max_k_len}
    return {
        "mosaic": Choice(
            mosaic.prefill_attention_mosaic,
            lambda device: wrong_rounding or mosaic.unsupported(q, k, v, window, device),
            # Measured without context before the queries; there as many rows of keys as of queries.
            preferred=lambda device: q.shape[0] == k.shape[0],
        ),
        "cudnn": Choice(_cudnn, lambda device: _cudnn_unsupported(q, uniform, numerics, device)),
        "triton": Choice(
            triton.prefill_attention_triton,
            lambda device: triton.unsupported(q, k, v, window, device),
        ),
        "xla": Choice(
            functools.partial(_xla, uniform=uniform, **lengths),
            lambda device: wrong_rounding,
        ),
        "reference": Choice(functools.partial(prefill_attention_reference, **lengths)),
    }


def _check_inputs(
    q, k, v, segments: Segments, max_q_len: int, uniform: bool, numerics: Numerics
) -> None:
    problem = None
    batch = segments.q_offsets.shape[0]
    if q.ndim != 4 or k.ndim != 3 or k.shape != v.shape:
        problem = f"q {q.shape}, k {k.shape}, v {v.shape}: needs [N, K, G, H] and twice [M, K, H]"
    elif (q.shape[1], q.shape[3]) != (k.shape[1], k.shape[2]):
        problem = f"q {q.shape} and k {k.shape} differ in key heads or head width"
    elif min(q.shape) < 1 or min(k.shape) < 1 or batch < 1:
        problem = f"q {q.shape}, k {k.shape}, {batch} sequences: nothing may be empty"
    elif q.dtype in (jnp.bfloat16, jnp.float32) and q.dtype != numerics.jnp_dtype:
        problem = f"q is {q.dtype}, the numerics are {numerics.dtype}"
    elif max_q_len < 1:
        problem = f"max_q_len={max_q_len}: needs at least 1"
    elif uniform and (q.shape[0] != k.shape[0] or q.shape[0] % batch):
        problem = f"uniform: {q.shape[0]} and {k.shape[0]} rows are not {batch} equal sequences"
    if problem is not None:
        raise ConfigError(f"prefill_attention: {problem}")


def _shape(q: jax.Array, k: jax.Array, segments: Segments, window: int | None) -> str:
    rows, num_kv, groups, head_dim = q.shape
    return (
        f"{q.dtype} {segments.q_offsets.shape[0]} sequences, {rows} queries, {k.shape[0]} keys,"
        f" {num_kv}x{groups} heads of {head_dim}, window {window}"
    )
