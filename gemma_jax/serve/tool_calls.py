"""Gemma's tool-call syntax, `call:NAME{key:value,…}`, to a name and JSON arguments.

Values: strings between `<|"|>` tokens, bare numbers, true, false and null, lists `[a,b]`, maps
`{key:value}` with bare keys. Also read, because models write them: a missing `call`, parentheses
around the arguments, JSON strings and quoted keys, a comma at the end, and bare text as a string.
Source of the format: the chat templates published with the Gemma 4 checkpoints.
"""

import json
import re
from typing import NamedTuple

QUOTE = '<|"|>'
MAX_DEPTH = 100
"""Deepest nesting of lists and maps that is read."""

_HEAD = re.compile(r"\s*(?:call)?:\s*([^\s:{}()<>\[\]\"',]+)\s*([{(])")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_KEY = re.compile(r"\s*([^\s:,{}\[\]\"<][^:,{}\[\]\"<]*)")
_BARE = re.compile(r"[^,\]})<\"\[{]+")
_SPACE = re.compile(r"\s*")
_CLOSING = {"{": "}", "(": ")"}


class ToolCall(NamedTuple):
    """One call: the function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


class MalformedCallError(ValueError):
    """The text is not a tool call; says where it stops being one."""


def parse_tool_call(text: str) -> ToolCall:
    """Return the call that `text`, from between `<|tool_call>` and `<tool_call|>`, writes.

    Raises:
      MalformedCallError: it is no call, or an unfinished one.
    """
    head = _HEAD.match(text)
    if head is None:
        raise MalformedCallError("expected call:NAME{")
    reader = _Reader(text, head.end())
    arguments = reader.fields(_CLOSING[head[2]], depth=1)
    if text[reader.at :].strip():
        raise MalformedCallError(f"text after the call, at {reader.at}")
    return ToolCall(head[1], arguments)


class _Reader:
    """Reads values from position `at` on, each as JSON text."""

    def __init__(self, text: str, at: int):
        self._text = text
        self.at = at

    def fields(self, closing: str, depth: int) -> str:
        """The rest of a map whose opening is behind."""
        items = []
        while not self._take(closing):
            key = self._key()
            self._expect(":")
            items.append(f"{json.dumps(key, ensure_ascii=False)}: {self._value(closing, depth)}")
            if not self._take(","):
                self._expect(closing)
                break
        return "{" + ", ".join(items) + "}"

    def _list(self, depth: int) -> str:
        items = []
        while not self._take("]"):
            items.append(self._value("]", depth))
            if not self._take(","):
                self._expect("]")
                break
        return "[" + ", ".join(items) + "]"

    def _value(self, closing: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise MalformedCallError(f"nested more than {MAX_DEPTH} deep")
        if self._next_is(QUOTE) or self._next_is('"'):
            return json.dumps(self._string(), ensure_ascii=False)
        if self._take("["):
            return self._list(depth + 1)
        if self._take("{"):
            return self.fields("}", depth + 1)
        return self._bare(closing)

    def _bare(self, closing: str) -> str:
        found = _BARE.match(self._text, self.at)
        text = found[0] if found else ""
        if closing != ")":  # then it is text like any other
            while self._text.startswith(")", self.at + len(text)):
                more = _BARE.match(self._text, self.at + len(text) + 1)
                text += ")" + (more[0] if more else "")
        self.at += len(text)
        word = text.strip()
        if not word:
            raise MalformedCallError(f"expected a value at {self.at}")
        if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
            return word
        return json.dumps(word, ensure_ascii=False)

    def _key(self) -> str:
        if self._next_is(QUOTE) or self._next_is('"'):
            return self._string()
        found = _KEY.match(self._text, self.at)
        if found is None:
            raise MalformedCallError(f"expected a key at {self.at}")
        self.at = found.end()
        return found[1].rstrip()

    def _string(self) -> str:
        if self._take(QUOTE):
            end = self._text.find(QUOTE, self.at)
            if end < 0:
                raise MalformedCallError("a string has no end")
            start, self.at = self.at, end + len(QUOTE)
            return self._text[start:end]
        try:
            value, self.at = json.JSONDecoder().raw_decode(self._text, self.at)
        except ValueError as error:
            raise MalformedCallError(f"not a JSON string: {error}") from error
        return value

    def _next_is(self, token: str) -> bool:
        space = _SPACE.match(self._text, self.at)
        self.at = space.end() if space else self.at
        return self._text.startswith(token, self.at)

    def _take(self, token: str) -> bool:
        if not self._next_is(token):
            return False
        self.at += len(token)
        return True

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise MalformedCallError(f"expected {token!r} at {self.at}")
