"""Times vLLM's kernels: the process of `bench.vllm_kernels` that has torch and no JAX on the GPU.

Rules as in `gemma_jax.benchmarks.kernel_timing`: a sample is the sum of the kernels of one call by
the GPU's own clock, as torch's profiler records them, and inputs rotate through sets that exceed
the L2 cache. Where the profiler records no kernels, CUDA events around each call stand in, which
count the gaps between its kernels too; the row's note says so.

Rows carry the names of our cases and the implementation "vllm" or "vllm-fused"; `numerics` is the
relative error of sampled rows of the result against the formula in float32. A kernel that fails,
or is off by more than `MAX_ERROR`, is a row with the error.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import vllm_ops
from gemma_jax.benchmarks.kernel_timing import rotations
from gemma_jax.benchmarks.kernels import chosen_cases
from gemma_jax.benchmarks.rows import Report, Row, Source
from gemma_jax.benchmarks.timing import Timing
from gemma_jax.pallas.cases import Case

MAX_ERROR = 0.02
"""Operands of bfloat16 give 0.002 to 0.01; a wrong mask or page gives far more."""
PACKAGES = ("jax", "vllm", "torch", "triton")
EVENTS_NOTE = "CUDA events, gaps between kernels included: the profiler recorded no kernels"


def main() -> int:
    """Times the named cases; the exit code is 1 if one failed, not if vLLM lacks the kernel."""
    parser = argparse.ArgumentParser(prog="bench.vllm_worker", allow_abbrev=False)
    parser.add_argument("--case", action="append", metavar="OP:NAME", required=True)
    parser.add_argument("--num-calls", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--commit", metavar="HASH[-dirty]")
    args = parser.parse_args()
    report = Report(args.output_json, Source.find(args.commit), _device(), PACKAGES)
    for case in chosen_cases(vllm_ops.OPS, None):
        if f"{case.op}:{case.name}" in args.case:
            for name in vllm_ops.implementations(case.op):
                row = Row(f"kernels-{case.op}", case.name, name, command=args.command)
                measure(row, case, args.num_calls, args.seed)
                report.add(row)
                print(summary(row), flush=True)
    return report.finish(allowed=("ok", "unsupported"))


def measure(row: Row, case: Case, calls: int, seed: int) -> None:
    """Fills the row in, with the reason if there is no figure."""
    import torch

    row.config = {"page_size": vllm_ops.PAGE}
    try:
        torch.cuda.reset_peak_memory_stats()
        count = rotations(case.bytes)
        programs = [vllm_ops.program(case, row.implementation, seed + i) for i in range(count)]
        start = time.perf_counter()
        error = programs[0].error()
        first_ms = (time.perf_counter() - start) * 1e3
        row.numerics = {"against": "float32 formula, sampled rows", "relative": error}
        if not error <= MAX_ERROR:
            raise ValueError(f"relative error {error:.3g} of the result, more than {MAX_ERROR}")
        samples, row.note = device_times([p.run for p in programs], calls)
        for field, value in Timing(first_ms, samples, 1).fields().items():
            setattr(row, field, value)
        row.peak_memory_bytes = torch.cuda.max_memory_allocated()
        seconds = (row.median_ms or 0) / 1e3
        row.derived = {"flops_per_s": case.flops / seconds, "bytes_per_s": case.bytes / seconds}
    except Exception as error:
        # Whatever a kernel of theirs raises: the other cases still run.
        row.fail(error)
    finally:
        torch.cuda.empty_cache()


def device_times(runs: Sequence[Callable[[], Any]], calls: int) -> tuple[list[float], str]:
    """Milliseconds of each of `calls` calls, and a note on how they were taken."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for run in runs:
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for i in range(calls):
            runs[i % len(runs)]()
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.elapsed_us())
        for e in profiler.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not spans:
        return _event_times(runs, calls), EVENTS_NOTE
    return per_call([duration for _, duration in sorted(spans)], calls), ""


def per_call(durations: Sequence[float], calls: int) -> list[float]:
    """Milliseconds a call from the microseconds of all kernels in order.

    Raises:
      RuntimeError: not the same number of kernels for each call.
    """
    if len(durations) % calls:
        raise RuntimeError(f"{len(durations)} kernels in {calls} calls: not the same in each call")
    return (np.reshape(durations, (calls, -1)).sum(axis=1) / 1e3).tolist()


def _event_times(runs: Sequence[Callable[[], Any]], calls: int) -> list[float]:
    import torch

    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for i, (start, stop) in enumerate(marks):
        start.record()
        runs[i % len(runs)]()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


def summary(row: Row) -> str:
    """One line for people."""
    head = f"{row.bench.removeprefix('kernels-'):>20} {row.case:<40} {row.implementation:>10}"
    if row.status != "ok":
        return f"{head} {row.status}: {row.note[:120]}"
    rates = {name: (value or 0.0) / 1e12 for name, value in row.derived.items()}
    return (
        f"{head} {1e3 * (row.median_ms or 0):9.2f} µs {rates['flops_per_s']:7.1f} TFLOP/s"
        f" {rates['bytes_per_s']:6.3f} TB/s, error {(row.numerics or {})['relative']:.1e}"
    )


def _device() -> dict[str, Any]:
    """The GPU as rows name it."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    sys.exit(main())
