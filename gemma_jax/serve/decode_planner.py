"""The next decode call: every row that can go on, and how many steps it takes."""

from gemma_jax.serve.admission import Admission
from gemma_jax.serve.entry import DecodePlan, Drain, Entry
from gemma_jax.serve.pages import NO_PAGES
from gemma_jax.serve.roster import Roster, pages_of
from gemma_jax.serve.scheduler_limits import SchedulerLimits


class DecodePlanner:
    """When pages are short, calls get shorter; then later arrivals give theirs up."""

    def __init__(self, limits: SchedulerLimits, roster: Roster, admission: Admission):
        self._limits, self._roster, self._kv = limits, roster, roster.kv
        self._admission = admission

    def plan(self) -> DecodePlan | Drain | None:
        """The call, with pages taken; None if no row can go on.

        `Drain` if pages can only come from entries with unread calls.
        """
        while rows := self._roster.decodable:
            steps = self._steps(rows)
            while steps:
                limits = [(entry, self._limit(entry, steps)) for entry in rows]
                if self._has_pages(limits):
                    return self._planned(limits)
                steps //= 2
            victim = self._roster.victim()
            if victim is None:
                return Drain()
            self._roster.preempt(victim)
        return None

    def _steps(self, rows: list[Entry]) -> int:
        """Few while somebody waits whom a return to the host would help, many otherwise.

        Where nobody can start before a row ends, the call ends with the first row that must. It
        ends with the shortest `max_steps` of a row too, so that no row idles in it.
        """
        many = self._limits.decode_steps
        few = min(self._limits.decode_steps_waiting, many)
        active, waiting = self._roster.active.values(), self._roster.waiting
        if self._roster.prefilling or any(entry.one_step for entry in active):
            steps = few
        elif self._admission.front_is_ready():
            steps = few
        elif waiting:
            steps = max(few, min(many, *(entry.remaining for entry in rows)))
        else:
            steps = many
        return min([steps, *(entry.max_steps for entry in rows if not entry.one_step)])

    def _limit(self, entry: Entry, steps: int) -> int:
        """Steps of one row in a call of `steps`."""
        if entry.one_step:
            return 1
        limit = min(steps, entry.remaining, entry.max_steps)
        end = self._kv.ring_end(entry.computed)
        return limit if end is None else min(limit, end - entry.computed)

    def _has_pages(self, limits: list[tuple[Entry, int]]) -> bool:
        needs = (self._kv.demand(pages_of(e), e.computed + limit) for e, limit in limits)
        total = sum((need for need in needs if need is not NO_PAGES), NO_PAGES)
        return total.within(self._kv.available)

    def _planned(self, limits: list[tuple[Entry, int]]) -> DecodePlan:
        for entry, limit in limits:
            grown = self._kv.grow(pages_of(entry), entry.computed + limit)
            assert grown, "counted as available"
            entry.computed += limit
            entry.pending += limit
        return DecodePlan(limits)
