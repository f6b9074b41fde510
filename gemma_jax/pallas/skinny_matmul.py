"""Product of 1 to 64 rows with a large weight matrix, at its end the activation of an MLP.

    z = x wᵀ        out = z | gelu(z₀) · z₁ | gelu(z) · g

with x [B, K], w [N, K] or gate|up [2, N, K], g [B, N]; the result is [B, N].

At decode the reading of w is the whole cost. The kernels and why they look as they do:
`skinny_kernels` (Triton, up to 16 rows) and `skinny_mosaic` (Hopper, up to 64). Sums run in
float32; their order depends on the tiles but not on the run. z rounds once, gelu once more.

Who adds and norms a plain product next can do so from partial sums: `unfinished` lets the op return
those where that is faster.

Limits: bfloat16 or float32 (plain multiply-adds, no TF32) and K a multiple of 16 up to 16 rows,
bfloat16 and K a multiple of 64 above; compute capability 8.0 and 9.0, or a CPU (interpreted).
"""

import functools

import jax

from gemma_jax.model.layers import gelu_mul
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import skinny_kernels, skinny_mosaic
from gemma_jax.pallas.device import current_device
from gemma_jax.pallas.dispatch import Choice, Implementation, dispatch
from gemma_jax.pallas.skinny_config import Activation, Config, Spec, default_config
from gemma_jax.pallas.skinny_prologue import Operands

MIN_OUTPUTS = 1024
"""Fewer outputs leave most of the GPU idle: XLA, which splits the depth, is faster."""


def skinny_matmul_reference(
    x: jax.Array,
    w: jax.Array,
    gate: jax.Array | None = None,
    gate_index: int = 0,
    *,
    numerics: Numerics,
    unfinished: bool = False,
) -> jax.Array:
    """The op in plain jnp, always finished; float64 arguments give the exact result."""
    del unfinished
    z = numerics.einsum("bk,...nk->b...n", x, w)
    if gate is not None:
        return gelu_mul(z, gate[:, gate_index], numerics)
    return z if w.ndim == 2 else gelu_mul(z[:, 0], z[:, 1], numerics)


@functools.partial(jax.jit, static_argnames=("gate_index", "numerics", "config", "unfinished"))
def _skinny_matmul_triton(
    x: jax.Array,
    w: jax.Array,
    gate: jax.Array | None = None,
    gate_index: int = 0,
    *,
    numerics: Numerics,
    unfinished: bool = False,
    config: Config | None = None,
) -> jax.Array:
    del unfinished
    activation: Activation | None = "gelu_mul" if w.ndim == 3 else None
    if gate is not None:
        activation, gate = "gelu_gate", gate[:, gate_index]
    w = _in_parts(w)
    spec = Spec(x.shape[0], w.shape[0], w.shape[1], x.shape[1], numerics, activation)
    config = config or default_config(spec, False, current_device())
    operands = Operands(h=x, w=w, ple=gate)
    return skinny_kernels.call(operands, config, spec, "skinny_matmul")[1]


def _skinny_matmul_mosaic(
    x: jax.Array,
    w: jax.Array,
    gate: jax.Array | None = None,
    gate_index: int = 0,
    *,
    numerics: Numerics,
    unfinished: bool = False,
) -> jax.Array:
    w = _in_parts(w)
    may_split = unfinished and gate is None
    parts, n, k = w.shape
    config = skinny_mosaic.default_config(parts, n, k, current_device(), may_split)
    assert config is not None  # else `unsupported` has said so
    column = gate_index * n
    gates = None if gate is None else gate.reshape(gate.shape[0], -1)
    return skinny_mosaic.multiply(x, w, gates, column, numerics=numerics, config=config)


def _in_parts(w: jax.Array) -> jax.Array:
    """[P, N, K]."""
    return w if w.ndim == 3 else w[None]


def is_worth_it(x: jax.Array, w: jax.Array, numerics: Numerics, gated: bool = False) -> bool:
    """Whether a kernel multiplies faster than XLA: few rows, or a few more on a Hopper GPU.

    With `gated`, XLA's product has further kernels behind it, that ours has not.
    """
    if x.shape[0] <= skinny_kernels.MAX_BATCH:
        return True
    if w.ndim == 2 and w.shape[0] < MIN_OUTPUTS and not gated:
        return False
    device = current_device()
    return device.is_gpu and skinny_mosaic.unsupported(x, _in_parts(w), numerics, device) is None


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    gate: jax.Array | None = None,
    gate_index: int = 0,
    *,
    numerics: Numerics,
    unfinished: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """x wᵀ in x's dtype, gelu(gate) · up of two such products, or gelu(x wᵀ) · g.

    Args:
      x: [B, K].
      w: [N, K], or gate|up [2, N, K].
      gate: [B, L, N]; g is gate[:, gate_index].
      unfinished: a product without activation may be partial sums [S, R, N] float32, R >= B,
        which `residual_norm.whole` adds; rows from B on are undefined.
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    _check(x, w, gate, gate_index)
    triton = functools.partial(skinny_kernels.unsupported, x, w, numerics)
    mosaic = functools.partial(skinny_mosaic.unsupported, x, _in_parts(w), numerics)
    choices = {
        "mosaic": Choice(_skinny_matmul_mosaic, mosaic),
        "triton": Choice(_skinny_matmul_triton, triton),
        "reference": Choice(skinny_matmul_reference),
    }
    shape = f"{x.dtype}{list(x.shape)}·{list(w.shape)}"
    run = dispatch("skinny_matmul", implementation, choices, shape)
    return run(x, w, gate, gate_index, numerics=numerics, unfinished=unfinished)


def _check(x: jax.Array, w: jax.Array, gate: jax.Array | None, gate_index: int) -> None:
    if x.ndim != 2 or w.ndim not in (2, 3) or x.shape[1] != w.shape[-1]:
        raise ValueError(f"x{list(x.shape)}, w{list(w.shape)}: expected [B, K] and [(2,) N, K]")
    if w.ndim == 3 and w.shape[0] != 2:
        raise ValueError(f"w{list(w.shape)}: expected [2, N, K], gate and up")
    if gate is None:
        return
    fits = gate.ndim == 3 and (gate.shape[0], gate.shape[2]) == (x.shape[0], w.shape[0])
    if w.ndim == 3 or not fits:
        raise ValueError(f"gate{list(gate.shape)}: expected [B, L, N] and w [N, K]")
    if not 0 <= gate_index < gate.shape[1]:
        raise ValueError(f"gate_index={gate_index}: expected 0 to {gate.shape[1] - 1}")
