"""Measures of agreement with a reference: flips with their margins, and logit differences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemma_jax.testing.goldens import COLUMN_STRIDE, Golden

FLOAT32_LOGIT_TOLERANCE = 2e-4
"""Largest |Δlogit| of two float32 runs."""

FLOAT32_TIE_MARGIN = 1e-4
"""Below this reference margin, in nats, a float32 run may choose the other token."""


@dataclass(frozen=True)
class Flip:
    """A position where the two sides choose different tokens."""

    row: int
    position: int
    expected: int
    actual: int
    margin: float

    def __str__(self) -> str:
        return (
            f"row {self.row}, position {self.position}: {self.actual} instead of"
            f" {self.expected}, reference margin {self.margin:.2e}"
        )


def find_flips(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], margins: Sequence[np.ndarray]
) -> list[Flip]:
    """Every position where `actual` [R][T] differs from `expected`."""
    flips = []
    for row, (a, e, margin) in enumerate(zip(actual, expected, margins, strict=True)):
        for t in np.flatnonzero(np.asarray(a) != np.asarray(e)):
            flips.append(Flip(row, int(t), int(e[t]), int(a[t]), float(margin[t])))
    return flips


def logit_differences(golden: Golden, logits: Sequence[np.ndarray]) -> dict[str, float]:
    """Largest |Δ| over what the golden keeps, from logits [R][T, V] of the generated positions."""
    rows = np.stack(logits)
    top = np.take_along_axis(rows, golden.top_ids, axis=-1)
    columns = rows[:, ::COLUMN_STRIDE][..., golden.column_ids]
    peak = rows.max(-1)
    logsumexp = peak + np.log(np.exp(rows - peak[..., None]).sum(-1))
    pairs = {
        "top": (top, golden.top_logits),
        "columns": (columns, golden.columns),
        "logsumexp": (logsumexp, golden.logsumexp),
    }
    return {name: float(np.abs(a - b).max()) for name, (a, b) in pairs.items()}
