"""Input of a batch job: JSON lines in the OpenAI batch format, or plain prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemma_jax.errors import ConfigError
from gemma_jax.request_lines import (
    BadLineError,
    LineFile,
    RowId,
    json_object,
    prompt_of,
    refuse_unknown,
)
from gemma_jax.serve.bodies import BODY_READERS

COMPLETIONS_URL = "/v1/completions"
_ROW_FIELDS = ("custom_id", "method", "url", "body")


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


class BatchInput(LineFile):
    """The rows of a batch job, read anew for every pass: in memory are only their ids.

    Attributes:
      ids: the custom_id of every row.

    Raises:
      ConfigError: the file has no rows, or one id on two lines.
    """

    def _scan(self) -> None:
        self.ids: set[RowId] = set()
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
        return (parse_row(number, line) for number, line in self.lines())


def parse_row(number: int, line: bytes) -> BatchRow:
    """Return the row on line `number`; what is wrong with it is in its `error`."""
    custom_id: RowId = f"line-{number}"
    try:
        fields = json_object(line)
        is_prompt = "custom_id" not in fields and "id" in fields
        custom_id = _row_id(fields, "id" if is_prompt else "custom_id")
        if is_prompt:
            (prompt,) = prompt_of(fields).values()
            return BatchRow(number, custom_id, COMPLETIONS_URL, {"prompt": prompt}, is_prompt)
        return BatchRow(number, custom_id, *_request(fields))
    except BadLineError as error:
        return BatchRow(number, custom_id, error=f"line {number}: {error}")


def _row_id(fields: dict[str, Any], name: str) -> RowId:
    value = fields.get(name)
    allowed = str | int if name == "id" else str
    if value == "" or isinstance(value, bool) or not isinstance(value, allowed):
        expected = "a string or an integer" if name == "id" else "a string"
        raise BadLineError(f'"{name}" is {value!r}; expected {expected}')
    return value


def _request(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    refuse_unknown(fields, _ROW_FIELDS)
    url, body = fields.get("url"), fields.get("body")
    if fields.get("method") != "POST":
        raise BadLineError(f'"method" is {fields.get("method")!r}; expected "POST"')
    if not isinstance(url, str) or url not in BODY_READERS:
        raise BadLineError(f'"url" is {url!r}; supported are {", ".join(BODY_READERS)}')
    if not isinstance(body, dict):
        raise BadLineError(f'"body" is a JSON {type(body).__name__}; expected an object')
    return url, body
