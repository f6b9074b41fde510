"""What one device call of the engine may take."""

from dataclasses import dataclass

from gemma_jax.buckets import pick
from gemma_jax.errors import ConfigError

_COUNTS = (
    "max_num_seqs", "max_num_batched_tokens", "mixed_budget", "decode_steps",
    "decode_steps_waiting", "max_queue",
)  # fmt: skip


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of a `Scheduler`.

    Budgets count padded tokens: a call of r rows with chunks of c tokens counts as
    row bucket of r × chunk bucket of c. One chunk of the smallest size is always allowed.

    Attributes:
      max_num_seqs: slots, so most entries admitted at a time.
      max_num_batched_tokens: budget of a prefill call while nothing decodes.
      mixed_budget: budget of a prefill call while rows decode.
      row_buckets, chunk_buckets: padded sizes of a prefill call, ascending.
      decode_steps: steps of a decode call.
      decode_steps_waiting: steps of a decode call while a prompt could be prefilled.
      max_queue: most waiting entries.
      prompts_first: no decode call while a prompt can be prefilled; for jobs whose rows nobody
        watches. Otherwise the two kinds of call alternate.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    mixed_budget: int
    row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]
    decode_steps: int = 32
    decode_steps_waiting: int = 4
    max_queue: int = 4096
    prompts_first: bool = False

    def __post_init__(self):
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("row_buckets", "chunk_buckets"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name}={sizes}: expected ascending sizes of at least 1")

    def longest_chunk(self, budget: int) -> int:
        """The longest chunk that the fewest rows can have within the budget."""
        sizes, rows = self.chunk_buckets, self.row_buckets[0]
        return max((n for n in sizes if n * rows <= budget), default=sizes[0])

    def chunk_bucket(self, length: int) -> int:
        """Padded length of a chunk."""
        return pick(length, self.chunk_buckets, "tokens of a chunk")

    def row_bucket(self, rows: int) -> int:
        """Padded rows of a prefill call."""
        return pick(rows, self.row_buckets, "rows of a prefill call")
