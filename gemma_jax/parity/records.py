"""Records as arrays: what an engine was given, what it chose, and its best candidates.

Reads this package's record files, vLLM's `RequestOutput` dumps and OpenAI-API completions, plain or
compressed (.gz, .xz). A file that cannot be compared is refused with a `RecordError` that names the
row and what is wrong.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.errors import ConfigError, RecordError
from gemma_jax.parity.compression import check_compression
from gemma_jax.parity.foreign import foreign_row, is_foreign
from gemma_jax.parity.record_header import DTYPES, check_header, is_count, model_of
from gemma_jax.records import LOGPROB_DECIMALS, read_lines

LOWEST_LOGPROB, LOGPROB_SLACK = float(np.finfo(np.float32).min), 1e-3
"""Range of a log-probability; one of nearly 0 may be rounded upwards."""

_Row = tuple[str, dict[str, Any]]

NO_CANDIDATE = -1
"""Pads `top_ids` where a position has fewer candidates than another; its logprob is -inf."""


@dataclass(frozen=True)
class Candidates:
    """The best candidates at T positions, best first, the lowest id first among equals.

    Attributes:
      ids: [T, K] int32, padded with `NO_CANDIDATE`.
      logprobs: [T, K] float32, natural logs, padded with -inf.
    """

    ids: np.ndarray
    logprobs: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """[T] the engine's own choice under greedy decoding."""
        return self.ids[:, 0]

    @property
    def margins(self) -> np.ndarray:
        """[T] float32: best minus second-best log-probability, in nats."""
        return self.logprobs[:, 0] - self.logprobs[:, 1]

    def logprob_of(self, ids: np.ndarray) -> np.ndarray:
        """[T, ...] log-probability of `ids` [T, ...] at each position; NaN where not listed."""
        flat = ids.reshape(len(ids), -1)
        match = (self.ids[:, None, :] == flat[:, :, None]) & (flat[:, :, None] != NO_CANDIDATE)
        at = match.argmax(-1)
        found = np.take_along_axis(self.logprobs, at, axis=1)
        return np.where(match.any(-1), found, np.nan).reshape(ids.shape)

    def as_pairs(self, decimals: int | None = LOGPROB_DECIMALS) -> list[list[list[Any]]]:
        """The field `top` of a record row: [[id, logprob], …] a position, without padding.

        `decimals=None` keeps every bit.
        """
        return [
            [
                [token, logprob if decimals is None else round(logprob, decimals)]
                for token, logprob in zip(ids, logprobs, strict=True)
                if token != NO_CANDIDATE
            ]
            for ids, logprobs in zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        ]

    @classmethod
    def of(cls, positions: list[list[tuple[int, float]]]) -> "Candidates":
        """From (id, logprob) pairs a position, in any order."""
        width = max([2, *map(len, positions)])
        ids = np.full((len(positions), width), NO_CANDIDATE, np.int32)
        logprobs = np.full((len(positions), width), -np.inf, np.float32)
        for t, pairs in enumerate(positions):
            for k, (token, logprob) in enumerate(sorted(pairs, key=lambda x: (-x[1], x[0]))):
                ids[t, k], logprobs[t, k] = token, logprob
        return cls(ids, logprobs)


@dataclass(frozen=True)
class Stream:
    """One prompt and its continuation.

    Attributes:
      id: of the prompt, unique in its record.
      prompt: [P] int32.
      tokens: [T] int32, what followed; position t was predicted from P + t tokens.
      top: candidates at each of the T positions; `None` when the record has none.
      batch: sequences that ran together, where the record says so.
      source: file and line of its row, for messages.
    """

    id: str | int
    prompt: np.ndarray
    tokens: np.ndarray
    top: Candidates | None = None
    batch: int | None = None
    source: str = ""

    @property
    def where(self) -> str:
        """Words for messages: file, line and id."""
        return f"{self.source or 'row'} {self.id!r}"

    @property
    def candidates(self) -> Candidates:
        """`top`, which a reference must have.

        Raises:
          RecordError: it has none.
        """
        if self.top is None:
            raise RecordError(f"{self.where}: no log-probabilities; record it with --logprobs 2")
        return self.top

    @property
    def sequence(self) -> list[int]:
        """Prompt and continuation, as `LLM.score` takes them."""
        return [*self.prompt.tolist(), *self.tokens.tolist()]


