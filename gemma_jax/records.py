"""Record files: what a run was asked and what it generated, as JSON lines (docs/records.md).

The first line is `{"header": {...}}`, then comes one row per prompt in input order. Offline jobs
and parity comparisons write and read this one format, whichever engine made the tokens.
"""

import contextlib
import datetime
import gzip
import json
import logging
import lzma
import math
import os
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from gemma_jax.errors import ConfigError
from gemma_jax.jsonlines import encode_line, is_regular, lock_output, open_output
from gemma_jax.outputs import PositionLogprobs, RequestOutput
from gemma_jax.system_info import device_info, driver_version, package_versions

logger = logging.getLogger(__name__)

FORMAT = "gemma-jax-records/1"
_HEADER_START = b'{"header":'
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
# Header fields that may differ between the runs that together write one file.
_NOT_COMPARED = frozenset({"created_utc"})
# Enough for float32: one unit in its last place at 1 nat is 1.2e-7.
LOGPROB_DECIMALS = 7


def make_header(
    settings: dict[str, Any], *, engine: str = "gemma_jax", **extra: Any
) -> dict[str, Any]:
    """Return a header: format, engine, versions, driver, device, `settings` and the time.

    Args:
      settings: the options of the run, as asked for.
      engine: who generates the tokens.
      extra: further top-level fields; they must be equal for a run to be resumed.
    """
    now = datetime.datetime.now(datetime.UTC)
    return {
        "format": FORMAT,
        "engine": engine,
        "versions": package_versions(),
        "driver": driver_version(),
        "device": device_info(),
        "settings": settings,
        **extra,
        "created_utc": now.isoformat(timespec="seconds"),
    }


def make_row(row_id: str | int | None, output: RequestOutput) -> dict[str, Any]:
    """Return the row of one finished request: its first completion, or its error."""
    if output.error is not None:
        row = error_row(row_id, output.error)
        return row | {"prompt_token_ids": list(output.prompt_token_ids)}
    completion = output.outputs[0]
    row = {
        "id": row_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is None:
        return row
    top = [_best_first(position) for position in completion.logprobs]
    if not all(math.isfinite(logprob) for position in top for _, logprob in position):
        return error_row(row_id, "a logprob is not finite; the model's logits overflowed")
    sampled = zip(completion.token_ids, completion.logprobs, strict=True)
    row["logprobs"] = [_rounded(position[token_id].logprob) for token_id, position in sampled]
    row["top"] = top
    return row


def error_row(row_id: str | int | None, error: str, **extra: Any) -> dict[str, Any]:
    """Return the row of a prompt that failed; `row_id` is None when its line had no readable id."""
    return {"id": row_id, **extra, "error": error}


def _rounded(logprob: float) -> float:
    return round(float(logprob), LOGPROB_DECIMALS)


def _best_first(position: PositionLogprobs) -> list[list[Any]]:
    ranked = sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))
    return [[token_id, _rounded(entry.logprob)] for token_id, entry in ranked]


class Records(NamedTuple):
    """A record file that was read: its header, and its rows, read while they are iterated."""

    header: dict[str, Any]
    rows: Iterator[dict[str, Any]]


def read_lines(path: str | Path) -> Generator[bytes]:
    """Yield the lines of a file, `.gz` and `.xz` unpacked on the way.

    Raises:
      ConfigError: no such file, or its compressed data is damaged or cut off.
    """
    opener = _OPENERS.get(Path(path).suffix, open)
    try:
        with opener(path, "rb") as file:
            yield from file
    except _DAMAGED as error:
        raise ConfigError(
            f"file {path}: compressed data is damaged or cut off: {error}; record it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}") from error


def read_records(path: str | Path) -> Records:
    """Return header and rows of a complete record file, which may be compressed (.gz, .xz).

    Raises:
      ConfigError: no such file, not a record file, or (while iterating) a line is torn or damaged.
    """
    header = _parse_header(next(read_lines(path), b""), path)
    return Records(header, _read_rows(Path(path)))


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.closing(read_lines(path)) as lines:
        next(lines)
        for number, line in enumerate(lines, start=2):
            row = _parse_row(line)
            if row is None:
                raise ConfigError(f"record file {path}: line {number} is torn or not a row")
            yield row


def _parse_header(line: bytes, path: str | Path) -> dict[str, Any]:
    try:
        header = json.loads(line)["header"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f'{path} is not a record file: its first line is not {{"header": ...}}')
    return header


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "id" in row else None


