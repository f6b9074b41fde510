"""Attention: projections of a layer, masks, and the softmax in each engine's rounding.

Axes: q is [B, T, K, G, H] (query head n = k·G + g), keys and values are [B, S, K, H], masks are
[B, T, S] with True = may attend. The scale is 1. Source: transformers 5.17 eager attention, and
the Triton kernel `unified_attention` of vLLM 0.25.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from gemma_jax.config import LayerConfig, ModelConfig
from gemma_jax.model.layers import parameter, rms_norm
from gemma_jax.model.residual import Ops, multiply_branch
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import MASK_VALUE, Numerics

Tables = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Q, K, V and output projections with per-head norms and RoPE of one layer.

    `qkv` is [K, C, H, D]: for each KV head its G query heads, then its k head, then its v head. A
    KV-shared layer has the query heads only; with k_eq_v there is no v head.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, numerics: Numerics):
        d, h = config.hidden_size, layer.head_dim
        k, g = layer.num_kv_heads, layer.num_groups
        self.layer = layer
        self.eps = config.rms_norm_eps
        kv_heads = (1 if layer.k_eq_v else 2) if layer.owns_kv else 0
        dtype = numerics.dtype
        self.qkv = parameter(k, g + kv_heads, h, d, axes="K G H D", dtype=dtype)
        self.q_norm = parameter(h, axes="H", dtype=dtype)
        if layer.owns_kv:
            self.k_norm = parameter(h, axes="H", dtype=dtype)
        self.out = parameter(d, k, g, h, axes="D K G H", dtype=dtype)

    def split(
        self, qkv: jax.Array, tables: Tables, numerics: Numerics
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """From qkv [B, T, K, C, H]: q [B, T, K, G, H] and an owner's k, v [B, T, K, H], normed and
        rotated."""
        g = self.layer.num_groups
        return (
            self.queries(qkv[..., :g, :], tables, numerics),
            *self.keys_and_values(qkv[..., g:, :], tables, numerics),
        )

    def queries(self, q: jax.Array, tables: Tables, numerics: Numerics) -> jax.Array:
        """Normed and rotated query heads."""
        return apply_rope(rms_norm(q, self.q_norm[...], self.eps, numerics), tables, numerics)

    def keys_and_values(
        self, kv: jax.Array, tables: Tables, numerics: Numerics
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """k and v [B, T, K, H] of the k and v heads `kv`; (None, None) in a KV-shared layer."""
        if not self.layer.owns_kv:
            return None, None
        raw_k, raw_v = kv[..., 0, :], kv[..., -1, :]  # the same head when k_eq_v
        k = apply_rope(rms_norm(raw_k, self.k_norm[...], self.eps, numerics), tables, numerics)
        return k, rms_norm(raw_v, None, self.eps, numerics)

    def output(self, o: jax.Array, ops: Ops) -> jax.Array:
        """The output projection of `o` [N, K·G·H]: [N, D], or partial sums of it."""
        matrix = self.out[...]
        return multiply_branch(o, matrix.reshape(matrix.shape[0], -1), ops)


class KeyBlock(NamedTuple):
    """Keys and values that queries may see, with the absolute position of each.

    A negative position, or one not yet written, is never attended to: masks compare positions.
    """

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    positions: jax.Array  # [B, S]


def causal_mask(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """[..., T, S] of [..., T] and [..., S]: 0 <= k <= q and, with a window, k > q - window."""
    q, k = q_positions[..., :, None], k_positions[..., None, :]
    mask = (k >= 0) & (k <= q)
    return mask if window is None else mask & (k > q - window)


def attend(
    q: jax.Array,
    keys: KeyBlock,
    q_positions: jax.Array,
    window: int | None,
    numerics: Numerics,
    split_keys: bool = False,
) -> jax.Array:
    """softmax(q kᵀ) v over the keys that the causal (windowed) mask lets through: [B, T, K, G, H].

    With vLLM's rounding the key axis must be in position order, starting at a multiple of the tile,
    and `split_keys` says which of its kernels to follow (`vllm_splits_keys`).
    """
    mask = causal_mask(q_positions, keys.positions, window)
    if numerics.matches_vllm and not numerics.is_float32:
        return _tiled_attention(q, keys, mask, q_positions, window, split_keys)
    scores = numerics.einsum("btkgh,bskh->bkgts", q, keys.k).astype(jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
    weights = numerics.cast(jax.nn.softmax(scores, axis=-1))
    return numerics.einsum("bkgts,bskh->btkgh", weights, keys.v)


def attend_in_blocks(
    q: jax.Array,
    keys: KeyBlock,
    q_positions: jax.Array,
    window: int,
    block: int,
    numerics: Numerics,
) -> jax.Array:
    """`attend` for consecutive queries, a block of queries at a time against the keys it can see.

    The last T of the S keys belong to the T queries; the S - T before them are at least the window
    that the first query sees. T must be a multiple of `block`.
    """
    batch, length = q_positions.shape
    past = keys.positions.shape[1] - length
    starts = range(0, length, block)

    def fold(x: jax.Array, size: int) -> jax.Array:
        """[B, S, ...] -> [B·blocks, size, ...], overlapping slices that start with each block."""
        slices = [lax.slice_in_dim(x, s, s + size, axis=1) for s in starts]
        return jnp.stack(slices, axis=1).reshape(batch * len(slices), size, *x.shape[2:])

    out = attend(
        fold(q, block),
        KeyBlock(*(fold(x, past + block) for x in keys)),
        fold(q_positions, block),
        window,
        numerics,
    )
    return out.reshape(batch, length, *out.shape[2:])


# --- vLLM's rounding ---------------------------------------------------------------------------

VLLM_PREFILL_TILE = 32
"""Keys a tile of vLLM's prefill kernel; its weights are rounded against the running maximum."""
VLLM_BLOCK_ROWS = 16
"""Query rows (positions times query heads of a group) that share a pass over the keys."""
VLLM_SEGMENTS = 16
VLLM_MAX_SPLIT_PROGRAMS = 128


