"""Checks a conversation before it is rendered, and brings its spellings to one form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gemma_jax.errors import RequestError, UnsupportedError

ROLES = ("system", "developer", "user", "assistant", "model", "tool")

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked copies of `messages` in the form that chat templates read.

    The role `model` becomes `assistant`, a missing content of an assistant message becomes "",
    and tool-call arguments given as JSON text become mappings. Other fields pass unchanged.

    Raises:
      RequestError: a role, content or tool call is malformed; the message names the field.
      UnsupportedError: a content part is an image, audio or video.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {messages!r} ({type(messages).__name__}); expected a list of messages"
        )
    if not messages:
        raise RequestError("messages is empty; expected at least one message")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        checked.append(_message(message, where))
        if checked[-1]["role"] == "tool":
            _name_tool_result(checked, where)
    return checked


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return checked copies of `tools`, each `{"type": "function", "function": {…}}`.

    A bare function description (`{"name": …, "parameters": …}`) is wrapped.

    Raises:
      RequestError: a tool has no name, or a field has the wrong type; the message names it.
    """
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is {tools!r}; expected a list of tool descriptions")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def text_parts(content: Any) -> list[str]:
    """Return the texts of a checked content: one of a string, one per part of a list."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r}; expected a mapping with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r}; allowed are {', '.join(ROLES)}")
    checked = dict(message)
    checked["role"] = role = "assistant" if role == "model" else role
    if role == "assistant":
        _check_reasoning(message, where)
        if message.get("tool_calls") is not None:
            checked["tool_calls"] = _tool_calls(message["tool_calls"], where)
        _check_tool_responses(message.get("tool_responses"), f"{where}.tool_responses")
        has_tools = checked.get("tool_calls") or checked.get("tool_responses")
        if message.get("content") is None and has_tools:
            checked["content"] = ""
    else:
        for name in ("tool_calls", "tool_responses"):
            if message.get(name):
                raise RequestError(f"{where}.{name} belongs to assistant messages, not to {role!r}")
    if role == "tool" and not isinstance(message.get("content"), str | list):
        return checked
    _check_content(checked.get("content"), f"{where}.content")
    return checked


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"{where} is {content!r}; expected a string or a list of text parts")
    for index, part in enumerate(content):
        _check_part(part, f"{where}[{index}]")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, Mapping):
        raise RequestError(
            f'{where} is {part!r}; expected a part such as {{"type": "text", "text": "…"}}'
        )
    kind = part.get("type")
    if kind in _MEDIA:
        raise UnsupportedError(
            f"{where}.type is {kind!r}: {_MEDIA[kind]} input is not supported, only text; "
            "leave the part out"
        )
    if kind != "text":
        raise RequestError(f"{where}.type is {kind!r}; allowed is 'text'")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text is {part.get('text')!r}; expected a string")


def _check_reasoning(message: Mapping[str, Any], where: str) -> None:
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise RequestError(f"{where}.{name} is {message[name]!r}; expected a string")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise RequestError(f"{where}.tool_calls is {calls!r}; expected a list")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} is {call!r}; expected a mapping with a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(
            f"{where}.function.name is {function.get('name')!r}; expected a function name"
        )
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _check_tool_responses(responses: Any, where: str) -> None:
    if responses is None:
        return
    if isinstance(responses, str | Mapping) or not isinstance(responses, Sequence):
        raise RequestError(f"{where} is {responses!r}; expected a list")
    for index, response in enumerate(responses):
        if not isinstance(response, Mapping) or not isinstance(response.get("name"), str):
            raise RequestError(
                f"{where}[{index}] is {response!r}; expected a mapping with name and response"
            )
        if "response" not in response:
            raise RequestError(f"{where}[{index}].response is missing; expected the tool's result")


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None:
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is {arguments!r}, not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {arguments!r}; expected a mapping or a JSON object")
    return dict(value)


def _name_tool_result(checked: list[dict[str, Any]], where: str) -> None:
    """Give the last message, a tool result, the `name` of the function it answers."""
    first = len(checked) - 1
    while first > 0 and checked[first - 1]["role"] == "tool":
        first -= 1
    calls = checked[first - 1].get("tool_calls") if first > 0 else None
    if not calls:
        raise RequestError(
            f"{where}.role is 'tool', but no assistant message with tool_calls comes before it"
        )
    result = checked[-1]
    call_id = result.get("tool_call_id")
    names = {call["id"]: call["function"]["name"] for call in calls if call.get("id") is not None}
    if call_id in names:
        result["name"] = names[call_id]
    elif not isinstance(result.get("name"), str):
        if call_id is not None and names:
            raise RequestError(
                f"{where}.tool_call_id is {call_id!r}; the calls before it are {sorted(names)}"
            )
        position = len(checked) - 1 - first
        if position >= len(calls):
            raise RequestError(f"{where} is one more tool result than there are tool_calls")
        result["name"] = calls[position]["function"]["name"]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is {tool!r}; expected a tool description (a mapping)")
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {tool['type']!r}; allowed is 'function'")
    function, inner = tool.get("function", tool), f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{inner} is {function!r}; expected a mapping")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{inner}.name is {function.get('name')!r}; expected a function name")
    if not isinstance(function.get("description") or "", str):
        raise RequestError(f"{inner}.description is {function['description']!r}; expected a string")
    for name in ("parameters", "response"):
        if not isinstance(function.get(name) or {}, Mapping):
            raise RequestError(
                f"{inner}.{name} is {function[name]!r}; expected a JSON schema (a mapping)"
            )
        _check_schema(function.get(name) or {}, f"{inner}.{name}")
    return {"type": "function", "function": dict(function)}


def _check_schema(schema: Any, where: str) -> None:
    """Check the parts of a JSON schema that are written into a declaration."""
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} is {schema!r}; expected a JSON schema (a mapping)")
    kind = schema.get("type")
    if kind is not None and not isinstance(kind, str) and not _is_list_of_strings(kind):
        raise RequestError(f"{where}.type is {kind!r}; expected a type name or a list of them")
    if not _is_list_of_strings(schema.get("required") or []):
        raise RequestError(f"{where}.required is {schema['required']!r}; expected a list of names")
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise RequestError(f"{where}.properties is {properties!r}; expected a mapping")
    for name, inner in properties.items():
        _check_schema(inner, f"{where}.properties.{name}")
    if isinstance(schema.get("items"), Mapping):
        _check_schema(schema["items"], f"{where}.items")


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
