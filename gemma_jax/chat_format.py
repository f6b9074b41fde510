"""Gemma 4's turn format, written out: the chat template for checkpoints that bring none.

Every function returns text; the input has passed `chat_messages`.
Source of the format: the chat templates published with the Gemma 4 checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemma_jax.chat_messages import text_parts

_QUOTE = '<|"|>'
_TURN_END = "<turn|>\n"
_MODEL_TURN = "<|turn>model\n"
_EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
_AWAIT_RESULT = "<|tool_response>"


def render_conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    enable_thinking: bool,
    add_generation_prompt: bool,
    empty_thought: bool,
) -> str:
    """Return the conversation in turn format, without BOS.

    Args:
      messages, tools: checked by `normalise_messages` and `normalise_tools`.
      enable_thinking: put `<|think|>` into the system turn.
      add_generation_prompt: open the model's turn, unless the conversation ends inside one
        (after tool calls or tool results), which the model then continues.
      empty_thought: with thinking off, follow the generation prompt by an empty thought channel.
    """
    has_system = messages[0]["role"] in ("system", "developer")
    system = messages[0] if has_system else None
    turns = messages[1:] if has_system else messages
    text = ""
    if system or tools or enable_thinking:
        text += _system_turn(system, tools, enable_thinking)
    body, turn_is_open = _turns(turns)
    text += body
    if add_generation_prompt and not turn_is_open:
        text += _MODEL_TURN
        if empty_thought and not enable_thinking:
            text += _EMPTY_THOUGHT
    return text


def strip_thoughts(text: str) -> str:
    """Return a model answer trimmed and without thought channels (an unclosed one: to the end)."""
    kept = (part.split("<|channel>", 1)[0] for part in text.split("<channel|>"))
    return "".join(kept).strip()


def _system_turn(
    message: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]], thinking: bool
) -> str:
    text = "<|turn>system\n"
    if thinking:
        text += "<|think|>\n"
    if message:
        text += " ".join(part.strip() for part in text_parts(message["content"])).strip()
    text += "".join(f"<|tool>{_declaration(tool['function'])}<tool|>" for tool in tools)
    return text + _TURN_END


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return the turns after the system turn, and whether the last one is still the model's."""
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    text, previous_role, turn_is_open = "", None, False
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            continue  # written inside the model turn that made the calls
        if role == "assistant":
            results, following = _results_and_next(messages, index)
            if previous_role != "assistant":
                text += _MODEL_TURN
            text += _model_message(message, results, keep_reasoning=index > last_user)
            ending = _model_turn_ending(message, results, following)
            text += ending
            turn_is_open = ending != _TURN_END
        else:
            name = "user" if role == "user" else "system"
            content = "".join(part.strip() for part in text_parts(message["content"]))
            text += f"<|turn>{name}\n{content}{_TURN_END}"
            turn_is_open = False
        previous_role = role
    return text, turn_is_open


def _results_and_next(
    messages: Sequence[Mapping[str, Any]], index: int
) -> tuple[list[Mapping[str, Any]], str | None]:
    """Return the tool results of message `index`, and the role that comes after them.

    Results are the tool messages right after it, or its own `tool_responses`.
    """
    results: list[Mapping[str, Any]] = [
        {"name": response["name"], "content": response["response"]}
        for response in messages[index].get("tool_responses") or []
    ]
    for message in messages[index + 1 :]:
        if message["role"] != "tool":
            return results, message["role"]
        results.append(message)
    return results, None


def _model_message(
    message: Mapping[str, Any], results: Sequence[Mapping[str, Any]], keep_reasoning: bool
) -> str:
    calls = message.get("tool_calls") or []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    text = ""
    if reasoning and calls and keep_reasoning:
        text += f"<|channel>thought\n{reasoning}\n<channel|>"
    for call in calls:
        function = call["function"]
        text += f"<|tool_call>call:{function['name']}{_value(function['arguments'])}<tool_call|>"
    text += "".join(_response(result["name"], result.get("content")) for result in results)
    return text + "".join(strip_thoughts(part) for part in text_parts(message["content"]))


