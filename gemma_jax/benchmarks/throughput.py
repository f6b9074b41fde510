"""`bench throughput`: how fast a set of requests is done when all are there from the start."""

import argparse
from collections.abc import Sequence
from typing import Any

from gemma_jax.benchmarks.session import run_workloads
from gemma_jax.benchmarks.timing import Timing
from gemma_jax.benchmarks.workload import Workload


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures every `--workload`, else `--num-prompts` of `--input-len` + `--output-len`."""
    workloads = [Workload.parse(name) for name in args.workload or ()]
    workloads = workloads or [Workload(args.num_prompts, args.input_len, args.output_len)]
    return run_workloads("throughput", args, arguments, workloads, throughput_fields)


def throughput_fields(workload: Workload, timing: Timing) -> dict[str, Any]:
    """elapsed_time (s, the median) and rates, as vLLM names them."""
    elapsed = timing.median_ms / 1e3
    tokens = workload.prompt_tokens + workload.generated_tokens
    return {
        "elapsed_time": elapsed,
        "num_requests": workload.num_requests,
        "total_num_tokens": tokens,
        "requests_per_second": workload.num_requests / elapsed,
        "tokens_per_second": tokens / elapsed,
    }
