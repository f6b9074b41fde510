"""The engine's loop around a scheduler, with a device that remembers what every page holds.

The device writes (position, hash of all tokens up to it) into the slots of its pages, and checks at
every read that each visible position holds what the reader's own tokens give. So it notices pages
shared wrongly, freed too early, overwritten in the ring, or matched by a wrong prefix.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

from gemma_jax.serve.entry import DecodePlan, Drain, Entry, PrefillPlan, Status
from gemma_jax.serve.pages import CacheSizes, KVPages
from gemma_jax.serve.scheduler import Scheduler, SchedulerLimits

ENDED_IN = {"stop", "length", "host stop", "abort"}


@dataclass(eq=False)
class Completion:
    """What the model would say for one entry, and where it stops.

    Attributes:
      stop_at: output tokens after which the device stops by itself.
      host_stop_at: output tokens after which the host stops; the device does not know.
    """

    entry: Entry
    stop_at: int | None = None
    host_stop_at: int | None = None
    ended: str | None = None

    def next_token(self, position: int) -> int:
        return hash((self.entry.entry_id, position)) % 5

    @property
    def num_output(self) -> int:
        return len(self.entry.tokens) - self.entry.prompt_len


@dataclass(eq=False)
class Row:
    """Device state of a slot: every token it has seen or made, and whether it stopped."""

    completion: Completion
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)
    finished: bool = False

    def hash_at(self, position: int) -> int:
        while len(self.hashes) <= position:
            before = self.hashes[-1] if self.hashes else 0
            self.hashes.append(hash((before, self.tokens[len(self.hashes)])))
        return self.hashes[position]

    def sample(self) -> int:
        entry = self.completion.entry
        self.tokens.append(self.completion.next_token(len(self.tokens)))
        output = len(self.tokens) - entry.prompt_len
        self.finished = output == self.completion.stop_at or len(self.tokens) == entry.max_total
        return self.tokens[-1]


@dataclass
class RowCall:
    """One row of a queued call, with its tables as they were when it was queued."""

    completion: Completion
    slot: int
    start: int
    length: int
    promised: int
    full: list[int]
    ring: list[int]
    prompt: list[int]  # the chunk's tokens and all before; empty for decode


class Device:
    """Runs queued calls in order; see the module."""

    def __init__(self, sizes: CacheSizes):
        self.sizes = sizes
        self.full: dict[tuple[int, int], tuple[int, int]] = {}
        self.window: dict[tuple[int, int], tuple[int, int]] = {}
        self.rows: dict[int, Row] = {}

    def run(self, calls: list[RowCall]) -> list[list[int]]:
        """The new tokens of every row."""
        prefill = [call for call in calls if call.prompt]
        for call in prefill:
            self._load(call)
            if call.start:  # as kernels do, the past is read before any row writes
                self._read(call, call.start, call.start)
        for call in prefill:
            for position in range(call.start, call.start + call.length):
                self._write(call, position)
        for call in prefill:
            end = call.start + call.length
            for query in {call.start, end - 1}:
                self._read(call, query, end)
        out = {id(c): [self.rows[c.slot].sample()] if c.promised else [] for c in prefill}
        decode = [call for call in calls if not call.prompt]
        for i in range(max((call.length for call in decode), default=0)):
            for call in decode:
                out.setdefault(id(call), [])
                row = self.rows[call.slot]
                if i < call.length and not row.finished:
                    assert row.completion is call.completion, "the slot was given away"
                    position = len(row.tokens) - 1
                    assert position == call.start + i
                    self._write(call, position)
                    self._read(call, position, position + 1)
                    out[id(call)].append(row.sample())
        return [out[id(call)] for call in calls]

    def _load(self, call: RowCall) -> None:
        self.rows[call.slot] = Row(call.completion, call.prompt)

    def _write(self, call: RowCall, position: int) -> None:
        value = position, self.rows[call.slot].hash_at(position)
        q, offset = divmod(position, self.sizes.page_size)
        self.full[call.full[q], offset] = value
        if self.sizes.window:
            self.window[call.ring[q % self.sizes.ring_pages], offset] = value

    def _read(self, call: RowCall, query: int, end: int) -> None:
        """What a query sees of positions below `end`, in both pools."""
        row, size = self.rows[call.slot], self.sizes.page_size
        for position in range(min(query + 1, end)):
            q, offset = divmod(position, size)
            expected = position, row.hash_at(position)
            assert self.full[call.full[q], offset] == expected
            if position > query - self.sizes.window:
                page = call.ring[q % self.sizes.ring_pages]
                assert self.window[page, offset] == expected


class Simulation:
    """An engine without a model: at most two calls are queued, results are read in order."""

    def __init__(self, sizes: CacheSizes, limits: SchedulerLimits, prefix_caching: bool = True):
        self.kv = KVPages(sizes, prefix_caching)
        self.scheduler = Scheduler(limits, self.kv)
        self.device = Device(sizes)
        self.queued: deque[list[RowCall]] = deque()
        self.completions: dict[int, Completion] = {}
        self.plans: list[PrefillPlan | DecodePlan] = []
        self._decodable_at_plan: list[set[int]] = []
        self._ids = 0

    def add(self, prompt, max_tokens, n=1, **options) -> list[Completion]:
        """Adds a request of n completions; options of `Entry` or `Completion`."""
        own = {k: options.pop(k) for k in ("stop_at", "host_stop_at") if k in options}
        added = []
        for _ in range(n):
            tokens = list(prompt)
            entry = Entry(self._ids, tokens, len(tokens), len(tokens) + max_tokens, **options)
            self._ids += 1
            added.append(Completion(entry, **own))
        self.scheduler.add(*(completion.entry for completion in added))
        self.completions.update((c.entry.entry_id, c) for c in added)
        return added

    def abort(self, completion: Completion) -> None:
        self.scheduler.abort(completion.entry)
        completion.ended = completion.ended or "abort"

    def step(self) -> bool:
        """Plans a call, and reads one where the engine would; False if nothing happened."""
        decodable = self._decodable()
        oldest = min((c.entry.entry_id for c in self._active()), default=None)
        plan = self.scheduler.schedule()
        assert oldest is None or self._status(oldest) is not Status.WAITING, (
            "the oldest was preempted"
        )
        if isinstance(plan, PrefillPlan | DecodePlan):
            self._check_plan(plan, decodable)
            self.queued.append(self._row_calls(plan))
        if self.queued and (len(self.queued) == 2 or plan is None or isinstance(plan, Drain)):
            self.read()
        elif plan is None:
            assert not self.scheduler.has_work
            return False
        else:
            assert not isinstance(plan, Drain), "nothing to wait for"
        return True

    def read(self) -> None:
        """Runs the oldest queued call and hands its tokens out."""
        calls = self.queued.popleft()
        for call, tokens in zip(calls, self.device.run(calls), strict=True):
            self._accept(call, tokens)

    def run(self, max_steps: int = 20_000) -> None:
        """Until everything has ended."""
        for _ in range(max_steps):
            if not self.step():
                break
            self.check()
        self.check_ended()

    def _accept(self, call: RowCall, tokens: list[int]) -> None:
        completion, entry = call.completion, call.completion.entry
        if completion.ended:
            self.scheduler.accept(entry, tokens, promised=call.promised, finished=True)
            return
        output = completion.num_output + len(tokens)
        if completion.host_stop_at is not None and output >= completion.host_stop_at:
            tokens = tokens[: len(tokens) - (output - completion.host_stop_at)]
            completion.ended = "host stop"
        elif output == completion.stop_at:
            completion.ended = "stop"
        elif entry.prompt_len + output == entry.max_total:
            completion.ended = "length"
        finished = completion.ended is not None
        self.scheduler.accept(entry, tokens, promised=call.promised, finished=finished)

    def _row_calls(self, plan: PrefillPlan | DecodePlan) -> list[RowCall]:
        if isinstance(plan, DecodePlan):
            rows = [(e, e.computed - n, n, n, []) for e, n in plan.rows]
        else:
            rows = [
                (c.entry, c.start, c.length, int(c.ends), c.entry.tokens[: c.start + c.length])
                for c in plan.chunks
            ]
        return [self._row_call(*row) for row in rows]

    def _row_call(self, entry, start, length, promised, prompt) -> RowCall:
        assert entry.pages is not None
        assert entry.slot is not None
        full, ring = self.kv.full_table(entry.pages), self.kv.ring_table(entry.pages)
        self._check_writes(entry, start, length)
        completion = self.completions[entry.entry_id]
        return RowCall(completion, entry.slot, start, length, promised, full, ring, prompt)

    def _decodable(self) -> set[int]:
        return {i for i, c in self.completions.items() if c.entry.decodable}

    # ---- what must always hold --------------------------------------------------------------

    def _check_writes(self, entry: Entry, start: int, length: int) -> None:
        """Whoever writes a page is its only holder."""
        size = self.kv.sizes.page_size
        for q in range(start // size, (start + length - 1) // size + 1):
            assert self.kv.full.holders(entry.pages.full[q]) == 1
            if self.kv.sizes.window:
                assert self.kv.window.holders(entry.pages.window[q]) == 1

    def _check_plan(self, plan: PrefillPlan | DecodePlan, decodable: set[int]) -> None:
        limits = self.scheduler.limits
        if isinstance(plan, PrefillPlan):
            self._check_prefill(plan)
        else:
            taken = {entry.entry_id for entry, _ in plan.rows}
            still = self._decodable_or(taken) & decodable
            assert taken == still, "a decode call takes every row that can go on"
            assert 1 <= plan.steps <= limits.decode_steps
            for entry, steps in plan.rows:
                assert 1 <= steps <= (1 if entry.one_step else entry.max_steps)
                assert entry.remaining >= 0
        self.plans.append(plan)
        self._decodable_at_plan.append(decodable)
        for (before, waited), (now, _) in pairwise(self._recent()):
            if isinstance(before, PrefillPlan) and isinstance(now, PrefillPlan):
                again = {chunk.entry.entry_id for chunk in now.chunks}  # preempted in between
                running = {i for i in waited if self._status(i) is Status.RUNNING} - again
                assert limits.prompts_first or not running, (
                    f"{running} waited for two prefill calls"
                )

    def _recent(self):
        return list(zip(self.plans, self._decodable_at_plan, strict=True))[-2:]

    def _active(self) -> list[Completion]:
        return [c for c in self.completions.values() if c.entry.pages is not None]

    def _decodable_or(self, taken: set[int]) -> set[int]:
        return taken | self._decodable()

    def _status(self, entry_id: int) -> Status:
        return self.completions[entry_id].entry.status

    def _check_prefill(self, plan: PrefillPlan) -> None:
        limits = self.scheduler.limits
        planned = {chunk.entry.entry_id for chunk in plan.chunks}
        mixed = any(
            c.entry.status is Status.RUNNING and i not in planned and c.entry.remaining > 0
            for i, c in self.completions.items()
        )
        budget = limits.mixed_budget if mixed else limits.max_num_batched_tokens
        smallest = limits.row_buckets[0] * limits.chunk_buckets[0]
        assert plan.row_bucket * plan.chunk_bucket <= max(budget, smallest)
        assert len(planned) == len(plan.chunks) <= plan.row_bucket
        for chunk in plan.chunks:
            assert 1 <= chunk.length <= plan.chunk_bucket
            assert chunk.ends == (chunk.start + chunk.length == len(chunk.entry.tokens))

    def check(self) -> None:
        """Every page is free, cached or held as often as it says; slots are distinct."""
        active = [c.entry for c in self._active()]
        held = [entry.pages for entry in active]
        full = Counter(page for pages in held for page in pages.full)
        window = Counter(page for pages in held for page in pages.window.values())
        for pool, counts in ((self.kv.full, full), (self.kv.window, window)):
            assert all(pool.holders(page) == counts[page] for page in range(pool.num_pages))
            assert pool.num_used == len(counts)
            assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages
        for pages in held:
            assert len(pages.window) <= self.kv.sizes.ring_pages
        slots = [entry.slot for entry in active]
        assert len(set(slots)) == len(slots) == self.scheduler.num_running
        assert all(0 <= slot < self.scheduler.limits.max_num_seqs for slot in slots)
        for entry in active:
            assert entry.status in (Status.PREFILLING, Status.RUNNING)

    def check_ended(self) -> None:
        """Everything has ended, with the tokens that it would have alone, and all is given back."""
        assert not self.queued
        assert not self.scheduler.has_work
        for completion in self.completions.values():
            entry = completion.entry
            assert completion.ended in ENDED_IN
            assert entry.status is Status.FINISHED
            output = entry.tokens[entry.prompt_len :]
            expected = map(completion.next_token, range(entry.prompt_len, len(entry.tokens)))
            assert output == list(expected)
            ends = {"stop": completion.stop_at, "host stop": completion.host_stop_at}
            ends["length"] = entry.max_total - entry.prompt_len
            assert completion.ended == "abort" or len(output) == ends[completion.ended]
        self.check()
        assert self.kv.full.num_used == self.kv.window.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.kv_usage == 0
