"""How our model agrees with recorded engines: one result row a set of goldens.

    python -m bench.agreement --output-json bench/results               every committed set
    python -m bench.agreement --only nano/ --free-run --output-json …   some of them
    python -m bench.agreement --record REF.jsonl.gz --float32 TWIN.jsonl.gz --name NAME \
        --output-json bench/results                                     any record of nano

Teacher-forced through `gemma_jax.parity`, so with its classes and bounds (docs/parity.md); against
vLLM with rounding="vllm". Committed sets are the engine goldens, the records of the trace tests,
and the older goldens (`.npz`), whose best five candidates are read as a record.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.benchmarks.rows import Report, Row, Source, command_line
from gemma_jax.checkpoint.load import load_config
from gemma_jax.errors import GemmaError
from gemma_jax.llm import LLM
from gemma_jax.parity import summary
from gemma_jax.parity.compare import compare
from gemma_jax.parity.records import Candidates, Record, Stream, read_record
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.golden_models import golden_checkpoint
from gemma_jax.testing.goldens import Golden, TeacherForced, load_golden, load_teacher_forced

DATA = Path(__file__).parents[1] / "tests" / "parity" / "data"
SUFFIX, TWIN_SUFFIX = ".jsonl.xz", ".twin.jsonl.xz"


@dataclass(frozen=True)
class Set:
    """A record to compare with.

    Attributes:
      name: in the tables.
      model: name of a golden model or tiny configuration.
      path: of the file.
      read: the record, and its float32 twin where it has one.
    """

    name: str
    model: str
    path: Path
    read: Callable[[], tuple[Record, Record | None]]


def committed_sets() -> Iterator[Set]:
    """Every golden of the repository, engine goldens first."""
    for path in sorted((DATA / "engines").rglob(f"*{SUFFIX}")):
        if not path.name.endswith(TWIN_SUFFIX):
            model = path.parent.name
            name = f"{model}/{path.name.removesuffix(SUFFIX)}"
            twin = path.with_name(path.name.replace(SUFFIX, TWIN_SUFFIX))
            yield Set(name, model, path, _reader(path, twin if twin.exists() else None))
    for texts in ("greedy", "held_out"):
        for dtype in ("float32", "bfloat16"):
            path = DATA / f"nano_{texts}.npz"
            yield Set(f"nano/{texts} {dtype}", "nano", path, _texts_reader(path, dtype))
    for name in TINY_CONFIGS:
        path = DATA / "hf" / f"{name}.npz"
        yield Set(f"{name}/float32", name, path, _golden_reader(path))


def _reader(record: Path, twin: Path | None) -> Callable[[], tuple[Record, Record | None]]:
    return lambda: (read_record(record), None if twin is None else read_record(twin))


def _texts_reader(path: Path, dtype: str) -> Callable[[], tuple[Record, Record | None]]:
    def read() -> tuple[Record, Record | None]:
        golden = load_teacher_forced(path)
        twin = _texts_record(path.name, golden, "float32") if dtype == "bfloat16" else None
        return _texts_record(path.name, golden, dtype), twin

    return read


def _texts_record(name: str, golden: TeacherForced, dtype: str) -> Record:
    """A text's first token is its prompt."""
    ends = np.cumsum([len(ids) - 1 for ids in golden.sequences])[:-1]
    parts = zip(
        golden.sequences,
        np.split(golden.top_ids[dtype], ends),
        np.split(golden.top_logprobs[dtype], ends),
        strict=True,
    )
    streams = [
        Stream(i, ids[:1], ids[1:], Candidates(top, values))
        for i, (ids, top, values) in enumerate(parts)
    ]
    return Record(name, _header(golden.header, dtype), tuple(streams))


def _golden_reader(path: Path) -> Callable[[], tuple[Record, None]]:
    def read() -> tuple[Record, None]:
        golden = load_golden(path)
        return Record(path.name, _header(golden.header, "float32"), _golden_streams(golden)), None

    return read


def _golden_streams(golden: Golden) -> tuple[Stream, ...]:
    logprobs = golden.top_logits - golden.logsumexp[..., None]
    rows = zip(golden.prompts, golden.tokens, golden.top_ids, logprobs, strict=True)
    return tuple(
        Stream(i, prompt, tokens, Candidates(ids, values))
        for i, (prompt, tokens, ids, values) in enumerate(rows)
    )


