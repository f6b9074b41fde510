"""Cases of `invariant_matmul`: E2B's products in prefill and decode, then edges."""

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case
from gemma_jax.pallas.cases.skinny_matmul import product_case
from gemma_jax.pallas.invariant_matmul import invariant_matmul


def matmul_case(name: str, n: int, f: int, k: int, dtype: str = "bfloat16", bench=False) -> Case:
    """x [n, k] times w [f, k]."""
    numerics = Numerics(dtype, batch_invariant=True)
    return product_case(invariant_matmul, name, n, f, k, numerics, bench=bench)


_E2B = {
    "E2B q|k|v, sliding": (2560, 1536),
    "E2B o, full": (1536, 4096),
    "E2B gate|up, shared": (24_576, 1536),
    "E2B down, shared": (1536, 12_288),
    "E2B PLE gate": (256, 1536),
}

CASES: list[Case] = [
    matmul_case("1 row, 1 output", 1, 1, 16),
    matmul_case("a row and an output past a tile", 65, 65, 128),
    matmul_case("depth no multiple of a tile", 3, 20, 80),
    matmul_case("one past a share", 2, 17, 528),
    matmul_case("three shares, many rows", 130, 70, 1536),
    matmul_case("float32", 3, 33, 96, "float32"),
    matmul_case("float32, two shares", 2, 6, 1024, "float32"),
    *(matmul_case(name, n, f, k, bench=True) for name, (f, k) in _E2B.items() for n in (64, 16384)),
    matmul_case("E2B head", 64, 262_144, 1536, bench=True),
]
