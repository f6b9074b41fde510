"""Who runs next: which prompts are admitted, how they are cut into chunks, which rows decode.

`Scheduler.schedule` plans one device call from what the host knows and takes slots and pages as if
it had run; the engine queues it. Calls run in the order they were planned, so pages that a plan
gives up may be given away at once: whoever gets them writes in a later call. `accept` brings the
tokens of a queued call back.

The rules, each in the file that keeps it:
- `prefill_planner`: prompts take turns, chunk by chunk; chunks of one padded size share a call, up
  to a budget of padded tokens.
- `admission`: an entry starts when the pages of its whole prompt are there beside those promised
  to others. Nobody overtakes an entry that waits for pages.
- `decode_planner`: every row that can go on does, for several steps.
- Here: while rows decode, prefill and decode calls alternate.
- `roster`: when pages run out, the latest arrival gives its own up and is computed again later.
  The oldest admitted entry never does, and so always ends.

No arrays, no device: this runs alone.
"""

from collections.abc import Sequence

from gemma_jax.errors import CapacityError, RequestError
from gemma_jax.serve.admission import Admission
from gemma_jax.serve.decode_planner import DecodePlanner
from gemma_jax.serve.entry import DecodePlan, Drain, Entry, Plan, PrefillPlan, Status
from gemma_jax.serve.pages import KVPages
from gemma_jax.serve.prefill_planner import PrefillPlanner
from gemma_jax.serve.roster import Roster
from gemma_jax.serve.scheduler_limits import SchedulerLimits

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Plans the device calls of one engine; see the module's rules."""

    def __init__(self, limits: SchedulerLimits, kv: KVPages):
        self.limits, self.kv = limits, kv
        self._roster = Roster(kv, limits.max_num_seqs)
        self._admission = Admission(limits, self._roster)
        self._prefill = PrefillPlanner(limits, self._roster, self._admission)
        self._decode = DecodePlanner(limits, self._roster, self._admission)
        self._turn = 0
        self._after_prefill = False

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Entries that have a slot."""
        return len(self._roster.active)

    @property
    def has_work(self) -> bool:
        return bool(self._roster.waiting or self._roster.active)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use, from 0 to 1."""
        return self.kv.usage

    @property
    def preemptions(self) -> int:
        """Times that an entry's pages were taken away."""
        return self._roster.preemptions

    @property
    def prefix_query_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache, once an entry."""
        return self._roster.prefix_query_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self._roster.prefix_hit_tokens

    def add(self, *entries: Entry) -> None:
        """Queues new entries, all or none.

        Raises:
          RequestError: an entry has no prompt or no room for a token.
          CapacityError: one could never run, or the queue is full (retry later).
        """
        for entry in entries:
            self._check(entry)
        if self.num_waiting + len(entries) > self.limits.max_queue:
            raise CapacityError(
                f"the queue is full: {self.num_waiting} completions wait, {len(entries)} more came,"
                f" max_queue={self.limits.max_queue}; retry later"
            )
        for entry in entries:
            entry.chain = self.kv.chain(entry.namespace)
            entry.turn = self._turn
            self._roster.queue(entry)

    def schedule(self) -> Plan | None:
        """The next device call, its slots and pages taken.

        `Drain` if queued calls must be read first; None if there is nothing to do.
        """
        self._roster.settle()
        self._admission.reset()
        if self._after_prefill and not self.limits.prompts_first:
            plan = self._decode.plan() or self._prefill.plan(self._turn + 1)
        else:
            plan = self._prefill.plan(self._turn + 1) or self._decode.plan()
        if isinstance(plan, PrefillPlan | DecodePlan):
            self._turn += 1
            self._after_prefill = isinstance(plan, PrefillPlan)
        elif plan is None and self.has_work:
            assert any(e.pending for e in self._roster.active.values()), "nobody can go on"
            return Drain()
        return plan

    def accept(
        self, entry: Entry, new_tokens: Sequence[int], *, promised: int, finished: bool
    ) -> None:
        """Takes the tokens that one queued call brought; ignored once the entry has ended.

        Args:
          entry: whose.
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
            self._roster.finish(entry)

    def abort(self, entry: Entry) -> None:
        """Ends an entry at any time; slot and pages are free at once."""
        if entry.status is not Status.FINISHED:
            self._roster.finish(entry)

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
