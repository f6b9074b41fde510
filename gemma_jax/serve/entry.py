"""One completion on its way through the scheduler, and the device calls planned for it."""

import enum
import sys
from dataclasses import dataclass, field

from gemma_jax.serve.hash_chain import HashChain
from gemma_jax.serve.pages import SequencePages


class Status(enum.Enum):
    """WAITING has neither slot nor pages; PREFILLING and RUNNING have both; FINISHED has neither.

    A preempted entry is WAITING again, with the tokens it has.
    """

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Entry:
    """One completion of a request; a request with n completions has n entries.

    The caller sets the first group of fields, the scheduler all others.

    Attributes:
      entry_id: arrival order; unique and ascending.
      tokens: prompt and accepted output.
      prompt_len: tokens of the prompt.
      max_total: most tokens that `tokens` may grow to.
      one_step: each token needs something from the host that depends on the one before (a grammar
        mask): at most one step a call, and no call while another is unread.
      max_steps: most decode steps a call, for instance while a stop string may end it on the host.
      namespace: prefix pages are shared only between entries of the same one.

      status: see `Status`.
      slot: row of the device state, while PREFILLING or RUNNING.
      pages: what it holds of the KV cache, while PREFILLING or RUNNING.
      computed: tokens whose K and V are in the cache once every queued call has run.
      pending: most output tokens that queued calls may still bring.
      num_cached: prompt tokens found in the prefix cache at the first admission.
      turn: when it was last served, or added; the earliest is served next.
      chain: page keys of `tokens`.
    """

    entry_id: int
    tokens: list[int]
    prompt_len: int
    max_total: int
    one_step: bool = False
    max_steps: int = sys.maxsize
    namespace: int = 0

    status: Status = field(default=Status.WAITING, init=False)
    slot: int | None = field(default=None, init=False)
    pages: SequencePages | None = field(default=None, init=False)
    computed: int = field(default=0, init=False)
    pending: int = field(default=0, init=False)
    num_cached: int | None = field(default=None, init=False)
    turn: int = field(default=0, init=False)
    chain: HashChain | None = field(default=None, init=False)

    @property
    def remaining(self) -> int:
        """Tokens that may still be promised."""
        return self.max_total - len(self.tokens) - self.pending

    @property
    def decodable(self) -> bool:
        """Whether a decode call may take it now."""
        blocked = self.one_step and self.pending > 0
        return self.status is Status.RUNNING and self.remaining > 0 and not blocked


@dataclass(frozen=True)
class ChunkPlan:
    """Tokens start … start + length - 1 of one entry.

    Attributes:
      entry: whose.
      start: position of the first token.
      length: tokens.
      ends: they are the entry's last, so one token is sampled after them.
    """

    entry: Entry
    start: int
    length: int
    ends: bool


@dataclass(frozen=True)
class PrefillPlan:
    """One prefill call.

    Attributes:
      chunks: one a row.
      chunk_bucket: padded length of every chunk.
      row_bucket: padded number of rows.
    """

    chunks: list[ChunkPlan]
    chunk_bucket: int
    row_bucket: int

    @property
    def has_past(self) -> bool:
        """Whether any chunk continues earlier tokens."""
        return any(chunk.start > 0 for chunk in self.chunks)

    @property
    def padded_tokens(self) -> int:
        return self.row_bucket * self.chunk_bucket


@dataclass(frozen=True)
class DecodePlan:
    """One decode call: each entry with the most steps that it may take, at least 1."""

    rows: list[tuple[Entry, int]]

    @property
    def steps(self) -> int:
        return max(limit for _, limit in self.rows)


@dataclass(frozen=True)
class Drain:
    """Nothing can be planned until the oldest queued call has been read."""


Plan = PrefillPlan | DecodePlan | Drain
