"""Batch jobs: rows of requests through one engine, a bounded number of them at a time.

A row is read when there is room for it and written when its last completion ends, so memory does
not grow with the job. Which rows are done is in the output alone: the same job started again goes
on where it stopped.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemma_jax.batch_input import BatchInput, BatchRow
from gemma_jax.batch_output import Output
from gemma_jax.errors import CapacityError, ConfigError, GemmaError, UnsupportedError
from gemma_jax.request_lines import RowId
from gemma_jax.serve.bodies import field_of
from gemma_jax.serve.exchange import Exchange, open_exchange
from gemma_jax.serve.request import CompletionDelta, EngineRequest
from gemma_jax.text_side import TextSide

DEFAULT_PROMPT_TOKENS = 256
"""`max_tokens` of a plain prompt for which nothing is said."""
_SEED_RANGE = 2**63


class Engine(Protocol):
    """What a batch job needs of the engine."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request; CapacityError when there is no room for it now."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing more comes of it."""
        ...

    def step(self) -> list[CompletionDelta]:
        """Run the device once; return what was generated."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        ...


@dataclass
class BatchProgress:
    """How far a job is.

    Attributes:
      total: rows of the input.
      resumed: rows that an earlier run had finished.
      succeeded, failed: rows finished so far, the resumed ones included.
      prompt_tokens, generated_tokens: of this run.
      seconds: since this run began.
    """

    total: int
    resumed: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    @property
    def finished(self) -> int:
        """Rows that have their result."""
        return self.succeeded + self.failed

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second of this run."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


@dataclass
class BatchSettings:
    """How the rows of a job run.

    Attributes:
      model: name that the responses give the model; a body with another one is refused.
      sampling: body fields for rows that do not set them.
      seed: row number i, from 0, samples with seed + i unless its body has a seed.
      max_in_flight: most completions that are in the engine at a time.
    """

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_in_flight: int = 128


def run_batch(
    source: BatchInput,
    output: Output,
    text: TextSide,
    engine: Engine,
    settings: BatchSettings,
    on_progress: Callable[[BatchProgress], None] = lambda progress: None,
) -> BatchProgress:
    """Run every row of `source` that `output` does not have yet, and return how it went.

    Args:
      on_progress: called whenever tokens or rows came.

    Raises:
      ConfigError: `output` belongs to another input, or cannot be written.
    """
    finished = output.finished_rows()
    foreign = next((row_id for row_id in finished if row_id not in source.ids), None)
    if foreign is not None:
        raise ConfigError(
            f"the output has a row for custom_id {foreign!r}, which {source.name} does not have;"
            " choose another output"
        )
    failed = sum(finished.values())
    progress = BatchProgress(len(source.ids), len(finished), len(finished) - failed, failed)
    rows = (
        (position, row)
        for position, row in enumerate(source.rows())
        if row.custom_id not in finished
    )
    _Job(rows, output, text, engine, settings, progress, on_progress).run()
    return progress


