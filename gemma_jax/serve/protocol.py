"""What goes over the wire beside the generation bodies: JSON, errors, /tokenize, and the schema.

Every refusal is `{"error": {message, type, param, code}}`, as in the OpenAI API.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemma_jax.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    GemmaError,
    RequestError,
    UnsupportedError,
)
from gemma_jax.serve.bodies import field_of

RETRY_SECONDS = 1
"""What a refused client is told to wait."""


class ApiError(Exception):
    """A refusal as the client gets it.

    Args:
      status: of the HTTP response.
      message: for people.
      kind: `type` of the API.
      param: the field at fault, if one is.
      code: for programs.
      headers: of the HTTP response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        error = {
            "message": str(self), "type": self.kind, "param": self.param, "code": self.code,
        }  # fmt: skip
        return {"error": error}


def api_error(error: Exception, field: str | None = None) -> ApiError:
    """What the client is told about an error; `field` is at fault when the error names none."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    message = str(error)
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, message, param=field, code="context_length_exceeded")
        case RequestError():
            param = _param(error, field)
            code = "unknown_parameter" if _is_unknown(message) else "invalid_value"
            return ApiError(400, message, param=param, code=code)
        case UnsupportedError():
            param = _param(error, field)
            return ApiError(400, message, param=param, code="unsupported_value")
        case CapacityError():
            return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", retry)
        case EngineError():
            return ApiError(503, message, "server_error", None, "engine_unavailable", retry)
        case TimeoutError():
            return ApiError(504, message, "server_error", None, "timeout")
        case _:
            return ApiError(500, "internal error; the server's log has it", "server_error")


def _param(error: GemmaError, field: str | None) -> str | None:
    """The field that the message begins with, else `field`."""
    first = str(error).partition(" ")[0]
    if first in _TOKENIZE_FIELDS or first in _DETOKENIZE_FIELDS:
        return first
    named = field_of(error)
    return field if named is None else named


def _is_unknown(message: str) -> bool:
    return message.endswith("is not a known field")


# --- JSON ----------------------------------------------------------------------------------------


def read_json(data: bytes) -> Any:
    """The value that a request body holds.

    Raises:
      RequestError: it is not JSON (RFC 8259: UTF-8, no NaN).
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise RequestError("body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"body is not JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def write_json(value: Any) -> bytes:
    """`value` as compact JSON."""
    # A lone surrogate, which a client can write as an escape, has no UTF-8.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", errors="backslashreplace"
    )


def event(value: Any) -> bytes:
    """`value` as one server-sent event."""
    return b"data: " + write_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"

# --- /tokenize and /detokenize -------------------------------------------------------------------

_TOKENIZE_FIELDS: dict[str, type] = {
    "model": str, "prompt": str, "messages": list, "tools": list, "add_special_tokens": bool,
    "add_generation_prompt": bool, "chat_template_kwargs": dict, "return_token_strs": bool,
}  # fmt: skip
_DETOKENIZE_FIELDS: dict[str, type] = {"model": str, "tokens": list}
_JSON_NAMES = {str: "a string", list: "a list", bool: "true or false", dict: "an object"}


@dataclass(frozen=True)
class TokenizeRequest:
    """A checked body of /tokenize: a text, or the messages of a chat.

    Attributes:
      model: the name asked for, or None.
      prompt: the text; None for a chat.
      messages, tools, thinking, add_generation_prompt: of a chat, as in /v1/chat/completions.
      add_special_tokens: begin a text with BOS.
      with_texts: also return the text of each token.
    """

    model: str | None
    prompt: str | None
    messages: list[Any]
    tools: list[Any]
    thinking: bool
    add_generation_prompt: bool
    add_special_tokens: bool
    with_texts: bool


def tokenize_request(body: Any) -> TokenizeRequest:
    """The checked body of /tokenize.

    Raises:
      RequestError: a field is unknown, missing or of the wrong type.
    """
    fields = _fields(body, _TOKENIZE_FIELDS)
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("prompt and messages: give one of them, and not both")
    variables = fields.get("chat_template_kwargs", {})
    thinking = variables.get("enable_thinking", False)
    if set(variables) - {"enable_thinking"} or not isinstance(thinking, bool):
        raise RequestError(
            f"chat_template_kwargs is {reprlib.repr(variables)}; supported is enable_thinking,"
            " true or false"
        )
    return TokenizeRequest(
        model=fields.get("model"),
        prompt=fields.get("prompt"),
        messages=fields.get("messages", []),
        tools=fields.get("tools", []),
        thinking=thinking,
        add_generation_prompt=fields.get("add_generation_prompt", True),
        add_special_tokens=fields.get("add_special_tokens", True),
        with_texts=fields.get("return_token_strs", False),
    )


def detokenize_request(body: Any) -> tuple[str | None, list[Any]]:
    """The model and the ids of a body of /detokenize; the ids are not checked yet."""
    fields = _fields(body, _DETOKENIZE_FIELDS)
    if "tokens" not in fields:
        raise RequestError("tokens is missing; expected a list of token ids")
    return fields.get("model"), fields["tokens"]


def _fields(body: Any, known: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise RequestError(f"body is {reprlib.repr(body)}; expected an object")
    for name, value in body.items():
        if name not in known:
            raise RequestError(f"{reprlib.repr(str(name))[1:-1]} is not a known field")
        if value is not None and not isinstance(value, known[name]):
            kind = _JSON_NAMES[known[name]]
            raise RequestError(f"{name} is {reprlib.repr(value)}; expected {kind}")
    return {name: value for name, value in body.items() if value is not None}
