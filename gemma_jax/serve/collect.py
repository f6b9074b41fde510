"""Deltas of a request put together to its `RequestOutput`."""

import time
from dataclasses import dataclass, field

from gemma_jax.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput
from gemma_jax.serve.request import CompletionDelta, EngineRequest


@dataclass
class Collector:
    """What one request has produced so far.

    Attributes:
      request: whose.
      prompt: its text, if it was given as text.
      arrival_time, first_token_time, finished_time: seconds of `time.monotonic`.
    """

    request: EngineRequest
    prompt: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self):
        wanted = self.request.params.logprobs is not None
        self._outputs = [
            CompletionOutput(i, "", [], logprobs=[] if wanted else None)
            for i in range(self.request.params.n)
        ]
        self._prompt_logprobs: PromptLogprobs | None = None
        self._error: str | None = None
        self._num_cached = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self._outputs)

    def add(self, delta: CompletionDelta) -> None:
        """Takes the next delta of the request."""
        output = self._outputs[delta.index]
        if self.first_token_time is None and delta.token_ids:
            self.first_token_time = time.monotonic()
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        output.text += delta.text
        output.token_ids += delta.token_ids
        if output.logprobs is not None and delta.logprobs is not None:
            output.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            if output.logprobs:
                pairs = zip(output.token_ids, output.logprobs, strict=True)
                output.cumulative_logprob = sum(x[token].logprob for token, x in pairs)
        self._error = self._error or delta.error
        self._num_cached = max(self._num_cached, delta.num_cached_tokens)
        if self.finished and self.finished_time is None:
            self.finished_time = time.monotonic()

    def output(self) -> RequestOutput:
        """The request as the caller sees it."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs if self._error is None else None,
            outputs=self._outputs if self._error is None else [],
            finished=self.finished,
            metrics=RequestMetrics(self.arrival_time, self.first_token_time, self.finished_time),
            num_cached_tokens=self._num_cached,
            error=self._error,
        )
