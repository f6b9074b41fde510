"""What goes into the engine and what comes out of it; plain data that crosses processes."""

from dataclasses import dataclass

from gemma_jax.outputs import FinishReason, PositionLogprobs, PromptLogprobs
from gemma_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """A checked request: everything that the engine needs, and nothing to look up.

    Attributes:
      request_id: unique among the requests that are waiting or running.
      prompt_token_ids: what the model reads, BOS included.
      params: the sampling parameters; `n` completions are generated.
      max_tokens: most tokens of a completion; already cut to what the context leaves. 0 generates
        nothing: each completion ends with `prompt_logprobs` where they are asked for.
      eos_ids: ids that end a completion without being its stop reason; () with `ignore_eos`.
      seed: of the random draws; completion `index` of a request derives its own key from it.
      grammar: grammar of llguidance as JSON text, which the output has to follow.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    eos_ids: tuple[int, ...]
    seed: int
    grammar: str | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion."""
        return (*self.eos_ids, *self.params.stop_token_ids)


@dataclass(frozen=True)
class CompletionDelta:
    """What one device call added to one completion of a request.

    Attributes:
      request_id: of its `EngineRequest`.
      index: which of the request's `n` completions.
      text: new text, never half a character and never the beginning of a stop string.
      token_ids: the new ids.
      logprobs: one mapping a new id, as in `CompletionOutput`; `None` when not asked for.
      finish_reason: set on the completion's last delta only.
      stop_reason: the stop string or stop id that hit; `None` for EOS and other endings.
      num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
      prompt_logprobs: of the prompt, on the first delta of a completion that asks for them.
      error: why, when `finish_reason` is "error".
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """State of the engine, and counters since it started.

    Attributes:
      waiting, running: completions that wait for a place, and that have one.
      kv_usage: share of the cache's pages in use, in [0, 1].
      prompt_tokens, generated_tokens: computed or taken from the prefix cache, and sampled.
      prefix_query_tokens, prefix_hit_tokens: prompt tokens looked up in the prefix cache, found.
      preemptions: completions that lost their pages and were computed again.
      device_calls: executions of a program.
      idle_seconds: time that the device waited for the host while there was work.
    """

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    device_calls: int = 0
    idle_seconds: float = 0.0
