"""`bench.kernels`: every op at the shapes of published models, each implementation in one run."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_jax.benchmarks.ceilings import Ceilings, copy_row, matmul_row
from gemma_jax.benchmarks.kernel_timing import rotations, time_kernel
from gemma_jax.benchmarks.rows import Report, Row, Source, command_line, peak_memory_bytes
from gemma_jax.errors import UnsupportedError
from gemma_jax.pallas.cases import Case, all_cases

BASELINES = ("unfused",)
IMPLEMENTATIONS = ("reference", *BASELINES, "xla", "cudnn", "triton", "mosaic")
RATIOS = {"reference": "speedup_over_reference", "unfused": "speedup_over_unfused"}
"""Implementations that the later ones of a case are compared with, and the field of the ratio."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the chosen cases; the exit code is 1 if one failed, not if one is unsupported."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(given)
    cases = chosen_cases(args.op, args.case)
    if not cases:
        parser.error(f"no case has --op {args.op} and --case {args.case} in its names")
    report = Report(args.output_json, Source.find(args.commit))
    ceilings = _ceilings(report)
    for case in cases:
        measure_case(case, args, ceilings, report, command_line("kernels", given))
    return report.finish(allowed=("ok", "unsupported"))


def chosen_cases(ops: Sequence[str] | None, names: Sequence[str] | None) -> list[Case]:
    """The cases worth timing whose op and name contain one of the given texts; None is any."""
    return [
        case
        for case in all_cases()
        if case.bench and _contains(case.op, ops) and _contains(case.name, names)
    ]


def _contains(text: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part.lower() in text.lower() for part in parts)


def measure_case(
    case: Case, args: argparse.Namespace, ceilings: Ceilings, report: Report, command: str
) -> None:
    """A row for each implementation, with its ratio to plain jax.numpy and to the baselines.

    One that does not take the case has a row only if it was named.
    """
    sets = [case.inputs(args.seed + i) for i in range(rotations(case.bytes))]
    bases: dict[str, float] = {}
    for name in args.implementation or IMPLEMENTATIONS:
        row = Row(f"kernels-{case.op}", case.name, name, command=command)
        try:
            timing = time_kernel(_calling(case, name), sets, args.num_calls, case.in_place)
        except Exception as error:
            row.fail(error)
            if row.status != "unsupported" or args.implementation:
                report.add(row)
                print(f"{case.op:>20} {case.name:<40} {name:>10} {row.status}: {row.note[:120]}")
            continue
        for field, value in timing.fields().items():
            setattr(row, field, value)
        if name in RATIOS:
            bases[name] = timing.median_ms
        row.derived = _rates(case, timing.median_ms, ceilings, bases)
        row.peak_memory_bytes = peak_memory_bytes()
        report.add(row)
        print(_summary(case, row), flush=True)


def _calling(case: Case, implementation: str) -> Callable[..., Any]:
    if implementation in case.baselines:
        return case.baselines[implementation]
    if implementation in BASELINES:
        raise UnsupportedError(f"{case.op} has no baseline {implementation!r}")
    return lambda **inputs: case.call(**inputs, implementation=implementation)


def _rates(
    case: Case, ms: float, ceilings: Ceilings, bases: Mapping[str, float]
) -> dict[str, float | None]:
    flops, bandwidth = case.flops / ms * 1e3, case.bytes / ms * 1e3
    ratios = {RATIOS[name]: base / ms for name, base in bases.items()}
    return {
        "flops_per_s": flops,
        "mfu": flops / ceilings.flops,
        "bytes_per_s": bandwidth,
        "mbu": bandwidth / ceilings.bandwidth,
        "speedup_over_reference": None,
        **ratios,
    }


def _summary(case: Case, row: Row) -> str:
    rates = {name: value or 0.0 for name, value in row.derived.items()}
    return (
        f"{case.op:>20} {case.name:<40} {row.implementation:>10}"
        f" {1e3 * (row.median_ms or 0):9.2f} µs {rates['flops_per_s'] / 1e12:7.1f} TFLOP/s"
        f" {rates['bytes_per_s'] / 1e12:6.3f} TB/s {rates['speedup_over_reference']:5.2f}x"
    )


def _ceilings(report: Report) -> Ceilings:
    rows = matmul_row(), copy_row()
    for row in rows:
        row.command = "python -m bench.kernels"
        report.add(row)
        report.rows.remove(row)
    flops, bandwidth = rows[0].derived["flops_per_s"], rows[1].derived["bytes_per_s"]
    print(f"ceilings: {(flops or 0) / 1e12:.0f} TFLOP/s, {(bandwidth or 0) / 1e12:.2f} TB/s")
    return Ceilings(float(flops or 0), float(bandwidth or 0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.kernels", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--op", action="append", metavar="TEXT",
        help="only ops whose name contains this, in either case; may be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--case", action="append", metavar="TEXT",
        help="only cases whose name contains this, in either case; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--implementation", action="append", choices=IMPLEMENTATIONS, help="may be repeated"
    )
    parser.add_argument("--num-calls", type=int, default=48, help="counted samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path, help="file or folder to append rows to")
    parser.add_argument("--commit", metavar="HASH[-dirty]", help="where git cannot tell")
    return parser
