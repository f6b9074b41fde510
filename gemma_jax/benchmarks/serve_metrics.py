"""The numbers of a serving benchmark, with the names and units of the vLLM tool."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemma_jax.benchmarks.http_client import Answer

LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, the first left out",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def latencies_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return the samples of each latency in milliseconds, of the requests that succeeded.

    ttft, e2el: one a request. tpot: (e2el - ttft) / (tokens - 1), one a request of at least two
    tokens. itl: one for every event after the first; an event may bring several tokens.
    """
    good = [answer for answer in answers if answer.error is None]
    return {
        "ttft": [1e3 * a.ttft for a in good],
        "tpot": [
            1e3 * (a.latency - a.ttft) / (a.output_tokens - 1) for a in good if a.output_tokens > 1
        ],
        "itl": [1e3 * gap for a in good for gap in a.itl],
        "e2el": [1e3 * a.latency for a in good],
    }


def result_fields(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Return counts, rates a second and latency statistics of a run that took `duration` seconds.

    A statistic without samples is 0, as in the vLLM tool.
    """
    good = [answer for answer in answers if answer.error is None]
    inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    fields: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    for name, samples in latencies_ms(answers).items():
        values = np.asarray(samples or [0.0])
        fields[f"mean_{name}_ms"] = float(values.mean())
        fields[f"median_{name}_ms"] = float(np.median(values))
        fields[f"std_{name}_ms"] = float(values.std())
        fields[f"p99_{name}_ms"] = float(np.percentile(values, 99))
    return fields


def detail_fields(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what each request saw, times in seconds."""
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens for a in answers],
        "ttfts": [a.ttft for a in answers],
        "itls": [a.itl for a in answers],
        "errors": [a.error or "" for a in answers],
    }


def rate_text(result: Mapping[str, Any]) -> str:
    """Return the request rate of a result in few characters."""
    rate = result["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:g}"


def table(result: Mapping[str, Any]) -> str:
    """Return a result as lines to read."""
    lines = [
        f"request rate {rate_text(result)}, concurrency {result['max_concurrency'] or 'any'}:"
        f" {result['completed']} completed, {result['failed']} failed"
        f" in {result['duration']:.2f} s",
        f"  {result['request_throughput']:.2f} requests/s,"
        f" {result['output_throughput']:.0f} output tok/s,"
        f" {result['total_token_throughput']:.0f} total tok/s",
        f"  {'ms':<42} {'mean':>9} {'median':>9} {'std':>9} {'p99':>9}",
    ]
    for name, text in LATENCIES.items():
        numbers = (result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p99"))
        lines.append(f"  {text:<42} " + " ".join(f"{number:9.2f}" for number in numbers))
    return "\n".join(lines)
