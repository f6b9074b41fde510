"""Wall-clock samples of repeated calls, the first call apart, and their percentiles."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the first call and of the counted ones."""

    first_ms: float
    samples_ms: list[float]
    warmup: int

    @property
    def median_ms(self) -> float:
        return percentile(self.samples_ms, 50)

    @property
    def compile_ms(self) -> float:
        """The first call less a later one: tracing, and compiling or reading the compiled file."""
        return max(self.first_ms - self.median_ms, 0.0)

    def fields(self) -> dict[str, Any]:
        """The timing fields of a row."""
        return {
            "warmup": self.warmup,
            "samples_ms": [round(x, 4) for x in self.samples_ms],
            "median_ms": round(self.median_ms, 4),
            "p10_ms": round(percentile(self.samples_ms, 10), 4),
            "p90_ms": round(percentile(self.samples_ms, 90), 4),
            "compile_ms": round(self.compile_ms, 1),
        }


def percentile(samples: Sequence[float], share: float) -> float:
    """The `share`-th percentile, linear between samples."""
    return float(np.percentile(samples, share))


def measure(
    prepare: Callable[[], Any], run: Callable[[Any], object], warmup: int, iters: int
) -> Timing:
    """Times `run(prepare())` once, then `warmup` times uncounted, then `iters` times.

    Only `run` is on the clock; it returns when the device has finished.
    """

    def once() -> float:
        given = prepare()
        start = time.perf_counter()
        run(given)
        return (time.perf_counter() - start) * 1e3

    first = once()
    for _ in range(warmup):
        once()
    return Timing(first, [once() for _ in range(iters)], warmup)
