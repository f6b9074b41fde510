"""Which waiting entries may have a slot and pages now."""

from gemma_jax.serve.entry import Entry, Status
from gemma_jax.serve.pages import PageCount, PrefixHit
from gemma_jax.serve.roster import Roster, chain_of, pages_of
from gemma_jax.serve.scheduler_limits import SchedulerLimits

LONG_PREFILLS = 4
"""Prompts of several chunks that take turns; another begins when one of them is through.

With none, a medium prompt would wait for a long one; with too many, all would end late.
"""


class Admission:
    """Pages for a whole prompt and its first decode call are promised before it begins.

    Promised too are those that earlier prompts still lack, and those of the running rows' next
    call; so what is admitted is not preempted at once. While nothing is admitted, anything may be.
    """

    def __init__(self, limits: SchedulerLimits, roster: Roster):
        self._limits, self._roster, self._kv = limits, roster, roster.kv
        self._spare: PageCount | None = None

    def reset(self) -> None:
        """Counts anew: to be called before each plan. In a plan only admissions change the count;
        once one has preempted an entry it admits nobody.
        """
        self._spare = None

    def has_pages(self, entry: Entry, hit: PrefixHit) -> bool:
        """Whether a waiting entry could be admitted, given a slot."""
        if not self._roster.active:
            return True
        if self._roster.held:
            return False
        if self._spare is None:
            self._spare = self._kv.available - self._promised()
        return self._need(entry, hit).within(self._spare)

    def admit(self, entry: Entry, hit: PrefixHit) -> None:
        """Admits a waiting entry for which `has_pages`."""
        if self._spare is not None:
            self._spare -= self._need(entry, hit)
        self._roster.admit(entry, hit)

    def front_is_ready(self) -> bool:
        """Whether the first waiting entry could be admitted now."""
        if not self._roster.free_slots or not self._roster.waiting:
            return False
        front = self._roster.waiting[0]
        return self.has_pages(front, self._kv.match(front.tokens, chain_of(front)))

    def should_wait(self, entry: Entry, start: int, budget: int) -> bool:
        """Whether it is better off later: when a shared prefix is there, or on its turn."""
        return self._prefix_is_coming(entry, start) or self._is_one_too_many(entry, start, budget)

    def _prefix_is_coming(self, entry: Entry, start: int) -> bool:
        """Whether the first page that a waiting entry lacks is being computed for another one."""
        size = self._kv.sizes.page_size
        q = start // size
        if not self._kv.prefix_caching or (q + 1) * size >= len(entry.tokens):
            return False
        key = chain_of(entry).keys(entry.tokens, q + 1)[q]
        return any(
            pages_of(e).num_registered <= q < (len(e.tokens) - 1) // size
            and chain_of(e).keys(e.tokens, q + 1)[q] == key
            for e in self._roster.prefilling
        )

    def _is_one_too_many(self, entry: Entry, start: int, budget: int) -> bool:
        """Whether it needs several chunks and enough others do."""
        limit = self._limits.longest_chunk(budget)
        if len(entry.tokens) - start <= limit:
            return False
        others = sum(len(e.tokens) - e.computed > limit for e in self._roster.prefilling)
        return others >= max(LONG_PREFILLS, budget // limit)

    def _need(self, entry: Entry, hit: PrefixHit) -> PageCount:
        """Available pages that a waiting entry takes until its first decode call has run."""
        held = PageCount(len(hit.full), len(hit.window))
        return self._prompt_peak(entry) - held + self._kv.idle(hit)

    def _promised(self) -> PageCount:
        total = PageCount()
        for entry in self._roster.active.values():
            if entry.status is Status.PREFILLING:
                total += self._prompt_peak(entry) - pages_of(entry).count
            elif entry.remaining > 0:
                steps = min(entry.remaining, self._next_steps(entry))
                total += self._kv.demand(pages_of(entry), entry.computed + steps)
        return total

    def _prompt_peak(self, entry: Entry) -> PageCount:
        """Most pages that an entry holds until its first decode call has run."""
        end = len(entry.tokens) + self._next_steps(entry)
        return self._kv.peak(min(entry.max_total - 1, end))

    def _next_steps(self, entry: Entry) -> int:
        return 1 if entry.one_step else min(entry.max_steps, self._limits.decode_steps)