def _header(header: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {"engine": "transformers", "versions": header["versions"], "dtype": dtype}


# --- comparing ------------------------------------------------------------------------------------


def checkpoint(model: str, folder: Path) -> Path:
    """The folder of a golden model or of a tiny configuration with seed 0."""
    if model not in TINY_CONFIGS:
        return golden_checkpoint(model, folder)
    path = folder / model
    if not path.is_dir():
        write_checkpoint(TINY_CONFIGS[model], path, 0, "float32")
    return path


def measure(row: Row, chosen: Set, path: Path, free_run: bool) -> None:
    """Compares one set and fills its row."""
    record, twin = chosen.read()
    rounding = "vllm" if record.engine == "vllm" else "hf"

    def load(dtype: str) -> LLM:
        return LLM(path, dtype=dtype, rounding=rounding)

    begun = time.monotonic()
    found = compare(record, load, record.dtype or "float32", twin=twin, free_run=free_run)
    values = summary.result(found)
    row.config = {
        "model": chosen.model,
        "dtype": found.dtype,
        "rounding": rounding,
        "reference": {
            "engine": record.engine,
            "version": record.header["versions"][record.engine],
            "device": (record.header.get("device") or {}).get("kind", "cpu"),
            "environment": record.header.get("environment"),
            "vllm": record.header.get("vllm"),
            "batch": record.streams[0].batch,
            "sha256": hashlib.sha256(chosen.path.read_bytes()).hexdigest(),
        },
        "window": load_config(path).sliding_window,
    }
    kept = ("sequences", "classes", "flips_rate", "unexplained_rate", "noise_limit")
    kept += ("delta_logprob", "splits", "free_running", "failed")
    row.result = {name: values[name] for name in kept}
    row.result["longest"] = max(len(stream.sequence) for stream in record.streams)
    row.result["largest_flip_margin"] = max((f.reference_margin for f in found.flips), default=0.0)
    row.result["seconds"] = round(time.monotonic() - begun, 1)
    if values["free_running"] is not None:
        drop = ("agreed", "lengths", "first_divergences")
        free = {k: x for k, x in values["free_running"].items() if k not in drop}
        row.result["free_running"] = free


def chosen_sets(args: argparse.Namespace) -> list[Set]:
    """The record of the flags, else the committed sets."""
    if args.record is None:
        return [found for found in committed_sets() if args.only in found.name]
    name = args.name or args.record.name
    return [Set(name, "nano", args.record, _reader(args.record, args.float32))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Agreement with recorded engines.", allow_abbrev=False
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="sets with this in the name")
    parser.add_argument("--free-run", action="store_true", help="also generate greedily")
    parser.add_argument("--record", type=Path, metavar="FILE", help="this record of nano instead")
    parser.add_argument("--float32", type=Path, metavar="FILE", help="the record's float32 twin")
    parser.add_argument("--name", help="of the record, in the row")
    parser.add_argument("--output-json", type=Path, metavar="PATH", help="append rows to it")
    parser.add_argument("--commit", metavar="HASH[-dirty]", help="where git cannot tell")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the sets; exit code 1 on an unexplained flip or a set that could not be compared."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parser().parse_args(arguments)
    report = Report(args.output_json, Source.find(args.commit))
    failed = False
    with tempfile.TemporaryDirectory(prefix="gemma-jax-agreement-") as folder:
        for chosen in chosen_sets(args):
            row = Row("parity", chosen.name, command=command_line("agreement", arguments))
            try:
                measure(row, chosen, checkpoint(chosen.model, Path(folder)), args.free_run)
            except GemmaError as error:
                row.fail(error)
            failed |= row.status != "ok" or row.result["failed"]
            report.add(row)
            print(_line(row), flush=True)
    return int(report.finish() or failed)


def _line(row: Row) -> str:
    if row.status != "ok":
        return f"{row.case}: {row.status}: {row.note}"
    rate, classes = row.result["flips_rate"], row.result["classes"]
    counts = "/".join(str(classes[kind]) for kind in ("tie", "noise", "unexplained"))
    return (
        f"{row.case}: {rate['tokens']:,} tokens, {rate['flips']} flips"
        f" (tie/noise/unexplained {counts}), {row.result['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
