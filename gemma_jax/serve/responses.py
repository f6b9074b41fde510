"""OpenAI response objects from the deltas of the engine, streamed or whole.

One choice object follows one completion: every delta of the engine is pushed into it, which gives
the parts of a streamed chunk, and at the end it can say the whole choice.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_jax.outputs import Logprob, PositionLogprobs, PromptLogprobs
from gemma_jax.serve.bodies import ChatRequest, CompletionRequest
from gemma_jax.serve.chat_output import (
    SPECIAL_TOKENS,
    ChatOutputParser,
    ChatPiece,
    Content,
    Reasoning,
    ToolArguments,
    ToolCallStart,
)
from gemma_jax.serve.echo import Echo
from gemma_jax.serve.request import CompletionDelta

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the OpenAI API does the same."""
NO_ECHO = Echo()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class ResponseHead:
    """What every chunk of a response repeats: id, creation in Unix seconds, the model's name."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the head of an object of type `kind`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChatChoice:
    """One completion of a chat request.

    Args:
      request: what was asked.
      index: of the choice in the response.
      special_tokens: texts of the tokenizer's special tokens, for `hide_special_tokens`.
    """

    def __init__(
        self,
        request: ChatRequest,
        index: int = 0,
        special_tokens: Collection[str] = SPECIAL_TOKENS,
    ):
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._parser = ChatOutputParser(
            tools=bool(request.tools),
            thinking=request.thinking,
            hidden=special_tokens if request.hide_special_tokens else (),
        )
        self._message = _Message()
        self._logprobs: list[dict[str, Any]] | None = (
            None if request.params.logprobs is None else []
        )
        self._top = request.params.logprobs or 0
        self._has_begun = False
        self.prompt_logprobs: PromptLogprobs | None = None

    def push(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """Take what the engine added; return the `choices` of the chunk to stream, often one."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
        added = _Message()
        for piece in pieces:
            added.add(piece)
            self._message.add(piece)
        logprobs = self._take_logprobs(delta)
        self.num_tokens += len(delta.token_ids)
        self._end(delta)
        changes = added.fields(whole=False)
        if not self._has_begun:
            changes = {"role": "assistant", "content": ""} | changes
            self._has_begun = True
        if not changes and not logprobs and self.finish_reason is None:
            return []
        return [self._fields("delta", changes, logprobs or None)]

    def choice(self) -> dict[str, Any]:
        """Return the whole choice."""
        message = {"role": "assistant"} | self._message.fields(whole=True)
        return self._fields("message", message, self._logprobs)

    def _fields(self, name: str, value: Any, logprobs: list[Any] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            name: value,
            "logprobs": None if logprobs is None else {"content": logprobs},
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _take_logprobs(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        if self._logprobs is None or delta.logprobs is None:
            return []
        new = [
            _chat_position(token, position, self._top)
            for token, position in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        self._logprobs += new
        return new

    def _end(self, delta: CompletionDelta) -> None:
        if delta.finish_reason is None:
            return
        self.stop_reason = delta.stop_reason
        called = self._message.tool_calls and delta.finish_reason == "stop"
        self.finish_reason = "tool_calls" if called else delta.finish_reason


class _Message:
    """Collects parsed pieces into the fields of a message or of a streamed delta."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: ChatPiece) -> None:
        match piece:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                self.tool_calls[index] = {"id": call_id, "type": "function", "function": function}
            case ToolArguments(index, text):
                call = self.tool_calls.setdefault(index, {"function": {"arguments": ""}})
                call["function"]["arguments"] += text

    def fields(self, whole: bool) -> dict[str, Any]:
        """Return the message (`whole`), or only what was added (a streamed delta)."""
        fields: dict[str, Any] = {}
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        if reasoning:
            # reasoning_content is what older clients read.
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if whole:
            fields["content"] = content if content or not self.tool_calls else None
        elif content:
            fields["content"] = content
        if self.tool_calls:
            calls = sorted(self.tool_calls.items())
            # In a stream every entry names the call that it goes on with.
            fields["tool_calls"] = [
                call if whole else {"index": index} | call for index, call in calls
            ]
        return fields


class CompletionChoice:
    """One completion of one prompt of a completion request.

    Args:
      request: what was asked.
      index: of the choice in the response: prompt number · n + completion.
      echo: the prompt before the completion, of a request that echoes it.
    """

    def __init__(self, request: CompletionRequest, index: int = 0, echo: Echo = NO_ECHO):
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self._reports_prompt = request.prompt_logprobs
        self._echo = echo
        self._text = echo.text
        self._unsent = self._text
        self._top = request.params.logprobs
        self._logprobs = _empty_logprobs()
        self._offset = len(self._text)

    def push(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """Take what the engine added; return the `choices` of the chunk to stream, often one."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self._text += delta.text
        self.num_tokens += len(delta.token_ids)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        logprobs = self._take_logprobs(delta)
        text, self._unsent = self._unsent + delta.text, ""
        if not text and not (logprobs and logprobs["tokens"]) and self.finish_reason is None:
            return []
        return [self._fields(text, logprobs)]

    def choice(self) -> dict[str, Any]:
        """Return the whole choice."""
        fields = self._fields(self._text, None if self._top is None else self._logprobs)
        if self._reports_prompt:
            fields["prompt_logprobs"] = prompt_fields(self.prompt_logprobs)
        return fields

    def _fields(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _take_logprobs(self, delta: CompletionDelta) -> dict[str, Any] | None:
        if self._top is None or (delta.logprobs is None and delta.prompt_logprobs is None):
            return None
        new = _empty_logprobs()
        if delta.prompt_logprobs is not None:
            self._add_prompt(new, delta.prompt_logprobs)
        for token, position in zip(delta.token_ids, delta.logprobs or (), strict=True):
            self._add_token(new, position[token], position, self._offset)
            self._offset += len(new["tokens"][-1])
        for name, values in new.items():
            self._logprobs[name] += values
        return new

    def _add_prompt(self, new: dict[str, list[Any]], prompt: PromptLogprobs) -> None:
        """Add the tokens of an echoed prompt."""
        echo = self._echo
        positions = zip(echo.token_ids, prompt, echo.offsets, strict=False)  # none without an echo
        for token, position, offset in positions:
            entry = echo.first if position is None else position[token]
            self._add_token(new, entry, position, offset)

    def _add_token(
        self, new: dict[str, list[Any]], entry: Logprob, position: PositionLogprobs | None,
        offset: int,
    ) -> None:  # fmt: skip
        shown = (position or {}).values() if self._top else ()
        top = {token_text(other): _finite(other.logprob) for other in shown}
        new["tokens"].append(token_text(entry))
        new["token_logprobs"].append(None if position is None else _finite(entry.logprob))
        new["top_logprobs"].append(None if position is None else top)
        new["text_offset"].append(offset)


Choice = ChatChoice | CompletionChoice


def _empty_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_response(head: ResponseHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
    """Return the `chat.completion` object of finished choices."""
    whole = _whole(head.fields("chat.completion"), choices, usage)
    prompt = choices[0].prompt_logprobs
    return whole if prompt is None else whole | {"prompt_logprobs": prompt_fields(prompt)}


def completion_response(
    head: ResponseHead, choices: Sequence[Choice], usage: Usage
) -> dict[str, Any]:
    """Return the `text_completion` object of finished choices."""
    return _whole(head.fields("text_completion"), choices, usage)


def _whole(fields: dict[str, Any], choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
    return fields | {"choices": [c.choice() for c in choices], "usage": usage.fields()}


def chat_chunk(
    head: ResponseHead, choices: Sequence[Mapping[str, Any]], usage: Usage | None = None
) -> dict[str, Any]:
    """Return one streamed chunk of a chat; the one with `usage` comes last, without choices."""
    return _chunk(head.fields("chat.completion.chunk"), choices, usage)


def completion_chunk(
    head: ResponseHead, choices: Sequence[Mapping[str, Any]], usage: Usage | None = None
) -> dict[str, Any]:
    """Return one streamed chunk of a completion; the one with `usage` comes last."""
    return _chunk(head.fields("text_completion"), choices, usage)


def _chunk(
    fields: dict[str, Any], choices: Sequence[Mapping[str, Any]], usage: Usage | None
) -> dict[str, Any]:
    fields["choices"] = list(choices)
    return fields if usage is None else fields | {"usage": usage.fields()}


def prompt_fields(logprobs: PromptLogprobs | None) -> list[Any] | None:
    """Return `prompt_logprobs` as vLLM's server writes them: id → logprob, rank, decoded_token."""
    if logprobs is None:
        return None
    return [
        position and {str(token): _prompt_entry(entry) for token, entry in position.items()}
        for position in logprobs
    ]


def _prompt_entry(entry: Logprob) -> dict[str, Any]:
    return {
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": token_text(entry),
    }


def token_bytes(entry: Logprob) -> bytes:
    """Return the bytes that a token stands for: the vocabulary writes a space as U+2581."""
    spelling = entry.decoded_token or ""
    byte = _BYTE_TOKEN.fullmatch(spelling)
    if byte:
        return bytes([int(byte[1], 16)])
    return spelling.replace("\u2581", " ").encode("utf-8", errors="replace")


def token_text(entry: Logprob) -> str:
    """Return a token's text; a byte that is no character is written `bytes:\\xe2`."""
    data = token_bytes(entry)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_position(token: int, position: PositionLogprobs, top: int) -> dict[str, Any]:
    best = sorted(position.values(), key=lambda entry: -entry.logprob)[:top]
    return _chat_entry(position[token]) | {"top_logprobs": [_chat_entry(entry) for entry in best]}


def _chat_entry(entry: Logprob) -> dict[str, Any]:
    return {
        "token": token_text(entry),
        "logprob": _finite(entry.logprob),
        "bytes": list(token_bytes(entry)),
    }


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, float(logprob))
