"""Product of 1 to 16 rows with a large weight matrix: out = x wᵀ, one rounding.

    x [B, K], w [N, K] → [B, N]

At decode the reading of w is the whole cost. The kernels and why they look as they do:
`skinny_kernels`. Sums run in float32; their order depends on the tiles but not on the run.

Limits: bfloat16 or float32 (plain multiply-adds, no TF32), at most 16 rows, K a multiple of 16,
compute capability 8.0 or a CPU (interpreted).
"""

import functools

import jax

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.device import current_device
from gemma_jax.pallas.dispatch import Choice, Implementation, dispatch
from gemma_jax.pallas.skinny_kernels import (
    Config,
    Operands,
    Spec,
    call,
    default_config,
    unsupported,
)


def skinny_matmul_reference(x: jax.Array, w: jax.Array, *, numerics: Numerics) -> jax.Array:
    """The op in plain jnp; float64 arguments give the exact result."""
    return numerics.einsum("bk,nk->bn", x, w)


@functools.partial(jax.jit, static_argnames=("numerics", "config"))
def _skinny_matmul_triton(
    x: jax.Array, w: jax.Array, *, numerics: Numerics, config: Config | None = None
) -> jax.Array:
    spec = Spec(x.shape[0], 1, w.shape[0], x.shape[1], numerics)
    config = config or default_config(spec, False, current_device())
    return call(Operands(h=x, w=w[None]), config, spec, "skinny_matmul")[1]


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> jax.Array:
    """x wᵀ in x's dtype.

    Args:
      x: [B, K].
      w: [N, K].
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x{list(x.shape)}, w{list(w.shape)}: expected [B, K] and [N, K]")
    choices = {
        "triton": Choice(_skinny_matmul_triton, functools.partial(unsupported, x, w, numerics)),
        "reference": Choice(skinny_matmul_reference),
    }
    shape = f"{x.dtype}[{x.shape[0]}, {x.shape[1]}]·[{w.shape[0]}, {w.shape[1]}]"
    return dispatch("skinny_matmul", implementation, choices, shape)(x, w, numerics=numerics)
