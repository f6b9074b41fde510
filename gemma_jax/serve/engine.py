"""The engine: requests in, deltas out, one device call after another.

`Scheduler` decides what runs, `KVPages` where; this is the only file of `serve/` that touches
arrays. Up to `QUEUED_CALLS` calls are on their way to the device: while the host reads the tokens
of one and plans ahead, the next one runs.
"""

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gemma_jax.batch_arrays import (
    PromptPart,
    decode_rows,
    page_tables,
    prompt_chunk,
    sampling_statics,
    sampling_table,
)
from gemma_jax.buckets import decode_row_buckets, length_buckets, pick
from gemma_jax.call_arrays import PageTables, StepOutput
from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import CapacityError, RequestError, UnsupportedError
from gemma_jax.model.cache import CacheLayout
from gemma_jax.model.kernel_context import reads_whole_tables
from gemma_jax.outputs import PromptLogprobs
from gemma_jax.runner import STEP_BLOCK, Runner
from gemma_jax.sampling import NO_ID, Logprobs, RowState, SamplingStatics
from gemma_jax.sequence import TokenLogprobs
from gemma_jax.serve.engine_sizes import cache_sizes, scheduler_limits
from gemma_jax.serve.entry import DecodePlan, Entry, PrefillPlan
from gemma_jax.serve.pages import KVPages
from gemma_jax.serve.prompt_scores import PromptScores, ScoreCall
from gemma_jax.serve.rehearsal import Rehearsal
from gemma_jax.serve.request import CompletionDelta, EngineRequest, EngineStats
from gemma_jax.serve.running import Running, start_completion
from gemma_jax.serve.scheduler import Scheduler
from gemma_jax.tokenizer import Tokenizer

if TYPE_CHECKING:  # its library is an extra
    from gemma_jax.serve.grammar import GrammarCompiler, GrammarState

QUEUED_CALLS = 2


@dataclass
class _Call:
    """A queued device call: its rows with what each was promised, and where its tokens will be."""

    rows: list[tuple[Running, int]]
    output: StepOutput | None


@dataclass
class _Counters:
    prompt_tokens: int = 0
    generated_tokens: int = 0
    device_calls: int = 0
    idle_seconds: float = 0.0
    idle_since: float | None = field(default=None)


