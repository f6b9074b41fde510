"""Output of a batch job: one JSON line a finished row, in the order in which rows finish."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from gemma_jax.errors import ConfigError
from gemma_jax.jsonlines import encode_line, is_regular, lock_output, open_output
from gemma_jax.request_lines import RowId

ROW_START = b'{"id":"batch_'


class Output(Protocol):
    """Where result rows go."""

    def finished_rows(self) -> dict[RowId, bool]:
        """Return custom_id -> whether it failed, of the rows that are there already."""
        ...

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and hand them to the operating system."""
        ...


class BatchFile:
    """The output file of a batch job; an unfinished one is continued.

    The file stays locked while it is open; one that was made here and stayed empty is removed
    again. A device or a pipe is written to, but cannot be continued.

    Args:
      path: an absent, empty or unfinished output file.

    Raises:
      ConfigError: it cannot be written, another run has it open, or it holds something else.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._created = not self.path.exists()
        self._file = open_output(self.path)
        self._regular = is_regular(self._file)
        self._rows: dict[RowId, bool] = {}
        self._end, self._repaired = 0, False
        try:
            if self._regular:
                lock_output(self._file, self.path)
                self._end = self._read_rows()
        except ConfigError:
            self._file.close()
            raise

    def finished_rows(self) -> dict[RowId, bool]:
        """Return custom_id -> whether it failed, of the rows that are there already."""
        return dict(self._rows)

    def _read_rows(self) -> int:
        """Read the whole rows; return where they end. A torn last line is overwritten later."""
        end = 0
        for number, line in enumerate(self._file, start=1):
            row = _parse(line)
            if row is None and _is_torn(line):
                break  # the run ended in the middle of it
            if row is None or row["custom_id"] in self._rows:
                what = "is not a result row" if row is None else "repeats a custom_id"
                raise ConfigError(
                    f"output {self.path}: line {number} {what}; the file is left as it is,"
                    " choose another name"
                )
            self._rows[row["custom_id"]] = row.get("error") is not None
            end += len(line)
        return end

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows and hand them to the operating system.

        Raises:
          ConfigError: the disk is full or failing; the rows written before can be continued.
        """
        data = b"".join(encode_line(dict(row)) for row in rows)
        try:
            if not self._regular:
                _write_all(self._file, data)
                return
            if not self._repaired:
                self._repair()
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"output {self.path}: {error.strerror}; the rows before are whole, and the same"
                " command goes on after them"
            ) from error
        self._end += len(data)

    def _repair(self) -> None:
        """Cut off a torn last line, and end a whole one where only its line end is missing."""
        self._file.seek(self._end)
        self._file.truncate()
        if self._end:
            self._file.seek(self._end - 1)
            if self._file.read(1) != b"\n":
                self._end += self._file.write(b"\n")
        self._repaired = True

    def close(self) -> None:
        """Release the file."""
        if self._file.closed:
            return
        if self._created and self._regular and self._end == 0:
            self.path.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            pass  # a full disk: what could not be written was reported by `write`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BatchStdout:
    """Result rows on stdout, where nothing can be continued."""

    def finished_rows(self) -> dict[RowId, bool]:
        """Return no rows."""
        return {}

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows."""
        sys.stdout.write(b"".join(encode_line(dict(row)) for row in rows).decode())
        sys.stdout.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]


def _is_torn(line: bytes) -> bool:
    return not line.endswith(b"\n") and ROW_START.startswith(line[: len(ROW_START)])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    valid = isinstance(row, dict) and isinstance(row.get("custom_id"), str | int)
    return row if valid and "response" in row else None