class Progress(NamedTuple):
    """What a record file already holds: its rows, and how many of them are errors."""

    rows: int
    failed: int


class RecordWriter:
    """Writes one record file, after the rows that an interrupted run left in it.

    Opening it fails early on an output that cannot be written. The file stays locked while it is
    open; a file that this writer made and never wrote to is removed again.

    Args:
      path: an absent, empty or unfinished record file.

    Raises:
      ConfigError: the path cannot be written, is not a regular file, or another run has it open.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._created = not self.path.exists()
        self._file: BinaryIO = open_output(self.path)
        try:
            self._claim()
        except ConfigError:
            self._file.close()
            raise

    def _claim(self) -> None:
        if not is_regular(self._file):
            raise ConfigError(f"output {self.path} is not a regular file; use - for stdout")
        lock_output(self._file, self.path)
        self._has_header()

    def _has_header(self) -> bool:
        """Return whether there is a whole header; raise when the content is something else."""
        self._file.seek(0)
        line = self._file.readline()
        if not line.endswith(b"\n") and _HEADER_START.startswith(line[: len(_HEADER_START)]):
            return False
        try:
            _parse_header(line, self.path)
        except ConfigError as error:
            raise ConfigError(f"output {error}; it is left as it is, choose another name") from None
        return True

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise ConfigError when the file was begun with other settings than these."""
        if self._has_header():
            self._file.seek(0)
            header = _parse_header(self._file.readline(), self.path)
            self._refuse_differences({"settings": header.get("settings")}, {"settings": settings})

    def start(self, header: dict[str, Any], ids: Iterable[str | int | None]) -> Progress:
        """Write the header, or keep the finished rows of a file that has an equal one.

        Args:
          header: from `make_header`.
          ids: the id of each prompt, in input order.

        Returns:
          How many of the first prompts have their row. A torn last line, and anything from a
          damaged line on, is cut off.

        Raises:
          ConfigError: the header differs (the message lists where), or a row is of another prompt.
        """
        if not self._has_header():
            self._file.seek(0)
            self._file.truncate()
            self._file.write(encode_line({"header": header}))
            self._file.flush()
            return Progress(0, 0)
        self._file.seek(0)
        old = _parse_header(self._file.readline(), self.path)
        # Through JSON, so that tuples and lists compare equal.
        self._refuse_differences(old, json.loads(encode_line(header)))
        return self._keep_rows(ids)

    def _refuse_differences(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        differences = list(_differences(old, new))
        if differences:
            raise ConfigError(
                f"output {self.path} was begun by a different run and cannot be resumed: "
                f"{'; '.join(differences)}. Choose another --output or delete the file."
            )

    def _keep_rows(self, ids: Iterable[str | int | None]) -> Progress:
        rows = failed = 0
        end = self._file.tell()
        expected = iter(ids)
        for line in self._file:
            row = _parse_row(line)
            if row is None:
                logger.warning("%s: cut after %d whole rows", self.path, rows)
                break
            if next(expected, _NoPrompt) != row["id"]:
                raise ConfigError(
                    f"output {self.path}: row {rows + 1} has id {row['id']!r}, which is not the id "
                    f"of prompt {rows + 1}; choose another --output"
                )
            rows += 1
            failed += "error" in row
            end += len(line)
        self._file.seek(end)
        self._file.truncate()
        return Progress(rows, failed)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows and hand them to the operating system.

        Raises:
          ConfigError: the disk is full or failing; what was written before can be resumed.
        """
        try:
            self._file.write(b"".join(encode_line(row) for row in rows))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"output {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Release the file; one that was made here and stayed empty is removed."""
        if self._file.closed:
            return
        if self._created and os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StdoutWriter:
    """Writes records to stdout, where nothing can be resumed; otherwise as RecordWriter."""

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Accept any settings."""

    def start(self, header: dict[str, Any], ids: Iterable[str | int | None]) -> Progress:
        """Write the header."""
        self._write({"header": header})
        return Progress(0, 0)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows."""
        self._write(*rows)

    def _write(self, *values: dict[str, Any]) -> None:
        sys.stdout.write(b"".join(map(encode_line, values)).decode())
        sys.stdout.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _NoPrompt:
    """Stands for the id after the last one; equal to no id."""


def _differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            if name or key not in _NOT_COMPARED:
                path = f"{name}.{key}" if name else key
                yield from _differences(old.get(key), new.get(key), path)
    elif old != new:
        yield f"{name} was {json.dumps(old)} and is now {json.dumps(new)}"
