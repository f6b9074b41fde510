"""The OpenAPI description of the routes: request bodies and refusals, for clients and fuzzers.

Bodies are checked by `bodies.py` and `protocol.py`, not by these schemas; a test holds the two
together.
"""

from collections.abc import Sequence
from typing import Any

from gemma_jax.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PENALTY
from gemma_jax.serve.bodies import MAX_COMPLETIONS, REASONING_EFFORTS

Schema = dict[str, Any]


def _number(low: float | None = None, high: float | None = None, **more: Any) -> Schema:
    return _bounded({"type": ["number", "null"]}, low, high) | more


def _integer(low: int | None = None, high: int | None = None) -> Schema:
    return _bounded({"type": ["integer", "null"]}, low, high)


def _bounded(schema: Schema, low: float | None, high: float | None) -> Schema:
    limits = {"minimum": low, "maximum": high}
    return schema | {name: value for name, value in limits.items() if value is not None}


def _object(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"]}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_SAMPLING: Schema = {
    "model": _TEXT,
    "n": _integer(1, MAX_COMPLETIONS),
    "temperature": _number(0),
    "top_p": _number(0, 1, exclusiveMinimum=0),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": {
        "anyOf": [_TEXT, {"type": "array", "items": {"type": "string", "minLength": 1}}],
    },
    "stop_token_ids": {"anyOf": [_IDS, {"type": "null"}]},
    "ignore_eos": _FLAG,
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": _number(0, exclusiveMinimum=0),
    "logit_bias": {
        "type": ["object", "null"],
        "additionalProperties": {
            "type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS,
        },
    },
    "skip_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG},
    },
    "response_format": {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object"},
        },
        "required": ["type"],
    },
}  # fmt: skip

_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": _object(
                            {"type": {"const": "text"}, "text": {"type": "string"}},
                            ["type", "text"],
                        ),
                    },
                ]
            },
        },
        "required": ["role", "content"],
    },
}

_TOOLS: Schema = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
}

_TEMPLATE_VARIABLES: Schema = {
    "type": ["object", "null"],
    "properties": {"enable_thinking": {"type": "boolean"}},
    "additionalProperties": False,
}

CHAT_BODY = _object(
    _SAMPLING
    | {
        "messages": _MESSAGES,
        "max_completion_tokens": _integer(1),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "tools": _TOOLS,
        "tool_choice": {"enum": ["auto", "none", None]},
        "reasoning_effort": {"enum": [*REASONING_EFFORTS, None]},
        "chat_template_kwargs": _TEMPLATE_VARIABLES,
    },
    ["messages"],
)
COMPLETION_BODY = _object(
    _SAMPLING
    | {
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _IDS | {"minItems": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": _IDS | {"minItems": 1}},
            ]
        },
        "max_tokens": _integer(0),  # 0 only with echo
        "logprobs": _integer(0, MAX_LOGPROBS),
        "echo": _FLAG,
    },
    ["prompt"],
)
TOKENIZE_BODY = _object(
    {
        "model": _TEXT,
        "prompt": _TEXT,
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "add_special_tokens": _FLAG,
        "add_generation_prompt": _FLAG,
        "chat_template_kwargs": _TEMPLATE_VARIABLES,
        "return_token_strs": _FLAG,
    },
    [],
)
DETOKENIZE_BODY = _object({"model": _TEXT, "tokens": _IDS}, ["tokens"])

_ERROR = _object(
    {
        "error": _object(
            {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT,
             "code": _TEXT},
            ["message", "type", "param", "code"],
        )
    },
    ["error"],
)  # fmt: skip
_REFUSALS = {
    400: "A field is missing, unknown or invalid.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; retry later.",
    500: "An error of the server.",
    503: "The engine takes no requests now.",
    504: "The request took longer than it may.",
}
_BODIES = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": COMPLETION_BODY,
    "/tokenize": TOKENIZE_BODY,
    "/detokenize": DETOKENIZE_BODY,
}
_STREAMS = ("/v1/chat/completions", "/v1/completions")
_PLAIN = {"/": "text/html", "/metrics": "text/plain"}
_STATUSES = {"/health": (503,), "/v1/models": (401,), "/v1/models/{name:path}": (401, 404)}


def describe(path: str, model_names: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of `add_api_route` that describe a path.

    Args:
      path: of a route.
      model_names: what requests may call the model.
    """
    statuses = tuple(_REFUSALS) if path in _BODIES else _STATUSES.get(path, ())
    kinds = {_PLAIN.get(path, "application/json"): {}}
    if path in _STREAMS:
        kinds["text/event-stream"] = {}
    responses: dict[int | str, Any] = {200: {"description": "Success.", "content": kinds}}
    for status in statuses:
        schema = {} if path == "/health" else {"schema": _ERROR}
        responses[status] = {
            "description": _REFUSALS[status], "content": {"application/json": schema},
        }  # fmt: skip
    out: dict[str, Any] = {"responses": responses}
    if path in _BODIES:
        names = {"enum": [*model_names, None]}
        properties = _BODIES[path]["properties"] | {"model": names}
        content = {"application/json": {"schema": _BODIES[path] | {"properties": properties}}}
        out["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return out
