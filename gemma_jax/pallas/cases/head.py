"""Cases of `top_candidates`: capped logits tie often, so results are exact."""

from typing import Any

import jax
import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.head import Candidates, top_candidates

VOCABULARY = 262_144
SOFTCAP = 30.0


def candidates_case(
    name: str,
    rows: int,
    k: int,
    vocabulary: int = VOCABULARY,
    spread: float = 4.0,
    softcap: float | None = SOFTCAP,
    dtype: str = "bfloat16",
    bench: bool = False,
) -> Case:
    def inputs(seed: int) -> dict[str, Any]:
        return {"logits": normal(seed)((rows, vocabulary), dtype, scale=spread)}

    def call(logits: jax.Array, implementation: Any = None) -> Candidates:
        return top_candidates(
            logits, k, softcap, numerics=Numerics(dtype), implementation=implementation
        )

    size = rows * vocabulary * jnp.dtype(dtype).itemsize
    return Case("top_candidates", name, inputs, call, bench, bytes=0.0 + size)


CASES = [
    candidates_case("1 row, 64 ids", 1, 64, bench=True),
    candidates_case("64 rows, 64 ids", 64, 64, bench=True),
    candidates_case("ties at the cap, 17 ids", 3, 17, 5000, spread=300.0),
    candidates_case("one past a block, all ids", 2, 257, 257),
    candidates_case("one block, no cap", 2, 9, 256, softcap=None),
    candidates_case("few ids", 3, 4, 5),
    candidates_case("one id", 2, 1, 700),
    candidates_case("float32", 2, 30, 700, dtype="float32"),
]
