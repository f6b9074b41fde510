"""Every end-to-end measurement of one GPU in one command, within a time budget.

    python -m bench.run_all --out FOLDER

Parts and workloads run in order of importance. Each part is a process of its own and appends its
rows as they come, so that a part that fails or runs out of time leaves the rows before it:
`<yyyymmdd>-<device>-<bench>.jsonl` in FOLDER. The workloads share one process: their programs are
compiled side by side, then each is timed and profiled with nothing else on the device. The tables
of their kernels go to FOLDER too.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WORKLOADS = (
    "8x2048+1", "1x128+256", "64x128+256", "64x2048+16", "256x128+128", "64x2048+1", "1x2048+1",
    "4x1024+1",
)  # fmt: skip
LOAD_SECONDS = 120
"""Kept free for the part that comes last."""


class Part(NamedTuple):
    """One command, and the seconds that must be left for later parts when it is stopped."""

    name: str
    command: list[str]
    reserve: float


def parts(args: argparse.Namespace) -> list[Part]:
    """The chosen parts in order."""
    common = ["--preset", args.preset]
    rows = ["--output-json", str(args.out)]
    if args.commit:
        rows += ["--commit", args.commit]
    workloads = [x for w in args.workload or WORKLOADS for x in ("--workload", w)]
    every = {
        "throughput": [
            *common,
            *workloads,
            *rows,
            "--compile-ahead",
            "--profile",
            str(args.traces),
        ],
        "load": [*common, *rows],
    }
    chosen = [name for name in every if name in args.only]
    reserves = {"throughput": LOAD_SECONDS if "load" in chosen else 0, "load": 0}
    return [Part(n, [sys.executable, "-m", f"bench.{n}", *every[n]], reserves[n]) for n in chosen]


def run(part: Part, seconds: float) -> int | None:
    """Runs a part for at most `seconds`; its exit code, None if it was stopped."""
    print(f"+ {shlex.join(part.command[1:])}   (at most {seconds:.0f} s)", flush=True)
    process = subprocess.Popen(part.command, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> int:
    """Runs the parts; the exit code is 1 if one failed or was stopped."""
    parser = argparse.ArgumentParser(description="Measure one GPU.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result rows")
    parser.add_argument(
        "--traces", type=Path, default=Path(tempfile.gettempdir()) / "gemma-jax-traces"
    )
    parser.add_argument("--preset", default="e2b", help="shape of the model (default: e2b)")
    parser.add_argument("--commit", metavar="HASH[-dirty]", help="where git cannot tell")
    parser.add_argument("--budget", type=float, default=530, help="seconds for everything")
    parser.add_argument(
        "--only", type=lambda x: x.split(","), default=["throughput", "load"],
        help="comma-separated parts: throughput, load (default: both)",
    )  # fmt: skip
    parser.add_argument("--workload", action="append", help="instead of the usual ones")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    failed = []
    for part in parts(args):
        start = time.monotonic()
        code = run(part, max(end - part.reserve - start, 1))
        took = time.monotonic() - start
        print(f"= {part.name}: {took:.0f} s, {'stopped' if code is None else f'exit {code}'}")
        if code != 0:
            failed.append(part.name)
        for table in args.traces.glob("*/kernels.txt"):
            name = f"profile-{table.parent.name.replace('+', '-')}.txt"
            (args.out / name).write_bytes(table.read_bytes())
    print(f"done; failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
