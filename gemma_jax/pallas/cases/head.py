"""Cases of `greedy_token` and `top_candidates`: capped logits tie often, so results are exact."""

from typing import Any

import jax
import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.head import Candidates, greedy_token, top_candidates

VOCABULARY = 262_144
SOFTCAP = 30.0


def _logits(seed: int, rows: int, vocabulary: int, spread: float, dtype: str) -> jax.Array:
    return normal(seed)((rows, vocabulary), dtype, scale=spread)


def greedy_case(
    name: str,
    rows: int,
    vocabulary: int = VOCABULARY,
    spread: float = 4.0,
    softcap: float | None = SOFTCAP,
    dtype: str = "bfloat16",
    bench: bool = False,
) -> Case:
    def inputs(seed: int) -> dict[str, Any]:
        return {"logits": _logits(seed, rows, vocabulary, spread, dtype)}

    def call(logits: jax.Array, implementation: Any = None) -> jax.Array:
        return greedy_token(
            logits, softcap, numerics=Numerics(dtype), implementation=implementation
        )

    size = rows * vocabulary * jnp.dtype(dtype).itemsize
    return Case("greedy_token", name, inputs, call, bench, bytes=0.0 + size)


def candidates_case(
    name: str, rows: int, k: int, vocabulary: int = VOCABULARY, spread=4.0, bench: bool = False
) -> Case:
    def inputs(seed: int) -> dict[str, Any]:
        return {"logits": _logits(seed, rows, vocabulary, spread, "bfloat16")}

    def call(logits: jax.Array, implementation: Any = None) -> Candidates:
        return top_candidates(
            logits, k, SOFTCAP, numerics=Numerics(), implementation=implementation
        )

    return Case("top_candidates", name, inputs, call, bench, bytes=2.0 * rows * vocabulary)


CASES = [
    greedy_case("1 row", 1, bench=True),
    greedy_case("64 rows", 64, bench=True),
    candidates_case("1 row, 64 ids", 1, 64, bench=True),
    candidates_case("64 rows, 64 ids", 64, 64, bench=True),
    greedy_case("ties at the cap", 3, 5000, spread=300.0),
    greedy_case("no cap", 2, 700, softcap=None),
    greedy_case("one block", 2, 256),
    greedy_case("one past a block", 2, 257),
    greedy_case("few ids", 3, 5),
    greedy_case("float32", 2, 700, dtype="float32"),
    candidates_case("ties at the cap, 17 ids", 3, 17, 5000, spread=300.0),
    candidates_case("one past a block, all ids", 2, 257, 257),
    candidates_case("one id", 2, 1, 700),
]
