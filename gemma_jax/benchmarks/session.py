"""What latency and throughput share: ceilings, the model, a row a workload, profiles."""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from gemma_jax.benchmarks import profile
from gemma_jax.benchmarks.ceilings import Ceilings, copy_row, matmul_row
from gemma_jax.benchmarks.measure_workload import (
    WorkloadRunner,
    fill,
    guarded,
    settings,
)
from gemma_jax.benchmarks.random_model import random_llm
from gemma_jax.benchmarks.rows import Report, Row, Source, command_line
from gemma_jax.benchmarks.timing import Timing
from gemma_jax.benchmarks.workload import Workload
from gemma_jax.llm import LLM
from gemma_jax.testing.configs import named_config

DEFAULT_PRESET = "e2b"
_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "decode_steps")

ResultFields = Callable[[Workload, Timing], dict[str, Any]]


def run_workloads(
    bench: str,
    args: argparse.Namespace,
    arguments: Sequence[str],
    workloads: Sequence[Workload],
    result_fields: ResultFields,
) -> int:
    """Measures every workload on one model and reports; returns the exit code.

    Args:
      bench: name of the benchmark in its rows.
      args: parsed flags; `arguments` are the same as given, for the row's command.
      result_fields: the fields that the vLLM tool of this name prints.
    """
    report = Report(args.output_json, Source.find(args.commit))
    ceilings = _ceilings(args, report)
    with progress("model"):
        llm, model = _load(args, workloads)
    runner = WorkloadRunner(llm, args.seed)
    notes: list[str] = []
    if args.compile_ahead:
        notes.append(_compile_ahead(runner, workloads))
    for i, workload in enumerate(workloads):
        row = Row(bench, workload.name, command=command_line(bench, arguments))
        row.config = settings(llm, model, ceilings)

        def measured(row: Row, workload: Workload = workload) -> None:
            timing = runner.measure(workload, args.num_iters_warmup, args.num_iters)
            fill(row, runner, workload, timing, ceilings)
            row.result = result_fields(workload, timing)

        with progress(f"{bench} {workload.name}"):
            guarded(row, measured)
        if row.status == "ok":
            earlier = ["peak_memory_bytes covers the earlier cases of this process too"]
            row.note = "; ".join([*notes, *(earlier if i else [])])
            _add_device_use(row, runner, workload, args.profile)
        report.add(row)
        print(summary(row), flush=True)
    return report.finish()


def _compile_ahead(runner: WorkloadRunner, workloads: Sequence[Workload]) -> str:
    """Compiles all workloads' programs; what the rows say of it."""
    start = time.perf_counter()
    with progress("compile ahead"):
        programs = runner.compile_ahead(workloads)
    took = time.perf_counter() - start
    return f"{programs} programs of all workloads compiled side by side before, in {took:.1f} s"


def summary(row: Row) -> str:
    """One line for people."""
    if row.status != "ok":
        return f"{row.case:>14}  {row.status}: {row.note}"
    rates = row.derived
    shares = [f"{x} {100 * share:.1f} %" for x in ("mfu", "mbu") if (share := rates[x])]
    memory = row.peak_memory_bytes
    return "  ".join(
        [
            f"{row.case:>14}  {row.median_ms:,.1f} ms [{row.p10_ms:,.1f}, {row.p90_ms:,.1f}]",
            f"prompt {rates['prompt_tok_per_s']:,.0f} tok/s",
            f"generated {rates['generated_tok_per_s']:,.1f} tok/s",
            *shares,
            *([] if (idle := rates.get("device_idle_share")) is None else [f"idle {idle:.1%}"]),
            f"compile {(row.compile_ms or 0) / 1e3:.1f} s",
            f"peak {memory / 2**30:.2f} GiB" if memory else "peak unknown",
        ]
    )


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on stderr when a part begins and how long it took."""
    start = time.perf_counter()
    print(f"[{time.strftime('%H:%M:%S')}] {what} ...", file=sys.stderr, flush=True)
    yield
    took = time.perf_counter() - start
    print(f"[{time.strftime('%H:%M:%S')}] {what}: {took:.1f} s", file=sys.stderr, flush=True)


def _ceilings(args: argparse.Namespace, report: Report) -> Ceilings:
    """The given ceilings, else measured ones, which become rows too."""
    flops, bandwidth = args.peak_flops, args.peak_bandwidth
    with progress("ceilings"):
        if flops is None:
            row = matmul_row()
            flops = float(row.derived["flops_per_s"] or 0)
            _add_ceiling(report, row, f"{flops / 1e12:,.1f} TFLOP/s")
        if bandwidth is None:
            row = copy_row()
            bandwidth = float(row.derived["bytes_per_s"] or 0)
            _add_ceiling(report, row, f"{bandwidth / 1e12:,.3f} TB/s")
    return Ceilings(flops, bandwidth)


def _add_ceiling(report: Report, row: Row, rate: str) -> None:
    row.command = "python -m bench.throughput"
    report.add(row)
    report.rows.remove(row)  # the last line is about workloads
    print(f"{row.case:>14}  {row.median_ms:,.3f} ms  {rate}", flush=True)


def _load(args: argparse.Namespace, workloads: Sequence[Workload]) -> tuple[LLM, str]:
    """The model, and its name in rows."""
    chosen: dict[str, Any] = {
        "dtype": args.dtype,
        "rounding": args.rounding,
        "fast_prefill": not args.no_fast_prefill,
        "batch_invariant": args.batch_invariant,
        "kernels": args.kernels,
        "max_num_seqs": max(64, *(w.num_requests for w in workloads)),
    }
    limits = {name: getattr(args, name) for name in _LIMITS}
    chosen |= {name: value for name, value in limits.items() if value is not None}
    if args.model is not None:
        return LLM(args.model, **chosen), Path(args.model).name
    preset = args.preset or DEFAULT_PRESET
    return random_llm(named_config(preset), args.seed, **chosen), f"random weights, {preset}"


def _add_device_use(
    row: Row, runner: WorkloadRunner, workload: Workload, folder: Path | None
) -> None:
    """Profiles one more run, on a GPU or if asked for: its busy time, and its table in `folder`.

    Of a loop inside of a CUDA graph the profiler sees part of the kernels only: no busy time then.
    A profile that fails leaves a note: the row has its figures already.
    """
    if folder is None and jax.default_backend() != "gpu":
        return
    prompts = runner.prompts(workload)
    with tempfile.TemporaryDirectory() as scratch, progress(f"profile {workload.name}"):
        into = Path(scratch) if folder is None else folder / workload.name
        try:
            with profile.record(into):
                runner.run(workload, prompts)
            events = profile.newest_events(into)
        except Exception as error:
            row.note = "; ".join(filter(None, [row.note, f"not profiled: {error}"]))
            return
        if workload.output_len == 1 or not runner.llm.runner.is_one_graph(2):
            row.derived["device_busy_ms"] = profile.busy_time(events) / 1e6 if events else None
        if folder is not None:
            table = profile.tables(events)
            print(f"\nprofile of {workload.name}\n{table}\n", flush=True)
            (into / "kernels.txt").write_text(table + "\n", encoding="utf-8")
