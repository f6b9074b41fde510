"""SamplingParams: what one request asks of the sampler, checked when it is built."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Self

from gemma_jax.errors import RequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0

# Names that users of other libraries try, with the field or value that does the same here.
_HINTS = {
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "num_return_sequences": "use n",
    "do_sample": "use temperature=0 for greedy decoding",
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one request; frozen, validated, with vLLM's names and defaults.

    Args:
      n: completions per prompt; more than one needs temperature > 0.
      temperature: divides the logits; 0 is greedy.
      top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      min_p: drop tokens less likely than min_p times the likeliest, in [0, 1]; 0 is off.
      seed: makes this request reproducible whatever else runs in its batch; None draws one.
      stop: a string or several that end the completion; stored as a tuple.
      stop_token_ids: token ids that end the completion, besides EOS; stored as a tuple.
      ignore_eos: go on after an EOS token.
      max_tokens: most tokens to generate, at least 1; None is the rest of the context.
      min_tokens: no EOS, stop id or stop string ends the completion before this many tokens.
      logprobs: report this many most likely tokens per position, 0 to 20; None is off.
      prompt_logprobs: the same for the prompt's tokens.
      presence_penalty: subtracted from logits of tokens already generated, in [-2, 2].
      frequency_penalty: the same, times the number of occurrences, in [-2, 2].
      repetition_penalty: divides positive and multiplies negative logits of seen tokens; 1 is off.
      logit_bias: token id -> value in [-100, 100] added to its logit.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: keep the stop string, or the text of the stop id, that hit.
      detokenize: produce text; False returns token ids only.

    Raises:
      RequestError: a value has the wrong type or range, or two contradict each other.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_lengths()
        self._check_outputs()
        self._check_penalties()
        for name in (
            "ignore_eos",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "detokenize",
        ):
            _check_bool(name, getattr(self, name))
        self._check_combinations()

    def _check_sampling(self) -> None:
        self._set("n", _integer("n", self.n, low=1))
        self._set("temperature", _real("temperature", self.temperature, low=0.0))
        self._set("top_p", _real("top_p", self.top_p, low=0.0, high=1.0, low_open=True))
        self._set("top_k", _integer("top_k", self.top_k, low=-1, note="0 or -1 turns it off"))
        self._set("min_p", _real("min_p", self.min_p, low=0.0, high=1.0))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, low=-(2**63), high=2**63 - 1))

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, low=1))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, low=0))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))

    def _check_outputs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _integer(name, value, low=0, high=MAX_LOGPROBS))

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _real(name, getattr(self, name), low=-MAX_PENALTY, high=MAX_PENALTY))
        self._set(
            "repetition_penalty",
            _real("repetition_penalty", self.repetition_penalty, low=0.0, low_open=True),
        )
        self._set("logit_bias", _logit_bias(self.logit_bias))

    def _check_combinations(self) -> None:
        if self.n > 1 and self.greedy:
            raise RequestError(
                f"n is {self.n} with temperature 0: greedy completions would all be the same; "
                "set temperature > 0 or n=1"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are looked for in the text, so they need detokenize=True; "
                "use stop_token_ids with detokenize=False"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether every step takes the most likely token."""
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> Self:
        """Return a copy with these fields changed, validated again."""
        _check_names(changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return params from a mapping such as a request body's sampling fields.

        Raises:
          RequestError: an unknown field (the message lists the known ones) or a bad value.
        """
        _check_names(fields)
        return cls(**fields)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise RequestError when a stop token id or logit_bias key is outside the vocabulary."""
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}; allowed are 0 to {vocab_size - 1}"
                )
        for token_id in self.logit_bias or ():
            if token_id >= vocab_size:
                raise RequestError(
                    f"logit_bias has the key {token_id}; allowed are 0 to {vocab_size - 1}"
                )


def _check_names(fields: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = _HINTS.get(name) or (f"did you mean {close[0]}?" if close else "")
        raise RequestError(
            f"unknown sampling field {name!r}{'; ' + hint if hint else ''} "
            f"(allowed: {', '.join(known)})"
        )


def _describe_range(low: float | None, high: float | None, low_open: bool = False) -> str:
    parts = []
    if low is not None:
        parts.append(f"{'>' if low_open else '>='} {low:g}" if abs(low) < 1e6 else f">= {low}")
    if high is not None:
        parts.append(f"<= {high:g}" if abs(high) < 1e6 else f"<= {high}")
    return " and ".join(parts)


def _integer(
    name: str, value: Any, *, low: int | None = None, high: int | None = None, note: str = ""
) -> int:
    allowed = f"an integer {_describe_range(low, high)}" + (f" ({note})" if note else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); expected {allowed}")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise RequestError(f"{name} is {number}; expected {allowed}")
    return number


def _real(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
) -> float:
    allowed = f"a finite number {_describe_range(low, high, low_open)}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); expected {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    too_low = low is not None and (number <= low if low_open else number < low)
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        raise RequestError(f"{name} is {number}; expected {allowed}")
    return number


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r} ({type(value).__name__}); expected True or False")


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence):
        raise RequestError(
            f"stop is {value!r} ({type(value).__name__}); expected a string or a list of strings"
        )
    for index, string in enumerate(strings):
        if not isinstance(string, str):
            raise RequestError(f"stop[{index}] is {string!r}; expected a string")
        if not string:
            raise RequestError(f"stop[{index}] is empty; it would match everywhere, leave it out")
    return tuple(strings)


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(
            f"stop_token_ids is {value!r} ({type(value).__name__}); expected a list of token ids"
        )
    return tuple(_integer(f"stop_token_ids[{i}]", item, low=0) for i, item in enumerate(value))


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias is {value!r} ({type(value).__name__}); "
            "expected a mapping from token id to bias"
        )
    bias = {}
    for key, amount in value.items():
        # JSON object keys are strings, so the decimal spelling of an id is accepted.
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _integer("logit_bias key", int(key) if is_digits else key, low=0)
        bias[token_id] = _real(
            f"logit_bias[{token_id}]", amount, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS
        )
    return bias or None
