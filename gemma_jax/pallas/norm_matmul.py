"""The step from one matrix of a decoder layer to the next: residual, norms, product, activation.

    h' = (h + rms_norm(y) · post_weight) · factor     the norm, the sum, the product round once each
    x  = rms_norm(h') · pre_weight
    z  = x wᵀ                                         [B, N], or [B, 2, N] of gate|up; one rounding
    out = z | gelu(z₀) · z₁ | gelu(z) · gate_input    "gelu_mul" and "gelu_gate" round twice

Every step but the product may be absent. For one or two rows one kernel does all of it, where
separate ones would cost a launch each: a block repeats the norms, whose rows come from the L2
cache, and streams its part of w (see `skinny_kernels`). Up to 16 rows are normed by `residual_norm`
first.

Limits: as `skinny_matmul`. Source of the formulas: transformers 5.17 `Gemma4TextDecoderLayer`.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gemma_jax.model.layers import add, gelu_mul, rms_norm, scale
from gemma_jax.numerics import Numerics
from gemma_jax.pallas.device import current_device
from gemma_jax.pallas.dispatch import Choice, Implementation, dispatch
from gemma_jax.pallas.residual_norm import residual_norm
from gemma_jax.pallas.skinny_config import Activation, Config, Spec, default_config
from gemma_jax.pallas.skinny_kernels import call, unsupported
from gemma_jax.pallas.skinny_prologue import Operands

MAX_FUSED_ROWS = 2
"""Most rows whose norms every block repeats."""


class NormMatmul(NamedTuple):
    """The residual stream h' [B, K] (h itself where nothing was added) and the result [B, N]."""

    h: jax.Array
    out: jax.Array


@dataclass(frozen=True)
class Update:
    """What the previous branch adds to the residual stream: its output y [B, K], normed."""

    y: jax.Array
    post_weight: jax.Array


jax.tree_util.register_dataclass(Update, ["y", "post_weight"], [])


# --- reference -----------------------------------------------------------------------------------


def norm_matmul_reference(
    h: jax.Array,
    w: jax.Array,
    update: Update | None,
    factor: jax.Array | None,
    pre_weight: jax.Array | None,
    gate_input: jax.Array | None,
    *,
    eps: float,
    numerics: Numerics,
) -> NormMatmul:
    """The op in plain jnp; float64 arguments give the exact result."""
    if update is not None:
        h = add(h, rms_norm(update.y, update.post_weight, eps, numerics), numerics)
    if factor is not None:
        h = scale(h, factor, numerics)
    x = h if pre_weight is None else rms_norm(h, pre_weight, eps, numerics)
    z = numerics.einsum("bk,...nk->b...n", x, w)
    if gate_input is not None:
        z = jnp.stack([z, gate_input], axis=1)
    return NormMatmul(h, z if z.ndim == 2 else gelu_mul(z[:, 0], z[:, 1], numerics))


# --- wrapper -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("eps", "numerics", "config"))
def _norm_matmul_triton(
    h: jax.Array,
    w: jax.Array,
    update: Update | None,
    factor: jax.Array | None,
    pre_weight: jax.Array | None,
    gate_input: jax.Array | None,
    *,
    eps: float,
    numerics: Numerics,
    config: Config | None = None,
) -> NormMatmul:
    activation: Activation | None = "gelu_gate" if gate_input is not None else None
    if w.ndim == 3:
        activation = "gelu_mul"
    else:
        w = w[None]
    (batch, k), (parts, n, _) = h.shape, w.shape
    if batch > MAX_FUSED_ROWS and config is None:
        h, x = _normed(h, update, factor, pre_weight, eps=eps, numerics=numerics)
        spec = Spec(batch, parts, n, k, numerics, activation, eps)
        operands = Operands(x, w, ple=gate_input)
        config = default_config(spec, False, current_device())
        return NormMatmul(h, call(operands, config, spec, "norm_matmul")[1])
    stores_h = update is not None or factor is not None
    spec = Spec(batch, parts, n, k, numerics, activation, eps, stores_h)
    has_prologue = stores_h or pre_weight is not None
    config = config or default_config(spec, has_prologue, current_device())
    y, post = (None, None) if update is None else (update.y, update.post_weight)
    operands = Operands(h, w, y, post, factor, pre_weight, gate_input)
    h_out, out = call(operands, config, spec, "norm_matmul")
    return NormMatmul(h if h_out is None else h_out, out)


def _normed(
    h: jax.Array,
    update: Update | None,
    factor: jax.Array | None,
    pre_weight: jax.Array | None,
    *,
    eps: float,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:
    """h' and what is multiplied, in a kernel of their own: repeated by every block of the product
    they would cost more than the launch does."""
    if update is None:
        h = h if factor is None else scale(h, factor, numerics)
        return h, h if pre_weight is None else rms_norm(h, pre_weight, eps, numerics)
    h, x = residual_norm(
        h, update.y, update.post_weight, pre_weight, factor,
        eps=eps, numerics=numerics, implementation="triton",
    )  # fmt: skip
    return h, h if x is None else x


# --- public op -----------------------------------------------------------------------------------


def norm_matmul(
    h: jax.Array,
    w: jax.Array,
    *,
    update: Update | None = None,
    factor: jax.Array | None = None,
    pre_weight: jax.Array | None = None,
    gate_input: jax.Array | None = None,
    eps: float,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> NormMatmul:
    """The residual stream after `update`, and its norm times `w`, activated.

    Args:
      h: residual stream [B, K].
      w: [N, K], or gate|up [2, N, K], whose product goes through gelu(gate) · up.
      update: the previous branch's output and its norm's weight.
      factor: [1], the scalar of the layer that `update` ends.
      pre_weight: [K]; without it h' itself is multiplied.
      gate_input: [B, N]; the product goes through gelu(·) · gate_input.
      eps: of the norms.
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    _check(h, w, update, gate_input)
    choices = {
        "triton": Choice(_norm_matmul_triton, functools.partial(unsupported, h, w, numerics)),
        "reference": Choice(norm_matmul_reference),
    }
    shape = f"{h.dtype}{list(h.shape)}·{list(w.shape)}"
    run = dispatch("norm_matmul", implementation, choices, shape)
    return run(h, w, update, factor, pre_weight, gate_input, eps=eps, numerics=numerics)


def _check(h: jax.Array, w: jax.Array, update: Update | None, gate_input: jax.Array | None) -> None:
    if h.ndim != 2 or w.ndim not in (2, 3) or h.shape[1] != w.shape[-1]:
        raise ValueError(f"h{list(h.shape)}, w{list(w.shape)}: expected [B, K] and [(2,) N, K]")
    if w.ndim == 3 and w.shape[0] != 2:
        raise ValueError(f"w{list(w.shape)}: expected [2, N, K], gate and up")
    if update is not None and update.y.shape != h.shape:
        raise ValueError(f"y{list(update.y.shape)}: expected {list(h.shape)}, the shape of h")
    if gate_input is not None and (w.ndim == 3 or gate_input.shape != (h.shape[0], w.shape[0])):
        raise ValueError(f"gate_input{list(gate_input.shape)}: expected [B, N] and w [N, K]")
