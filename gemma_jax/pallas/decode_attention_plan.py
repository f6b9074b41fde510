"""What one call of `decode_attention` computes, and which rows and keys each program takes.

Inside the kernels q, out and the cache are matrices: a row is one head of one token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as tt
from gemma_jax.pallas.decode_attention_config import Config


@dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    config: Config
    numerics: Numerics
    batch: int
    queries: int
    kv_heads: int
    groups: int
    head_dim: int
    slots: int
    page: int
    window: int | None
    paged: bool
    raw_heads: int = 0  # heads a KV head of the raw projection; 0 = q is ready to attend
    eps: float = 0.0

    @property
    def is_owner(self) -> bool:
        """Whether the step brings a key and a value of its own."""
        return self.raw_heads > self.groups

    @property
    def blocks(self) -> int:
        """Programs that share the query rows of one KV head."""
        return -(-self.queries * self.groups // self.config.rows)

    @property
    def programs(self) -> int:
        """Programs of one split."""
        return self.batch * self.kv_heads * self.blocks

    @property
    def kept_rows(self) -> int:
        """Rows of a block that are stored between the passes: a power of two."""
        return min(self.config.rows, pl.next_power_of_2(self.queries * self.groups))

    @property
    def merged_rows(self) -> int:
        """Query rows that the last program merges at a time: half of its registers."""
        registers = self.config.num_warps * 32 * 128
        fitting = registers // (self.head_dim * self.kept_splits)
        return min(self.kept_rows, max(1, fitting))

    @property
    def kept_splits(self) -> int:
        """Splits that the arrays between the passes have room for: a power of two."""
        return pl.next_power_of_2(self.config.splits)


@dataclass(frozen=True)
class Program:
    """Which query rows this program has and which keys they see; traced scalars."""

    row: Any  # of the batch
    head: Any  # KV head
    block: Any  # of query rows
    index: Any  # of (row, head, block)
    length: Any
    low: Any  # first visible position
    end: Any  # one past the last position to be read from the cache
    origin: Any  # position of the first key of tile 0
    tiles: Any
    live: Any  # splits that have work, at least 1


def program_of(plan: Plan, index: jax.Array, lengths_ref: Any) -> Program:
    c = plan.config
    block, pair = index % plan.blocks, index // plan.blocks
    row, head = pair // plan.kv_heads, pair % plan.kv_heads
    length = lengths_ref[row]
    end = jnp.maximum(length - 1, 0) if plan.is_owner else length
    low = jnp.int32(0)
    if plan.window is not None:
        low = jnp.maximum(length - plan.queries - plan.window + 1, 0)
    aligned = plan.paged or plan.numerics.batch_invariant  # a tile stays inside its page
    origin = low // c.tile * c.tile if aligned else low
    tiles = (jnp.maximum(end - origin, 0) + c.tile - 1) // c.tile
    live = jnp.clip(tiles, 1, c.splits)
    return Program(row, head, block, index, length, low, end, origin, tiles, live)


def query_rows(
    plan: Plan, p: Program, first: Any = 0, count: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For `count` rows of the block from `first`: row in q, whether it is real, its position."""
    rows = plan.config.rows
    i = p.block * rows + first + jnp.arange(count or rows, dtype=jnp.int32)
    valid = i < plan.queries * plan.groups
    query, group = i // plan.groups, i % plan.groups
    row = ((p.row * plan.queries + query) * plan.kv_heads + p.head) * plan.groups + group
    return row, valid, p.length - plan.queries + query


def half_columns(plan: Plan) -> tuple[Any, Any]:
    half = plan.head_dim // 2
    return pl.ds(0, half), pl.ds(half, half)


def load_rows(ref: Any, rows: jax.Array, columns: Any, mask: jax.Array) -> jax.Array:
    """[rows, columns] of a matrix, zero where masked."""
    return tt.load(ref.at[block_index(rows, columns)], mask=widened(mask, columns.size), other=0.0)


def block_index(rows: jax.Array, columns: Any) -> tuple[jax.Array, jax.Array]:
    """Index pair of a block of a matrix; masked accesses take no mixture of vectors and slices."""
    shape = (rows.shape[0], columns.size)
    steps = columns.start + jnp.arange(columns.size, dtype=jnp.int32)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(steps[None], shape)


def widened(mask: jax.Array, width: int) -> jax.Array:
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], width))
