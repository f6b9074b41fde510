"""Prompts of `gemma-jax generate`: JSON lines, checked row by row."""

import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from gemma_jax.errors import ConfigError
from gemma_jax.request_lines import BadLineError, LineFile, json_object, prompt_of


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


class PromptFile(LineFile):
    """JSON lines of prompts, read anew for every pass so that they may be larger than memory.

    Attributes:
      num_prompts: how many there are.
      sha256: of their lines.

    Raises:
      ConfigError: the file cannot be read, has no rows, or has an id twice.
    """

    what = "--prompts"

    @classmethod
    def from_texts(cls, texts: list[str]) -> Self:
        """Return prompts with the ids 0, 1, ..."""
        rows = [{"id": index, "prompt": text} for index, text in enumerate(texts)]
        return cls(io.BytesIO("\n".join(map(json.dumps, rows)).encode()), "--prompt")

    def _scan(self) -> None:
        digest = hashlib.sha256()
        first_line: dict[str | int, int] = {}
        count = 0
        for number, line in self.lines():
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
        self.num_prompts, self.sha256 = count, digest.hexdigest()

    def ids(self) -> Iterator[str | int | None]:
        """Yield the id of each prompt."""
        return (_parse(number, line)[0] for number, line in self.lines())

    def prompts(self, start: int = 0) -> Iterator[Prompt]:
        """Yield the prompts from position `start` on."""
        rows = itertools.islice(enumerate(self.lines()), start, None)
        for position, (number, line) in rows:
            row_id, request, error = _parse(number, line)
            yield Prompt(position, row_id, request, error)


def _parse(number: int, line: bytes) -> tuple[str | int | None, dict[str, Any] | None, str | None]:
    """Return (id, request, None) of a line, or (id or None, None, error)."""
    row_id = None
    try:
        row = json_object(line)
        row_id = _checked_id(row)
        return row_id, prompt_of(row), None
    except BadLineError as error:
        return row_id, None, f"line {number}: {error}"


def _checked_id(row: dict[str, Any]) -> str | int:
    if "id" not in row:
        raise BadLineError('no "id"; expected a string or an integer')
    row_id = row["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise BadLineError(f'"id" is {row_id!r}; expected a string or an integer')
    return row_id
