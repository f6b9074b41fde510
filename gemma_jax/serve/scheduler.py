"""Who runs next: which prompts are admitted, how they are cut into chunks, which rows decode.

`Scheduler.schedule` plans one device call from what the host knows and takes slots and pages as if
it had run; the engine queues it. Calls run in the order they were planned, so pages that a plan
gives up may be given away at once: whoever gets them writes in a later call. `accept` brings the
tokens of a queued call back.

The rules:
- Prompts take turns, chunk by chunk: whoever was served least recently is next, and entries whose
  next chunk has the same padded size share its call, up to a budget of padded tokens.
- While rows decode, prefill and decode calls alternate.
- A waiting entry is admitted when the pages of its whole prompt are there beside those that
  admitted prompts still need and running rows need for their next call. Nobody overtakes an entry
  that waits for pages.
- When pages run out, decode calls get shorter; then the latest arrival gives its pages up and is
  computed again later. The oldest admitted entry never does, and so always ends.

No arrays, no device: this runs alone.
"""

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gemma_jax.buckets import pick
from gemma_jax.errors import CapacityError, ConfigError, RequestError
from gemma_jax.serve.entry import ChunkPlan, DecodePlan, Drain, Entry, Plan, PrefillPlan, Status
from gemma_jax.serve.hash_chain import HashChain
from gemma_jax.serve.pages import KVPages, PageCount, PrefixHit, SequencePages

LOOKAHEAD = 64
"""Waiting entries that are looked at for one prefill call."""

LONG_PREFILLS = 4
"""Prompts of several chunks that take turns; the next begins when one of them is through."""

PADDING_TOKENS = 1024
"""Most tokens of padding rows in a prefill call; beyond it the last rows wait for the next call."""

DRAIN = Drain()


