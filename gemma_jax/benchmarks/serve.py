"""`bench serve`: latency and throughput of a running OpenAI-compatible server, at given rates."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from gemma_jax.benchmarks.http_client import ENDPOINTS, Answer, arrival_offsets, send, send_all
from gemma_jax.benchmarks.rows import Report, Row, Source, command_line
from gemma_jax.benchmarks.serve_metrics import (
    detail_fields,
    latencies_ms,
    rate_text,
    result_fields,
    table,
)
from gemma_jax.benchmarks.serve_plot import check_plot, plot_sweep
from gemma_jax.benchmarks.timing import percentile
from gemma_jax.errors import ConfigError

# Random ids come from here to --vocab-size: special tokens and single bytes are below.
FIRST_RANDOM_ID = 400
_WORDS = "time year people way day man thing woman life child world school state family".split()


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measures the server at every `--request-rate`; the exit code is 1 if a request failed.

    Raises:
      ConfigError: the server does not answer, or a result cannot be written.
    """
    check_plot(args.plot)
    if args.vocab_size <= FIRST_RANDOM_ID:
        raise ConfigError(f"--vocab-size {args.vocab_size}: expected more than {FIRST_RANDOM_ID}")
    return asyncio.run(_run(args, arguments))


async def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    report = Report(args.output_json, Source.find(args.commit), server_device(args.base_url))
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    results = []
    async with httpx.AsyncClient(
        base_url=args.base_url,
        headers=headers,
        limits=limits,
        timeout=args.timeout,
        trust_env=False,  # a proxy would be measured too
    ) as client:
        model = args.model or await _served_model(client)
        await _warm_up(client, args, model)
        for rate in args.request_rate:
            answers, duration = await _measure(client, args, model, rate)
            result = _result(args, model, rate, answers, duration)
            print(table(result), file=sys.stderr)
            if args.save_result:
                _save(args, result, answers)
            report.add(_row(args, arguments, result, answers))
            results.append(result)
    if args.plot is not None:
        plot_sweep(results, args.plot)
        _write_json(args.plot.with_suffix(".json"), results)
    return report.finish()


async def _served_model(client: httpx.AsyncClient) -> str:
    """The first model that the server lists."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--base-url {client.base_url} lists no models ({type(error).__name__}: {error});"
            " start a server there, or give --model"
        ) from error


async def _warm_up(client: httpx.AsyncClient, args: argparse.Namespace, model: str) -> None:
    for body in _bodies(args, model, args.num_warmups, args.seed + 1):
        answer = await send(client, ENDPOINTS[args.backend], body)
        if answer.error is not None:
            raise ConfigError(f"--base-url {args.base_url}: a first request failed: {answer.error}")


async def _measure(
    client: httpx.AsyncClient, args: argparse.Namespace, model: str, rate: float
) -> tuple[list[Answer], float]:
    """The answers at one rate, and the seconds that all of them took."""
    bodies = _bodies(args, model, args.num_prompts, args.seed)
    offsets = arrival_offsets(args.num_prompts, rate, args.burstiness, args.seed)
    start = time.perf_counter()
    answers = await send_all(client, ENDPOINTS[args.backend], bodies, offsets, args.max_concurrency)
    return answers, time.perf_counter() - start


def _bodies(args: argparse.Namespace, model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Random prompts: token ids for completions, words for chats."""
    rng = np.random.default_rng(seed)
    shared = {
        "model": model,
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        shared["ignore_eos"] = True
    if args.backend == "openai":
        ids = rng.integers(FIRST_RANDOM_ID, args.vocab_size, (count, args.input_len))
        return [shared | {"prompt": row} for row in ids.tolist()]
    texts = [" ".join(rng.choice(_WORDS, args.input_len)) for _ in range(count)]
    return [shared | {"messages": [{"role": "user", "content": text}]} for text in texts]


def _result(
    args: argparse.Namespace, model: str, rate: float, answers: list[Answer], duration: float
) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if np.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **result_fields(answers, duration),
    }


def _row(
    args: argparse.Namespace,
    arguments: Sequence[str],
    result: dict[str, Any],
    answers: list[Answer],
) -> Row:
    """The result as a row; its samples are the latencies of whole requests."""
    concurrency = f" concurrency {args.max_concurrency}" if args.max_concurrency else ""
    shape = f"{args.num_prompts}x{args.input_len}+{args.output_len}"
    row = Row("serve", f"{shape} rate {rate_text(result)}{concurrency}")
    row.command = command_line("serve", arguments)
    names = ("backend", "base_url", "temperature", "ignore_eos", "seed", "num_warmups")
    row.config = {"model": result["model_id"]} | {name: getattr(args, name) for name in names}
    row.warmup = args.num_warmups
    samples = latencies_ms(answers)["e2el"]
    row.samples_ms = [round(sample, 3) for sample in samples]
    if samples:
        row.median_ms, row.p10_ms, row.p90_ms = (percentile(samples, p) for p in (50, 10, 90))
    row.derived = {"tok_per_s": result["output_throughput"]}
    row.result = result
    if result["failed"]:
        row.status = "error"
        first = next(answer.error for answer in answers if answer.error is not None)
        row.note = f"{result['failed']} requests failed, the first: {first}"[:500]
        print(f"gemma-jax: {row.note}", file=sys.stderr)
    return row


def _save(args: argparse.Namespace, result: dict[str, Any], answers: list[Answer]) -> None:
    """Writes one result under the file name that the vLLM tool gives it."""
    if args.save_detailed:
        result = result | detail_fields(answers)
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = Path(result["model_id"]).name
    name = f"{args.backend}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
    _write_json(args.result_dir / name, result)


def _write_json(path: Path, value: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"result {path} cannot be written: {error.strerror}") from error


def server_device(base_url: str) -> dict[str, Any]:
    """The GPUs of this host, where the server is on it; JAX, which would take them, stays out."""
    unknown = {"kind": "unknown", "count": None, "memory_bytes": None}
    if httpx.URL(base_url).host not in ("127.0.0.1", "localhost", "::1"):
        return unknown
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"kind": "cpu", "count": 1, "memory_bytes": None}
    gpus = [line.rsplit(",", 1) for line in done.stdout.strip().splitlines()]
    if not gpus:
        return unknown
    mebibytes = gpus[0][1].strip()
    memory = int(mebibytes) * 2**20 if mebibytes.isdigit() else None
    return {"kind": gpus[0][0].strip(), "count": len(gpus), "memory_bytes": memory}
