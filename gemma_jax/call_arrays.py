"""The arrays that a device call takes beside weights, cache and row state, and what it gives back.

`batch_arrays` builds them on the host.
"""

from dataclasses import dataclass

import jax

from gemma_jax.program import PromptRows
from gemma_jax.sampling import Logprobs


@jax.tree_util.register_dataclass
@dataclass
class PageTables:
    """The pages of a call's rows, int32 [B, pages a row]: full-attention and sliding layers."""

    full: jax.Array
    window: jax.Array


@jax.tree_util.register_dataclass
@dataclass
class Chunk:
    """Consecutive prompt tokens of some rows.

    Attributes:
      ids: [G, T] int32, right-padded.
      start: [G] int32, position of the first token.
      lengths: [G] int32, tokens that count; 0 for a padding row.
      ends: [G] bool, the chunk ends its prompt, so that the next token is due.
      rows: [G] int32, the slot of each; a padding row names one past the last.
      counts: [G] int32, tokens that were generated before (and now belong to the prompt).
      prompt_seen, output_counts: [G, V] bool and int32, the ids of prompt and output so far; needed
        where a prompt with a penalty ends.
      allowed: [G, ceil(V / 32)] uint32, bit i of word j set where id 32 j + i may be drawn.
    """

    ids: jax.Array
    start: jax.Array
    lengths: jax.Array
    ends: jax.Array
    rows: jax.Array
    counts: jax.Array
    prompt_seen: jax.Array | None = None
    output_counts: jax.Array | None = None
    allowed: jax.Array | None = None

    @property
    def part(self) -> PromptRows:
        """What the network sees of it."""
        return PromptRows(self.ids, self.start, self.lengths)


@jax.tree_util.register_dataclass
@dataclass
class DecodeRows:
    """The rows of a decode call.

    Attributes:
      rows: [B] int32, the slot of each; a padding row names one past the last.
      limits: [B] int32, most steps that each may take in this call; 0 for a padding row.
      allowed: as in `Chunk`; holds for the first step, so a constrained row has limit 1.
    """

    rows: jax.Array
    limits: jax.Array
    allowed: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass
class StepOutput:
    """Tokens of one call: int32 [B, n] with `NO_ID` where a row produced none.

    `logprobs` leaves have the shape [B, n, …]; `None` when none were asked for.
    """

    tokens: jax.Array
    logprobs: Logprobs | None
