"""Prompts of `gemma-jax generate`: JSON lines, checked row by row."""

import hashlib
import io
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

from gemma_jax.errors import ConfigError

FIELDS = ("id", "prompt", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a run.

    Args:
      position: 0 for the first prompt of the run.
      id: of its row; None when the line had no readable one.
      request: what `LLM.generate` takes; None when the row is bad.
      error: what is wrong with the row, or None.
    """

    position: int
    id: str | int | None
    request: dict[str, Any] | None
    error: str | None = None


class PromptFile:
    """JSON lines of prompts, read anew for every pass so that they may be larger than memory.

    Args:
      file: seekable; closed with this object.
      name: of the file in messages.

    Raises:
      ConfigError: the file cannot be read, has no rows, or has an id twice.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file = file
        self.name = name
        try:
            self.num_prompts, self.sha256 = self._scan()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """Return the prompts of a file; "-" copies stdin to a temporary file first."""
        try:
            if path != "-":
                return cls(open(path, "rb"), path)
            spool = tempfile.TemporaryFile()
            shutil.copyfileobj(sys.stdin.buffer, spool)
            return cls(spool, "stdin")
        except OSError as error:
            raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}") from error

    @classmethod
    def from_texts(cls, texts: list[str]) -> Self:
        """Return prompts with the ids 0, 1, ..."""
        rows = [{"id": index, "prompt": text} for index, text in enumerate(texts)]
        return cls(io.BytesIO("\n".join(map(json.dumps, rows)).encode()), "--prompt")

    def _scan(self) -> tuple[int, str]:
        digest = hashlib.sha256()
        first_line: dict[str | int, int] = {}
        count = 0
        for number, line in self._lines():
            digest.update(line)
            count += 1
            row_id = _parse(number, line)[0]
            if row_id is None:
                continue
            if row_id in first_line:
                raise ConfigError(
                    f"{self.name}: id {row_id!r} is on line {first_line[row_id]} and on "
                    f"line {number}; ids must differ"
                )
            first_line[row_id] = number
        if not count:
            raise ConfigError(f"{self.name} has no rows")
        return count, digest.hexdigest()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number from 1, line) of the lines that are not blank."""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                yield number, line

    def ids(self) -> Iterator[str | int | None]:
        """Yield the id of each prompt."""
        return (_parse(number, line)[0] for number, line in self._lines())

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        """Yield the prompts from position `start` on."""
        rows = itertools.islice(enumerate(self._lines()), start, None)
        for position, (number, line) in rows:
            row_id, request, error = _parse(number, line)
            yield Prompt(position, row_id, request, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BadRow(Exception):
    """A row is not usable; the text says why."""


def _parse(number: int, line: bytes) -> tuple[str | int | None, dict[str, Any] | None, str | None]:
    """Return (id, request, None) of a line, or (id or None, None, error)."""
    row_id = None
    try:
        row = _parse_json(line)
        row_id = _checked_id(row)
        return row_id, _checked_request(row), None
    except _BadRow as error:
        return row_id, None, f"line {number}: {error}"


def _parse_json(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadRow(f"a JSON {type(row).__name__}; expected an object")
    return row


def _checked_id(row: dict[str, Any]) -> str | int:
    if "id" not in row:
        raise _BadRow('no "id"; expected a string or an integer')
    row_id = row["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise _BadRow(f'"id" is {row_id!r}; expected a string or an integer')
    return row_id


def _checked_request(row: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in row if name not in FIELDS]
    if unknown:
        raise _BadRow(f"unknown field {unknown[0]!r} (allowed: {', '.join(FIELDS)})")
    given = [name for name in FIELDS[1:] if name in row]
    if len(given) != 1:
        raise _BadRow('expected one of "prompt" and "prompt_token_ids"')
    value = row[given[0]]
    if given[0] == "prompt" and not isinstance(value, str):
        raise _BadRow(f'"prompt" is a {type(value).__name__}; expected a string')
    if given[0] == "prompt_token_ids" and not _is_id_list(value):
        raise _BadRow('"prompt_token_ids" is not a list of integers')
    return {given[0]: value}


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)
