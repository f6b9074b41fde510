"""`gemma-jax convert`: safetensors to orbax, orbax to safetensors, and a bit-for-bit comparison."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gemma_jax.errors import GemmaError

_GIB = 1 << 30


def main(argv: Sequence[str] | None = None, prog: str = "gemma-jax convert") -> int:
    """Runs one sub-command; returns 0 when done, 1 when checkpoints differ, 2 for an error."""
    args = build_parser(prog).parse_args(argv)
    _configure_logging()
    os.environ["JAX_PLATFORMS"] = "cpu"  # conversion needs no accelerator and must not reserve one
    try:
        return args.run(args)
    except GemmaError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def _configure_logging() -> None:
    """Casts and skipped config fields are worth a line on stderr, unless the caller decided."""
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("gemma_jax").setLevel(logging.INFO)


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The argument parser, built without importing JAX."""
    parser = argparse.ArgumentParser(prog=prog, description="Convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    orbax = _converter(commands, "to-orbax", "write an orbax checkpoint")
    orbax.set_defaults(run=_to_orbax)
    hf = _converter(commands, "to-hf", "write Hugging Face safetensors (text-only)")
    hf.add_argument(
        "--shard-gib", type=_positive, default=5.0, help="largest file in GiB (default: 5)"
    )
    hf.set_defaults(run=_to_hf)
    verify = commands.add_parser(
        "verify",
        help="compare two checkpoints bit for bit",
        description="Exit code 0 when equal, 1 when not.",
    )
    verify.add_argument("source", type=Path, metavar="SRC")
    verify.add_argument("target", type=Path, metavar="DST")
    verify.set_defaults(run=_verify)
    return parser


def _converter(commands: argparse._SubParsersAction, name: str, text: str):
    parser = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint of either format")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to create")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="cast the weights (default: keep them as they are, bit for bit)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def _to_orbax(args: argparse.Namespace) -> int:
    from gemma_jax.checkpoint.convert import to_orbax

    to_orbax(args.source, args.target, dtype=args.dtype, overwrite=args.overwrite)
    print(f"wrote {args.target} (orbax)")
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from gemma_jax.checkpoint.convert import to_hf

    to_hf(
        args.source,
        args.target,
        dtype=args.dtype,
        shard_bytes=int(args.shard_gib * _GIB),
        overwrite=args.overwrite,
    )
    print(f"wrote {args.target} (safetensors)")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from gemma_jax.checkpoint.verify import grouped, verify

    report = verify(args.source, args.target)
    for path, names in report.dropped.items():
        if names:
            print(f"{path}: {len(names)} tensors that the text decoder does not use:")
            print("".join(f"  {line}\n" for line in grouped(names)), end="")
    for line in (*report.config_differences, *report.different):
        print(f"DIFFERENT {line}")
    same = report.compared - len(report.different)
    print(f"{same} of {report.compared} tensors are bit-identical")
    return 0 if report.ok else 1
