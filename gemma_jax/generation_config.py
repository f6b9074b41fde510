"""What a checkpoint says about generation: its EOS ids, suppressed ids and sampling defaults."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gemma_jax.errors import ConfigError
from gemma_jax.jsonfile import read_json_object
from gemma_jax.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"

# Fields that carry over to SamplingParams under their own name.
_SHARED_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """The generation settings of one checkpoint; None where it says nothing.

    Args:
      eos_token_ids: ids that end a completion.
      bos_token_id, pad_token_id: as in the file, else from config.json.
      suppress_tokens: ids that are never generated, greedy or sampled.
      do_sample: False means greedy; an absent key is False, as in transformers.
      temperature, top_k, top_p, min_p, repetition_penalty: defaults for `SamplingParams`.
      max_new_tokens: default of `SamplingParams.max_tokens`.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_dir(cls, path: str | Path) -> Self:
        """Return the defaults of the checkpoint in folder `path`.

        `generation_config.json` comes first; special ids that it lacks come from `config.json`,
        top level and then `text_config`. A folder with neither gives the field defaults.

        Raises:
          ConfigError: a file is not JSON, or a value has the wrong type or range; the message
            names file, field and value.
        """
        generation = _Source(Path(path) / FILE_NAME)
        config = _Source(Path(path) / "config.json")
        return cls(
            eos_token_ids=_special(generation, config, "eos_token_id", _token_ids) or (),
            bos_token_id=_special(generation, config, "bos_token_id", _token_id),
            pad_token_id=_special(generation, config, "pad_token_id", _token_id),
            suppress_tokens=generation.get("suppress_tokens", _token_ids) or (),
            do_sample=generation.get("do_sample", _flag) or False,
            temperature=generation.get("temperature", _number(0.0)),
            top_k=generation.get("top_k", _count_from(-1)),
            top_p=generation.get("top_p", _number(0.0, 1.0, low_open=True)),
            min_p=generation.get("min_p", _number(0.0, 1.0)),
            repetition_penalty=generation.get("repetition_penalty", _number(0.0, low_open=True)),
            max_new_tokens=generation.get("max_new_tokens", _count_from(1)),
        )

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """Return SamplingParams from these defaults; an override that is None counts as unset.

        Without `do_sample` the temperature is 0, unless it is overridden.

        Raises:
          RequestError: an override is unknown or invalid.
        """
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in _SHARED_FIELDS if getattr(self, name) is not None
        }
        if not self.do_sample:
            fields["temperature"] = 0.0
        if self.max_new_tokens is not None:
            fields["max_tokens"] = self.max_new_tokens
        fields.update({name: value for name, value in overrides.items() if value is not None})
        return SamplingParams.from_dict(fields)


class _Invalid(Exception):
    """A value is not what its field allows; the text says what is."""


class _Source:
    """One JSON file whose fields are checked on reading; null counts as absent."""

    def __init__(self, path: Path):
        self.path = path
        self.fields = read_json_object(path)

    def get[T](self, name: str, check: Callable[[Any], T], section: str = "") -> T | None:
        fields = self.fields.get(section) if section else self.fields
        value = fields.get(name) if isinstance(fields, dict) else None
        if value is None:
            return None
        try:
            return check(value)
        except _Invalid as allowed:
            where = f"{section}.{name}" if section else name
            raise ConfigError(f"{self.path}: {where} is {value!r}; expected {allowed}") from None


def _special[T](
    generation: _Source, config: _Source, name: str, check: Callable[[Any], T]
) -> T | None:
    for source, section in ((generation, ""), (config, ""), (config, "text_config")):
        value = source.get(name, check, section)
        if value is not None:
            return value
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(value: Any) -> int:
    if not _is_int(value) or value < 0:
        raise _Invalid("a token id (an integer >= 0)")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(_is_int(token_id) and token_id >= 0 for token_id in ids):
        raise _Invalid("a token id or a list of token ids (integers >= 0)")
    return tuple(ids)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Invalid("true or false")
    return value


def _count_from(low: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not _is_int(value) or value < low:
            raise _Invalid(f"an integer >= {low}")
        return value

    return check


def _number(
    low: float, high: float = math.inf, *, low_open: bool = False
) -> Callable[[Any], float]:
    allowed = f"a finite number {'>' if low_open else '>='} {low:g}"
    if math.isfinite(high):
        allowed += f" and <= {high:g}"

    def check(value: Any) -> float:
        if not (_is_int(value) or isinstance(value, float)) or not math.isfinite(value):
            raise _Invalid(allowed)
        if value < low or value > high or (low_open and value == low):
            raise _Invalid(allowed)
        return float(value)

    return check
