"""The forward pass of training: every row, packed documents, windowed attention in blocks, dropout.

It runs the model's own modules with the rounding of inference, so that the trained weights meet the
same arithmetic. What differs is where attention looks: rows hold several documents and no cache.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gemma_jax.config import FULL, SLIDING, LayerConfig, LayerKind
from gemma_jax.kernels import Kernels
from gemma_jax.model.attention import Tables
from gemma_jax.model.layers import add, rms_norm, scale
from gemma_jax.model.residual import (
    Ops,
    Residual,
    matmul,
    project,
    project_gate,
    project_gelu_mul,
)
from gemma_jax.model.rope import rope_tables
from gemma_jax.model.transformer import Gemma4
from gemma_jax.numerics import MASK_VALUE, Numerics

BOS = 2


@dataclass(frozen=True)
class Packed:
    """Documents of a batch of rows: [B, T] each.

    Attributes:
      segments: number of the document that a token belongs to; 0 before the first BOS.
      positions: position of a token inside its document.
    """

    segments: jax.Array
    positions: jax.Array

    @classmethod
    def from_ids(cls, ids: jax.Array) -> "Packed":
        """Documents begin at each BOS of `ids` [B, T]."""
        starts = ids == BOS
        column = jnp.arange(ids.shape[1], dtype=jnp.int32)
        first = jax.lax.cummax(jnp.where(starts, column[None], 0), axis=1)
        return cls(jnp.cumsum(starts, axis=1, dtype=jnp.int32), column[None] - first)


def logits(
    model: Gemma4, ids: jax.Array, numerics: Numerics, dropout: float = 0.0, key=None
) -> jax.Array:
    """Logits of every row of `ids` [B, T]: float32 [B, T, V]; see `logits_and_partition`."""
    return logits_and_partition(model, ids, numerics, dropout, key)[0]


def logits_and_partition(
    model: Gemma4, ids: jax.Array, numerics: Numerics, dropout: float = 0.0, key=None
) -> tuple[jax.Array, jax.Array]:
    """Logits of every row of `ids` [B, T], float32 [B, T, V], and the attention's partition.

    T is a multiple of the sliding window. `dropout` falls on the embedding and on what each block
    adds to the residual; `key` is needed when it is above 0. The partition is the mean over layers,
    heads and rows of (log Σ exp(scores))².
    """
    packed = Packed.from_ids(ids)
    tables = _rope(model, packed, numerics)
    ops = Ops(numerics, Kernels("reference"), model.config.rms_norm_eps)
    flat = ids.reshape(-1)
    h = model.embed(flat, numerics)
    ple = None if model.ple is None else model.ple(flat, h, 0, len(model.layers), ops)
    keys: dict[int, tuple[jax.Array, jax.Array]] = {}
    drop = _Dropout(dropout, key)
    h = drop(h)
    partitions = []
    for i, layer in enumerate(model.layers):
        attention, config = layer.attention, layer.layer
        matrix = attention.qkv[...]
        _, qkv = project(
            Residual(h), layer.input_layernorm[...], matrix.reshape(-1, matrix.shape[-1]), ops
        )
        qkv = qkv.reshape(*ids.shape, *matrix.shape[:-1])
        q, k, v = attention.split(qkv, tables[config.kind], numerics)
        if k is not None and v is not None:
            keys[config.index] = k, v
        attended, partition = _attend(config, q, *keys[config.kv_source], packed, numerics)
        partitions.append(partition)
        o = attention.output(attended.reshape(flat.shape[0], -1), ops)
        h = add(h, drop(_norm(o, layer.post_attention_layernorm, ops)), numerics)
        _, active = project_gelu_mul(
            Residual(h), layer.pre_feedforward_layernorm[...], layer.mlp.gate_up[...], ops
        )
        y = matmul(active, layer.mlp.down[...], ops)
        h = add(h, drop(_norm(y, layer.post_feedforward_layernorm, ops)), numerics)
        if layer.ple is not None and ple is not None:
            _, gated = project_gate(Residual(h), layer.ple.gate[...], ple, i, ops)
            y = matmul(gated, layer.ple.projection[...], ops)
            h = add(h, drop(_norm(y, layer.ple.norm, ops)), numerics)
        h = scale(h, layer.layer_scalar[...], numerics)
    h = rms_norm(h, model.norm[...], model.config.rms_norm_eps, numerics)
    z = model.logits(h, ops).reshape(*ids.shape, -1)
    return z, jnp.mean(jnp.stack(partitions))


class _Dropout:
    """Zeroes elements at `rate` and scales the others up; each call uses a key of its own."""

    def __init__(self, rate: float, key):
        self._rate, self._key, self._calls = rate, key, 0

    def __call__(self, x: jax.Array) -> jax.Array:
        if self._rate == 0.0:
            return x
        self._calls += 1
        keep = jax.random.bernoulli(
            jax.random.fold_in(self._key, self._calls), 1.0 - self._rate, x.shape
        )
        return jnp.where(keep, x / jnp.asarray(1.0 - self._rate, x.dtype), jnp.zeros((), x.dtype))


def _norm(x: jax.Array, weight, ops: Ops) -> jax.Array:
    return rms_norm(x, weight[...], ops.eps, ops.numerics)


def _rope(model: Gemma4, packed: Packed, numerics: Numerics) -> dict[LayerKind, Tables]:
    c = model.config
    return {
        SLIDING: rope_tables(packed.positions, c.sliding_rope, c.head_dim, numerics),
        FULL: rope_tables(packed.positions, c.full_rope, c.global_head_dim, numerics),
    }


# --- attention ------------------------------------------------------------------------------------


def _attend(layer: LayerConfig, q, k, v, packed: Packed, numerics: Numerics):
    """Attention inside documents, causal and windowed by layer: [B, T, K, G, H], partition."""
    column = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), packed.segments.shape)
    if layer.window is None:
        mask = _mask(column, column, packed.segments, packed.segments, None)
        return _softmax_attention(q, k, v, mask, numerics)
    w = layer.window
    blocks = lambda x: x.reshape(-1, w, *x.shape[2:])  # noqa: E731
    mask = _mask(
        blocks(column), _with_previous(column, w, -1),
        blocks(packed.segments), _with_previous(packed.segments, w, -1), w,
    )  # fmt: skip
    out, partition = _softmax_attention(
        blocks(q), _with_previous(k, w, 0), _with_previous(v, w, 0), mask, numerics
    )
    return out.reshape(q.shape), partition


def _with_previous(x: jax.Array, block: int, fill: int) -> jax.Array:
    """[B, T, ...] -> [B·blocks, 2·block, ...]: each block with the one before it."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (block, 0)
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(x.shape[0], -1, block, *x.shape[2:])
    pairs = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
    return pairs.reshape(-1, *pairs.shape[2:])


def _mask(q_column, k_column, q_segment, k_segment, window: int | None) -> jax.Array:
    """[B, T, S]: same document, not later, and inside the window."""
    distance = q_column[:, :, None] - k_column[:, None, :]
    mask = (distance >= 0) & (q_segment[:, :, None] == k_segment[:, None, :])
    return mask if window is None else mask & (distance < window)


def _softmax_attention(q, k, v, mask: jax.Array, numerics: Numerics):
    scores = numerics.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32)
    scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
    weights = numerics.cast(jax.nn.softmax(scores, axis=-1))
    partition = jnp.mean(jnp.square(jax.nn.logsumexp(scores, axis=-1)))
    return numerics.einsum("bkgts,bskh->btkgh", weights, v), partition
