"""What the device reaches in a plain matrix product and a plain copy: the 100 % of MFU and MBU."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gemma_jax.benchmarks.rows import Row, peak_memory_bytes
from gemma_jax.benchmarks.timing import Timing, measure

CALLS = 20
"""Calls in flight for one sample, so that host dispatch is hidden."""


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of a bfloat16 matrix product and bytes/s (read and written) of a copy."""

    flops: float
    bandwidth: float


def matmul_row(size: int | None = None, iters: int = 5) -> Row:
    """Times a `size`³ bfloat16 product of random normal matrices."""
    size = size or (8192 if _on_gpu() else 512)
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    timing = _repeat(jax.jit(jnp.matmul), (a, b), iters)
    row = Row("ceilings", f"matmul-{size}", "xla", config={"dtype": "bfloat16"}, **timing.fields())
    row.derived = {"flops_per_s": 2 * size**3 / timing.median_ms * 1e3}
    row.peak_memory_bytes = peak_memory_bytes()
    return row


def copy_row(size: int | None = None, iters: int = 5) -> Row:
    """Times an element-wise pass over `size` bytes, which reads and writes each once."""
    size = size or (1 << 30 if _on_gpu() else 1 << 24)
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    timing = _repeat(jax.jit(lambda x: x ^ jnp.uint32(1)), (x,), iters)
    row = Row("ceilings", f"copy-{size}", "xla", config={"dtype": "uint32"}, **timing.fields())
    row.derived = {"bytes_per_s": 2 * size / timing.median_ms * 1e3}
    row.peak_memory_bytes = peak_memory_bytes()
    return row


def _repeat(function: Callable, arguments: tuple, iters: int) -> Timing:
    """The time of one call out of `CALLS` queued ones."""

    def run(unused: None) -> None:
        del unused
        out = function(*arguments)
        for _ in range(CALLS - 1):
            out = function(*arguments)  # frees the one before: one output is alive at a time
        jax.block_until_ready(out)

    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    first_ms = (time.perf_counter() - start) * 1e3
    timing = measure(lambda: None, run, 1, iters)
    return Timing(first_ms, [x / CALLS for x in timing.samples_ms], timing.warmup)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"