@dataclass(frozen=True)
class Record:
    """A record file in memory.

    Attributes:
      name: of the file, for messages.
      header: engine, versions, settings, `model`; fields that the source lacks are missing.
      streams: the rows, in order.
      failed: ids of rows that hold an error instead of tokens.
    """

    name: str
    header: dict[str, Any]
    streams: tuple[Stream, ...]
    failed: tuple[Any, ...] = ()

    @property
    def engine(self) -> str:
        return str(self.header.get("engine") or "unknown engine")

    @property
    def dtype(self) -> str | None:
        """Compute dtype of the run, or `None` when the record does not say."""
        dtype = self.header.get("dtype") or (self.header.get("settings") or {}).get("dtype")
        return dtype if dtype in DTYPES else None

    @property
    def model(self) -> dict[str, Any]:
        """What the header says of the model: name, vocab_size, config_sha256, weights_sha256."""
        return model_of(self.header)

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)


def read_record(path: str | Path, *, needs_logprobs: bool = True) -> Record:
    """Reads a record of any engine.

    Args:
      path: a record file (docs/records.md), JSON lines or a JSON list of vLLM `RequestOutput`s, or
        of OpenAI-API completions with logprobs.
      needs_logprobs: whether every position must list at least two candidates.

    Raises:
      RecordError: the file is damaged, mixes models, or lacks what a comparison needs.
    """
    check_compression(path)
    try:
        header, rows = _split(path)
    except ConfigError as error:
        raise RecordError(str(error)) from None
    streams: dict[str | int, Stream] = {}
    failed: list[_Row] = []
    for where, row in rows:
        if row.get("error") is not None:
            failed.append((where, row))
            continue
        stream = _stream(row, where, needs_logprobs, header)
        if stream.id in streams:
            raise RecordError(f"{where}: id {stream.id!r} is there twice")
        streams[stream.id] = stream
    if not streams:
        raise RecordError(_no_tokens(path, failed))
    ids = tuple(row.get("id") for _, row in failed)
    return Record(Path(path).name, header, tuple(streams.values()), ids)


def _no_tokens(path: str | Path, failed: Sequence[_Row]) -> str:
    if not failed:
        return f"{path}: a header, but no rows; record it again"
    where, row = failed[0]
    words = f"{path}: none of its {len(failed)} rows has tokens, all hold an error"
    return f"{words} ({where}: {row['error']!s:.200}); record it again"


# --- lines to rows ------------------------------------------------------------------------------


def _split(path: str | Path) -> tuple[dict[str, Any], list[_Row]]:
    """The header, and each row with the words that say where it stands."""
    objects = _objects(path)
    where, first = next(objects, ("", None))
    if first is None:
        raise RecordError(f"{path}: the file is empty; record it again")
    if "header" in first:
        if not isinstance(first["header"], dict):
            raise RecordError(f'{where}: "header" is not an object')
        check_header(first["header"], where)
        return first["header"], list(_rows(objects))
    if not is_foreign(first):
        raise RecordError(
            f"{where}: neither a record header, nor a vLLM RequestOutput, nor an OpenAI completion"
        )
    return _foreign(path)


def _objects(path: str | Path) -> Iterator[_Row]:
    lines = read_lines(path)
    start = next(lines, b"")
    if start.lstrip().startswith(b"["):
        yield from _listed(path, start + b"".join(lines))
        return
    number, line = 1, start
    while line:
        where = f"{path}, line {number}"
        if line.strip():
            yield where, _json(line, where)
        number, line = number + 1, next(lines, b"")


