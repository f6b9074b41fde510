"""Cases of `gelu_mul` and `gelu_gate`: the widths of the presets, then edges."""

from typing import Any

import jax
import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.gelu_mul import gelu_gate, gelu_mul


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Wide enough to reach the tails of the activation."""
    return normal(seed)(shape, dtype, scale=3.0)


def mlp_case(
    name: str, rows: int, width: int, dtype: str = "bfloat16", bench: bool = False
) -> Case:
    def inputs(seed: int) -> dict[str, Any]:
        return {"y": _normal(seed, (rows, 2, width), dtype)}

    def call(y: jax.Array, implementation: Any = None) -> jax.Array:
        return gelu_mul(y, numerics=Numerics(dtype), implementation=implementation)

    size = 3.0 * rows * width * jnp.dtype(dtype).itemsize
    return Case("gelu_mul", name, inputs, call, bench, bytes=size)


def gate_case(
    name: str, rows: int, layers: int, layer: int, width: int = 256, bench: bool = False
) -> Case:
    def inputs(seed: int) -> dict[str, Any]:
        gate = _normal(seed, (rows, width), "bfloat16")
        return {"gate": gate, "inputs": _normal(seed + 1, (rows, layers, width), "bfloat16")}

    def call(gate: jax.Array, inputs: jax.Array, implementation: Any = None) -> jax.Array:
        return gelu_gate(gate, inputs, layer, numerics=Numerics(), implementation=implementation)

    return Case("gelu_gate", name, inputs, call, bench, bytes=6.0 * rows * width)


CASES = [
    mlp_case("e2b, 16384 tokens", 16_384, 6144, bench=True),
    mlp_case("e2b shared, 1 token", 1, 12_288, bench=True),
    mlp_case("e2b shared, 64 tokens", 64, 12_288, bench=True),
    mlp_case("31b, 4096 tokens", 4096, 21_504, bench=True),
    gate_case("e2b, 16384 tokens", 16_384, 15, 7, bench=True),
    gate_case("e2b, 1 token", 1, 35, 34, bench=True),
    mlp_case("e2b", 2, 6144),
    mlp_case("26b expert", 3, 704),
    mlp_case("26b", 2, 2112),
    mlp_case("many rows", 65, 96),
    mlp_case("one past a tile", 2, 257),
    mlp_case("width 1", 3, 1),
    mlp_case("float32", 3, 96, dtype="float32"),
    gate_case("first layer", 3, 4, 0),
    gate_case("last layer, width 48", 3, 4, 3, width=48),
]
