"""Result rows made by hand."""

from typing import Any


def result_row(**changes: Any) -> dict[str, Any]:
    """A throughput row as the benchmark writes it, with some fields changed."""
    row = {
        "schema": 1, "bench": "throughput", "case": "8x2048+1", "implementation": "gemma_jax",
        "commit": "0123456789abcdef", "dirty": False, "date_utc": "2026-01-02T03:04:05+00:00",
        "device": {"kind": "NVIDIA H200", "count": 1, "memory_bytes": 1},
        "versions": {"python": "3.12", "jax": "0.11.2", "driver": "580"},
        "command": "", "config": {"model": "random weights, e2b"}, "warmup": 1,
        "samples_ms": [50.0], "median_ms": 50.0, "p10_ms": 49.0, "p90_ms": 51.0,
        "compile_ms": 2000.0, "peak_memory_bytes": 2**34,
        "derived": {"prompt_tok_per_s": 327680.0, "generated_tok_per_s": 160.0, "mfu": 0.5271},
        "result": {}, "numerics": None, "status": "ok", "note": "",
    }  # fmt: skip
    return row | changes