def _model_turn_ending(
    message: Mapping[str, Any], results: Sequence[Mapping[str, Any]], following: str | None
) -> str:
    if message.get("tool_calls") and not results:
        return _AWAIT_RESULT
    if following == "assistant":
        return ""  # the next message goes on in this turn
    has_content = any(strip_thoughts(part) for part in text_parts(message["content"]))
    if results and following is None and not has_content:
        return ""  # the model has yet to answer the results
    return _TURN_END


def _response(name: str, content: Any) -> str:
    if isinstance(content, list):
        content = "".join(text_parts(content))
    fields = content if isinstance(content, Mapping) else {"value": content}
    return f"<|tool_response>response:{name}{_value(fields)}<tool_response|>"


def _value(value: Any, quote_keys: bool = False) -> str:
    """Return one value: strings between quote tokens, maps sorted by key, numbers bare."""
    if isinstance(value, str):
        return _quoted(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return _fields(
            f"{_quoted(key) if quote_keys else key}:{_value(item, quote_keys)}"
            for key, item in _sorted_items(value)
        )
    if isinstance(value, Sequence):
        return f"[{','.join(_value(item, quote_keys) for item in value)}]"
    return str(value)


def _quoted(text: Any) -> str:
    return f"{_QUOTE}{text}{_QUOTE}"


def _fields(fields: Iterable[str]) -> str:
    return "{" + ",".join(fields) + "}"


def _sorted_items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(mapping.items(), key=lambda item: str(item[0]).lower())


def _declaration(function: Mapping[str, Any]) -> str:
    fields = [f"description:{_quoted(function.get('description') or '')}"]
    if function.get("parameters"):
        fields.append(f"parameters:{_parameters(function['parameters'])}")
    if function.get("response"):
        fields.append(f"response:{_response_schema(function['response'])}")
    return f"declaration:{function['name']}{_fields(fields)}"


def _parameters(schema: Mapping[str, Any]) -> str:
    fields = []
    if schema.get("properties"):
        fields.append(f"properties:{_properties(schema['properties'])}")
    if schema.get("required"):
        fields.append(f"required:{_value(schema['required'])}")
    fields.append(_type_field(schema.get("type") or "object"))
    return _fields(fields)


def _response_schema(schema: Mapping[str, Any]) -> str:
    fields = []
    if schema.get("description"):
        fields.append(f"description:{_quoted(schema['description'])}")
    fields.append(_type_field(schema.get("type") or "object"))
    return _fields(fields)


def _properties(properties: Mapping[str, Any]) -> str:
    return _fields(f"{name}:{_property(schema)}" for name, schema in _sorted_items(properties))


def _property(schema: Mapping[str, Any]) -> str:
    """Return one property: description, enum or items, nullable, nested fields, type last."""
    kind, nullable = _kind(schema)
    fields = []
    if schema.get("description"):
        fields.append(f"description:{_quoted(schema['description'])}")
    if kind == "STRING" and schema.get("enum"):
        fields.append(f"enum:{_value(schema['enum'])}")
    if kind == "ARRAY" and schema.get("items") and isinstance(schema["items"], Mapping):
        fields.append(f"items:{_items(schema['items'])}")
    if nullable:
        fields.append("nullable:true")
    if kind == "OBJECT":
        fields.append(f"properties:{_properties(schema.get('properties') or {})}")
        if schema.get("required"):
            fields.append(f"required:{_value(schema['required'])}")
    fields.append(_type_field(kind))
    return _fields(fields)


def _kind(schema: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a schema's upper-case type ("" when it has none) and whether it allows null."""
    kind, nullable = schema.get("type") or "", bool(schema.get("nullable"))
    if isinstance(kind, str):
        return kind.upper(), nullable
    named = [str(item) for item in kind if item != "null"]
    return (named[0].upper() if named else "NULL"), nullable or "null" in kind


def _items(schema: Mapping[str, Any]) -> str:
    """Return an array's element schema: its fields sorted by name, unlike a property's."""
    fields = []
    for name, value in _sorted_items(schema):
        if value is None:
            continue
        if name == "properties":
            fields.append(f"properties:{_properties(value)}")
        elif name == "type":
            upper = value.upper() if isinstance(value, str) else [str(v).upper() for v in value]
            fields.append(f"type:{_value(upper)}")
        else:
            fields.append(f"{name}:{_value(value, quote_keys=True)}")
    return _fields(fields)


def _type_field(kind: str) -> str:
    return f"type:{_quoted(kind.upper())}"
