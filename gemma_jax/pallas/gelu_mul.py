"""gelu_tanh(gate) · up: the activation of the MLP and of the per-layer-input gate.

The activation and the product round apart. The kernel is element-wise and bound by memory; it reads
gate and up where they lie, also when `up` is one layer's slice of an array of all layers.

Limits: bfloat16 or float32, compute capability 8.0 or a CPU (interpreted).
Source of the formula: transformers 5.17 `Gemma4TextMLP`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model import layers
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)

# --- reference -----------------------------------------------------------------------------------


def gelu_mul_reference(
    gate: jax.Array, up: jax.Array, gate_index: int, up_index: int, *, numerics: Numerics
) -> jax.Array:
    """The op in plain jnp on [N, A, F] and [N, B, F]; float64 arguments give the exact result."""
    return layers.gelu_mul(gate[:, gate_index], up[:, up_index], numerics)


# --- kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Tile of a program: a power of two of columns of one row, and its warps."""

    block: int
    num_warps: int


def default_config(num_rows: int, width: int) -> Config:
    """Sixteen bytes a thread and load; few rows get small programs, to fill the GPU."""
    block = 1024 if num_rows >= 64 else 256
    while block > 32 and block >= 2 * width:
        block //= 2
    return Config(block, max(block // 256, 1))


def _kernel(
    gate_ref: Any,
    up_ref: Any,
    out_ref: Any,
    *,
    gate_index: int,
    up_index: int,
    config: Config,
    numerics: Numerics,
) -> None:
    row = pl.program_id(0)
    columns = pl.program_id(1) * config.block + lax.iota(jnp.int32, config.block)
    inside, other = None, None
    if out_ref.shape[1] % config.block:
        inside, other = columns < out_ref.shape[1], 0.0
    gate = triton.load(gate_ref.at[row, gate_index, columns], mask=inside, other=other)
    up = triton.load(up_ref.at[row, up_index, columns], mask=inside, other=other)
    active = triton.rounded(layers.gelu_tanh(gate.astype(jnp.float32)), numerics)
    out = active * up.astype(jnp.float32)
    triton.store(out_ref.at[row, columns], out.astype(out_ref.dtype), mask=inside)


# --- wrapper -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("gate_index", "up_index", "numerics", "config"))
def _gelu_mul_pallas(
    gate: jax.Array,
    up: jax.Array,
    gate_index: int,
    up_index: int,
    *,
    numerics: Numerics,
    config: Config | None = None,
) -> jax.Array:
    n, _, f = gate.shape
    config = config or default_config(n, f)
    return triton.pallas_call(
        functools.partial(
            _kernel, gate_index=gate_index, up_index=up_index, config=config, numerics=numerics
        ),
        name="gelu_mul",
        out_shape=jax.ShapeDtypeStruct((n, f), gate.dtype),
        grid=(n, pl.cdiv(f, config.block)),
        in_specs=[triton.whole(), triton.whole()],
        out_specs=triton.whole(),
        num_warps=config.num_warps,
        num_stages=1,
    )(gate, up)


# --- public ops ----------------------------------------------------------------------------------


def gelu_mul(
    y: jax.Array, *, numerics: Numerics, implementation: Implementation | None = None
) -> jax.Array:
    """gelu_tanh(y[:, 0]) · y[:, 1], [N, F], of the fused projection y [N, 2, F].

    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    if y.ndim != 3 or y.shape[1] != 2:
        raise ValueError(f"y{list(y.shape)}: expected [N, 2, F]")
    return _run("gelu_mul", y, y, 0, 1, numerics, implementation)


def gelu_gate(
    gate: jax.Array,
    inputs: jax.Array,
    layer: int,
    *,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> jax.Array:
    """gelu_tanh(gate) · inputs[:, layer], [N, P]: the per-layer-input gate.

    Args:
      gate: [N, P].
      inputs: [N, L, P], the per-layer inputs of all layers of this pass.
      layer: index on the axis L.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    n, p = gate.shape
    if inputs.ndim != 3 or (inputs.shape[0], inputs.shape[2]) != (n, p):
        raise ValueError(f"inputs{list(inputs.shape)}: expected [{n}, L, {p}]")
    return _run("gelu_gate", gate[:, None], inputs, 0, layer, numerics, implementation)


def _run(op, gate, up, gate_index, up_index, numerics, implementation) -> jax.Array:
    choices = {
        "triton": Choice(_gelu_mul_pallas, functools.partial(_unsupported, gate, numerics)),
        "reference": Choice(gelu_mul_reference),
    }
    run = dispatch(op, implementation, choices, f"{gate.dtype}{list(gate.shape)}")
    return run(gate, up, gate_index, up_index, numerics=numerics)


def _unsupported(gate: jax.Array, numerics: Numerics, device: Device) -> str | None:
    if gate.dtype != numerics.jnp_dtype:
        return f"dtype {gate.dtype}, compute dtype {numerics.dtype}"
    return needs_gpu_or_interpreter((8, 0))(device)