class Engine:
    """Runs any number of requests on one model; not thread-safe.

    Args:
      runner: the model's programs.
      config: row, token and step limits.
      max_model_len: most tokens of a sequence.
      memory: bytes that the KV cache may take.
      tokenizer: for text and stop strings; `None` gives ids only.
      suppressed: ids that are never generated.
      grammars: for requests that bring a grammar; made at the first one.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_model_len: int,
        memory: int,
        tokenizer: Tokenizer | None = None,
        suppressed: Sequence[int] = (),
        grammars: "Callable[[], GrammarCompiler] | None" = None,
    ):
        self._runner, self._tokenizer, self._suppressed = runner, tokenizer, suppressed
        self._grammars, self._compiler = grammars, None
        self._slots, self._max_len = config.max_num_seqs, max_model_len
        self._rows = decode_row_buckets(config.max_num_seqs)
        self._max_steps = -(-config.decode_steps // STEP_BLOCK) * STEP_BLOCK
        longest = config.chunk_tokens(runner.config, max_model_len, self._is_plain)
        sizes = cache_sizes(
            runner, config, max_model_len=max_model_len, longest_chunk=longest, memory=memory
        )
        self._scheduling = sizes, config.prefix_caching, scheduler_limits(config, longest)
        self._reset()
        self._cache = runner.new_cache(
            sizes.num_full_pages, max(sizes.num_window_pages, 1), sizes.page_size
        )
        self._state = runner.new_state(self._slots)
        self._running: dict[int, Running] = {}
        self._by_request: dict[str, list[Running]] = {}
        self._calls: deque[_Call | ScoreCall] = deque()
        self._ids = itertools.count()
        self._table: tuple[tuple[Any, ...], Any] = ((), None)
        plain_chunk = config.chunk_tokens(runner.config, max_model_len, plain=True)
        self._scores = PromptScores(runner, plain_chunk, config.page_size, tokenizer)
        self._has_scored = False  # in the turn before
        self._held: dict[str, list[CompletionDelta]] = {}  # until their prompt is scored
        self._due: list[CompletionDelta] = []

    def _reset(self) -> None:
        """Empty pages, queues and counters."""
        sizes, prefix_caching, limits = self._scheduling
        self._kv = KVPages(sizes, prefix_caching)
        self._scheduler = Scheduler(limits, self._kv)
        self._count = _Counters()

    @property
    def _is_plain(self) -> bool:
        return not reads_whole_tables(self._runner.kernels, self._runner.numerics)

    # --- requests --------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
          RequestError: its id is taken.
          UnsupportedError: it brings a grammar, and the model has no tokenizer.
          CapacityError: it could never run, or the queue is full (retry later).
        """
        if request.request_id in self._by_request:
            raise RequestError(f"request_id={request.request_id!r}: is still running")
        was_idle = not self.has_work and not self._calls
        asks = request.params.prompt_logprobs is not None
        if asks:
            self._check_scores()
        count = request.params.n if request.max_tokens else 0
        running = [self._start(request, i) for i in range(count)]
        self._scheduler.add(*(r.entry for r in running))
        self._by_request[request.request_id] = running
        self._running |= {r.entry.entry_id: r for r in running}
        self._count.prompt_tokens += len(request.prompt_token_ids) * request.params.n
        if asks and len(request.prompt_token_ids) > 1:
            self._held[request.request_id] = []
            self._scores.add(request)
        elif asks or not running:
            self._end_prompt(request, [None] if asks else None)
        if was_idle:
            self._count.idle_since = time.monotonic()

    def _check_scores(self) -> None:
        waiting, most = len(self._held), self._scheduler.limits.max_queue
        if waiting >= most:
            raise CapacityError(
                f"the queue is full: {waiting} prompts wait to be scored, max_queue={most};"
                " retry later"
            )

    def _start(self, request: EngineRequest, index: int) -> Running:
        grammar = None if request.grammar is None else self._grammar(request.grammar)
        return start_completion(
            request, index, next(self._ids),
            tokenizer=self._tokenizer, grammar=grammar, max_steps=self._max_steps,
        )  # fmt: skip

    def _grammar(self, text: str) -> "GrammarState":
        if self._compiler is None:
            if self._grammars is None:
                raise UnsupportedError("response_format: the model has no tokenizer")
            self._compiler = self._grammars()
        return self._compiler.start(text)

    def abort(self, request_id: str) -> None:
        """Ends a request; its slots and pages are free at once. Unknown ids are ignored."""
        for running in self._by_request.pop(request_id, ()):
            self._scheduler.abort(running.entry)
            self._running.pop(running.entry.entry_id, None)
            running.completion.abort()
        self._scores.abort(request_id)
        self._held.pop(request_id, None)
        self._due = [delta for delta in self._due if delta.request_id != request_id]

    def close(self) -> None:
        """Waits for the queued calls; a process that ends under them would crash."""
        while self._calls:
            call = self._calls.popleft()
            with contextlib.suppress(RuntimeError):  # what they bring no longer matters
                jax.block_until_ready(call.output)

    def compile_for(self, batches: Iterable[Sequence[EngineRequest]]) -> int:
        """Compiles the programs that these requests need, several at a time, and runs nothing.

        Those that score prompts are left to the first such request.

        Args:
          batches: the requests of each are there together, after those before have ended; they
            should run to their `max_tokens`, whatever is drawn.
        Returns:
          The number of programs.
        Raises:
          RuntimeError: requests are running.
        """
        if self.has_work:
            raise RuntimeError("compile_for: requests are running")
        runner, rehearsal = self._runner, Rehearsal()
        self._runner = runner.calling(rehearsal.call)
        try:
            for batch in batches:
                for request in batch:
                    params = dataclasses.replace(request.params, prompt_logprobs=None)
                    self.add(dataclasses.replace(request, params=params))
                while self.has_work:
                    self.step()
        finally:
            self._runner = runner
            for request_id in list(self._by_request):
                self.abort(request_id)
            self._calls.clear()
            self._reset()
            programs = rehearsal.finish()
        return programs

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._by_request or self._due)

    def stats(self) -> EngineStats:
        """Where the engine stands."""
        scheduler, count = self._scheduler, self._count
        return EngineStats(
            waiting=scheduler.num_waiting,
            running=scheduler.num_running + self._num_unscheduled,
            kv_usage=scheduler.kv_usage,
            prompt_tokens=count.prompt_tokens,
            generated_tokens=count.generated_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
            device_calls=count.device_calls,
            idle_seconds=count.idle_seconds,
        )

    @property
    def _num_unscheduled(self) -> int:
        """Requests of which only the prompt is scored."""
        return sum(not rows for rows in self._by_request.values())

    # --- the loop --------------------------------------------------------------------------------

    def step(self) -> list[CompletionDelta]:
        """Queues the next device call, if one can be planned, and reads the oldest one if due."""
        if self._due:
            due, self._due = self._due, []
            return due
        call = self._next_call() if len(self._calls) < QUEUED_CALLS else None
        if call is not None:
            self._launch(call)
        elif self._calls:
            return self._read(self._calls.popleft())
        return []

    def _next_call(self) -> _Call | ScoreCall | None:
        """The next device call, queued; scoring and generating take turns."""
        if self._scores.has_next and not self._has_scored:
            self._has_scored = True
            return self._scores.launch()
        self._has_scored = False
        plan = self._scheduler.schedule()
        if isinstance(plan, PrefillPlan):
            return self._prefill(plan)
        if isinstance(plan, DecodePlan):
            return self._decode(plan)
        return self._scores.launch() if self._scores.has_next else None

    def _launch(self, call: _Call | ScoreCall) -> None:
        count, now = self._count, time.monotonic()
        count.device_calls += 1
        if count.idle_since is not None:
            count.idle_seconds += now - count.idle_since
            count.idle_since = None
        if call.output is not None:
            jax.tree.map(lambda x: x.copy_to_host_async(), call.output)
        self._calls.append(call)

    def _statics(self, rows: Sequence[Running]) -> SamplingStatics:
        invariant = self._runner.numerics.batch_invariant
        return sampling_statics([r.completion for r in rows], self._vocab_size, invariant)

    def _prefill(self, plan: PrefillPlan) -> _Call:
        rows = [self._running[chunk.entry.entry_id] for chunk in plan.chunks]
        parts = [
            PromptPart(row.completion, c.entry.tokens, _slot(c.entry), c.start, c.length, c.ends)
            for row, c in zip(rows, plan.chunks, strict=True)
        ]
        statics = self._statics(rows)
        table = sampling_table([r.completion for r in rows], plan.row_bucket, self._suppressed)
        counted = self._vocab_size if statics.penalties else None
        chunk = prompt_chunk(parts, plan.row_bucket, plan.chunk_bucket, self._slots, counted)
        ending = [r if c.ends else None for r, c in zip(rows, plan.chunks, strict=True)]
        chunk.allowed = self._allowed(ending, plan.row_bucket)
        end = max(c.start + c.length for c in plan.chunks) if plan.has_past else plan.chunk_bucket
        layout, tables = self._tables([c.entry for c in plan.chunks], plan.row_bucket, end)
        self._cache, state, output = self._runner.prefill(
            layout, self._cache, self._state_for(statics.penalties), chunk, tables, table, statics,
            has_past=plan.has_past, wants_token=any(c.ends for c in plan.chunks),
        )  # fmt: skip
        self._keep(state)
        promised = [int(c.ends) for c in plan.chunks]
        return _Call(list(zip(rows, promised, strict=True)), output)

    def _decode(self, plan: DecodePlan) -> _Call:
        entries, limits = zip(*plan.rows, strict=True)
        rows = [self._running[entry.entry_id] for entry in entries]
        size = pick(len(rows), self._rows, "rows")
        statics = self._statics(rows)
        arrays = decode_rows([_slot(e) for e in entries], limits, size, self._slots)
        arrays.allowed = self._allowed(rows, size)
        end = max(e.computed for e in entries) if self._is_plain else self._max_len
        layout, tables = self._tables(entries, size, end)
        self._cache, state, output = self._runner.decode(
            layout, self._cache, self._state_for(statics.penalties), arrays, tables,
            self._sampling_table(rows, size), statics,
            max_steps=1 if plan.steps == 1 else self._max_steps,
        )  # fmt: skip
        self._keep(state)
        return _Call(list(zip(rows, limits, strict=True)), output)

    def _tables(
        self, entries: Sequence[Entry], size: int, end: int
    ) -> tuple[CacheLayout, PageTables]:
        """The page tables of a call that reaches position `end`, and their static sizes."""
        kv, page = self._kv, self._kv.sizes.page_size
        longest = -(-self._max_len // page) * page
        slots = pick(min(end, longest), length_buckets(longest, page), "tokens of a sequence")
        ring = max(kv.sizes.ring_pages, 1)
        pages = [_pages(entry) for entry in entries]
        tables = page_tables(
            [p.full for p in pages], [kv.ring_table(p) for p in pages], size, (slots // page, ring)
        )
        return CacheLayout(size, slots, ring * page, page), tables

    def _sampling_table(self, rows: Sequence[Running], size: int) -> Any:
        """The table of a decode call; the same rows come call after call."""
        key = (size, *(r.entry.entry_id for r in rows))
        if self._table[0] != key:
            table = sampling_table([r.completion for r in rows], size, self._suppressed)
            self._table = key, self._runner.place(table)
        return self._table[1]

    def _allowed(self, rows: Sequence[Running | None], size: int) -> Any:
        """Bit masks of the ids that each row may draw; `None` if no row has a grammar."""
        if not any(r and r.grammar for r in rows):
            return None
        words = -(-self._vocab_size // 32)
        allowed: Any = np.full((size, words), np.uint32(2**32 - 1))
        for i, row in enumerate(rows):
            if row is not None and row.grammar is not None:
                allowed[i] = row.grammar.mask()
        return allowed

    def _state_for(self, penalties: bool) -> RowState:
        """The row state, with counts of ids where needed; they are made at their first use."""
        if not penalties:
            return RowState(
                self._state.token, self._state.position, self._state.count, self._state.finished
            )
        if self._state.prompt_seen is None:
            empty = self._runner.new_state(self._slots, penalties=True)
            self._state.prompt_seen = empty.prompt_seen
            self._state.output_counts = empty.output_counts
        return self._state

    def _keep(self, state: RowState) -> None:
        """Takes the state that a call gave back; one without counts leaves those of before."""
        if state.prompt_seen is None:
            state.prompt_seen = self._state.prompt_seen
            state.output_counts = self._state.output_counts
        self._state = state

    @property
    def _vocab_size(self) -> int:
        return self._runner.config.vocab_size

    # --- tokens ----------------------------------------------------------------------------------

    def _read(self, call: _Call | ScoreCall) -> list[CompletionDelta]:
        """The deltas of a call; waits until it has run."""
        if isinstance(call, ScoreCall):
            return self._read_scores(call)
        tokens = logprobs = None
        if call.output is not None:
            tokens = np.asarray(call.output.tokens).tolist()
            logprobs = jax.tree.map(np.asarray, call.output.logprobs)
        if not self._calls:
            self._count.idle_since = time.monotonic()
        deltas = []
        for i, (row, promised) in enumerate(call.rows):
            if row.completion.finished:  # by a stop string or an abort, after this call was queued
                continue
            drawn = [t for t in tokens[i] if t != NO_ID] if tokens and promised else []
            delta = row.take(drawn, None if logprobs is None else _columns(logprobs, i))
            self._count.generated_tokens += len(delta.token_ids)
            if row.completion.finished:
                self._forget(row)
            self._scheduler.accept(
                row.entry, delta.token_ids, promised=promised, finished=row.completion.finished
            )
            if delta.token_ids or delta.finish_reason:
                self._held.get(delta.request_id, deltas).append(delta)
        return deltas

    def _read_scores(self, call: ScoreCall) -> list[CompletionDelta]:
        """With a prompt's last chunk, its log-probabilities and what has been held till then."""
        scored = self._scores.read(call)
        if not self._calls:
            self._count.idle_since = time.monotonic()
        if scored is not None:
            self._end_prompt(*scored)
        due, self._due = self._due, []
        return due

    def _end_prompt(self, request: EngineRequest, logprobs: PromptLogprobs | None) -> None:
        """The prompt of a request has been scored, or need not be."""
        name, ends = request.request_id, not request.max_tokens
        self._due += [
            CompletionDelta(
                name, index, "", [], finish_reason="length" if ends else None,
                prompt_logprobs=logprobs,
            )
            for index in range(request.params.n)
        ]  # fmt: skip
        self._due += self._held.pop(name, ())
        self._drop_if_finished(name)

    def _forget(self, row: Running) -> None:
        del self._running[row.entry.entry_id]
        self._drop_if_finished(row.request.request_id)

    def _drop_if_finished(self, request_id: str) -> None:
        finished = all(r.completion.finished for r in self._by_request[request_id])
        if finished and request_id not in self._held:
            del self._by_request[request_id]


def _slot(entry: Entry) -> int:
    assert entry.slot is not None, "not admitted"
    return entry.slot


def _pages(entry: Entry):
    assert entry.pages is not None, "not admitted"
    return entry.pages


def _columns(logprobs: Logprobs, row: int) -> list[TokenLogprobs]:
    """The log-probabilities of one row of a call, a token each."""
    columns = zip(
        logprobs.sampled[row].tolist(), logprobs.rank[row].tolist(),
        logprobs.top_ids[row].tolist(), logprobs.top[row].tolist(), strict=True,
    )  # fmt: skip
    return [TokenLogprobs(*values) for values in columns]
