"""Exception classes: one for each decision that a caller may take."""


class GemmaError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(GemmaError, ValueError):
    """A model or engine configuration value is unknown, missing or contradicts another one."""


class CheckpointError(GemmaError, ValueError):
    """A checkpoint cannot be read or written; names the tensor or file and what was expected."""


class RequestError(GemmaError, ValueError):
    """One request is invalid (HTTP 400); other requests are not affected."""


class UnsupportedError(GemmaError, NotImplementedError):
    """The input is understood, but this build, device or model cannot do it; says why."""


class CapacityError(GemmaError, RuntimeError):
    """There is no room for the request now; the caller may retry later."""


class ContextLengthError(RequestError):
    """The prompt is longer than the context; a shorter one, or a longer context, would run."""


class EngineError(GemmaError, RuntimeError):
    """The engine failed or has ended, and the request with it (HTTP 5xx)."""


class RecordError(GemmaError, ValueError):
    """A record of an engine's outputs cannot be read, or not be compared with this model."""
