"""What a request returns: one RequestOutput per prompt, one CompletionOutput per sample."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """One candidate token at one position.

    Args:
      logprob: natural log of its probability, before temperature and filters.
      rank: 1 for the most likely token of the vocabulary.
      decoded_token: its text, or None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Token id -> Logprob at one position; the sampled (or prompt) token is always a key.
PositionLogprobs = dict[int, Logprob]
# One a token of a prompt; the first, which nothing precedes, is None.
PromptLogprobs = list[PositionLogprobs | None]


@dataclass(frozen=True)
class RequestMetrics:
    """When a request moved on, in seconds of one monotonic clock; None before it happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end of the request."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Args:
      index: which of the request's `n` samples this is.
      text: the generated text without the prompt; "" without a tokenizer.
      token_ids: the generated ids, an ending EOS or stop id included.
      cumulative_logprob: sum of the sampled tokens' logprobs, or None when not asked for.
      logprobs: one mapping per generated token, or None when not asked for.
      finish_reason: "stop", "length", "abort" or "error"; None while it runs.
      stop_reason: the stop string or stop token id that hit; None for EOS and other endings.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The result of one prompt.

    Args:
      request_id: unique within the engine.
      prompt: the prompt's text, or None when token ids were given.
      prompt_token_ids: the ids the model read, BOS included.
      prompt_logprobs: one mapping per prompt token, the first None; None when not asked for.
      outputs: the completions, in order of their index.
      finished: whether all of them have ended.
      metrics: when the request moved on, where the engine measured it.
      num_cached_tokens: prompt tokens whose KV came from a cache instead of being computed.
      error: why the request failed, or None; a failed request has finished and has no outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class StreamChunk:
    """What one device call added to a streamed completion.

    Attributes:
      text: new text, never half a character and never the beginning of a stop string.
      token_ids: the new ids.
      logprobs: one mapping a new id, as in `CompletionOutput`; `None` when not asked for.
      finish_reason: set on the last chunk only.
      stop_reason: as in `CompletionOutput`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
