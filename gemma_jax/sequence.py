"""One running completion: its prompt, its tokens so far, its text, and why it ended."""

from dataclasses import dataclass, field

import numpy as np

from gemma_jax.outputs import FinishReason, Logprob, PositionLogprobs
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


@dataclass
class TokenLogprobs:
    """Raw log-probabilities at one position: the sampled token's, its rank, the best k."""

    sampled: float
    rank: int
    top_ids: list[int]
    top: list[float]


@dataclass
class Sequence:
    """State of one completion of one request.

    Attributes:
      prompt_token_ids: what the model reads, BOS included.
      params: the request's sampling parameters.
      index: which of the request's `n` completions.
      key: uint32 [2], the random key of this completion.
      max_tokens: the request's limit, cut to the context.
      eos_ids: ids that end the completion without being reported as its stop reason.
      tokenizer: for text and stop strings; `None` gives ids only.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    index: int
    key: np.ndarray
    max_tokens: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self):
        wants_text = self.tokenizer is not None and self.params.detokenize
        self._detokenizer = (
            IncrementalDetokenizer(self.tokenizer, self.params.skip_special_tokens)
            if wants_text and self.tokenizer is not None
            else None
        )
        self._stop = StopChecker(self.params.stop, self.params.include_stop_str_in_output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends the completion on the device."""
        return (*self.eos_ids, *self.params.stop_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.token_ids)

    def extend(self, tokens: list[int], logprobs: list[TokenLogprobs] | None = None) -> str:
        """Takes the tokens of one device call up to its end; the text that became final.

        `logprobs` has an entry a token.
        """
        if self.params.stop:  # which may end it at any of them
            values = logprobs or [None] * len(tokens)
            return "".join(self.append(t, x) for t, x in zip(tokens, values, strict=False))
        if self.finished or not tokens:
            return ""
        tokens = tokens[: self.remaining]
        stop_ids = self.stop_ids
        end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
        self.token_ids += tokens[:end]
        if logprobs is not None and self.params.logprobs is not None:
            self.logprobs += logprobs[:end]
        text = self._detokenizer.push(tokens[:end]) if self._detokenizer and end else ""
        self.text += text
        return text + self.append(tokens[end], None if logprobs is None else logprobs[end])

    def abort(self) -> None:
        """Ends the completion from outside."""
        if not self.finished:
            self.finish_reason = "abort"

    def append(self, token: int, logprobs: TokenLogprobs | None) -> str:
        """Takes the next token; the text that became final with it. A finished one takes none."""
        if self.finished:
            return ""
        self.token_ids.append(token)
        if logprobs is not None and self.params.logprobs is not None:
            self.logprobs.append(logprobs)
        stops = token in self.stop_ids
        shown = not stops or self.params.include_stop_str_in_output
        delta = self._new_text(token) if shown else ""
        if self.finished:
            pass
        elif stops:
            stop_reason = None if token in self.eos_ids else token
            delta += self._finish("stop", stop_reason)
        elif self.remaining == 0:
            delta += self._finish("length", None)
        self.text += delta
        return delta

    def _new_text(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push([token])
        if not self.params.stop or len(self.token_ids) < self.params.min_tokens:
            return text
        shown, hit = self._stop.push(text)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
        return shown

    def _finish(self, reason: FinishReason, stop_reason: int | None) -> str:
        """Ends the completion; the text held back for a character or a stop string."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.finish()
        if not self.params.stop:
            return text
        shown, hit = self._stop.push(text)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit
            return shown
        return shown + self._stop.finish()

    def output_logprobs(self, start: int = 0) -> list[PositionLogprobs] | None:
        """One mapping a token from number `start` on; `None` when the request asked for none."""
        if self.params.logprobs is None:
            return None
        k = self.params.logprobs
        pairs = zip(self.token_ids[start:], self.logprobs[start:], strict=True)
        return [position_logprobs(token, x, k, self.tokenizer) for token, x in pairs]


def position_logprobs(
    token: int, values: TokenLogprobs, k: int, tokenizer: Tokenizer | None
) -> PositionLogprobs:
    """id → Logprob of the best k ids, best first, and of `token` itself."""

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        text = None if tokenizer is None else tokenizer.id_to_token(token_id)
        return Logprob(logprob, rank, text)

    best = zip(values.top_ids[:k], values.top[:k], strict=True)
    out = {i: entry(i, logprob, rank) for rank, (i, logprob) in enumerate(best, start=1)}
    if token not in out:
        out[token] = entry(token, values.sampled, values.rank)
    return out
