"""Formulas inside a kernel, on float32 values in registers.

Plain jnp defines them in `model/layers.py` and `model/rope.py`; what differs here is what lowers:
no `reduce_precision`, no value slices. The root of a norm is an `rsqrt` for both engines: within
2 ulp of float32 of the power that transformers takes, and what XLA makes of that power on a GPU.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.triton_api import rounded

Halves = tuple[jax.Array, jax.Array]
"""The channels of a head as RoPE pairs them: the first H/2 and the last."""


def inverse_root(sum_of_squares: jax.Array, width: int, eps: float) -> jax.Array:
    """The factor of an RMS norm over `width` elements."""
    return lax.rsqrt(sum_of_squares / jnp.float32(width) + jnp.float32(eps))


def rotate(halves: Halves, tables: Halves, numerics: Numerics) -> Halves:
    """RoPE by cos and sin; the last rounding, of the sum, is left to the store."""
    low, high = halves
    cos, sin = tables

    def turn(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x * cos, y * sin
        if numerics.matches_vllm:
            return x + y
        return rounded(x, numerics) + rounded(y, numerics)

    return turn(low, -high), turn(high, low)
