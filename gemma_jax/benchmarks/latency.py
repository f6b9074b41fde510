"""`bench latency`: the time of one batch of a fixed shape, over and over."""

import argparse
from collections.abc import Sequence
from typing import Any

from gemma_jax.benchmarks.session import run_workloads
from gemma_jax.benchmarks.timing import PERCENTILES, Timing, percentile
from gemma_jax.benchmarks.workload import Workload


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures `--batch-size` x `--input-len` + `--output-len`."""
    workload = Workload(args.batch_size, args.input_len, args.output_len)
    return run_workloads("latency", args, arguments, [workload], latency_fields)


def latency_fields(workload: Workload, timing: Timing) -> dict[str, Any]:
    """avg_latency, latencies and percentiles in seconds, as vLLM names them."""
    del workload
    seconds = [x / 1e3 for x in timing.samples_ms]
    return {
        "avg_latency": sum(seconds) / len(seconds),
        "latencies": seconds,
        "percentiles": {str(p): percentile(seconds, p) for p in PERCENTILES},
    }
