"""Every environment variable that this package reads, in one table; a bad value raises."""

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemma_jax.errors import ConfigError

PREFIX = "GEMMA_JAX_"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Variable[T]:
    """One environment variable.

    Args:
      name: its full name.
      default: what an unset variable means, in words.
      help: what it does, in one line.
      parse: text -> value; None stands for unset. Raises ValueError with what is allowed.
      is_secret: whether reports must not show its value.
    """

    name: str
    default: str
    help: str
    parse: Callable[[str | None], T]
    is_secret: bool = False

    def read(self) -> T:
        """Return the parsed value of this variable now.

        Raises:
          ConfigError: the value does not parse; the message says what is allowed.
        """
        value = os.environ.get(self.name)
        try:
            return self.parse(value)
        except ValueError as allowed:
            raise ConfigError(
                f"environment variable {self.name}={value!r}: expected {allowed}"
            ) from None


def _parse_cache_dir(value: str | None) -> Path | None:
    if value is None:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG base directory specification says that a relative path is to be ignored.
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        return root / "gemma_jax"
    if value.strip().lower() in ("", "off"):
        return None
    return Path(value).expanduser().absolute()


def _parse_log_level(value: str | None) -> int:
    name = "warning" if value is None else value.strip().lower()
    if name not in LOG_LEVELS:
        raise ValueError(f"one of {', '.join(LOG_LEVELS)}")
    return logging.getLevelNamesMapping()[name.upper()]


CACHE_DIR = Variable(
    name="GEMMA_JAX_CACHE_DIR",
    default="$XDG_CACHE_HOME/gemma_jax, else ~/.cache/gemma_jax",
    help="folder of compiled programs (in its xla/); empty or 'off' keeps none",
    parse=_parse_cache_dir,
)
LOG_LEVEL = Variable(
    name="GEMMA_JAX_LOG_LEVEL",
    default="warning",
    help=f"least severe log message on stderr: {', '.join(LOG_LEVELS)}",
    parse=_parse_log_level,
)

API_KEY = Variable(
    name="GEMMA_JAX_API_KEY",
    default="none",
    help="bearer token that `gemma-jax serve` asks for when --api-key is not given",
    parse=lambda value: value or None,
    is_secret=True,
)

VARIABLES: Mapping[str, Variable] = {v.name: v for v in (CACHE_DIR, LOG_LEVEL, API_KEY)}


def unknown_variables() -> list[str]:
    """Return one sentence per variable that has our prefix and is not in the table."""
    sentences = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            sentences.append(f"unknown environment variable {name} is ignored; {hint}")
    return sentences
