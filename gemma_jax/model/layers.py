"""Norm, embedding, MLP and soft cap: the element-wise formulas of the decoder.

Weights keep the published `[out, in]` order. Every function takes the `Numerics` that says where to
round; float64 arguments give the exact result. The kernels' references are made of these formulas.
Source: transformers 5.17 `Gemma4TextModel`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from gemma_jax.numerics import Numerics, widen


def parameter(*shape: int, axes: str, dtype: str) -> nnx.Param:
    """An uninitialised weight; `axes` names one logical axis a dimension, letters as in docs."""
    names = tuple(axes.split())
    if len(names) != len(shape):
        raise ValueError(f"axes={axes!r}: expected {len(shape)} names for shape {shape}")
    return nnx.Param(jnp.zeros(shape, dtype), axes=names)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, numerics: Numerics) -> jax.Array:
    """x · (mean(x²) + eps)^(-1/2) · weight over the last axis, in float32 with one rounding.

    The weight multiplies directly (no 1 + w); `None` is a norm without weight.
    """
    wide = widen(x)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    out = wide * numerics.inverse_root(mean_square + eps)
    return numerics.cast(out if weight is None else out * weight.astype(wide.dtype))


def add(x: jax.Array, y: jax.Array, numerics: Numerics) -> jax.Array:
    """x + y, rounded once."""
    return numerics.cast(widen(x) + widen(y))


def scale(x: jax.Array, factor: jax.Array, numerics: Numerics) -> jax.Array:
    """x · factor, rounded once; `factor` broadcasts."""
    return numerics.cast(widen(x) * widen(factor))


def gelu_mul(gate: jax.Array, up: jax.Array, numerics: Numerics) -> jax.Array:
    """gelu_tanh(gate) · up; the activation and the product are rounded apart."""
    return numerics.cast(numerics.round(gelu_tanh(widen(gate))) * widen(up))


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x/2 · (1 + tanh( sqrt(2/π) (x + 0.044715 x³) )) of a widened x, unrounded."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def softcap(logits: jax.Array, cap: float | None, numerics: Numerics) -> jax.Array:
    """cap · tanh(logits / cap) as float32, each of the three steps rounded; `None` is no cap."""
    z = widen(logits)
    if cap is None:
        return z
    z = numerics.round(z / cap)
    z = numerics.round(jnp.tanh(z))
    return numerics.round(z * cap)


class Embedding(nnx.Module):
    """Token embedding, also the (unscaled) matrix of the tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, numerics: Numerics):
        self.table = parameter(vocab_size, hidden_size, axes="V D", dtype=numerics.dtype)

    def __call__(self, ids: jax.Array, numerics: Numerics) -> jax.Array:
        """E[ids] · sqrt(D), the scale rounded to the compute dtype first; [..., D]."""
        rows = self.table[...].at[ids].get(mode="clip")
        return scale(rows, numerics.constant(rows.shape[-1] ** 0.5), numerics)

    def logits(self, h: jax.Array, numerics: Numerics) -> jax.Array:
        """h Eᵀ, [..., V], before the soft cap."""
        return numerics.einsum("...d,vd->...v", h, self.table[...])


class Mlp(nnx.Module):
    """Weights of down( gelu_tanh(gate(x)) · up(x) ), gate and up stored as one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, numerics: Numerics):
        dtype = numerics.dtype
        self.gate_up = parameter(2, intermediate_size, hidden_size, axes="gate F D", dtype=dtype)
        self.down = parameter(hidden_size, intermediate_size, axes="D F", dtype=dtype)
