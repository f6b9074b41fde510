"""Rotary position embedding: half-split rotation, channel j paired with j + H/2.

Source: transformers 5.17 `Gemma4TextRotaryEmbedding` and its "proportional" initialiser.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gemma_jax.config import RopeConfig
from gemma_jax.numerics import Numerics, widen


@functools.lru_cache
def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Frequencies [H/2] in float32; a proportional RoPE leaves the tail zero (not rotated).

    θ^(2j/H) is taken in float64 and rounded to float32 before the reciprocal: a float32 power is
    up to 2 ulp away from torch's values, and the error grows with the position.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    powers = np.power(np.float64(rope.rope_theta), exponents).astype(np.float32)
    frequencies = np.float32(1.0) / powers / np.float32(rope.factor)
    if rope.rope_type == "proportional":
        rotated = int(rope.partial_rotary_factor * head_dim // 2)
        frequencies[rotated:] = 0.0
    return frequencies


def rope_tables(
    positions: jax.Array, rope: RopeConfig, head_dim: int, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · frequency for `positions` [...]: two float32 [..., H/2].

    Angles are float32; the values are rounded to the compute dtype, as both engines do.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return numerics.round(jnp.cos(angles)), numerics.round(jnp.sin(angles))


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array], numerics: Numerics) -> jax.Array:
    """Rotates `x` [..., heads, H] by tables [..., H/2]; `heads` stands for any number of axes."""
    wide = widen(x)
    heads = [1] * (x.ndim - tables[0].ndim)
    cos, sin = (t.reshape(*t.shape[:-1], *heads, t.shape[-1]).astype(wide.dtype) for t in tables)
    low, high = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate(
        [numerics.rotate(low, -high, cos, sin), numerics.rotate(high, low, cos, sin)], axis=-1
    )
