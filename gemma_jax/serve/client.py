"""The HTTP process's side of the engine: starts its process, and routes deltas to who waits.

Everything here runs on the event loop, except the thread that reads the pipe.
"""

import asyncio
import contextlib
import enum
import logging
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from gemma_jax.errors import CapacityError, EngineError, GemmaError, RequestError
from gemma_jax.serve.engine_process import (
    Abort,
    Accepted,
    EngineFactory,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Stop,
    ToEngine,
    run_engine,
)
from gemma_jax.serve.metrics import ServerMetrics
from gemma_jax.serve.request import CompletionDelta, EngineRequest, EngineStats

logger = logging.getLogger(__name__)

STOP_SECONDS = 10.0
"""How long the engine's process may take to end before it is killed."""


class State(enum.Enum):
    """What the engine does with a new request; only READY takes it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class NotReadyError(EngineError):
    """The engine takes no requests now: it is loading, draining or gone."""


class Generation:
    """The completions of one HTTP request, one engine request a prompt.

    Whoever submits it calls `abort` when it is done with it, ended or not.
    """

    def __init__(self, client: "EngineClient", requests: Sequence[EngineRequest]):
        self._client = client
        self._prompts = {r.request_id: i for i, r in enumerate(requests)}
        self._unaccepted = set(self._prompts)
        self._left = {r.request_id: r.params.n for r in requests}
        self._deltas: list[CompletionDelta] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self.timings = client.metrics.new_request(requests)

    @property
    def completions_left(self) -> int:
        """Completions that have not ended."""
        return sum(self._left.values())

    async def accepted(self) -> None:
        """Wait until the engine has taken every request.

        Raises:
          GemmaError: why it has refused one; the others are aborted.
        """
        while self._unaccepted and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[list[CompletionDelta]]:
        """Yield the deltas that have arrived, until all completions have ended.

        Raises:
          EngineError: the engine failed.
          TimeoutError: the request took longer than it may.
        """
        while self._deltas or self.completions_left:
            if not self._deltas:
                if self._error is not None:
                    raise self._error
                await self._wait()
                continue
            deltas, self._deltas = self._deltas, []
            yield deltas

    def abort(self) -> None:
        """End what has not ended; the engine forgets it, and waiting ends."""
        self.fail(EngineError("the request was aborted"))

    def fail(self, error: Exception) -> None:
        """`abort`, with the error that a waiting side is to raise."""
        if self._error is not None or not self.completions_left:
            return
        self._error = error
        self._client.forget(self)
        self._news.set()

    @property
    def request_ids(self) -> list[str]:
        """Ids of the engine requests that have not ended."""
        return [request_id for request_id, left in self._left.items() if left]

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    # --- called by the client --------------------------------------------------------------------

    def on_accepted(self, request_id: str) -> None:
        self._unaccepted.discard(request_id)
        self._news.set()

    def on_delta(self, delta: CompletionDelta) -> None:
        prompt = self._prompts[delta.request_id]
        self.timings.on_tokens((prompt, delta.index), len(delta.token_ids))
        if delta.finish_reason == "error":
            logger.warning("the engine gave up %s: %s", delta.request_id, delta.error)
            self.fail(EngineError(delta.error or "the engine gave up this completion"))
            return
        if delta.finish_reason is not None:
            self._left[delta.request_id] -= 1
            self.timings.on_finish((prompt, delta.index), delta.finish_reason)
        self._deltas.append(delta)
        self._news.set()


class EngineClient:
    """Owns the engine's process.

    Args:
      factory: makes the engine there.
      metrics: told what happens to requests.
      max_queue: completions that may wait beyond those that run.
      request_timeout: seconds that a request may take, its waiting included; None is no limit.
      on_end: called once when the process has ended by itself or failed to start.
      on_ready: called once when requests are taken.
    """

    def __init__(
        self,
        factory: EngineFactory,
        metrics: ServerMetrics,
        max_queue: int,
        request_timeout: float | None = None,
        on_end: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self._factory, self.metrics = factory, metrics
        self._max_queue, self._request_timeout = max_queue, request_timeout
        self._on_end, self._on_ready = on_end, on_ready
        self._max_num_seqs = 0
        self._generations: dict[str, Generation] = {}
        self._timers: dict[Generation, asyncio.TimerHandle] = {}
        self.state = State.STARTING
        self.failure: GemmaError | None = None
        self.stats = EngineStats()

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; requests are taken once it is ready."""
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(theirs, self._factory), name="gemma-jax-engine", daemon=True
        )
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        threading.Thread(target=self._read, daemon=True).start()

    def drain(self) -> None:
        """Take no further requests; those that were taken go on."""
        if self.state in (State.STARTING, State.READY):
            self.state = State.DRAINING

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        for generation in set(self._generations.values()):
            generation.fail(EngineError(reason))

    async def stop(self) -> None:
        """End the process; one that is still loading is not waited for."""
        is_loading = not self._max_num_seqs
        self.state = State.DEAD
        self._send(Stop())
        if not is_loading:
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            if not is_loading:
                logger.warning("the engine's process did not end in %g s; killed", STOP_SECONDS)
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    # --- requests --------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Completions that may run and wait at a time."""
        return self._max_num_seqs + self._max_queue

    def submit(self, requests: Sequence[EngineRequest]) -> Generation:
        """Hand the requests of one HTTP request to the engine.

        Raises:
          NotReadyError: the engine takes none now.
          CapacityError: the queue is full.
          RequestError: more completions than the queue could ever hold.
        """
        self.check_ready()
        wanted = sum(r.params.n for r in requests)
        if wanted > self.capacity:
            raise RequestError(
                f"n is {requests[0].params.n} for {len(requests)} prompts: {wanted} completions,"
                f" but this server holds at most {self.capacity} at a time; send fewer in a request"
            )
        held = sum(g.completions_left for g in set(self._generations.values()))
        if held + wanted > self.capacity:
            raise CapacityError(
                f"the queue is full: {held} of {self.capacity} completions wait or run; retry later"
            )
        generation = Generation(self, requests)
        for request in requests:
            self._generations[request.request_id] = generation
            self._send(request)
        if self._request_timeout is not None:
            self._timers[generation] = self._loop.call_later(
                self._request_timeout, self._expire, generation
            )
        return generation

    def check_ready(self) -> None:
        """Raise NotReadyError unless requests are taken."""
        if self.state is State.READY:
            return
        reasons = {
            State.STARTING: "the model is being loaded",
            State.DRAINING: "the server is shutting down",
            State.DEAD: "the engine has ended",
        }
        raise NotReadyError(f"{reasons[self.state]}; no requests are taken")

    def forget(self, generation: Generation) -> None:
        """Abort what the engine still has of a generation, and route nothing to it any more."""
        for request_id in generation.request_ids:
            self._generations.pop(request_id, None)
            self._send(Abort(request_id))
        generation.timings.on_abort()
        self._stop_timer(generation)

    def _expire(self, generation: Generation) -> None:
        generation.fail(
            TimeoutError(f"the request took longer than the {self._request_timeout:g} s it may")
        )

    def _stop_timer(self, generation: Generation) -> None:
        timer = self._timers.pop(generation, None)
        if timer is not None:
            timer.cancel()

    # --- the pipe --------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by the reading thread
            self._connection.send(message)

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._take, message)
            if message is None:
                return

    def _take(self, message: FromEngine | None) -> None:
        match message:
            case Progress(deltas, stats):
                self.stats = stats
                self.metrics.on_stats(stats)
                for delta in deltas:
                    self._route(delta)
            case Accepted(request_id):
                if request_id in self._generations:
                    self._generations[request_id].on_accepted(request_id)
            case Refused(request_id, error):
                if request_id in self._generations:
                    self._generations[request_id].fail(error)
            case Ready(max_num_seqs):
                self._max_num_seqs = max_num_seqs
                if self.state is State.STARTING:
                    self.state = State.READY
                    self._on_ready()
            case Failed(error):
                self.failure = error
            case None:
                self._on_pipe_closed()

    def _route(self, delta: CompletionDelta) -> None:
        generation = self._generations.get(delta.request_id)
        if generation is None:
            return  # aborted while the delta was on its way
        generation.on_delta(delta)
        if delta.request_id not in generation.request_ids:
            self._generations.pop(delta.request_id, None)
        if not generation.completions_left:
            self._stop_timer(generation)

    def _on_pipe_closed(self) -> None:
        if self.state is State.DEAD:
            return
        self.state = State.DEAD
        if self.failure is None:
            self.failure = EngineError("the engine's process has ended unexpectedly")
        self.fail_all(str(self.failure))
        self._on_end()
