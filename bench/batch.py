"""`python -m bench.batch`: an offline job of short prompts through `gemma-jax run-batch`.

Prompts are the first words of nano's own tales, cut anew for each. The figures are of the whole
process: from its start, compilation included, to its end, and its largest resident memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.benchmarks.measure_workload import guarded
from gemma_jax.benchmarks.rows import Report, Row, Source, command_line
from gemma_jax.errors import GemmaError

WORDS = "once upon a time there was an old king who had three sons and a well in the woods".split()
LONGEST = 12
"""Words of a prompt at most."""


class JobError(GemmaError, RuntimeError):
    """The job failed; carries the end of its log."""


def main(arguments: list[str]) -> int:
    """Runs the job and reports one row."""
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--num-prompts", type=_count, default=1000, metavar="N")
    parser.add_argument("--max-tokens", type=_count, default=32, metavar="N")
    parser.add_argument("--output-json", type=Path, metavar="PATH")
    parser.add_argument("--commit", metavar="HASH")
    args = parser.parse_args(arguments)
    if args.output_json is not None and not args.output_json.is_dir():
        args.output_json.touch()  # before the job rather than after it
    report = Report(args.output_json, Source.find(args.commit))
    case = f"{args.num_prompts} short prompts + {args.max_tokens}"
    row = Row("batch", case, command=command_line("batch", arguments))
    row.config = {"model": args.model, "max_tokens": args.max_tokens}
    report.add(guarded(row, lambda row: _fill(row, args)))
    return report.finish()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _fill(row: Row, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        given.write_text("".join(json.dumps(p) + "\n" for p in prompts(args.num_prompts)))
        command = ["run-batch", "-i", str(given), "-o", str(made), "--model", args.model]
        command += ["--max-tokens", str(args.max_tokens)]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "gemma_jax.cli", *command], capture_output=True, text=True
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise JobError(f"run-batch exited with {done.returncode}: {done.stderr[-400:]}")
        rows = [json.loads(line) for line in made.read_text().splitlines()]
    tokens = sum(r["response"]["body"]["usage"]["completion_tokens"] for r in rows)
    row.median_ms, row.samples_ms = seconds * 1e3, [seconds * 1e3]
    row.derived = {"generated_tok_per_s": tokens / seconds}
    row.result = {
        "seconds": seconds,
        "num_prompts": args.num_prompts,
        "generated_tokens": tokens,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def prompts(count: int) -> list[dict[str, Any]]:
    """Rows of `generate`'s prompt format, a few words each."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, LONGEST + 1, count)
    starts = generator.integers(0, len(WORDS) - LONGEST + 1, count)
    cut = zip(starts, lengths, strict=True)
    return [{"id": i, "prompt": " ".join(WORDS[s : s + n])} for i, (s, n) in enumerate(cut)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
