"""Markdown tables from result rows; every table in README and docs comes from here.

    python -m bench.compare [FILE ...]              tables of these files (default: bench/results)
    python -m bench.compare --update README.md ...  rewrites the tables inside documents

In a document a table stands between `<!-- table: BENCH -->`, or `<!-- table: BENCH CASE -->` for
the cases whose names begin with CASE, and `<!-- end table -->`. Of several rows with the same
benchmark, case, device and settings the newest counts. The benchmarks `kernels-<op>` share one
table; there a case shows the rows of the commit that measured it last, so that its ratios are all
of one state of the code. vLLM's kernels are not in it: the table `vllm` puts them beside our rows
of the same case and commit.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
KERNELS, VLLM = "kernels", "vllm"
_BLOCK = re.compile(r"(<!-- table: (\w+) ?(\S*) -->\n).*?(<!-- end table -->)", re.DOTALL)

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Every row of the files, in the order of their dates.

    Raises:
      ValueError: a line is not a JSON object; names file and line.
    """
    rows: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number}: not a result row ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number}: not a result row: {line[:60]}")
            rows.append(row)
    return sorted(rows, key=lambda row: row["date_utc"])


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each benchmark, case, device and variant, in order of first appearance."""
    latest = {
        (r["bench"], r["case"], r["device"]["kind"], variant(r)): r
        for r in sorted(rows, key=lambda row: row["date_utc"])
    }
    return list(latest.values())


def of_newest_commit(rows: Sequence[Row]) -> list[Row]:
    """The rows of each benchmark, case and device that come from the commit that measured last."""
    commits = {
        (r["bench"], r["case"], r["device"]["kind"]): (r["commit"], r["dirty"])
        for r in sorted(rows, key=lambda row: row["date_utc"])
    }
    return [
        r for r in rows
        if commits[r["bench"], r["case"], r["device"]["kind"]] == (r["commit"], r["dirty"])
    ]  # fmt: skip


def variant(row: Row) -> str:
    """The implementation, with the settings that are not the usual ones."""
    config = row["config"]
    parts = [row["implementation"]]
    if config.get("fast_prefill") is False:
        parts.append("no fast prefill")
    if config.get("batch_invariant"):
        parts.append("batch-invariant")
    if config.get("rounding", "hf") != "hf":
        parts.append(f"rounding {config['rounding']}")
    if config.get("kernels", "auto") != "auto":
        parts.append(f"kernels {config['kernels']}")
    if "model" in config and config["model"] != "random weights, e2b":
        parts.append(config["model"])
    return ", ".join(parts)


# --- columns --------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value / scale:,.{digits}f}"


def _derived(name: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: _number(row["derived"].get(name), digits, scale)


def _result(name: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: _number(row["result"].get(name), digits, scale)


def _percent(name: str) -> Callable[[Row], str]:
    return _derived(name, 1, 0.01)


def _rate(name: str, digits: int) -> Callable[[Row], str]:
    """In units of 10¹²; a kernel that has no such work, or none worth counting, shows a dash."""
    return lambda row: _number(row["derived"].get(name) or None, digits, 1e12)


def _share_of_peak(row: Row) -> str:
    """Of arithmetic or of bandwidth, whichever is nearer to its ceiling."""
    shares = [row["derived"].get(name) or 0.0 for name in ("mfu", "mbu")]
    return _number(max(shares) or None, 1, 0.01)


def _milliseconds(row: Row) -> str:
    low, high = row["p10_ms"], row["p90_ms"]
    return f"{_number(row['median_ms'], 1)} ({_number(low, 1)}-{_number(high, 1)})"


def _latency(name: str) -> Callable[[Row], str]:
    """Median and p99 of one of vLLM's latencies."""
    return lambda row: " / ".join(
        _result(f"{kind}_{name}_ms", 1)(row) for kind in ("median", "p99")
    )


def _peak_gib(row: Row) -> str:
    return _number(row["peak_memory_bytes"], 2, 2**30)


def _reference(row: Row) -> str:
    """Engine, version and the settings that decide its numbers."""
    reference = row["config"]["reference"]
    words = [f"{reference['engine']} {reference['version']}"]
    settings = reference["vllm"] or {}
    if settings:
        words.append("eager" if settings["enforce_eager"] else "compiled")
        words += ["fast prefill"] if settings["kv_sharing_fast_prefill"] else []
        words.append(f"batch {reference['batch']}")
    if row["config"]["dtype"] == "float32" and settings:
        words.append((reference["environment"] or {}).get("TRITON_F32_DEFAULT", "tf32"))
    return ", ".join(words)


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row['result'][name]['upper_95']:.2g} %"


