"""Cases of `skinny_matmul`: the plain products of a decode step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.skinny_matmul import skinny_matmul

PLAIN, GATE_UP = 1, 2
"""Parts of w."""


def _inputs(b: int, n: int, k: int, dtype: str, parts: int, seed: int) -> dict[str, jax.Array]:
    draw = normal(seed)
    shape = (n, k) if parts == PLAIN else (parts, n, k)
    return {
        "x": draw((b, k), dtype),
        "w": draw(shape, dtype, scale=k**-0.5),
    }


def matmul_case(
    name: str, b: int, n: int, k: int, dtype: str = "bfloat16", parts: int = PLAIN, bench=False
) -> Case:
    """x [b, k] times w [n, k], or gate|up [2, n, k]."""
    return product_case(skinny_matmul, name, b, n, k, Numerics(dtype), parts, bench)


def product_case(
    op: Callable[..., Any],
    name: str,
    b: int,
    n: int,
    k: int,
    numerics: Numerics,
    parts: int = PLAIN,
    bench: bool = False,
) -> Case:
    """The same product by `op`, which takes x, w, numerics and implementation."""
    size = jnp.dtype(numerics.dtype).itemsize
    return Case(
        op=op.__name__,
        name=f"{name}, {b} rows" if bench else name,
        inputs=functools.partial(_inputs, b, n, k, numerics.dtype, parts),
        call=functools.partial(op, numerics=numerics),
        bench=bench,
        flops=2.0 * b * parts * n * k,
        bytes=float(size * (parts * n * k + b * (n + k))),
    )


_MODELS = {
    "E2B down, shared": (1536, 12288),
    "E2B down, owner": (1536, 6144),
    "E2B o, sliding": (1536, 2048),
    "E2B o, full": (1536, 4096),
    "E2B PLE projection": (1536, 256),
    "E2B q|k|v, sliding": (2560, 1536),
    "E4B down": (2560, 10240),
    "E4B o, full": (2560, 4096),
    "E2B q|k|v, full": (5120, 1536),
    "31B down": (5376, 21504),
    "31B o, sliding": (5376, 8192),
}

_GATE_UP = {"E2B gate|up, shared": (12288, 1536), "E2B gate|up, owner": (6144, 1536)}

CASES: list[Case] = [
    matmul_case("1 row, 1 output", 1, 1, 64),
    matmul_case("outputs one past a tile", 1, 65, 128),
    matmul_case("K below one load", 2, 24, 48),
    matmul_case("K no multiple of a load", 1, 12, 336),
    matmul_case("long K", 1, 10, 2640),
    matmul_case("long K, 2 rows, float32", 2, 6, 2640, "float32"),
    matmul_case("3 rows", 3, 40, 64),
    matmul_case("8 rows, long K", 8, 20, 2688),
    matmul_case("16 rows", 16, 70, 144),
    matmul_case("16 rows, float32", 16, 33, 96, "float32"),
    matmul_case("gate|up", 3, 20, 64, parts=GATE_UP),
    *(
        matmul_case(name, b, n, k, bench=True)
        for name, (n, k) in _MODELS.items()
        for b in (1, 8, 64)
    ),
    *(matmul_case("E2B down, shared", b, 1536, 12288, bench=True) for b in (2, 4, 16)),
    *(
        matmul_case(name, b, n, k, parts=GATE_UP, bench=True)
        for name, (n, k) in _GATE_UP.items()
        for b in (32, 64)
    ),
]
