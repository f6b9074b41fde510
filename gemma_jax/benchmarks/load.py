"""`bench load`: seconds and host memory to load a checkpoint, each time in a fresh process."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_jax.benchmarks.measure_workload import guarded
from gemma_jax.benchmarks.rows import Report, Row, Source, command_line
from gemma_jax.benchmarks.session import DEFAULT_PRESET, progress
from gemma_jax.benchmarks.timing import Timing
from gemma_jax.errors import GemmaError
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import named_config

WORKER = "gemma_jax.benchmarks.load_worker"
_MEMORY = ("peak_rss_anon_bytes", "peak_rss_bytes")


class LoadError(GemmaError, RuntimeError):
    """The loading process failed; carries the end of its log."""


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Loads `--model`, or a random checkpoint of `--preset` written for the occasion."""
    report = Report(args.output_json, Source.find(args.commit))
    if args.model is not None:
        row = _measure(args, Path(args.model), Path(args.model).name, arguments)
    else:
        preset = args.preset or DEFAULT_PRESET
        with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
            folder = Path(temporary) / preset
            with progress(f"write a random {preset} checkpoint"):
                write_checkpoint(named_config(preset), folder, args.seed)
            row = _measure(args, folder, f"random weights, {preset}", arguments)
            row.note = row.note or "read right after it was written, so from the page cache"
    report.add(row)
    print(_summary(row), flush=True)
    return report.finish()


def _measure(args: argparse.Namespace, folder: Path, model: str, arguments: Sequence[str]) -> Row:
    row = Row("load", args.preset or model, command=command_line("load", arguments))
    row.config = {"model": model, "dtype": args.dtype, "file_bytes": _size(folder)}

    def fill(row: Row) -> None:
        runs = []
        for i in range(args.num_iters):
            with progress(f"load {model}, {i + 1} of {args.num_iters}"):
                runs.append(load_once(folder, args.dtype))
        samples = [r["load_s"] * 1e3 for r in runs]
        timing = Timing(samples[0], samples, warmup=0)
        for name, value in timing.fields().items():
            setattr(row, name, value)
        row.compile_ms = None
        row.peak_memory_bytes = max(r["peak_memory_bytes"] or 0 for r in runs) or None
        row.derived = {"bytes_per_s": runs[0]["weight_bytes"] / timing.median_ms * 1e3}
        row.result = runs[-1] | {name: _largest(runs, name) for name in _MEMORY}

    return guarded(row, fill)


def load_once(folder: Path, dtype: str) -> dict[str, Any]:
    """What `load_worker` reports of one load.

    Raises:
      LoadError: the process failed.
    """
    command = [sys.executable, "-m", WORKER, str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LoadError(f"{WORKER} exited with {done.returncode}: {done.stderr.strip()[-400:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if result["error"]:
        raise LoadError(f"the loaded model did not generate: {result['error']}")
    return result


def _largest(runs: Sequence[dict[str, Any]], name: str) -> int | None:
    values = [run[name] for run in runs if run[name] is not None]
    return max(values, default=None)


def _size(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _summary(row: Row) -> str:
    if row.status != "ok":
        return f"{row.case:>14}  {row.status}: {row.note}"
    memory = {name: row.result[name] for name in _MEMORY} | {"device": row.peak_memory_bytes}
    sizes = [f"{name} {value / 2**30:.2f} GiB" for name, value in memory.items() if value]
    return f"{row.case:>14}  {(row.median_ms or 0) / 1e3:.2f} s  " + "  ".join(sizes)
