"""A model turn as it is generated, taken apart: content, reasoning and tool calls.

The text must still hold the special tokens (`skip_special_tokens=False`): `<|channel>` and
`<channel|>` around a thought, `<|tool_call>` and `<tool_call|>` around a call, `<|"|>` around a
string in it. Source of the format: the chat templates published with the Gemma 4 checkpoints.
"""

import functools
import re
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from gemma_jax.serve.tool_calls import QUOTE, MalformedCallError, parse_tool_call

CHANNEL_OPEN, CHANNEL_CLOSE = "<|channel>", "<channel|>"
CALL_OPEN, CALL_CLOSE = "<|tool_call>", "<tool_call|>"

SPECIAL_TOKENS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", "<|turn>", "<turn|>",
    "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>",
    CHANNEL_OPEN, CHANNEL_CLOSE, CALL_OPEN, CALL_CLOSE, QUOTE,
)  # fmt: skip
"""Gemma 4's special tokens of text, as the tokenizer writes them."""

_THOUGHT = "thought\n"
# What may stand between <|channel> and the thought; without a thought the line end is left out.
_CHANNEL_HEADS = (_THOUGHT, "thought" + CHANNEL_CLOSE)


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the thinking channel."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins: its number in this turn, a fresh id, the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """JSON text to append to the arguments of call `index`."""

    index: int
    text: str


ChatPiece = Content | Reasoning | ToolCallStart | ToolArguments


def new_call_id() -> str:
    """Return a fresh id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatOutputParser:
    """Parses one model turn; the pieces joined are the same however the text is cut.

    A call comes out whole, when it is complete: what turns out not to be one is content then,
    which could not be taken back from a client that has half of its arguments. The same for a
    call that the end of the text cuts off. Space at the end of a thought is dropped.

    Args:
      tools: whether the prompt offered tools; without them a call is content.
      thinking: whether the prompt asked to think; then a thought may lack its `<|channel>`.
      hidden: special tokens to leave out of content and reasoning, by their text.
      call_id: makes the id of each call.
    """

    def __init__(
        self,
        tools: bool,
        thinking: bool,
        hidden: Collection[str] = SPECIAL_TOKENS,
        call_id: Callable[[], str] = new_call_id,
    ):
        self._call_id = call_id
        self._num_calls = 0
        self._buffer = ""
        self._searched = 0  # of the buffer, which holds no end of the call up to here
        self._space = ""  # at the end of a thought so far
        self._hidden = frozenset(hidden)
        structure = {CHANNEL_OPEN, CHANNEL_CLOSE} | ({CALL_OPEN, CALL_CLOSE} if tools else set())
        self._markers = _markers(self._hidden | structure)
        self._call_markers = _markers(frozenset({CALL_OPEN, CALL_CLOSE}))
        self._step: Callable[[bool], list[ChatPiece] | None] = (
            self._bare_thought if thinking else self._content
        )
        self._tools = tools

    def push(self, text: str) -> list[ChatPiece]:
        """Return what is settled once `text` has arrived; neighbours of one kind are joined."""
        self._buffer += text
        return self._run(at_end=False)

    def finish(self) -> list[ChatPiece]:
        """Return what was held back; the turn is over."""
        return self._run(at_end=True)

    def _run(self, at_end: bool) -> list[ChatPiece]:
        pieces: list[ChatPiece] = []
        while (new := self._step(at_end)) is not None:
            pieces += new
        return _joined(pieces)

    # Each step consumes the buffer up to a change of state, or returns None to wait for more.

    def _bare_thought(self, at_end: bool) -> list[ChatPiece] | None:
        if not at_end and len(self._buffer) < len(_THOUGHT) and _THOUGHT.startswith(self._buffer):
            return None
        if self._buffer.startswith(_THOUGHT):
            self._buffer = self._buffer[len(_THOUGHT) :]
            self._step = self._reasoning
        else:
            self._step = self._content
        return []

    def _channel_head(self, at_end: bool) -> list[ChatPiece] | None:
        for head in _CHANNEL_HEADS:
            if self._buffer.startswith(head):
                self._buffer = self._buffer[len("thought") :].removeprefix("\n")
                break
            if head.startswith(self._buffer):
                if not at_end:
                    return None
                self._buffer = ""
        self._step = self._reasoning
        return []

    def _content(self, at_end: bool) -> list[ChatPiece] | None:
        text, marker = self._up_to_marker(self._markers, at_end)
        if marker == CHANNEL_OPEN:
            self._step = self._channel_head
        elif marker == CALL_OPEN and self._tools:
            self._step = self._call
        elif marker is None and not text:
            return None
        elif marker is not None and marker not in self._hidden:
            text += marker
        return [Content(text)] if text else []

    def _reasoning(self, at_end: bool) -> list[ChatPiece] | None:
        text, marker = self._up_to_marker(self._markers, at_end)
        if marker is None and not text:
            return None
        if marker == CHANNEL_CLOSE:
            self._step = self._content
        elif marker == CALL_OPEN and self._tools:
            self._step = self._call
        elif marker is not None and marker != CHANNEL_OPEN and marker not in self._hidden:
            text += marker
        text = self._space + text
        thought = text.rstrip()
        ended = self._step != self._reasoning
        self._space = "" if ended else text[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def _call(self, at_end: bool) -> list[ChatPiece] | None:
        found = self._call_markers.search(self._buffer, self._searched)
        if found is None and not at_end:
            self._searched = max(0, len(self._buffer) - len(CALL_CLOSE))
            return None
        self._searched = 0
        if found is None:
            body, marker, self._buffer = self._buffer, "", ""
        else:
            body, marker = self._buffer[: found.start()], found[0]
            self._buffer = self._buffer[found.end() :]
        if marker != CALL_OPEN:  # else the next call begins, although this one has no end
            self._step = self._content
        return self._call_pieces(body, marker.removeprefix(CALL_OPEN))

    def _call_pieces(self, body: str, closing: str) -> list[ChatPiece]:
        """Return the pieces of a call, or its text as content when it is none."""
        try:
            call = parse_tool_call(body)
        except MalformedCallError:
            text = _markers(self._hidden).remove(CALL_OPEN + body + closing)
            return [Content(text)] if text else []
        index, self._num_calls = self._num_calls, self._num_calls + 1
        start = ToolCallStart(index, self._call_id(), call.name)
        return [start, ToolArguments(index, call.arguments)]

    def _up_to_marker(self, markers: "_Markers", at_end: bool) -> tuple[str, str | None]:
        """Take the text before the next marker, and the marker; without one, what is settled."""
        found = markers.search(self._buffer)
        if found is not None:
            text, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
            return text, found[0]
        settled = len(self._buffer) - (0 if at_end else markers.held(self._buffer))
        text, self._buffer = self._buffer[:settled], self._buffer[settled:]
        return text, None


class _Markers:
    """Finds the first of several strings in a text, and the beginning of one at its end."""

    def __init__(self, markers: Iterable[str]):
        pattern = "|".join(re.escape(marker) for marker in sorted(markers))
        self._pattern = re.compile(pattern or r"(?!)")
        self._beginnings = {marker[:i] for marker in markers for i in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def remove(self, text: str) -> str:
        return self._pattern.sub("", text)

    def held(self, text: str) -> int:
        """Return the length of the longest end of `text` that a marker begins with."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@functools.lru_cache(maxsize=16)
def _markers(markers: frozenset[str]) -> _Markers:
    return _Markers(markers)


def _joined(pieces: Iterable[ChatPiece]) -> list[ChatPiece]:
    joined: list[ChatPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        else:
            joined.append(piece)
    return joined