class _Job:
    """The rows that are in the engine, and what came of them."""

    def __init__(
        self,
        rows: Iterator[tuple[int, BatchRow]],
        output: Output,
        text: TextSide,
        engine: Engine,
        settings: BatchSettings,
        progress: BatchProgress,
        on_progress: Callable[[BatchProgress], None],
    ):
        self._rows, self._output = rows, output
        self._text, self._engine, self._settings = text, engine, settings
        self._progress, self._on_progress = progress, on_progress
        self._running: dict[str, tuple[RowId, Exchange]] = {}  # by id of each engine request
        self._in_flight = 0  # completions
        self._waiting: tuple[RowId, Exchange] | None = None  # read, but there was no room for it
        self._results: list[dict[str, Any]] = []

    def run(self) -> None:
        start = time.monotonic()
        try:
            while self._fill() or self._results:
                for delta in self._engine.step() if self._running else ():
                    self._take(delta)
                self._progress.seconds = time.monotonic() - start
                self._output.write(self._results)
                self._results = []
                self._on_progress(self._progress)
        finally:
            for request_id in self._running:
                self._engine.abort(request_id)

    def _fill(self) -> bool:
        """Start rows while there is room; return whether any runs."""
        limit = self._settings.max_in_flight
        while self._in_flight < limit and len(self._results) < limit:
            opened = self._waiting or self._open_next()
            if opened is None:
                break
            self._waiting = None
            row_id, exchange = opened
            if self._running and self._in_flight + exchange.num_choices > limit:
                self._waiting = opened
                break
            try:
                self._start(row_id, exchange)
            except CapacityError as error:
                if self._running:
                    self._waiting = opened
                    break
                self._fail(row_id, error)
            except GemmaError as error:
                self._fail(row_id, error)
        return bool(self._running)

    def _open_next(self) -> tuple[RowId, Exchange] | None:
        """Return the next row that can run; those that cannot become error rows."""
        for position, row in self._rows:
            if row.error is not None:
                self._finish(row.custom_id, error_row(row.custom_id, None, row.error))
            else:
                try:
                    return row.custom_id, self._exchange(position, row)
                except GemmaError as error:
                    self._fail(row.custom_id, error)
            if len(self._results) >= self._settings.max_in_flight:
                break  # to be written first
        return None

    def _exchange(self, position: int, row: BatchRow) -> Exchange:
        body = _with_defaults(row, position, self._settings)
        if body.get("stream"):
            raise UnsupportedError("stream is true; a row of a batch is answered whole")
        model = body.get("model")
        if model is not None and model != self._settings.model:
            raise ModelNameError(
                f"model is {model!r}; this job runs {self._settings.model!r}"
                " (--served-model-name sets its name)"
            )
        return open_exchange(str(row.url), body, self._text, self._settings.model)

    def _start(self, row_id: RowId, exchange: Exchange) -> None:
        """Put all requests of a row into the engine, or none."""
        added: list[str] = []
        try:
            for request in exchange.requests:
                self._engine.add(request)
                added.append(request.request_id)
        except GemmaError:
            for request_id in added:
                self._engine.abort(request_id)
            raise
        self._running |= dict.fromkeys(added, (row_id, exchange))
        self._in_flight += exchange.num_choices
        self._progress.prompt_tokens += exchange.usage.prompt_tokens

    def _take(self, delta: CompletionDelta) -> None:
        found = self._running.get(delta.request_id)
        if found is None:
            return
        row_id, exchange = found
        self._progress.generated_tokens += len(delta.token_ids)
        exchange.push(delta)
        if not exchange.finished:
            return
        for request in exchange.requests:
            del self._running[request.request_id]
            if exchange.error is not None:
                self._engine.abort(request.request_id)
        self._in_flight -= exchange.num_choices
        if exchange.error is None:
            self._finish(row_id, result_row(row_id, exchange))
        else:
            self._finish(row_id, error_row(row_id, 500, exchange.error))

    def _fail(self, row_id: RowId, error: GemmaError) -> None:
        self._finish(row_id, error_row(row_id, _status(error), str(error), field_of(error)))

    def _finish(self, row_id: RowId, row: dict[str, Any]) -> None:
        if row["error"] is None:
            self._progress.succeeded += 1
        else:
            self._progress.failed += 1
        self._results.append(row)


class ModelNameError(GemmaError):
    """A body asks for another model than the one that runs (HTTP 404)."""


def _with_defaults(row: BatchRow, position: int, settings: BatchSettings) -> dict[str, Any]:
    """Return the body of a row with the job's settings where it says nothing."""
    given = {name: value for name, value in (row.body or {}).items() if value is not None}
    defaults = dict(settings.sampling)
    if row.is_prompt:
        defaults.setdefault("max_tokens", DEFAULT_PROMPT_TOKENS)
    if "max_completion_tokens" in given:
        defaults.pop("max_tokens", None)
    return defaults | {"seed": (settings.seed + position) % _SEED_RANGE} | given


def result_row(row_id: RowId, exchange: Exchange) -> dict[str, Any]:
    """Return the output row of a request that was answered."""
    response = {
        "status_code": 200,
        "request_id": exchange.head.id,
        "body": exchange.response(),
    }
    return {"id": _row_key(), "custom_id": row_id, "response": response, "error": None}


def error_row(
    row_id: RowId, status: int | None, message: str, param: str | None = None
) -> dict[str, Any]:
    """Return the output row of a request that failed, or (`status` None) of a malformed line."""
    if status is None:
        error = {"code": "invalid_line", "message": message}
        return {"id": _row_key(), "custom_id": row_id, "response": None, "error": error}
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    response = {"status_code": status, "request_id": _row_key(), "body": body}
    error = {"code": kind, "message": message}
    return {"id": _row_key(), "custom_id": row_id, "response": response, "error": error}


def _row_key() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _status(error: GemmaError) -> int:
    if isinstance(error, ModelNameError):
        return 404
    return 503 if isinstance(error, CapacityError) else 400
