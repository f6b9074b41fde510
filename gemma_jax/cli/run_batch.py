"""`gemma-jax run-batch`: an offline job of OpenAI requests or plain prompts, in JSON lines."""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from gemma_jax.cli import EXIT_FAILED, EXIT_OK, options

if TYPE_CHECKING:
    from gemma_jax.batch import BatchProgress

IN_FLIGHT_PER_SEQUENCE = 4
"""Completions in the engine for each that can run at a time: enough that none waits for input."""
_BAR_SECONDS = 0.5

EPILOG = """\
Input rows are of the OpenAI batch format, {"custom_id", "method": "POST", "url", "body"} with the
url /v1/chat/completions or /v1/completions, or plain prompts, {"id", "prompt"} or
{"id", "prompt_token_ids"}. Each becomes one output row {"id", "custom_id", "response", "error"} as
soon as it is done, in completion order. The same command given again goes on where an interrupted
one stopped. The sampling flags are defaults for rows that do not set a field; row number i samples
with seed S + i. Exit code 1 means that a row failed.
"""


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("run-batch", "Run a file of requests, offline.")
    parser.epilog = EPILOG
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="JSON lines; - reads stdin"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="JSON lines; - is stdout"
    )
    options.add_model_flags(parser)
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in bodies and responses (default: --model)",
    )
    options.add_sampling_flags(
        parser,
        None,
        "16 for a completion, 256 for a plain prompt, the rest of the context for a chat",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command and return its exit code."""
    args = _parser().parse_args(argv)
    sampling = options.sampling_settings(args)
    seed = sampling.pop("seed")

    from gemma_jax.batch import BatchSettings, run_batch
    from gemma_jax.batch_input import BatchInput
    from gemma_jax.batch_output import BatchFile, BatchStdout

    to_stdout = args.output_file == "-"
    with (
        BatchInput.open(args.input_file) as source,
        BatchStdout() if to_stdout else BatchFile(args.output_file) as output,
        options.load_model(args) as llm,
    ):
        settings = BatchSettings(
            model=args.served_model_name or args.model,
            sampling=sampling,
            seed=seed,
            max_in_flight=IN_FLIGHT_PER_SEQUENCE * llm.max_num_seqs,
        )
        with tqdm(total=len(source.ids), unit="row", file=sys.stderr, dynamic_ncols=True) as bar:
            progress = run_batch(source, output, llm.text_side, llm.engine, settings, _updater(bar))
    print(summary(progress), file=sys.stderr)
    return EXIT_FAILED if progress.failed else EXIT_OK


def _updater(bar: tqdm) -> "Callable[[BatchProgress], None]":
    """Return what moves the bar; rows of an earlier run do not count for its ETA."""
    drawn = 0.0

    def update(progress: "BatchProgress") -> None:
        nonlocal drawn
        bar.initial = progress.resumed
        now = time.monotonic()
        if now - drawn < _BAR_SECONDS and progress.finished < progress.total:
            return
        drawn = now
        bar.set_postfix_str(f"{progress.tokens_per_second:.0f} tok/s", refresh=False)
        bar.n = progress.finished
        bar.refresh()

    return update


def summary(progress: "BatchProgress") -> str:
    """Return the line that ends a job."""
    resumed = f" ({progress.resumed} of them before this run)" if progress.resumed else ""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    return (
        f"gemma-jax: {progress.finished} rows{resumed}: {progress.succeeded} succeeded,"
        f" {progress.failed} failed; {progress.prompt_tokens} prompt and"
        f" {progress.generated_tokens} generated tokens in {progress.seconds:.1f} s,"
        f" {progress.tokens_per_second:.0f} generated tok/s; peak memory {peak_mib:.0f} MiB"
    )