def vllm_splits_keys(rows: int, length: int, num_kv_heads: int) -> bool:
    """Whether vLLM splits the key axis: for single-token queries of few rows.

    `num_kv_heads` is the config's `num_key_value_heads`, whatever the layer.
    """
    return length == 1 and rows <= VLLM_MAX_SPLIT_PROGRAMS // num_kv_heads


def vllm_decode_tile(head_dim: int, window: int | None) -> int:
    """Keys a tile of vLLM's split-key kernel, which serves single-token queries."""
    return 32 if head_dim == 256 and window == 1024 else 16


def _tiled_attention(
    q: jax.Array,
    keys: KeyBlock,
    mask: jax.Array,
    q_positions: jax.Array,
    window: int | None,
    split_keys: bool,
) -> jax.Array:
    """Online softmax over key tiles: bf16 weights, rounded against the running maximum.

    Split keys form segments, each with a running maximum of its own.
    """
    batch, length, num_kv, groups, head_dim = q.shape
    tile = vllm_decode_tile(head_dim, window) if split_keys else VLLM_PREFILL_TILE
    keys, mask = _pad_keys(keys, mask, -keys.positions.shape[1] % tile)
    tiles = keys.positions.shape[1] // tile

    f32 = jnp.float32
    scores = jnp.einsum("btkgh,bskh->bkgts", q, keys.k, preferred_element_type=f32)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    scores = scores.reshape(batch, num_kv, groups, length, tiles, tile)
    restart = _segment_starts(keys.positions[:, ::tile], q_positions, tile) if split_keys else None
    running = _running_max(jnp.max(scores, axis=-1), restart)
    if window is not None and not split_keys:
        start = first_maximum(q_positions, window, groups, -jnp.inf)
        running = jnp.maximum(running, start[:, None, None, :, None])
    top = jnp.max(running, axis=-1)
    seen = ~jnp.isneginf(running)
    running = jnp.where(seen, running, 0.0)
    weights = jnp.exp(scores - running[..., None])

    rescale = jnp.where(seen, jnp.exp(running - top[..., None]), 0.0)[..., None]
    total = jnp.sum(weights * rescale, axis=(-1, -2))
    flat = (lax.reduce_precision(weights, 8, 7) * rescale).reshape(
        batch, num_kv, groups, length, -1
    )
    out = jnp.einsum("bkgts,bskh->btkgh", flat, keys.v.astype(f32), precision=lax.Precision.HIGHEST)
    total = jnp.moveaxis(jnp.where(total == 0.0, 1.0, total), 3, 1)[..., None]
    return lax.reduce_precision(out / total, 8, 7).astype(jnp.bfloat16)


def _pad_keys(keys: KeyBlock, mask: jax.Array, padding: int) -> tuple[KeyBlock, jax.Array]:
    if padding == 0:
        return keys, mask
    heads = ((0, 0), (0, padding), (0, 0), (0, 0))
    last = keys.positions[:, -1:] + 1 + jnp.arange(padding, dtype=keys.positions.dtype)
    padded = KeyBlock(
        jnp.pad(keys.k, heads),
        jnp.pad(keys.v, heads),
        jnp.concatenate([keys.positions, last], axis=1),
    )
    return padded, jnp.pad(mask, ((0, 0), (0, 0), (0, padding)))


def first_maximum(q_positions: jax.Array, window: int, groups: int, low: float) -> jax.Array:
    """Where the running maximum of a row starts, [..., T]: `low`, or 0 after a tile it cannot see.

    That tile is there when the window of the first row of its block begins a tile earlier.
    """
    block = max(VLLM_BLOCK_ROWS // groups, 1)
    length = q_positions.shape[-1]
    block_starts = q_positions[..., jnp.arange(length) // block * block]

    def first_tile(position: jax.Array) -> jax.Array:
        return jnp.maximum(position - window + 1, 0) // VLLM_PREFILL_TILE

    hidden = first_tile(block_starts) < first_tile(q_positions)
    return jnp.where(hidden, 0.0, jnp.float32(low))


def _segment_starts(tile_positions: jax.Array, q_positions: jax.Array, tile: int) -> jax.Array:
    """True [B, tiles] where a tile opens a segment of the split over `VLLM_SEGMENTS` key ranges."""
    per_segment = -(-(q_positions + 1) // (VLLM_SEGMENTS * tile))  # [B, 1]
    return (tile_positions // tile) % per_segment == 0


def _running_max(tile_max: jax.Array, restart: jax.Array | None) -> jax.Array:
    """Cumulative maximum over the last axis, begun anew where `restart` [B, tiles] is True."""
    if restart is None:
        return lax.cummax(tile_max, axis=tile_max.ndim - 1)
    flags = jnp.broadcast_to(restart[:, None, None, None], tile_max.shape)

    def combine(left, right):
        return jnp.where(right[1], right[0], jnp.maximum(left[0], right[0])), left[1] | right[1]

    return lax.associative_scan(combine, (tile_max, flags), axis=-1)[0]