def _flips(row: Row) -> str:
    """All, and in parentheses ties, inside the noise, unexplained."""
    classes = row["result"]["classes"]
    counts = " / ".join(str(classes[kind]) for kind in ("tie", "noise", "unexplained"))
    return f"{row['result']['flips_rate']['flips']} ({counts})"


CASE: Column = ("workload", lambda row: row["case"])
CASE_OF_KERNEL: Column = ("case", lambda row: row["case"])
VARIANT: Column = ("implementation", variant)
ENGINE: tuple[Column, ...] = (
    CASE,
    VARIANT,
    ("ms (p10-p90)", _milliseconds),
    ("prompt tok/s", _derived("prompt_tok_per_s")),
    ("generated tok/s", _derived("generated_tok_per_s")),
    ("MFU %", _percent("mfu")),
    ("MBU %", _percent("mbu")),
    ("peak GiB", _peak_gib),
    ("compile s", lambda row: _number(row["compile_ms"], 1, 1e3)),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "throughput": ENGINE,
    "latency": ENGINE,
    "serve": (
        CASE,
        VARIANT,
        ("requests/s", _result("request_throughput", 2)),
        ("output tok/s", _result("output_throughput")),
        ("TTFT ms, median / p99", _latency("ttft")),
        ("ITL ms", _latency("itl")),
        ("TPOT ms", _latency("tpot")),
        ("E2E ms", _latency("e2el")),
    ),
    "load": (
        ("checkpoint", lambda row: row["case"]),
        ("file GB", lambda row: _number(row["config"].get("file_bytes"), 2, 1e9)),
        ("seconds", lambda row: _number(row["median_ms"], 2, 1e3)),
        ("peak RssAnon GiB", _result("peak_rss_anon_bytes", 2, 2**30)),
        ("RssAnon before GiB", _result("rss_anon_before_bytes", 2, 2**30)),
        ("peak RSS GiB", _result("peak_rss_bytes", 2, 2**30)),
        ("peak device GiB", _peak_gib),
    ),
    "batch": (
        ("job", lambda row: row["case"]),
        ("model", lambda row: row["config"]["model"]),
        ("seconds, all included", _result("seconds", 1)),
        ("generated tok/s", _derived("generated_tok_per_s")),
        ("peak RSS GiB", _result("peak_rss_bytes", 2, 2**30)),
    ),
    KERNELS: (
        ("op", lambda row: row["bench"].removeprefix(f"{KERNELS}-")),
        CASE_OF_KERNEL,
        VARIANT,
        ("µs", lambda row: _number(row["median_ms"], 2, 1e-3)),
        ("TFLOP/s", _rate("flops_per_s", 1)),
        ("TB/s", _rate("bytes_per_s", 3)),
        ("% of peak", _share_of_peak),
        ("× plain jnp", _derived("speedup_over_reference", 2)),
    ),
    VLLM: (
        ("op", lambda row: row["bench"].removeprefix(f"{KERNELS}-")),
        CASE_OF_KERNEL,
        VARIANT,
        ("µs", lambda row: _number(row["median_ms"], 2, 1e-3)),
        ("TFLOP/s", _rate("flops_per_s", 1)),
        ("TB/s", _rate("bytes_per_s", 3)),
        ("× vLLM", _derived("speedup_over_vllm", 2)),
    ),
    "parity": (
        ("set", lambda row: row["case"]),
        ("reference", _reference),
        ("dtype", lambda row: row["config"]["dtype"]),
        ("tokens", lambda row: _number(row["result"]["flips_rate"]["tokens"])),
        ("longest", _result("longest")),
        ("flips (tie / noise / unexplained)", _flips),
        ("flip rate below", _share("flips_rate")),
        ("unexplained below", _share("unexplained_rate")),
        ("limit, nat", lambda row: f"{row['result']['noise_limit']['nats']:.2g}"),
        ("largest flip margin", lambda row: f"{row['result']['largest_flip_margin']:.2g}"),
        ("max Δlogprob", lambda row: f"{row['result']['delta_logprob']['max']:.1e}"),
    ),
    "ceilings": (
        ("measured", lambda row: row["case"]),
        ("ms", lambda row: _number(row["median_ms"], 3)),
        ("TFLOP/s", _derived("flops_per_s", 0, 1e12)),
        ("TB/s", _derived("bytes_per_s", 2, 1e12)),
    ),
}