@dataclass(frozen=True)
class SchedulerLimits:
    """What one call may take.

    Attributes:
      max_num_seqs: slots, so most entries admitted at a time.
      max_num_batched_tokens: padded tokens of a prefill call while nothing decodes.
      mixed_budget: the same while rows decode.
      row_buckets, chunk_buckets: padded sizes of a prefill call, ascending.
      decode_steps: steps of a decode call.
      decode_steps_waiting: steps of a decode call while a prompt could be prefilled.
      max_queue: most waiting entries.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    mixed_budget: int
    row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]
    decode_steps: int = 32
    decode_steps_waiting: int = 4
    max_queue: int = 4096

    def __post_init__(self):
        for name in (
            "max_num_seqs", "max_num_batched_tokens", "mixed_budget", "decode_steps",
            "decode_steps_waiting", "max_queue",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("row_buckets", "chunk_buckets"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name}={sizes}: expected ascending sizes of at least 1")


@dataclass(frozen=True)
class _Candidate:
    """The next chunk of an entry; `hit` is what a waiting entry would start from."""

    entry: Entry
    start: int
    length: int
    hit: PrefixHit | None = None


class Scheduler:
    """Plans the device calls of one engine; see the module's rules.

    Attributes:
      preemptions: entries whose pages were taken away so far.
      prefix_query_tokens: prompt tokens looked up in the prefix cache, once an entry.
      prefix_hit_tokens: those that were found.
    """

    def __init__(self, limits: SchedulerLimits, kv: KVPages):
        self.limits, self.kv = limits, kv
        self.preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._waiting: list[Entry] = []  # by arrival
        self._active: dict[int, Entry] = {}
        self._free_slots = list(range(limits.max_num_seqs))  # a heap: low rows first
        self._clock = 0
        self._after_prefill = False
        self._admission_held = False
        self._spare: PageCount | None = None  # pages nobody admitted needs; None: not counted yet

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Entries that have a slot."""
        return len(self._active)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use, from 0 to 1."""
        return self.kv.usage

    def add(self, *entries: Entry) -> None:
        """Queues new entries, all or none.

        Raises:
          RequestError: an entry has no prompt or no room for a token.
          CapacityError: one could never run, or the queue is full (retry later).
        """
        for entry in entries:
            self._check(entry)
        if len(self._waiting) + len(entries) > self.limits.max_queue:
            raise CapacityError(
                f"the queue is full: {len(self._waiting)} of at most {self.limits.max_queue}"
                f" entries wait and {len(entries)} more came; retry later"
            )
        for entry in entries:
            entry.chain = self.kv.chain(entry.namespace)
            entry.turn = self._clock
            self._queue(entry)

    def schedule(self) -> Plan | None:
        """The next device call, its slots and pages taken.

        `Drain` if queued calls must be read first; None if there is nothing to do.
        """
        self._settle()
        self._spare = None
        first, second = self._plan_prefill, self._plan_decode
        if self._after_prefill:
            first, second = second, first
        plan = first() or second()
        if isinstance(plan, PrefillPlan | DecodePlan):
            self._clock += 1
            self._after_prefill = isinstance(plan, PrefillPlan)
        elif plan is None and self.has_work:
            assert any(entry.pending for entry in self._active.values()), "nobody can go on"
            return DRAIN
        return plan

    def accept(
        self, entry: Entry, new_tokens: Sequence[int], *, promised: int, finished: bool
    ) -> None:
        """Takes the tokens that one queued call brought; ignored once the entry has ended.

        Args:
          new_tokens: at most `promised`; fewer only if `finished`.
          promised: the row's step limit of that call, 1 for a chunk that ends a prompt, 0 for
            another chunk.
          finished: the entry has ended; slot and pages are freed, later calls of it ignored.
        """
        if entry.status is Status.FINISHED:
            return
        assert promised <= entry.pending, "not promised by a queued call"
        assert len(new_tokens) == promised or (finished and len(new_tokens) < promised)
        entry.tokens.extend(new_tokens)
        assert finished or len(entry.tokens) < entry.max_total, "it has reached its limit"
        entry.pending -= promised
        if entry.status is Status.RUNNING:
            entry.computed = len(entry.tokens) + entry.pending - 1
        if finished:
            self._finish(entry)

    def abort(self, entry: Entry) -> None:
        """Ends an entry at any time; slot and pages are free at once."""
        if entry.status is Status.WAITING:
            self._unqueue(entry)
            entry.status = Status.FINISHED
        elif entry.status is not Status.FINISHED:
            self._finish(entry)

    # ---- entries in and out -----------------------------------------------------------------

    def _check(self, entry: Entry) -> None:
        length, total = len(entry.tokens), entry.max_total
        if not length or total <= length:
            raise RequestError(
                f"a prompt of {length} tokens and at most {total} in all: expected at least one"
                " prompt token and room for one more"
            )
        if not self.kv.fits(total - 1):
            need, sizes = self.kv.peak(total - 1), self.kv.sizes
            raise CapacityError(
                f"{total} tokens (prompt and max_tokens) need {need.full} full and {need.window}"
                f" sliding pages of {sizes.page_size} tokens; the KV cache has"
                f" {sizes.num_full_pages} and {sizes.num_window_pages}: lower max_tokens, shorten"
                " the prompt or give the cache more memory"
            )

    def _queue(self, entry: Entry) -> None:
        bisect.insort(self._waiting, entry, key=lambda e: e.entry_id)

    def _unqueue(self, entry: Entry) -> None:
        i = bisect.bisect_left(self._waiting, entry.entry_id, key=lambda e: e.entry_id)
        assert self._waiting[i] is entry
        del self._waiting[i]

    def _admit(self, entry: Entry, hit: PrefixHit) -> None:
        if self._spare is not None:
            self._spare -= self._admission_need(entry, hit)
        self._unqueue(entry)
        entry.slot = heapq.heappop(self._free_slots)
        entry.pages = self.kv.attach(hit)
        entry.computed = hit.num_tokens
        entry.status = Status.PREFILLING
        self._active[entry.entry_id] = entry
        if entry.num_cached is None:  # not after a preemption
            entry.num_cached = hit.num_tokens
            self.prefix_query_tokens += entry.prompt_len
            self.prefix_hit_tokens += hit.num_tokens

    def _leave(self, entry: Entry) -> None:
        """Gives slot and pages back, what is known of them to the prefix cache."""
        pages = _held(entry)
        self._commit(entry)
        self.kv.free(pages)
        assert entry.slot is not None
        heapq.heappush(self._free_slots, entry.slot)
        del self._active[entry.entry_id]
        entry.slot = entry.pages = None
        entry.computed = entry.pending = 0

    def _finish(self, entry: Entry) -> None:
        self._leave(entry)
        entry.status = Status.FINISHED
        self._admission_held = False

    def _preempt(self, entry: Entry) -> None:
        assert entry.pending == 0
        self._leave(entry)
        entry.status = Status.WAITING
        self._queue(entry)
        self.preemptions += 1
        self._spare = None
        self._admission_held = True

    def _victim(self, than: Entry | None = None) -> Entry | None:
        """The latest arrival that may be preempted, of those after `than` if given.

        Tokens on their way pin an entry; so does being the oldest.
        """
        oldest = min(self._active)
        after = oldest if than is None else max(oldest, than.entry_id)
        able = [e for i, e in self._active.items() if i > after and not e.pending]
        return max(able, key=lambda e: e.entry_id, default=None)

    def _settle(self) -> None:
        """After a plan: offers what it wrote to the prefix cache, then lets windows slide."""
        for entry in self._active.values():
            self._commit(entry)
            self.kv.slide(_held(entry), entry.computed)

    def _commit(self, entry: Entry) -> None:
        known = min(entry.computed, len(entry.tokens) - 1)  # the last one may never be fed
        self.kv.commit(_held(entry), entry.tokens, known)

    # ---- prefill ----------------------------------------------------------------------------

    def _plan_prefill(self) -> PrefillPlan | Drain | None:
        budget = self._prefill_budget()
        group: list[_Candidate] = []
        bucket = 0
        for candidate in self._candidates(budget):
            if not group:
                room = self._make_room(candidate)
                if room is None:
                    return DRAIN
                if room:
                    group.append(candidate)
                    bucket = self._chunk_bucket(candidate.length)
            elif (len(group) + 1) * bucket > budget or len(group) == self.limits.row_buckets[-1]:
                break
            elif self._joins(candidate, group[0], bucket) and self._take(candidate):
                group.append(candidate)
        if not group:
            return None
        group = group[: self._rows_within(len(group), bucket, budget)]
        return self._prefill_plan(group, bucket)

    def _prefill_budget(self) -> int:
        decoding = any(
            e.status is Status.RUNNING and e.remaining > 0 for e in self._active.values()
        )
        return self.limits.mixed_budget if decoding else self.limits.max_num_batched_tokens

    def _candidates(self, budget: int) -> Iterator[_Candidate]:
        """Next chunks by turn; a waiting entry only if it could be admitted when it is reached."""
        limit = self._longest_chunk(budget)
        started = [e for e in self._active.values() if e.status is Status.PREFILLING]
        waiting = list(islice(self._waiting, LOOKAHEAD)) if self._free_slots else []
        blocked = False
        for entry in sorted(started + waiting, key=lambda e: (e.turn, e.entry_id)):
            if entry.status is Status.PREFILLING:
                yield self._candidate(entry, entry.computed, limit)
            elif not blocked and self._free_slots:
                hit = self.kv.match(entry.tokens, _chain(entry))
                candidate = self._candidate(entry, hit.num_tokens, limit, hit)
                if self._should_wait(candidate, budget):
                    continue
                blocked = not self._admissible(entry, hit)
                if not blocked:
                    yield candidate

    def _candidate(
        self, entry: Entry, start: int, limit: int, hit: PrefixHit | None = None
    ) -> _Candidate:
        end = min(len(entry.tokens), start + limit, self.kv.ring_end(start) or len(entry.tokens))
        return _Candidate(entry, start, end - start, hit)

    def _should_wait(self, candidate: _Candidate, budget: int) -> bool:
        """Whether it waits for others: for the prefix that they share, or for its turn."""
        prefilling = [e for e in self._active.values() if e.status is Status.PREFILLING]
        if self._prefix_is_coming(candidate, prefilling):
            return True
        limit = self._longest_chunk(budget)
        long = sum(len(e.tokens) - e.computed > limit for e in prefilling)
        return not _is_last(candidate) and long >= max(LONG_PREFILLS, budget // limit)

    def _prefix_is_coming(self, candidate: _Candidate, prefilling: list[Entry]) -> bool:
        """Whether the first page that a waiting entry lacks is being computed for another one."""
        entry, size = candidate.entry, self.kv.sizes.page_size
        q = candidate.start // size
        if not self.kv.prefix_caching or (q + 1) * size >= len(entry.tokens):
            return False
        key = _chain(entry).keys(entry.tokens, q + 1)[q]
        return any(
            _held(e).num_registered <= q < (len(e.tokens) - 1) // size
            and _chain(e).keys(e.tokens, q + 1)[q] == key
            for e in prefilling
        )

    def _admissible(self, entry: Entry, hit: PrefixHit) -> bool:
        """Whether the whole prompt has pages, beside what admitted entries need next."""
        if not self._active:
            return True
        if self._admission_held:
            return False
        if self._spare is None:
            self._spare = self.kv.available - self._reserved()
        return self._admission_need(entry, hit).within(self._spare)

    def _admission_need(self, entry: Entry, hit: PrefixHit) -> PageCount:
        """Available pages that a waiting entry takes until its first decode call has run."""
        held = PageCount(len(hit.full), len(hit.window))
        return self._prompt_peak(entry) - held + self.kv.idle(hit)

    def _reserved(self) -> PageCount:
        """Pages that admitted prompts need to their end, and running rows for their next call."""
        total = PageCount()
        for entry in self._active.values():
            if entry.status is Status.PREFILLING:
                total += self._prompt_peak(entry) - _held(entry).count
            elif entry.remaining > 0:
                steps = min(entry.remaining, self._next_steps(entry))
                total += self.kv.demand(_held(entry), entry.computed + steps)
        return total

    def _prompt_peak(self, entry: Entry) -> PageCount:
        """Most pages that an entry holds until its first decode call has run."""
        end = len(entry.tokens) + self._next_steps(entry)
        return self.kv.peak(min(entry.max_total - 1, end))

    def _next_steps(self, entry: Entry) -> int:
        return 1 if entry.one_step else min(entry.max_steps, self.limits.decode_steps)

    def _joins(self, candidate: _Candidate, head: _Candidate, bucket: int) -> bool:
        """Whether it may share the head's call at no cost to the head."""
        has_past = head.start > 0
        return self._chunk_bucket(candidate.length) == bucket and (has_past or candidate.start == 0)

    def _make_room(self, candidate: _Candidate) -> bool | None:
        """Takes the chunk's pages, from later arrivals if need be; None: after a drain."""
        entry = candidate.entry
        while not self._take(candidate):
            victim = self._victim(than=entry)
            if victim is None:
                later = (e for i, e in self._active.items() if i > entry.entry_id)
                return None if any(e.pending for e in later) else False
            self._preempt(victim)
        return True

    def _take(self, candidate: _Candidate) -> bool:
        """Admits the entry if it waits, and takes the chunk's pages; False if they are short."""
        entry = candidate.entry
        if candidate.hit is not None and entry.status is Status.WAITING:
            self._admit(entry, candidate.hit)
        return self.kv.grow(_held(entry), candidate.start + candidate.length)

    def _prefill_plan(self, group: list[_Candidate], bucket: int) -> PrefillPlan:
        chunks = []
        for candidate in group:
            entry, ends = candidate.entry, _is_last(candidate)
            chunks.append(ChunkPlan(entry, candidate.start, candidate.length, ends))
            entry.computed = candidate.start + candidate.length
            entry.turn = self._clock + 1
            if ends:
                entry.status = Status.RUNNING
                entry.pending += 1
        return PrefillPlan(chunks, bucket, self._row_bucket(len(group)))

    def _longest_chunk(self, budget: int) -> int:
        """The longest that the fewest rows can have within the budget."""
        sizes, rows = self.limits.chunk_buckets, self.limits.row_buckets[0]
        return max((n for n in sizes if n * rows <= budget), default=sizes[0])

    def _chunk_bucket(self, length: int) -> int:
        return pick(length, self.limits.chunk_buckets, "tokens of a chunk")

    def _row_bucket(self, rows: int) -> int:
        return pick(rows, self.limits.row_buckets, "rows of a prefill call")

    def _rows_within(self, rows: int, bucket: int, budget: int) -> int:
        """At most `rows`, so that their padded number keeps to the budget and is not mostly air."""
        padded = self._row_bucket(rows)
        if padded * bucket <= budget and (padded - rows) * bucket <= PADDING_TOKENS:
            return rows
        whole = (n for n in self.limits.row_buckets if n <= rows and n * bucket <= budget)
        return max(whole, default=1)

    # ---- decode -----------------------------------------------------------------------------

    def _plan_decode(self) -> DecodePlan | Drain | None:
        while rows := self._decodable():
            steps = self._steps_that_fit(rows, self._decode_steps(rows))
            if steps:
                return self._decode_plan(rows, steps)
            victim = self._victim()
            if victim is None:
                return DRAIN
            self._preempt(victim)
        return None

    def _decodable(self) -> list[Entry]:
        rows = (e for e in self._active.values() if e.decodable)
        return sorted(rows, key=lambda e: e.entry_id)

    def _decode_steps(self, rows: list[Entry]) -> int:
        """Few while somebody waits whom a return to the host would help, many otherwise."""
        few, many = self.limits.decode_steps_waiting, self.limits.decode_steps
        few = min(few, many)
        active = self._active.values()
        steps = many
        if any(e.status is Status.PREFILLING or e.one_step for e in active):
            steps = few
        elif self._waiting:
            # Nobody can start before a row ends, which its limit foretells at the latest.
            soonest = min(e.remaining for e in rows)
            steps = few if self._front_is_admissible() else max(few, min(many, soonest))
        shared = (e.max_steps for e in rows if not e.one_step)
        return min([steps, *shared])

    def _front_is_admissible(self) -> bool:
        if not self._free_slots:
            return False
        front = self._waiting[0]
        return self._admissible(front, self.kv.match(front.tokens, _chain(front)))

    def _steps_that_fit(self, rows: list[Entry], steps: int) -> int:
        """`steps` halved until there are pages for all rows; 0 if there are not even for one."""
        while steps:
            need = sum(
                (self.kv.demand(_held(e), e.computed + self._limit(e, steps)) for e in rows),
                PageCount(),
            )
            if need.within(self.kv.available):
                return steps
            steps //= 2
        return 0

    def _limit(self, entry: Entry, steps: int) -> int:
        """Steps of a row in a call of `steps`."""
        limit = min(steps, entry.remaining, entry.max_steps)
        if entry.one_step:
            limit = 1
        end = self.kv.ring_end(entry.computed)
        return limit if end is None else min(limit, end - entry.computed)

    def _decode_plan(self, entries: Iterable[Entry], steps: int) -> DecodePlan:
        rows = []
        for entry in entries:
            limit = self._limit(entry, steps)
            grown = self.kv.grow(_held(entry), entry.computed + limit)
            assert grown, "counted as available"
            entry.computed += limit
            entry.pending += limit
            rows.append((entry, limit))
        return DecodePlan(rows)


def _held(entry: Entry) -> SequencePages:
    assert entry.pages is not None, "not admitted"
    return entry.pages


def _chain(entry: Entry) -> HashChain:
    assert entry.chain is not None, "not added"
    return entry.chain


def _is_last(candidate: _Candidate) -> bool:
    return candidate.start + candidate.length == len(candidate.entry.tokens)
