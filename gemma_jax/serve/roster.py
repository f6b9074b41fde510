"""Who waits, and who has a slot and pages."""

import bisect
import heapq

from gemma_jax.serve.entry import Entry, Status
from gemma_jax.serve.hash_chain import HashChain
from gemma_jax.serve.pages import KVPages, PrefixHit, SequencePages


class Roster:
    """Every entry that has not ended, and what it takes to move one from state to state.

    Attributes:
      kv: the pages.
      waiting: entries without a slot, by arrival.
      active: entry_id → entry with slot and pages.
      free_slots: a heap, so that low rows go first.
      held: a preemption has shown that pages are short, and no entry has ended since.
      preemptions: entries whose pages were taken away so far.
      prefix_query_tokens: prompt tokens looked up in the prefix cache, once an entry.
      prefix_hit_tokens: those that were found.
    """

    def __init__(self, kv: KVPages, num_slots: int):
        self.kv = kv
        self.waiting: list[Entry] = []
        self.active: dict[int, Entry] = {}
        self.free_slots = list(range(num_slots))
        self.held = False
        self.preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def prefilling(self) -> list[Entry]:
        """Admitted entries with tokens left to prefill."""
        return [e for e in self.active.values() if e.status is Status.PREFILLING]

    @property
    def decodable(self) -> list[Entry]:
        """Entries that a decode call may take now, by arrival."""
        rows = (e for e in self.active.values() if e.decodable)
        return sorted(rows, key=_arrival)

    def queue(self, entry: Entry) -> None:
        bisect.insort(self.waiting, entry, key=_arrival)

    def unqueue(self, entry: Entry) -> None:
        i = bisect.bisect_left(self.waiting, entry.entry_id, key=_arrival)
        assert self.waiting[i] is entry
        del self.waiting[i]

    def admit(self, entry: Entry, hit: PrefixHit) -> None:
        """Gives a waiting entry a slot and the pages of `hit`."""
        self.unqueue(entry)
        entry.slot = heapq.heappop(self.free_slots)
        entry.pages = self.kv.attach(hit)
        entry.computed = hit.num_tokens
        entry.status = Status.PREFILLING
        self.active[entry.entry_id] = entry
        if entry.num_cached is None:  # not after a preemption
            entry.num_cached = hit.num_tokens
            self.prefix_query_tokens += entry.prompt_len
            self.prefix_hit_tokens += hit.num_tokens

    def finish(self, entry: Entry) -> None:
        """Ends an entry in any state; slot and pages are free at once."""
        if entry.status is Status.WAITING:
            self.unqueue(entry)
        else:
            self._leave(entry)
            self.held = False
        entry.status = Status.FINISHED

    def preempt(self, entry: Entry) -> None:
        """Takes slot and pages away; the entry waits again, by its arrival, with its tokens."""
        assert entry.pending == 0, "tokens are on their way"
        self._leave(entry)
        entry.status = Status.WAITING
        self.queue(entry)
        self.preemptions += 1
        self.held = True

    def victim(self, than: int = -1) -> Entry | None:
        """The latest arrival that may be preempted, among those after entry `than`.

        Tokens on their way pin an entry; so does being the oldest.
        """
        after = max(than, min(self.active))
        able = (e for i, e in self.active.items() if i > after and not e.pending)
        return max(able, key=_arrival, default=None)

    def settle(self) -> None:
        """After a plan: offers what it wrote to the prefix cache, then lets windows slide."""
        for entry in self.active.values():
            self._commit(entry)
            self.kv.slide(pages_of(entry), entry.computed)

    def _leave(self, entry: Entry) -> None:
        """Slot and pages go back, those with known content to the prefix cache."""
        assert entry.slot is not None
        self._commit(entry)
        self.kv.free(pages_of(entry))
        heapq.heappush(self.free_slots, entry.slot)
        del self.active[entry.entry_id]
        entry.slot = entry.pages = None
        entry.computed = entry.pending = 0

    def _commit(self, entry: Entry) -> None:
        known = min(entry.computed, len(entry.tokens) - 1)  # the last one may never be fed
        self.kv.commit(pages_of(entry), entry.tokens, known)


def pages_of(entry: Entry) -> SequencePages:
    """The pages of an admitted entry."""
    assert entry.pages is not None, "not admitted"
    return entry.pages


def chain_of(entry: Entry) -> HashChain:
    """The page keys of a queued entry."""
    assert entry.chain is not None, "not added"
    return entry.chain


def _arrival(entry: Entry) -> int:
    return entry.entry_id
