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

RECORD_EPILOG = """\
A record of --prompts is greedy and goes on after EOS. --teacher-force scores given tokens, which is
how the float32 twin of a bfloat16 record is made. transformers and vLLM run in processes of their
own; either may live in another environment, named by --python.
"""
MATRIX_EPILOG = """\
The first cell of each context (batch 1, no fast prefill, reference kernels, the first chunk size)
is the baseline of the others. Exit code 1 means an unexplained difference in some cell, or that no
cell could be compared. With --batch-invariant the baseline has the kernels of the cells, and any
other bit of a token or log-probability is a failure.
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
    options.add_model_flags(parser, of_reference=True)
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
    parser.epilog = RECORD_EPILOG
    parser.add_argument(
        "--engine",
        required=True,
        choices=("gemma-jax", "transformers", "vllm", "openai-url"),
        help="who generates the tokens",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='generate greedily: JSONL with rows {"id", "prompt" | "prompt_token_ids"}',
    )
    source.add_argument(
        "--teacher-force",
        metavar="REF.jsonl",
        help="score the tokens of this record instead of generating",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE.jsonl", help="record (.gz and .xz compress)"
    )
    _number(parser, "--max-tokens", 64, "tokens to generate from each prompt")
    _number(parser, "--logprobs", 8, "candidates to record a token, 2 to 20")
    options.add_model_flags(parser)
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter with torch and transformers, or vLLM (default: this one)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch on a CPU")
    _add_hidden(parser)
    _add_vllm(parser)
    group = parser.add_argument_group("openai-url", "The key is read from OPENAI_API_KEY.")
    group.add_argument("--url", help="base of the API, such as http://127.0.0.1:8000/v1")
    group.add_argument("--served-model", metavar="NAME", help="default: the first of /models")
    group.add_argument("--extra-body", metavar="JSON", help="fields to add to every request")


def _add_hidden(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sub-blocks", "What compare --trace reads; transformers only, with --teacher-force."
    )
    group.add_argument("--hidden", metavar="F.npz", help="also store sub-block outputs of one row")
    group.add_argument("--hidden-row", metavar="ID", help="default: the first")
    group.add_argument("--hidden-tokens", type=int, metavar="N", help="use its first N tokens")
    group.add_argument(
        "--hidden-positions",
        type=_positions,
        metavar="P,P,…",
        help="positions of the sequence (default: first, middle and the last two)",
    )
    _number(group, "--hidden-columns", 1024, "vocabulary entries of the logits to store")


def _add_vllm(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vllm")
    group.add_argument(
        "--vllm-attention", metavar="BACKEND", default="TRITON_ATTN", help="(default: %(default)s)"
    )
    group.add_argument("--vllm-compiled", action="store_true", help="not enforce_eager")
    group.add_argument("--vllm-fast-prefill", action="store_true", help="kv_sharing_fast_prefill")
    _number(group, "--vllm-max-num-batched-tokens", 16_384, "prompt tokens of a step")
    group.add_argument(
        "--vllm-memory", type=float, default=0.8, metavar="SHARE", help="gpu_memory_utilization"
    )
    group.add_argument("--vllm-args", metavar="JSON", help="further arguments of vllm.LLM")


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.epilog = MATRIX_EPILOG
    parser.add_argument(
        "--model",
        default=options.DEFAULT_MODEL,
        help="checkpoint folder, bundled name or Hugging Face Hub id (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--rounding", choices=("hf", "vllm"), default="hf")
    parser.add_argument(
        "--output", required=True, metavar="FILE.jsonl", help="a row a cell; resumed if it is there"
    )
    parser.add_argument("--reference", metavar="REF.jsonl", help="also compare with this record")
    parser.add_argument(
        "--float32", metavar="F32.jsonl", help="the reference's float32 record of the same tokens"
    )
    parser.add_argument(
        "--noise", type=_nats, metavar="NATS", help="noise limit, instead of the measured one"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="run every cell in that mode; any other bit is a failure",
    )
    group = parser.add_argument_group("cells")
    for name, kind, default, text in (
        ("--batches", _sizes, "1,8,64,256", "sequences that run together"),
        ("--contexts", _sizes, "128,2048,16384,32768", "prompt tokens"),
        ("--chunks", _positions, "0", "max_num_batched_tokens; 0 is the engine's"),
    ):
        group.add_argument(
            name, type=kind, default=default, metavar="N,N,…", help=f"{text} (%(default)s)"
        )
    for name, default, choices, text in (
        ("--fast-prefills", "on,off", ("on", "off"), "on,off"),
        ("--kernels", None, ("auto", "reference", "pallas"),
         "reference,pallas; auto with --batch-invariant"),
    ):  # fmt: skip
        group.add_argument(
            name, type=_choices(choices), default=default, metavar="A,B", help=f"({text})"
        )
    _number(group, "--prompts-per-context", 8, "different prompts; a batch repeats them in turn")
    _number(group, "--max-tokens", 32, "tokens to generate from each")
    _number(group, "--logprobs", 8, "candidates a token, 2 to 20")
    group.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the random prompts (%(default)s)"
    )


def _number(group: argparse._ActionsContainer, name: str, default: int, text: str) -> None:
    group.add_argument(
        name, type=_positive, default=default, metavar="N", help=f"{text} (default: %(default)s)"
    )


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r}: expected an integer of at least 1")
    return int(value)


def _seed(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r}: expected an integer of at least 0")
    return int(value)


def _positions(value: str) -> list[int]:
    return _integers(value, 0)


def _sizes(value: str) -> list[int]:
    return _integers(value, 1)


def _integers(value: str, low: int) -> list[int]:
    parts = value.split(",")
    if not all(part.isdecimal() and int(part) >= low for part in parts):
        raise argparse.ArgumentTypeError(
            f"{value!r}: expected integers of at least {low} with commas between"
        )
    return [int(part) for part in parts]


def _choices(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(value: str) -> list[str]:
        parts = value.split(",")
        if not set(parts) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{value!r}: expected some of {','.join(allowed)}")
        return parts

    return parse
