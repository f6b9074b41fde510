"""`gemma-jax bench`: the flags of each benchmark; JAX is imported when one runs."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gemma_jax.cli.options import add_model_flags
from gemma_jax.errors import ConfigError

BENCHMARKS = {
    "latency": "time of one batch of a fixed shape",
    "throughput": "requests and tokens a second, all requests there from the start",
    "serve": "latency and throughput of a running server, at given request rates",
    "load": "seconds and host memory to load a checkpoint",
}


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark; the exit code is 1 if a row could not be measured."""
    args = _parser().parse_args(argv)
    _check_source(args)
    module = importlib.import_module(f"gemma_jax.benchmarks.{args.benchmark}")
    return module.run(args, list(argv[1:]))


def _check_source(args: argparse.Namespace) -> None:
    """Refuses two models at once.

    Raises:
      ConfigError: both --model and --preset.
    """
    if args.model is not None and getattr(args, "preset", None) is not None:
        raise ConfigError(
            f"--model {args.model} and --preset {args.preset}: give one; --preset is random weights"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gemma-jax bench",
        description="Measure this device; rows and fields are explained in docs/benchmarks.md.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    adders: dict[str, Callable[[argparse.ArgumentParser], None]] = {
        "latency": _add_latency,
        "throughput": _add_throughput,
        "serve": _add_serve,
        "load": _add_load,
    }
    for name, add in adders.items():
        text = BENCHMARKS[name]
        add(commands.add_parser(name, help=text, description=text, allow_abbrev=False))
    return parser


def _add_latency(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    _number(group, "--batch-size", 8, "sequences of the batch")
    _number(group, "--input-len", 32, "prompt tokens of each")
    _number(group, "--output-len", 128, "generated tokens of each")
    _add_repeats(group, warmup=10, iters=30)
    _add_engine(parser)
    _add_output(parser, profile=True)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        action="append",
        metavar="BxP+G",
        help="B requests of P prompt tokens, G generated each, for instance 8x2048+1; may be"
        " repeated, and replaces the three flags below",
    )
    _number(group, "--num-prompts", 64, "requests")
    _number(group, "--input-len", 1024, "prompt tokens of each")
    _number(group, "--output-len", 128, "generated tokens of each")
    _add_repeats(group, warmup=1, iters=3)
    _add_engine(parser)
    _add_output(parser, profile=True)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="of the server, without /v1 (default: %(default)s)",
    )
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="ask for completions of token ids, or for chats (default: %(default)s)",
    )
    group.add_argument("--model", help="name of the model (default: the first that is served)")
    group.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    group.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="S",
        help="most seconds between two events of an answer (default: %(default)s)",
    )
    _add_serve_workload(parser.add_argument_group("workload"))
    group = parser.add_argument_group("files")
    group.add_argument(
        "--save-result", action="store_true", help="write one JSON file a rate to --result-dir"
    )
    group.add_argument("--save-detailed", action="store_true", help="with each request's times")
    group.add_argument(
        "--result-dir", type=Path, default=Path(), metavar="FOLDER", help="(default: this folder)"
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="plot latencies against the rates, and write the results beside it as JSON",
    )
    _add_output(parser, profile=False)


def _add_serve_workload(group: argparse._ArgumentGroup) -> None:
    _number(group, "--num-prompts", 100, "requests at each rate")
    _number(group, "--input-len", 1024, "prompt tokens of each (words, for chats)")
    _number(group, "--output-len", 128, "generated tokens of each")
    group.add_argument(
        "--request-rate",
        type=_rate,
        nargs="+",
        default=[float("inf")],
        metavar="R",
        help="requests a second, or inf to send all at once; several make a sweep (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="shape of the gaps between requests; 1 is a Poisson process (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency", type=_count, metavar="N", help="most requests at a time"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make every answer --output-len tokens long",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T")
    group.add_argument(
        "--vocab-size",
        type=_count,
        default=4096,
        metavar="V",
        help="random ids are below this (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and gaps")
    _number(group, "--num-warmups", 1, "requests before the clock starts", minimum=0)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoint")
    group.add_argument("--model", metavar="FOLDER", help="the checkpoint to load")
    _add_preset(group)
    group.add_argument("--folder", type=Path, help="where the random checkpoint is written")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    _number(group, "--num-iters", 1, "loads, each in a fresh process")
    _add_output(parser, profile=False)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.set_defaults(model=None)
    group = parser.add_argument_group("engine")
    _add_preset(group)
    for name, text in (
        ("--max-num-batched-tokens", "most prompt tokens of one prefill call"),
        ("--decode-steps", "tokens of one decode call"),
    ):
        group.add_argument(name, type=int, metavar="N", help=f"{text} (default: the engine's)")
    for name, unit, text in (
        ("--peak-flops", "FLOP/s", "100 %% of mfu (default: an 8192³ bfloat16 product)"),
        ("--peak-bandwidth", "BYTES/s", "100 %% of mbu (default: a copy, read + written)"),
    ):
        group.add_argument(name, type=_positive, metavar=unit, help=text)


def _add_preset(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset",
        help="instead of --model: random weights of this size, for instance e2b (the default) or"
        " e2b-tiny",
    )
    group.add_argument("--seed", type=int, default=0, help="of random weights and prompts")


def _add_repeats(group: argparse._ArgumentGroup, warmup: int, iters: int) -> None:
    _number(group, "--num-iters-warmup", warmup, "uncounted calls after the first", minimum=0)
    _number(group, "--num-iters", iters, "counted calls, each on fresh random prompts")


def _add_output(parser: argparse.ArgumentParser, profile: bool) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--output-json",
        type=Path,
        metavar="PATH",
        help="append the rows to this file; in an existing folder, to"
        " <yyyymmdd>-<device>-<bench>.jsonl",
    )
    group.add_argument(
        "--commit", metavar="HASH[-dirty]", help="what is measured, where git cannot tell"
    )
    if profile:
        group.add_argument(
            "--profile",
            type=Path,
            metavar="FOLDER",
            help="keep the trace of one more run of each workload and print its kernels by time",
        )
        group.add_argument(
            "--compile-ahead",
            action="store_true",
            help="compile the programs of all workloads side by side before the first runs;"
            " compile_ms of the rows is then what is left",
        )


def _number(
    group: argparse._ArgumentGroup, name: str, default: int, text: str, minimum: int = 1
) -> None:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(
                f"{value!r}: expected an integer of at least {minimum}"
            )
        return number

    group.add_argument(
        name, type=parse, default=default, metavar="N", help=f"{text} (default: %(default)s)"
    )


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r}: expected an integer of at least 1")
    return int(value)


def _rate(value: str) -> float:
    return float("inf") if value == "inf" else _positive(value)


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: expected a number above 0")
    return number
