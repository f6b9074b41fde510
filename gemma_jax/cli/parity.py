"""`gemma-jax parity`: record an engine, compare a record with our model, report, run a matrix."""

import argparse
import importlib
from collections.abc import Callable, Sequence

from gemma_jax.cli import options

COMMANDS = {
    "record": "write what an engine generates, with its candidates",
    "compare": "teacher-force a record through our model and class every flip",
    "report": "one HTML page of comparisons",
    "matrix": "compare one model over batch, context, fast prefill, kernels and chunk sizes",
}

COMPARE_EPILOG = """\
Exit code 1 means an unexplained flip, or a traced sub-block that differs. A flip is a tie (the
reference gives both tokens equal logits), inside the bfloat16 noise (--float32 gives the
reference's float32 record, from which the limit is measured), or unexplained: docs/parity.md.
"""


def main(argv: Sequence[str]) -> int:
    """Run one of the four and return its exit code."""
    args = _parser().parse_args(argv)
    return importlib.import_module(f"gemma_jax.parity.commands.{args.action}").run(args)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("parity", "Parity with other engines: docs/parity.md.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    adders: dict[str, Callable[[argparse.ArgumentParser], None]] = {
        "record": _add_record,
        "compare": _add_compare,
        "report": _add_report,
        "matrix": _add_matrix,
    }
    for name, add in adders.items():
        add(
            actions.add_parser(
                name, help=COMMANDS[name], description=COMMANDS[name], allow_abbrev=False
            )
        )
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.epilog = COMPARE_EPILOG
    parser.add_argument("reference", metavar="REF.jsonl", help="a record; .gz and .xz are read too")
    parser.add_argument(
        "--float32",
        metavar="F32.jsonl",
        help="the reference's float32 record of the same tokens (record --teacher-force REF.jsonl)",
    )
    parser.add_argument(
        "--noise", type=_nats, metavar="NATS", help="noise limit, instead of the measured one"
    )
    parser.add_argument(
        "--free-run", action="store_true", help="also generate greedily from the same prompts"
    )
    parser.add_argument(
        "--float32-everywhere",
        action="store_true",
        help="our float32 choice at every position, not only in sequences with a flip",
    )
    parser.add_argument(
        "--trace",
        metavar="F.npz",
        help="sub-block outputs of record --hidden: find the first of ours that differs",
    )
    parser.add_argument(
        "--any-model", action="store_true", help="compare although the record is of other weights"
    )
    options.add_model_flags(parser)
    parser.set_defaults(dtype=None, rounding=None)
    group = parser.add_argument_group("results")
    group.add_argument("--output-json", metavar="FILE", help="write the result, for report")
    group.add_argument(
        "--positions", metavar="FILE.jsonl", help="write every position (.gz and .xz compress)"
    )
    group.add_argument("--html", metavar="FILE.html", help="write the report too")


def _nats(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: expected a number of nats, at least 0")
    return number


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", nargs="+", metavar="RESULT.json", help="of compare --output-json"
    )
    parser.add_argument("--html", metavar="FILE.html", help="one self-contained page with plots")


def _add_record(parser: argparse.ArgumentParser) -> None:
    pass


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    pass
