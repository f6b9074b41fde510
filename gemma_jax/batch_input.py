"""Input of a batch job: JSON lines in the OpenAI batch format, or plain prompts."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from gemma_jax.errors import ConfigError
from gemma_jax.serve.bodies import BODY_READERS

RowId = str | int

COMPLETIONS_URL = "/v1/completions"
_ROW_FIELDS = ("custom_id", "method", "url", "body")
_PROMPT_FIELDS = ("id", "prompt", "prompt_token_ids")


@dataclass(frozen=True)
class BatchRow:
    """One line of the input.

    Attributes:
      number: of the line, from 1.
      custom_id: its key in the output; `line-<number>` when the line has no readable one.
      url, body: the request, or None when the line is malformed.
      is_prompt: whether it is a plain prompt, `{"id", "prompt" | "prompt_token_ids"}`.
      error: what is wrong with the line, or None.
    """

    number: int
    custom_id: RowId
    url: str | None = None
    body: dict[str, Any] | None = None
    is_prompt: bool = False
    error: str | None = None


class BatchInput:
    """The rows of a batch job, read anew for every pass: in memory are only their ids.

    Args:
      file: seekable; closed with this object.
      name: of the file in messages.

    Attributes:
      ids: the custom_id of every row.

    Raises:
      ConfigError: the file has no rows, or one id on two lines.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file = file
        self.name = name
        self.ids: set[RowId] = set()
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str) -> Self:
        """Return the rows of a file; "-" copies stdin to a temporary file first.

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
            raise ConfigError(f"input {path} cannot be read: {error.strerror}") from error

    def _scan(self) -> None:
        for row in self.rows():
            if row.custom_id in self.ids:
                first = next(r.number for r in self.rows() if r.custom_id == row.custom_id)
                raise ConfigError(
                    f"{self.name}: custom_id {row.custom_id!r} is on line {first} and on line"
                    f" {row.number}; custom_ids must differ"
                )
            self.ids.add(row.custom_id)
        if not self.ids:
            raise ConfigError(f"{self.name} has no rows")

    def rows(self) -> Iterator[BatchRow]:
        """Yield the rows in order; blank lines are none."""
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                yield parse_row(number, line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BadRowError(Exception):
    """A line is not usable; the text says why."""


def parse_row(number: int, line: bytes) -> BatchRow:
    """Return the row on line `number`; what is wrong with it is in its `error`."""
    custom_id: RowId = f"line-{number}"
    try:
        fields = _json_object(line)
        is_prompt = "custom_id" not in fields and "id" in fields
        custom_id = _row_id(fields, "id" if is_prompt else "custom_id")
        if is_prompt:
            return BatchRow(number, custom_id, COMPLETIONS_URL, _prompt_body(fields), is_prompt)
        return BatchRow(number, custom_id, *_request(fields))
    except _BadRowError as error:
        return BatchRow(number, custom_id, error=f"line {number}: {error}")


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadRowError(f"not UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _BadRowError(f"a JSON {type(fields).__name__}; expected an object")
    return fields


def _row_id(fields: dict[str, Any], name: str) -> RowId:
    value = fields.get(name)
    allowed = str | int if name == "id" else str
    if value == "" or isinstance(value, bool) or not isinstance(value, allowed):
        expected = "a string or an integer" if name == "id" else "a string"
        raise _BadRowError(f'"{name}" is {value!r}; expected {expected}')
    return value


def _request(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    _refuse_unknown(fields, _ROW_FIELDS)
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method") != "POST":
        raise _BadRowError(f'"method" is {fields.get("method")!r}; expected "POST"')
    if not isinstance(url, str) or url not in BODY_READERS:
        raise _BadRowError(f'"url" is {url!r}; supported are {", ".join(BODY_READERS)}')
    if not isinstance(body, dict):
        raise _BadRowError(f'"body" is a JSON {type(body).__name__}; expected an object')
    return url, body


def _prompt_body(fields: dict[str, Any]) -> dict[str, Any]:
    _refuse_unknown(fields, _PROMPT_FIELDS)
    given = [name for name in _PROMPT_FIELDS[1:] if name in fields]
    if len(given) != 1:
        raise _BadRowError('expected one of "prompt" and "prompt_token_ids"')
    value = fields[given[0]]
    kind, expected = (str, "a string") if given[0] == "prompt" else (list, "a list of token ids")
    if not isinstance(value, kind):
        raise _BadRowError(f'"{given[0]}" is a {type(value).__name__}; expected {expected}')
    return {"prompt": value}


def _refuse_unknown(fields: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise _BadRowError(f"unknown field {name!r} (allowed: {', '.join(known)})")
