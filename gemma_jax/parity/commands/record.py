"""`gemma-jax parity record`."""

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

from gemma_jax.cli import EXIT_OK, options
from gemma_jax.cli.prompts import PromptFile
from gemma_jax.errors import ConfigError, RecordError
from gemma_jax.model_source import resolve_model
from gemma_jax.parity.engines import WORKERS, Job, record
from gemma_jax.parity.record_file import write_record
from gemma_jax.parity.records import Stream, read_record
from gemma_jax.sampling_params import MAX_LOGPROBS
from gemma_jax.tokenizer import Tokenizer, require_tokenizer

DEFAULT_BATCH = 64
API_KEY_VARIABLE = "OPENAI_API_KEY"


def run(args: argparse.Namespace) -> int:
    """Run the engine and write the record."""
    job = _job(args)
    source = os.path.basename(args.teacher_force) if args.teacher_force else None
    tokens = write_record(args.output, job, record(job), source)
    print(f"{args.output}: {len(job.requests)} rows, {tokens} tokens", file=sys.stderr)
    return EXIT_OK


def _job(args: argparse.Namespace) -> Job:
    if not 2 <= args.logprobs <= MAX_LOGPROBS:
        raise ConfigError(f"--logprobs {args.logprobs}: expected 2 to {MAX_LOGPROBS}")
    if args.teacher_force:
        requests = read_record(args.teacher_force, needs_logprobs=False).streams
    else:
        requests = _prompts(args)
    return Job(
        engine=args.engine,
        model=args.model,
        requests=requests,
        teacher_force=bool(args.teacher_force),
        max_tokens=args.max_tokens,
        logprobs=args.logprobs,
        dtype=args.dtype,
        batch=args.max_num_seqs or DEFAULT_BATCH,
        python=args.python or sys.executable,
        options=_options(args),
        hidden=_hidden(args, requests),
    )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What only this engine takes; a flag of another engine is refused."""
    own = options.model_settings(args)
    own = {k: v for k, v in own.items() if k not in ("model", "dtype", "max_num_seqs")}
    if args.engine == "gemma-jax":
        return own
    defaults = {"rounding": "hf", "fast_prefill": True, "kernels": "auto", "batch_invariant": False}
    for name, value in own.items():
        if value != defaults.get(name):
            raise ConfigError(f"--{name.replace('_', '-')}: only for --engine gemma-jax")
    if args.engine == "transformers":
        return {"threads": args.threads}
    if args.engine == "vllm":
        return {"vllm": _vllm_options(args)}
    if not args.url:
        raise ConfigError("--engine openai-url: give --url, such as http://127.0.0.1:8000/v1")
    return {
        "url": args.url,
        "served_model": args.served_model,
        "api_key": os.environ.get(API_KEY_VARIABLE),
        "extra_body": _json_object("--extra-body", args.extra_body),
    }


def _vllm_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "attention": args.vllm_attention,
        "enforce_eager": not args.vllm_compiled,
        "kv_sharing_fast_prefill": args.vllm_fast_prefill,
        "max_num_batched_tokens": args.vllm_max_num_batched_tokens,
        "gpu_memory_utilization": args.vllm_memory,
    } | _json_object("--vllm-args", args.vllm_args)


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text}: expected a JSON object")
    return value


def _hidden(args: argparse.Namespace, requests: tuple[Stream, ...]) -> dict[str, Any] | None:
    if not args.hidden:
        return None
    if args.engine not in WORKERS or args.engine == "vllm":
        raise ConfigError("--hidden: only for --engine transformers")
    if not args.teacher_force:
        raise ConfigError("--hidden: give the tokens to run with --teacher-force REF.jsonl")
    by_name = {str(stream.id): stream for stream in requests}
    name = args.hidden_row if args.hidden_row is not None else str(requests[0].id)
    if name not in by_name:
        raise ConfigError(f"--hidden-row {name}: no such id in {args.teacher_force}")
    ids = by_name[name].sequence[: args.hidden_tokens]
    positions = args.hidden_positions or sorted({0, len(ids) // 2, len(ids) - 2, len(ids) - 1})
    if not all(0 <= p < len(ids) for p in positions):
        raise ConfigError(f"--hidden-positions: expected 0 to {len(ids) - 1}")
    return {
        "token_ids": ids,
        "positions": sorted(set(positions)),
        "columns": args.hidden_columns,
        "output": os.path.abspath(args.hidden),
    }


def _prompts(args: argparse.Namespace) -> tuple[Stream, ...]:
    path = resolve_model(args.model)
    tokenizer = Tokenizer.from_dir(path if path.is_dir() else path.parent)
    streams = []
    with PromptFile.open(args.prompts) as prompts:
        for prompt in prompts.prompts():
            if prompt.request is None or prompt.id is None:
                raise RecordError(f"{args.prompts}: {prompt.error}")
            ids = prompt.request.get("prompt_token_ids")
            if ids is None:
                ids = require_tokenizer(tokenizer, "a text prompt").encode(prompt.request["prompt"])
            if not ids:
                raise RecordError(f"{args.prompts}: prompt {prompt.id!r} has no tokens")
            tokens = np.zeros(0, np.int32)
            source = f"{args.prompts}, prompt"
            streams.append(Stream(prompt.id, np.array(ids, np.int32), tokens, source=source))
    return tuple(streams)
