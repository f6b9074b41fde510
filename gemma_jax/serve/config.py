"""Settings of the HTTP server; those of the model and the engine are `EngineConfig`'s."""

import math
from dataclasses import dataclass
from typing import Any

from gemma_jax.errors import ConfigError

DEFAULT_PORT = 8000


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, whom it lets in, and how much it takes.

    Attributes:
      model: as given to `LLM`: a path, a bundled name or a Hub id.
      host: address to listen on; by default only this machine is let in.
      port: 0 picks a free one.
      api_keys: any of them is accepted as bearer token; none lets everyone in.
      served_model_name: names that requests may use; by default `model` itself.
      max_queue: completions that may wait beyond those that run; more get 429.
      max_body_bytes: longest request body; a longer one gets 413.
      request_timeout: seconds that a request may take, waiting included; None is no limit.
      drain_timeout: seconds that running requests get to end after SIGTERM.
      allowed_origins: web pages of other origins that may use the API (CORS).
      access_log: log every HTTP request.
    """

    model: str = "nano"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 8 * 2**20
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False

    def __post_init__(self):
        _check_int("port", self.port, 0, 65_535)
        _check_int("max_queue", self.max_queue, 0)
        _check_int("max_body_bytes", self.max_body_bytes, 1)
        _check_seconds("drain_timeout", self.drain_timeout, may_be_zero=True)
        if self.request_timeout is not None:
            _check_seconds("request_timeout", self.request_timeout)
        for name in ("api_keys", "served_model_name", "allowed_origins"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected non-empty texts")

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is the one in responses."""
        return self.served_model_name or (self.model,)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    in_range = isinstance(value, int) and value >= low and (high is None or value <= high)
    if isinstance(value, bool) or not in_range:
        raise ConfigError(f"{name}={value!r}: expected an integer {limits}")


def _check_seconds(name: str, value: Any, may_be_zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value < math.inf or (value == 0 and may_be_zero)):
        return
    least = "0 or more" if may_be_zero else "more than 0"
    raise ConfigError(f"{name}={value!r}: expected a number of seconds, {least}")
