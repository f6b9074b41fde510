"""`gemma-jax generate`: continue one prompt, several, or a JSONL file of them."""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from gemma_jax.cli import EXIT_FAILED, EXIT_OK, options
from gemma_jax.cli.prompts import Prompt, PromptFile
from gemma_jax.errors import ConfigError, RequestError
from gemma_jax.outputs import RequestOutput
from gemma_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gemma_jax.llm import LLM

DEFAULT_MAX_TOKENS = 256
# Prompts that are handed over together, in full batches; what an interrupted run may lose.
GROUPS_PER_BATCH = 2
_SEED_RANGE = 2**63

EPILOG = """\
One --prompt streams its continuation to stdout. Several are printed one after another. With
--output, or with --prompts, each becomes one JSON row (docs/records.md); an interrupted run with
--output goes on where it stopped when the same command is given again. Prompt number i samples
with seed S + i, whatever else runs beside it. With --system the prompts are user messages of a
chat; without it they are continued as they are. Exit code 1 means that a prompt failed.
"""


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("generate", "Continue prompts with a Gemma 4 model.")
    parser.epilog = EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be repeated; - reads stdin"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSONL with rows {"id", "prompt" | "prompt_token_ids"}; - reads stdin',
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write a record file; - writes it to stdout"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message; turns on the chat format")
    options.add_model_flags(parser)
    options.add_sampling_flags(parser, DEFAULT_MAX_TOKENS)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an EOS token")
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="record the K most likely tokens (needs --output)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.logprobs is not None and args.output is None and args.prompts is None:
        parser.error("--logprobs needs --output (- for stdout)")
    if args.prompts is not None:
        with PromptFile.open(args.prompts) as prompts:
            return _run_to_records(args, prompts)
    texts = _texts(args.prompt)
    if args.output is not None:
        with PromptFile.from_texts(texts) as prompts:
            return _run_to_records(args, prompts)
    return _run_to_text(args, texts)


def _texts(values: list[str]) -> list[str]:
    if values.count("-") > 1:
        raise ConfigError("--prompt - is given twice; stdin can be read only once")
    return [sys.stdin.read() if value == "-" else value for value in values]


def _run_to_text(args: argparse.Namespace, texts: list[str]) -> int:
    fields = options.sampling_settings(args)
    with options.load_model(args) as llm:
        params = llm.generation_defaults.sampling_params(**fields)
        if len(texts) == 1:
            return _stream(llm, texts[0], params, args.system)
        return _print_all(llm, texts, params, args.system)


def _stream(llm: "LLM", text: str, params: SamplingParams, system: str | None) -> int:
    try:
        if system is None:
            chunks = llm.stream(text, params)
        else:
            chunks = llm.stream_chat(_conversation(text, system), params)
        for index, chunk in enumerate(chunks):
            # A person reads a continuation together with its start; a pipe wants it alone.
            if index == 0 and system is None and sys.stdout.isatty():
                sys.stdout.write(text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except RequestError as error:
        print(f"gemma-jax: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    sys.stdout.write("\n")
    return EXIT_OK


def _print_all(llm: "LLM", texts: list[str], params: SamplingParams, system: str | None) -> int:
    prompts = [Prompt(index, index, {"prompt": text}) for index, text in enumerate(texts)]
    failed = False
    with _progress_bar(len(prompts)) as bar:
        outputs = _generate(llm, prompts, params, system)
        bar.update(len(prompts))
    for text, output in zip(texts, outputs, strict=True):
        if output.error is None:
            print(f"> {text}\n{output.outputs[0].text}\n", flush=True)
        else:
            failed = True
            print(f"gemma-jax: error: prompt {text!r}: {output.error}", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def _run_to_records(args: argparse.Namespace, prompts: PromptFile) -> int:
    from gemma_jax.records import RecordWriter, StdoutWriter, make_header

    fields = options.sampling_settings(args)
    settings = options.model_settings(args) | fields | {"system": args.system}
    to_stdout = args.output in (None, "-")
    with StdoutWriter() if to_stdout else RecordWriter(args.output) as writer:
        writer.check_settings(settings)
        with options.load_model(args) as llm:
            params = llm.generation_defaults.sampling_params(**fields)
            source = {"sha256": prompts.sha256, "rows": prompts.num_prompts}
            header = make_header(settings, sampling=_resolved(params), prompts=source)
            done = writer.start(header, prompts.ids())
            failed = done.failed
            for rows in _groups_of_rows(llm, prompts, params, args.system, done.rows):
                writer.write(rows)
                failed += sum("error" in row for row in rows)
    if failed:
        print(f"gemma-jax: {failed} of {prompts.num_prompts} prompts failed", file=sys.stderr)
    return EXIT_FAILED if failed else EXIT_OK


def _resolved(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling fields that every prompt shares; its seed is in the settings."""
    fields = dataclasses.asdict(params)
    del fields["seed"]
    return fields


def _groups_of_rows(
    llm: "LLM", prompts: PromptFile, params: SamplingParams, system: str | None, start: int
) -> Iterator[list[dict[str, Any]]]:
    size = GROUPS_PER_BATCH * llm.max_num_seqs
    with _progress_bar(prompts.num_prompts, start) as bar:
        for group in itertools.batched(prompts.prompts(start), size):
            yield _rows(llm, group, params, system)
            bar.update(len(group))


def _rows(
    llm: "LLM", group: Sequence[Prompt], params: SamplingParams, system: str | None
) -> list[dict[str, Any]]:
    from gemma_jax.records import error_row, make_row

    usable = [prompt for prompt in group if _error(prompt, system) is None]
    outputs = iter(_generate(llm, usable, params, system))
    rows = []
    for prompt in group:
        error = _error(prompt, system)
        rows.append(
            make_row(prompt.id, next(outputs)) if error is None else error_row(prompt.id, error)
        )
    return rows


def _error(prompt: Prompt, system: str | None) -> str | None:
    if prompt.request is not None and system is not None and "prompt" not in prompt.request:
        return f'id {prompt.id!r}: --system needs a "prompt"; a chat is not made from token ids'
    return prompt.error


def _generate(
    llm: "LLM", prompts: Sequence[Prompt], params: SamplingParams, system: str | None
) -> list[RequestOutput]:
    """Return the output of each prompt, all of which have a request; one may hold an error."""
    if not prompts:
        return []
    seeded = [_seeded(params, prompt.position) for prompt in prompts]
    requests = [prompt.request or {} for prompt in prompts]
    if system is None:
        return llm.generate(requests, seeded, use_tqdm=False)
    conversations = [_conversation(request["prompt"], system) for request in requests]
    return llm.chat(conversations, seeded, use_tqdm=False)


def _seeded(params: SamplingParams, position: int) -> SamplingParams:
    return params.replace(seed=((params.seed or 0) + position) % _SEED_RANGE)


def _conversation(text: str, system: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _progress_bar(total: int, done: int = 0) -> tqdm:
    return tqdm(total=total, initial=done, unit="prompt", file=sys.stderr, dynamic_ncols=True)
