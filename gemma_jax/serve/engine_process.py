"""The engine's own process: takes requests from a pipe, steps the engine, sends what it produced.

The pipe carries pickled messages of the classes below. One thread receives and one sends, so that
the engine never waits for the other side.
"""

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from gemma_jax import env
from gemma_jax.errors import EngineError, GemmaError
from gemma_jax.serve.request import CompletionDelta, EngineRequest, EngineStats

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25
"""Seconds between two reports while no completion gains a token."""


class EnginePort(Protocol):
    """What this process needs of an engine; `Engine` has it, and the tests' fake ones."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[CompletionDelta]: ...
    def stats(self) -> EngineStats: ...
    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True)
class LoadedEngine:
    """A warm engine and how many completions it runs at a time."""

    engine: EnginePort
    max_num_seqs: int


EngineFactory = Callable[[], LoadedEngine]
"""Makes the engine in the process that runs it; has to be picklable."""


# --- messages to the engine: an EngineRequest, or one of these -----------------------------------


@dataclass(frozen=True)
class Abort:
    """Forget a request."""

    request_id: str


@dataclass(frozen=True)
class Stop:
    """End the process."""


# --- messages from the engine --------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The engine is warm."""

    max_num_seqs: int


@dataclass(frozen=True)
class Failed:
    """The engine could not be made; the process ends."""

    error: GemmaError


@dataclass(frozen=True)
class Accepted:
    """The engine has taken a request."""

    request_id: str


@dataclass(frozen=True)
class Refused:
    """The engine has not taken a request."""

    request_id: str
    error: GemmaError


@dataclass(frozen=True)
class Progress:
    """What a step produced, and the state after it."""

    deltas: list[CompletionDelta]
    stats: EngineStats


ToEngine = EngineRequest | Abort | Stop
FromEngine = Ready | Failed | Accepted | Refused | Progress


def run_engine(connection: Connection, factory: EngineFactory) -> None:
    """Make an engine and serve `connection` until a `Stop`; the body of the process.

    Ctrl-C and SIGTERM may reach the whole process group: they are left to the other side, which
    lets running requests end first. When that side is gone, this process ends at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")  # on stderr
    logging.getLogger("gemma_jax").setLevel(env.LOG_LEVEL.read())
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        loaded = factory()
    except GemmaError as error:
        connection.send(Failed(_portable(error)))
        return
    outbox: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(connection, outbox), daemon=True)
    sender.start()
    outbox.put(Ready(loaded.max_num_seqs))
    _Loop(loaded.engine, inbox, outbox).run()
    outbox.put(None)
    sender.join()


def _receive(connection: Connection, inbox: "queue.SimpleQueue[ToEngine]") -> None:
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to work for, even in the middle of compiling
        inbox.put(message)
        if isinstance(message, Stop):
            return


def _send(connection: Connection, outbox: "queue.SimpleQueue[FromEngine | None]") -> None:
    while (message := outbox.get()) is not None:
        try:
            connection.send(message)
        except OSError:
            return  # the receiving thread ends the process


class _Loop:
    """Messages in, one step, deltas out, until a `Stop`."""

    def __init__(
        self,
        engine: EnginePort,
        inbox: "queue.SimpleQueue[ToEngine]",
        outbox: "queue.SimpleQueue[FromEngine | None]",
    ):
        self._engine, self._inbox, self._outbox = engine, inbox, outbox
        self._reported = EngineStats()
        self._reported_at = 0.0

    def run(self) -> None:
        self._report([])
        while self._take_messages():
            deltas = self._engine.step() if self._engine.has_work else []
            self._report(deltas)

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting for it without work; False after a `Stop`."""
        wait = not self._engine.has_work
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            self._handle(message)
            wait = False

    def _handle(self, message: EngineRequest | Abort) -> None:
        if isinstance(message, Abort):
            self._engine.abort(message.request_id)
            return
        request_id = message.request_id
        try:
            self._engine.add(message)
        except GemmaError as error:
            self._outbox.put(Refused(request_id, _portable(error)))
        except Exception as error:  # one request must not end the others
            logger.exception("the engine failed to take request %s", request_id)
            self._engine.abort(request_id)
            self._outbox.put(Refused(request_id, EngineError(f"internal error: {error!r}")))
        else:
            self._outbox.put(Accepted(request_id))

    def _report(self, deltas: list[CompletionDelta]) -> None:
        now = time.monotonic()
        due = not self._engine.has_work or now - self._reported_at >= STATS_INTERVAL
        if not deltas and not due:
            return
        stats = self._engine.stats()
        if deltas or stats != self._reported:
            self._outbox.put(Progress(deltas, stats))
            self._reported, self._reported_at = stats, now


def _portable(error: GemmaError) -> GemmaError:
    """The error of the same class with its text only: causes may not survive a pipe."""
    return type(error)(str(error))