# --- tables ---------------------------------------------------------------------------------------


def table(bench: str, rows: Sequence[Row]) -> str:
    """The markdown tables of one benchmark, one a device; a failed row shows its status.

    Raises:
      ValueError: no such benchmark.
    """
    if bench not in COLUMNS:
        raise ValueError(f"bench={bench!r}: expected one of {', '.join(COLUMNS)}")
    if bench == VLLM:
        chosen = beside_vllm(rows)
    else:
        chosen = newest([row for row in rows if _table_of(row) == bench])
    if bench == KERNELS:
        chosen = sorted(of_newest_commit(chosen), key=lambda row: row["bench"])
    if not chosen:
        return "No rows yet.\n"
    kinds = dict.fromkeys(row["device"]["kind"] for row in chosen)
    return "\n".join(
        _device_table(bench, kind, [r for r in chosen if r["device"]["kind"] == kind])
        for kind in kinds
    )


def _table_of(row: Row) -> str:
    if not row["bench"].startswith(f"{KERNELS}-"):
        return row["bench"]
    return VLLM if row["implementation"].startswith(VLLM) else KERNELS


def beside_vllm(rows: Sequence[Row]) -> list[Row]:
    """The newest rows of vLLM's kernels, each case followed by ours of the commit of these.

    `speedup_over_vllm` is the time of the fastest kernel of vLLM over the row's.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in newest([row for row in rows if _table_of(row) == VLLM]):
        groups.setdefault((row["bench"], row["case"], row["device"]["kind"]), []).append(row)
    chosen = []
    for (bench, case, kind), theirs in sorted(groups.items()):
        commits = {row["commit"] for row in theirs}
        own = [
            r for r in rows
            if (r["bench"], r["case"], r["device"]["kind"]) == (bench, case, kind)
            and _table_of(r) == KERNELS and r["commit"] in commits and r["status"] == "ok"
        ]  # fmt: skip
        times = [row["median_ms"] for row in theirs if row["status"] == "ok"]
        for row in [*theirs, *newest(own)]:
            ratio = min(times) / row["median_ms"] if times and row["median_ms"] else None
            chosen.append(row | {"derived": row["derived"] | {"speedup_over_vllm": ratio}})
    return chosen


def _device_table(bench: str, kind: str, rows: Sequence[Row]) -> str:
    columns = COLUMNS[bench]
    lines = [f"{kind}, {_origin(rows)}:", "", _line(name for name, _ in columns)]
    lines.append(_line("---" for _ in columns))
    lines += [_line(_cells(row, columns)) for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    if row["status"] == "ok":
        return [value(row) for _, value in columns]
    kept = (columns[0], CASE_OF_KERNEL, VARIANT)
    names = [value(row) if (name, value) in kept else "" for name, value in columns]
    return [*names[:-1], row["status"]]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _origin(rows: Sequence[Row]) -> str:
    """Versions, driver, commits and dates of the rows."""
    versions = {
        f"jax {r['versions']['jax']}, driver {r['versions']['driver'] or 'none'}" for r in rows
    }
    commits = {(r["commit"] or "unknown")[:7] + ("-dirty" if r["dirty"] else "") for r in rows}
    dates = sorted({r["date_utc"][:10] for r in rows})
    return (
        f"{' / '.join(sorted(versions))}, commit {', '.join(sorted(commits))}, {', '.join(dates)}"
    )


def update(document: str, rows: Sequence[Row]) -> str:
    """The document with each of its tables made anew."""

    def replaced(match: re.Match[str]) -> str:
        chosen = [row for row in rows if row["case"].startswith(match[3])]
        return f"{match[1]}{table(match[2], chosen)}{match[4]}"

    return _BLOCK.sub(replaced, document)


def main() -> int:
    """Prints or updates tables."""
    parser = argparse.ArgumentParser(description="Markdown tables of results.", allow_abbrev=False)
    parser.add_argument("files", nargs="*", type=Path, help="result files (default: all committed)")
    parser.add_argument("--update", nargs="+", type=Path, default=[], metavar="DOCUMENT")
    args = parser.parse_args()
    try:
        rows = read_rows(args.files or sorted(RESULTS.glob("*.jsonl")))
        for path in args.update:
            path.write_text(update(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.update:
        for bench in COLUMNS:
            if any(_table_of(row) == bench for row in rows):
                print(f"### {bench}\n\n{table(bench, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