def _listed(path: str | Path, data: bytes) -> Iterator[_Row]:
    for number, value in enumerate(_decoded(data, str(path))):
        if not isinstance(value, dict):
            raise RecordError(f"{path}, entry {number}: {value!r:.60}: expected an object")
        yield f"{path}, entry {number}", value


def _json(line: bytes, where: str) -> dict[str, Any]:
    value = _decoded(line, where, "" if line.endswith(b"\n") else "the line is cut off, ")
    if not isinstance(value, dict):
        raise RecordError(f"{where}: {value!r:.60}: expected an object")
    return value


def _decoded(data: bytes, where: str, torn: str = "") -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        why = "nested too deeply"
    except json.JSONDecodeError as error:
        why = f"{error.msg}, character {error.pos}"
    except ValueError:  # not UTF-8, or an integer that Python does not convert
        why = "unreadable text, or a number of too many digits"
    raise RecordError(f"{where}: {torn}not valid JSON ({why}); record it again")


def _rows(objects: Iterable[_Row]) -> Iterator[_Row]:
    for where, row in objects:
        if "header" in row:
            raise RecordError(f"{where}: a second header; the file mixes two runs, split it")
        if "id" not in row:
            raise RecordError(f'{where}: no "id"')
        yield where, row


def _foreign(path: str | Path) -> tuple[dict[str, Any], list[_Row]]:
    rows: list[_Row] = []
    header: dict[str, Any] = {}
    for number, (where, value) in enumerate(_objects(path)):
        engine, model, row = foreign_row(value, number, where)
        rows.append((where, row))
        for name, found in (("engine", engine), ("model", model)):
            if found and header.setdefault(name, found) != found:
                raise RecordError(
                    f"{where}: of the {name} {found!r}, but the rows before it of"
                    f" {header[name]!r}; split the file by {name}"
                )
    return header, rows


# --- rows to arrays -----------------------------------------------------------------------------


