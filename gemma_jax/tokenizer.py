"""Text to token ids and back: the tokenizer of a checkpoint, and decoding while tokens arrive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from gemma_jax.errors import CheckpointError, RequestError
from gemma_jax.jsonfile import read_json_object

FILE_NAME = "tokenizer.json"

# Fallback spellings of the special tokens that the model code needs (spec: Gemma 4 vocabulary).
_BOS, _EOS, _PAD, _TURN_END = "<bos>", "<eos>", "<pad>", "<turn|>"

_REPLACEMENT = "\ufffd"
_ID_RANGE = "expected integers from 0 to 2**32 - 1"


class Tokenizer:
    """A checkpoint's tokenizer: `tokenizer.json`, with special ids from `tokenizer_config.json`.

    Args:
      backend: the `tokenizers` object; its truncation and padding are switched off.
      config: the content of `tokenizer_config.json`; {} when there is none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None):
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        config = config or {}
        self.bos_token_id = self._special_id(config.get("bos_token"), _BOS)
        self.eos_token_id = self._special_id(config.get("eos_token"), _EOS)
        self.pad_token_id = self._special_id(config.get("pad_token"), _PAD)
        self.turn_end_token_id = self._special_id(config.get("eot_token"), _TURN_END)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.byte_ids = frozenset(
            token_id
            for byte in range(256)
            for name in {f"<0x{byte:02X}>", f"<0x{byte:02x}>"}
            if (token_id := backend.token_to_id(name)) is not None
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> Self | None:
        """Return the tokenizer in folder `path`, or None when it has no `tokenizer.json`.

        Raises:
          CheckpointError: the file cannot be read as a tokenizer.
          ConfigError: `tokenizer_config.json` is not a JSON object.
        """
        file = Path(path) / FILE_NAME
        if not file.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every bad file
            raise CheckpointError(f"{file} is not a readable tokenizer: {error}") from error
        return cls(backend, read_json_object(Path(path) / "tokenizer_config.json"))

    def _special_id(self, configured: Any, fallback: str) -> int | None:
        name = configured.get("content") if isinstance(configured, dict) else configured
        return self._backend.token_to_id(name if isinstance(name, str) else fallback)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written out in it become their ids.

        With `add_bos` the ids start with exactly one BOS, however many `text` starts with (none,
        or the one of a chat template). Without it the text is encoded as it is.

        Raises:
          RequestError: `text` is not a string, or holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise RequestError(f"text is {text!r} ({type(text).__name__}); expected a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text is not valid Unicode: {error}") from error
        # The post-processor, which may add a BOS of its own, is not run.
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if not add_bos or self.bos_token_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_token_id:
            start += 1
        return [self.bos_token_id, *ids[start:]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; undecodable bytes become U+FFFD, unknown ids nothing.

        Raises:
          RequestError: an id is negative or does not fit 32 bits.
        """
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise RequestError(f"token ids hold one out of range; {_ID_RANGE}") from error

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of one id, or None when there is no such id.

        Raises:
          RequestError: the id is negative or does not fit 32 bits.
        """
        try:
            return self._backend.id_to_token(token_id)
        except OverflowError as error:
            raise RequestError(f"token id is {token_id}; {_ID_RANGE}") from error

    def to_json(self) -> str:
        """Return the tokenizer in the format of `tokenizer.json`."""
        return self._backend.to_str()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of one vocabulary entry, or None when there is no such entry."""
        return self._backend.token_to_id(token)


def require_tokenizer(tokenizer: Tokenizer | None, need: str) -> Tokenizer:
    """Return `tokenizer`, or say what to do without one.

    Args:
      tokenizer: what `Tokenizer.from_dir` returned.
      need: what the caller wants it for, such as "a text prompt".

    Raises:
      RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(
            f"{need} needs a tokenizer, and this checkpoint has no {FILE_NAME}; "
            "pass prompt_token_ids, or name a folder that holds one with tokenizer="
        )
    return tokenizer


class IncrementalDetokenizer:
    """Decodes a stream of token ids; what it returned never changes with later tokens.

    The pieces joined are `tokenizer.decode` of all ids. Two things are held back until they are
    settled: a run of byte-fallback tokens (an invalid byte at its end would turn the whole run
    into U+FFFD) and a text that ends in U+FFFD (a character whose bytes are still arriving).
    Each push decodes the new tokens and one token before them, so the cost per token is constant;
    only a run of undecodable bytes is decoded again while it lasts.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # the last token whose text is out: decoders look back
        self._pending: list[int] = []
        self._byte_run = 0  # byte-fallback tokens at the end of _pending

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is final once `ids` have arrived; "" while nothing is."""
        for token_id in ids:
            if self._has_no_text(token_id):
                continue
            self._pending.append(token_id)
            is_byte = token_id in self._tokenizer.byte_ids
            self._byte_run = self._byte_run + 1 if is_byte else 0
        settled = len(self._pending) - self._byte_run
        return self._take(settled, keep_incomplete=True) if settled else ""

    def finish(self) -> str:
        """Return what was held back, with U+FFFD for characters that never completed."""
        text = self._take(len(self._pending), keep_incomplete=False) if self._pending else ""
        self._context, self._byte_run = [], 0
        return text

    def _has_no_text(self, token_id: int) -> bool:
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return True
        return self._tokenizer.id_to_token(token_id) is None

    def _take(self, count: int, keep_incomplete: bool) -> str:
        """Return the text of the first `count` pending tokens and drop them."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending[:count])
        if keep_incomplete and text.endswith(_REPLACEMENT):
            return ""
        self._context = self._pending[count - 1 : count]
        del self._pending[:count]
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        # Special tokens are already filtered out where they are not wanted.
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopChecker:
    """Looks for stop strings in a stream of text, whatever way the text is cut into pieces.

    The match that completes first ends the stream; of two that complete together, the one that
    began first. Text that may be the start of a stop string is held back.

    Args:
      stop: the stop strings; none lets all text through.
      include_in_output: keep the stop string that hit in the text.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False):
        if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
            raise RequestError(f"stop is {stop!r}; expected a list of non-empty strings")
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text that may be shown, the stop string that hit or None).

        After a hit the text is "" and the hit stays.
        """
        if self.hit is not None:
            return "", self.hit
        buffer = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := buffer.find(s)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return buffer[: end if self._include_in_output else start], self.hit
        keep = max((_overlap(buffer, s) for s in self._stop), default=0)
        shown = len(buffer) - keep
        self._held = buffer[shown:]
        return buffer[:shown], None

    def finish(self) -> str:
        """Return the text that was held back; the stream ended without completing a match."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
