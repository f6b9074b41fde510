"""Cases of `norm_matmul`: what leads from one matrix of a decoder layer to the next."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.norm_matmul import NormMatmul, Update, norm_matmul


@dataclass(frozen=True)
class Step:
    """What one call does: which of the optional operands it has, and its activation."""

    update: bool = False
    factor: bool = False
    pre_norm: bool = False
    gate_up: bool = False
    gate_input: bool = False


FIRST = Step(pre_norm=True)
"""The first layer's q|k|v."""
QKV = Step(update=True, factor=True, pre_norm=True)
"""Layer end → the next layer's q|k|v."""
GATE_UP = Step(update=True, pre_norm=True, gate_up=True)
"""Attention → MLP."""
PLE_GATE = Step(update=True, gate_input=True)
"""MLP → per-layer-input gate."""


def _inputs(step: Step, b: int, n: int, k: int, dtype: str, seed: int) -> dict[str, Any]:
    draw = functools.partial(normal(seed), dtype=dtype)
    shape = (2, n, k) if step.gate_up else (n, k)
    given = {"h": draw((b, k), scale=3.0), "w": draw(shape, scale=k**-0.5)}
    if step.update:
        given |= {"y": draw((b, k), scale=5.0), "post_weight": draw((k,))}
    if step.factor:
        given["factor"] = jnp.full((1,), 0.71, dtype)
    if step.pre_norm:
        given["pre_weight"] = draw((k,))
    if step.gate_input:
        given["gate_input"] = draw((b, n))
    return given


def call(
    numerics: Numerics,
    y: jax.Array | None = None,
    post_weight: jax.Array | None = None,
    **arrays: Any,
) -> NormMatmul:
    """`norm_matmul` with the update's arrays given one by one."""
    update = None if y is None or post_weight is None else Update(y, post_weight)
    return norm_matmul(**arrays, update=update, eps=1e-6, numerics=numerics)


def step_case(
    name: str, step: Step, b: int, n: int, k: int, numerics: Numerics | None = None, bench=False
) -> Case:
    """One call on h [b, k] and n outputs."""
    numerics = numerics or Numerics()
    weights = (2 if step.gate_up else 1) * n * k
    size = jnp.dtype(numerics.dtype).itemsize
    return Case(
        op="norm_matmul",
        name=f"{name}, {b} rows" if bench else name,
        inputs=functools.partial(_inputs, step, b, n, k, numerics.dtype),
        call=functools.partial(call, numerics),
        bench=bench,
        flops=2.0 * b * weights,
        bytes=float(size * (weights + b * (n + (3 if step.update else 1) * k))),
    )


_MODELS = {
    "E2B gate|up, shared": (GATE_UP, 12288, 1536),
    "E2B gate|up, owner": (GATE_UP, 6144, 1536),
    "E2B q, sliding": (QKV, 2048, 1536),
    "E2B q, full": (QKV, 4096, 1536),
    "E2B q|k|v, sliding": (QKV, 2560, 1536),
    "E2B q|k|v, full": (QKV, 5120, 1536),
    "E2B PLE gate": (PLE_GATE, 256, 1536),
    "E4B gate|up": (GATE_UP, 10240, 2560),
    "E4B q|k|v, sliding": (QKV, 3072, 2560),
    "31B gate|up": (GATE_UP, 21504, 5376),
    "31B q|k|v, sliding": (QKV, 16384, 5376),
}

_FLOAT32, _VLLM = Numerics("float32"), Numerics(rounding="vllm")

CASES: list[Case] = [
    step_case("product alone", Step(), 1, 9, 64),
    step_case("first layer", FIRST, 1, 20, 320),
    step_case("layer end", QKV, 1, 21, 320),
    step_case("layer end, 3 rows", QKV, 3, 24, 96),
    step_case("layer end, 16 rows", QKV, 16, 40, 128),
    step_case("layer end, wide", QKV, 1, 8, 2688),
    step_case("layer end, float32", QKV, 2, 12, 272, _FLOAT32),
    step_case("gate|up, vLLM", GATE_UP, 1, 17, 320, _VLLM),
    step_case("gate|up, 8 rows", GATE_UP, 8, 33, 128),
    step_case("gate|up, 4 rows, float32", GATE_UP, 4, 12, 96, _FLOAT32),
    step_case("PLE gate", PLE_GATE, 1, 16, 320),
    step_case("PLE gate, 8 rows", PLE_GATE, 8, 16, 256),
    step_case("factor alone", Step(factor=True), 5, 16, 64),
    *(
        step_case(name, step, b, n, k, bench=True)
        for name, (step, n, k) in _MODELS.items()
        for b in (1, 8)
    ),
]
