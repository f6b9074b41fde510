"""Cases of `residual_norm`: the widths of the presets, then edges."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.residual_norm import ResidualNorm, residual_norm

EPS = 1e-6


@dataclass(frozen=True)
class Rows:
    """Sizes of one case, and which of the optional arguments it has."""

    rows: int
    width: int
    pre_norm: bool = True
    scalar: bool = False
    dtype: str = "bfloat16"
    splits: int = 0

    @property
    def bytes(self) -> int:
        """Of the arrays with a row a token."""
        size = jnp.dtype(self.dtype).itemsize
        y = 4 * self.splits if self.splits else size
        return ((2 + self.pre_norm) * size + y) * self.rows * self.width

    def inputs(self, seed: int) -> dict[str, Any]:
        draw = functools.partial(normal(seed), dtype=self.dtype)
        n, d = self.rows, self.width
        y = draw((n, d))
        if self.splits:
            y = draw((self.splits, n + 1, d), dtype="float32")  # a row too many, as of padding
        return {
            "x": draw((n, d)),
            "y": y,
            "post_weight": draw((d,)),
            "pre_weight": draw((d,)) if self.pre_norm else None,
            "scalar": draw((1,)) if self.scalar else None,
        }

    def call(self, implementation: Any = None, **arrays: Any) -> ResidualNorm:
        numerics = Numerics(self.dtype)
        return residual_norm(**arrays, eps=EPS, numerics=numerics, implementation=implementation)


def rows_case(name: str, rows: Rows, bench: bool = False) -> Case:
    return Case("residual_norm", name, rows.inputs, rows.call, bench, bytes=0.0 + rows.bytes)


CASES = [
    rows_case("e2b, 16384 tokens", Rows(16_384, 1536), bench=True),
    rows_case("e2b layer end, 16384 tokens", Rows(16_384, 1536, scalar=True), bench=True),
    rows_case("e2b, 1 token", Rows(1, 1536), bench=True),
    rows_case("e2b layer end, 1 token", Rows(1, 1536, scalar=True), bench=True),
    rows_case("e2b, 64 tokens", Rows(64, 1536), bench=True),
    rows_case("e2b, 8 partial sums of 64 rows", Rows(64, 1536, splits=8), bench=True),
    rows_case("e4b, 8192 tokens", Rows(8192, 2560), bench=True),
    rows_case("31b, 4096 tokens", Rows(4096, 5376), bench=True),
    rows_case("31b, 1 token", Rows(1, 5376), bench=True),
    rows_case("e2b", Rows(3, 1536, scalar=True)),
    rows_case("partial sums", Rows(3, 40, scalar=True, splits=3)),
    rows_case("e4b", Rows(2, 2560)),
    rows_case("26b", Rows(2, 2816)),
    rows_case("12b", Rows(2, 3840, pre_norm=False, scalar=True)),
    rows_case("31b", Rows(2, 5376)),
    rows_case("no next norm", Rows(5, 96, pre_norm=False)),
    rows_case("no next norm, scalar", Rows(5, 96, pre_norm=False, scalar=True)),
    rows_case("one past a chunk", Rows(3, 1025)),
    rows_case("width 1", Rows(3, 1)),
    rows_case("float32", Rows(3, 96, scalar=True, dtype="float32")),
]
