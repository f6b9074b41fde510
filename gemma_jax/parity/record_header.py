"""What the header of a record may say: the type and range of each field that a comparison uses."""

from collections.abc import Callable
from typing import Any, NamedTuple

from gemma_jax.errors import RecordError

DTYPES = ("bfloat16", "float32")
"""Compute dtypes that can be compared."""


class _Kind(NamedTuple):
    """What a value must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def is_count(value: Any) -> bool:
    """Whether this is an integer of at least 1."""
    return type(value) is int and value >= 1


_TEXT = _Kind("a string", lambda x: isinstance(x, str))
_OBJECT = _Kind("an object", lambda x: isinstance(x, dict))
_NAMED = _Kind("an object or a string", lambda x: isinstance(x, dict | str))
_COUNT = _Kind("an integer of at least 1", is_count)
_DTYPE = _Kind(" or ".join(DTYPES), lambda x: x in DTYPES)
_ASKED_DTYPE = _Kind("auto, bfloat16 or float32", lambda x: x in ("auto", *DTYPES))

_KINDS = {
    "format": _TEXT,
    "engine": _TEXT,
    "versions": _OBJECT,
    "device": _NAMED,
    "dtype": _DTYPE,
    "rounding": _TEXT,
    "max_num_seqs": _COUNT,
    "settings": _OBJECT,
    "settings.dtype": _ASKED_DTYPE,
    "settings.max_num_seqs": _COUNT,
    "model": _NAMED,
    "model.name": _TEXT,
    "model.vocab_size": _COUNT,
    "model.config_sha256": _TEXT,
    "model.weights_sha256": _TEXT,
}


def model_of(header: dict[str, Any]) -> dict[str, Any]:
    """The field `model` as an object; a string is its name."""
    model = header.get("model") or {}
    return {"name": model} if isinstance(model, str) else model


def check_header(header: dict[str, Any], where: str) -> None:
    """Refuses a header with a field of another type; fields that are missing or null may be.

    Args:
      where: words for messages.

    Raises:
      RecordError: the field, its value and what it must be.
    """
    for name, kind in _KINDS.items():
        outer, _, inner = name.rpartition(".")
        fields = header.get(outer) if outer else header
        value = fields.get(inner) if isinstance(fields, dict) else None
        if value is not None and not kind.holds(value):
            raise RecordError(
                f"{where}: header {name}={value!r:.60}: expected {kind.words}; correct it or"
                " leave it out"
            )