def _stream(
    row: dict[str, Any], where: str, needs_logprobs: bool, header: dict[str, Any]
) -> Stream:
    row_id = row["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise RecordError(f"{where}: id={row_id!r}: expected a string or an integer")
    source, where = f"{where}, row", f"{where}, row {row_id!r}"
    prompt = _ids(row, "prompt_token_ids", where)
    tokens = _ids(row, "token_ids", where)
    if not len(prompt) or not len(tokens):
        raise RecordError(f"{where}: a prompt or a continuation without tokens")
    top = _candidates(row.get("top"), tokens, where) if needs_logprobs or "top" in row else None
    batch = row.get("batch", (header.get("settings") or header).get("max_num_seqs"))
    if batch is not None and not is_count(batch):
        raise RecordError(
            f"{where}: batch={batch!r:.60}: expected an integer of at least 1; correct it or leave"
            " it out"
        )
    return Stream(row_id, prompt, tokens, top, batch, source)


def _ids(row: dict[str, Any], name: str, where: str) -> np.ndarray:
    values = row.get(name)
    if not isinstance(values, list) or any(type(x) is not int for x in values):
        raise RecordError(f"{where}: {name} is missing or not a list of integers")
    if values and not 0 <= min(values) <= max(values) < 2**31:
        raise RecordError(f"{where}: {name} has an id outside [0, 2**31)")
    return np.array(values, np.int32)


def _candidates(top: Any, tokens: np.ndarray, where: str) -> Candidates:
    if not isinstance(top, list) or not top:
        raise RecordError(f'{where}: no log-probabilities ("top"); record it with --logprobs 2')
    if len(top) != len(tokens):
        raise RecordError(f"{where}: {len(tokens)} tokens, but candidates at {len(top)} positions")
    positions = []
    for t, pairs in enumerate(top):
        if not isinstance(pairs, list) or len(pairs) < 2:
            raise RecordError(
                f"{where}, token {t}: fewer than two candidates; --logprobs 2 or more"
            )
        positions.append([_pair(pair, f"{where}, token {t}") for pair in pairs])
        if len({token for token, _ in positions[-1]}) < len(pairs):
            raise RecordError(f"{where}, token {t}: a candidate is listed twice")
    return Candidates.of(positions)


def _pair(pair: Any, where: str) -> tuple[int, float]:
    match pair:
        case [int(token), int() | float() as logprob] if not isinstance(token, bool):
            if 0 <= token < 2**31 and LOWEST_LOGPROB <= logprob <= LOGPROB_SLACK:
                return token, float(logprob)
    raise RecordError(
        f"{where}: candidate {pair!r:.60}: expected [id, logprob], a finite float32 of at most 0;"
        " record it again"
    )


# --- what a record is compared with -------------------------------------------------------------


OWN_MODEL = "give the model that it was recorded with as --model"
"""The remedy for a record of another model."""


def check_vocabulary(record: Record, vocab_size: int) -> None:
    """Refuses a record of a model with another vocabulary, or with ids outside this one.

    Raises:
      RecordError: sizes differ, or the row, place and id that is out of range.
    """
    theirs = record.model.get("vocab_size")
    if theirs is not None and theirs != vocab_size:
        raise RecordError(
            f"{record.name}: recorded with a vocabulary of {theirs}, but the model has"
            f" {vocab_size}; it is of another tokenizer: {OWN_MODEL}"
        )
    for stream in record.streams:
        named = {"prompt_token_ids": stream.prompt, "token_ids": stream.tokens}
        if stream.top is not None:
            named["top"] = stream.top.ids
        for name, ids in named.items():
            if ids.size and ids.max() >= vocab_size:
                place = tuple(int(i) for i in np.argwhere(ids >= vocab_size)[0])
                raise RecordError(
                    f"{stream.where}: {name}{list(place)}={int(ids[place])}, outside the"
                    f" vocabulary of {vocab_size}; {OWN_MODEL}"
                )


def check_model(record: Record, identity: dict[str, Any], remedy: str = OWN_MODEL) -> None:
    """Refuses a record of a model other than `identity` (of `model_identity`).

    Raises:
      RecordError: configurations or weights differ; hashes that either side lacks are not compared.
    """
    check_identity(record.name, record.model, identity, remedy)


def check_identity(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], remedy: str = OWN_MODEL
) -> None:
    """`check_model` for any file: `name` is the file's, `theirs` the identity in it."""
    for key, what in (("config_sha256", "configuration"), ("weights_sha256", "weights")):
        a, b = theirs.get(key), ours.get(key)
        if a and b and a != b:
            raise RecordError(
                f"{name}: recorded with other {what} ({theirs.get('name')}, {key} {str(a)[:12]}…)"
                f" than {ours.get('name')} ({str(b)[:12]}…); {remedy}"
            )


def check_twin(record: Record, twin: Record) -> None:
    """Refuses a float32 record that is not of the same model and the same tokens as `record`.

    Raises:
      RecordError: what differs, and how to make the twin.
    """
    remedy = f"make it with --teacher-force {record.name} --dtype float32"
    if twin.dtype not in (None, "float32"):
        raise RecordError(f"{twin.name}: a {twin.dtype} record, expected float32; {remedy}")
    check_model(record, twin.model, remedy)
    theirs = {stream.id: stream for stream in twin.streams}
    for stream in record.streams:
        other = theirs.get(stream.id)
        if other is None:
            raise RecordError(f"{twin.name}: no row {stream.id!r} of {record.name}; {remedy}")
        if other.sequence != stream.sequence or len(other.tokens) != len(stream.tokens):
            raise RecordError(f"{twin.name}, row {stream.id!r}: other tokens; {remedy}")
