"""RMS norm as the kernels see it: x · (mean(x²) + eps)^(-1/2) · weight, one rounding.

The reference pieces here define the norm for every kernel that contains one; `inverse_root` is the
step inside a kernel. There the root is an `rsqrt` for both engines: within 2 ulp of float32 of the
power that transformers takes, and what XLA makes of that power on a GPU. No kernel of its own: XLA
turns a lone norm into one pass.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.numerics import Numerics


def widen(x: jax.Array) -> jax.Array:
    """`x` in float32; float64 stays, so that a reference can also give the exact result."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def round_once(x: jax.Array, numerics: Numerics) -> jax.Array:
    """A widened `x` rounded as `Numerics.round` does; float64 is never rounded."""
    return x if x.dtype == jnp.float64 else numerics.round(x)


def rms_norm_reference(
    x: jax.Array, weight: jax.Array | None, eps: float, numerics: Numerics
) -> jax.Array:
    """The norm over the last axis, [..., D] in x's dtype; `None` is a norm without weight."""
    wide = widen(x)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    out = wide * numerics.inverse_root(mean_square + eps)
    if weight is not None:
        out = out * weight.astype(wide.dtype)
    return round_once(out, numerics).astype(x.dtype)


def inverse_root(sum_of_squares: jax.Array, width: int, eps: float) -> jax.Array:
    """The factor of the norm, inside a kernel, from the float32 sum over `width` elements."""
    return lax.rsqrt(sum_of_squares / jnp.float32(width) + jnp.float32(eps))
