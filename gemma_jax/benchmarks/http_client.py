"""Streams one completion after another from an OpenAI-compatible server, and times every event."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backend, as the vLLM tool names it, to the path of its requests."""


@dataclass
class Answer:
    """How one request went; times in seconds.

    Attributes:
      start: when it was sent, on `time.perf_counter`.
      ttft: from there to the first event with a token.
      itl: between each event with tokens and the one before.
      latency: from the start to the last event with a token.
      prompt_tokens, output_tokens: as the server counted them.
      error: why it failed, or None.
    """

    start: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def saw_tokens(self, now: float) -> None:
        """Take the time of an event that brought tokens."""
        since_start = now - self.start
        if self.latency == 0.0:
            self.ttft = since_start
        else:
            self.itl.append(since_start - self.latency)
        self.latency = since_start


async def send_all(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    offsets: Sequence[float],
    max_concurrency: int | None,
) -> list[Answer]:
    """Return the answer to each body, sent `offsets` seconds after the start.

    A body waits longer while `max_concurrency` others are under way; waiting is not counted.
    """
    room = asyncio.Semaphore(max_concurrency or len(bodies))
    start = time.perf_counter()

    async def send_at(offset: float, body: Mapping[str, Any]) -> Answer:
        await asyncio.sleep(start + offset - time.perf_counter())
        async with room:
            return await send(client, path, body)

    return await asyncio.gather(*map(send_at, offsets, bodies))


async def send(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Return the answer to one body, which asks for a stream with usage."""
    answer = Answer(time.perf_counter())
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"HTTP {response.status_code}: {text[:500]}"
                return answer
            async for event in _events(response):
                _take(answer, event)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}".removesuffix(": ")
    if answer.error is None and answer.output_tokens == 0:
        answer.error = "the stream ended without usage"
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"])[:500]
    if any(_has_tokens(choice) for choice in event.get("choices") or ()):
        answer.saw_tokens(time.perf_counter())
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether an event is more than the role that some servers send ahead of the first token."""
    delta = choice.get("delta")
    return delta is None or any(value for name, value in delta.items() if name != "role")


def arrival_offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each request is sent, in seconds: all at once for an infinite rate.

    Gaps follow a gamma distribution of mean 1 / rate and shape `burstiness`; 1 is a Poisson
    process, less is more bursty.
    """
    if np.isinf(rate):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
