"""The next prefill call: whose chunk is due, and which others ride along."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from gemma_jax.serve.admission import Admission
from gemma_jax.serve.entry import ChunkPlan, Drain, Entry, PrefillPlan, Status
from gemma_jax.serve.pages import PrefixHit
from gemma_jax.serve.roster import Roster, chain_of, pages_of
from gemma_jax.serve.scheduler_limits import SchedulerLimits

LOOKAHEAD = 64
"""Waiting entries that are looked at for one call."""

CALL_TOKENS = 1024
"""Padded tokens that take about as long as one more call would."""


@dataclass(frozen=True)
class _Candidate:
    """The next chunk of an entry; `hit` is what a waiting entry would start from."""

    entry: Entry
    start: int
    length: int
    hit: PrefixHit | None = None

    @property
    def ends(self) -> bool:
        return self.start + self.length == len(self.entry.tokens)


class PrefillPlanner:
    """Chunks in turn: whoever was served least recently is the head of the next call.

    Entries whose next chunk has the head's padded length join it, up to the budget. Those without
    earlier tokens may join one that has some, but not the reverse: its program would change.
    """

    def __init__(self, limits: SchedulerLimits, roster: Roster, admission: Admission):
        self._limits, self._roster, self._kv = limits, roster, roster.kv
        self._admission = admission

    def plan(self, turn: int) -> PrefillPlan | Drain | None:
        """The call, with slots and pages taken; `turn` marks the entries that it serves.

        `Drain` if the next one's pages can only come from entries with unread calls.
        """
        budget = self._budget()
        group: list[_Candidate] = []
        for candidate in self._candidates(budget):
            if not group:
                room = self._make_room(candidate)
                if room is None:
                    return Drain()
                if room:
                    group.append(candidate)
            elif self._is_full(group, budget):
                break
            elif self._joins(candidate, group[0]) and self._take(candidate):
                group.append(candidate)
        if not group:
            return None
        return self._planned(group[: self._worthwhile_rows(group, budget)], turn)

    def _budget(self) -> int:
        entries = self._roster.active.values()
        decoding = any(e.status is Status.RUNNING and e.remaining > 0 for e in entries)
        return self._limits.mixed_budget if decoding else self._limits.max_num_batched_tokens

    def _candidates(self, budget: int) -> Iterator[_Candidate]:
        """Next chunks by turn; a waiting entry only if it can be admitted when it is reached.

        Once one waits for pages, nobody who came after it is admitted.
        """
        slots = self._roster.free_slots
        waiting = list(islice(self._roster.waiting, LOOKAHEAD)) if slots else []
        entries = sorted(self._roster.prefilling + waiting, key=lambda e: (e.turn, e.entry_id))
        blocked = False
        for entry in entries:
            if entry.status is Status.PREFILLING:
                yield self._candidate(entry, entry.computed, budget, len(entries))
            elif slots and not blocked:
                hit = self._kv.match(entry.tokens, chain_of(entry))
                if self._admission.should_wait(entry, hit.num_tokens, budget):
                    continue
                blocked = not self._admission.has_pages(entry, hit)
                if not blocked:
                    yield self._candidate(entry, hit.num_tokens, budget, len(entries), hit)

    def _candidate(
        self, entry: Entry, start: int, budget: int, crowd: int, hit: PrefixHit | None = None
    ) -> _Candidate:
        length = self._chunk_length(len(entry.tokens) - start, budget, crowd)
        end = self._kv.ring_end(start)
        if end is not None:
            length = min(length, end - start)
        return _Candidate(entry, start, length, hit)

    def _chunk_length(self, left: int, budget: int, crowd: int) -> int:
        """All that is `left` if it fits, unless two chunks pad so much less that it pays.

        It does when many rows are padded alike: at most `crowd`.
        """
        limits = self._limits
        longest = limits.longest_chunk(budget)
        if left >= longest:
            return longest
        bucket = limits.chunk_bucket(left)
        shorter = max((n for n in limits.chunk_buckets if n < left), default=0)
        saved = bucket - shorter - limits.chunk_bucket(left - shorter)
        rows = min(crowd, max(1, budget // bucket))
        return shorter if shorter and saved * rows > CALL_TOKENS else left

    def _is_full(self, group: list[_Candidate], budget: int) -> bool:
        bucket = self._limits.chunk_bucket(group[0].length)
        return (len(group) + 1) * bucket > budget or len(group) == self._limits.row_buckets[-1]

    def _joins(self, candidate: _Candidate, head: _Candidate) -> bool:
        """Whether it may share the head's call at no cost to the head."""
        bucket = self._limits.chunk_bucket
        same = bucket(candidate.length) == bucket(head.length)
        return same and (head.start > 0 or candidate.start == 0)

    def _make_room(self, candidate: _Candidate) -> bool | None:
        """Takes the chunk's pages, from later arrivals if need be; None: not before a drain."""
        entry = candidate.entry
        while not self._take(candidate):
            victim = self._roster.victim(entry.entry_id)
            if victim is None:
                later = (e for i, e in self._roster.active.items() if i > entry.entry_id)
                return None if any(e.pending for e in later) else False
            self._roster.preempt(victim)
        return True

    def _take(self, candidate: _Candidate) -> bool:
        """Admits the entry if it waits, and takes the chunk's pages; False if they are short."""
        entry = candidate.entry
        if candidate.hit is not None and entry.status is Status.WAITING:
            self._admission.admit(entry, candidate.hit)
        return self._kv.grow(pages_of(entry), candidate.start + candidate.length)

    def _worthwhile_rows(self, group: list[_Candidate], budget: int) -> int:
        """Rows of the group whose padding keeps to the budget and costs less than another call.

        The others stay admitted and come next.
        """
        limits, rows = self._limits, len(group)
        bucket, padded = limits.chunk_bucket(group[0].length), limits.row_bucket(rows)
        if padded * bucket <= budget and (padded - rows) * bucket <= CALL_TOKENS:
            return rows
        whole = (n for n in limits.row_buckets if n <= rows and n * bucket <= budget)
        return max(whole, default=1)

    def _planned(self, group: list[_Candidate], turn: int) -> PrefillPlan:
        chunks = []
        for c in group:
            chunks.append(ChunkPlan(c.entry, c.start, c.length, c.ends))
            c.entry.computed = c.start + c.length
            c.entry.turn = turn
        for c in group:
            if c.ends:
                c.entry.status = Status.RUNNING
                c.entry.pending += 1
        bucket = self._limits.chunk_bucket(group[0].length)
        return PrefillPlan(chunks, bucket, self._limits.row_bucket(len(group)))
