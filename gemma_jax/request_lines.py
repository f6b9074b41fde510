"""Files of requests, a JSON object a line: what prompts and batch jobs have in common."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

from gemma_jax.errors import ConfigError

RowId = str | int
PROMPT_FIELDS = ("id", "prompt", "prompt_token_ids")
"""Fields of a plain prompt; one of the last two is there."""


class BadLineError(Exception):
    """A line is not usable; the text says why."""


class LineFile:
    """A file of requests, read anew for every pass so that it may be larger than memory.

    Args:
      file: seekable; closed with this object.
      name: of the file in messages.

    Raises:
      ConfigError: what `_scan` finds wrong with the file as a whole.
    """

    what: ClassVar[str] = "input"
    """How messages call a file that cannot be read."""

    def __init__(self, file: BinaryIO, name: str):
        self._file = file
        self.name = name
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """Return the lines of a file; "-" copies stdin to a temporary file first.

        Raises:
          ConfigError: it cannot be read, and as for the class.
        """
        try:
            if path != "-":
                return cls(Path(path).open("rb"), path)
            spool = tempfile.TemporaryFile()
            shutil.copyfileobj(sys.stdin.buffer, spool)
            return cls(spool, "stdin")
        except OSError as error:
            raise ConfigError(f"{cls.what} {path} cannot be read: {error.strerror}") from error

    def _scan(self) -> None:
        """Go through the file once and check what concerns more than one line."""
        raise NotImplementedError

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number from 1, line) of the lines that are not blank."""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                yield number, line

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def json_object(line: bytes) -> dict[str, Any]:
    """The object on a line.

    Raises:
      BadLineError: there is none.
    """
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadLineError(f"not UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadLineError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadLineError(f"a JSON {type(fields).__name__}; expected an object")
    return fields


def refuse_unknown(fields: dict[str, Any], known: tuple[str, ...]) -> None:
    """Check that an object has no other fields.

    Raises:
      BadLineError: it has.
    """
    for name in fields:
        if name not in known:
            raise BadLineError(f"unknown field {name!r} (allowed: {', '.join(known)})")


def prompt_of(fields: dict[str, Any]) -> dict[str, Any]:
    """{"prompt": text} or {"prompt_token_ids": ids} of a plain prompt.

    Raises:
      BadLineError: it has other fields, none of the two or both, or one of a wrong type.
    """
    refuse_unknown(fields, PROMPT_FIELDS)
    given = [name for name in PROMPT_FIELDS[1:] if name in fields]
    if len(given) != 1:
        raise BadLineError('expected one of "prompt" and "prompt_token_ids"')
    value = fields[given[0]]
    if given[0] == "prompt" and not isinstance(value, str):
        raise BadLineError(f'"prompt" is a {type(value).__name__}; expected a string')
    if given[0] == "prompt_token_ids" and not _is_id_list(value):
        raise BadLineError('"prompt_token_ids" is not a list of integers')
    return {given[0]: value}


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
