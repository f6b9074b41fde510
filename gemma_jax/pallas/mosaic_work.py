"""Which query rows and key rows each block of the Mosaic prefill kernel has.

A block owns 64-row tiles: 64/G tokens times the G query heads of one key/value head, so that a
causal or window edge wastes few products. TMA needs row addresses that are multiples of 8, so tiles
start at rows rounded down to 8 and the rows before a sequence are masked like those behind it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.pallas.segments import Segments

ROWS = 64
"""Rows of a wgmma product."""
HALF = 256
"""Output columns of one warpgroup: the widest wgmma, and 128 accumulator registers a thread."""
ALIGN = 8
"""Rows of a swizzled tile: what a TMA row address must divide by."""


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      design: "split" or "joined", see `prefill_attention_mosaic.py`.
      groups: 64-row tiles of a block.
      cluster: blocks that share their loads, 1 or 2.
      block_kv: keys of a tile, a multiple of 64.
      k_columns, k_slots: split: columns and number of the pieces in which a key tile is streamed.
      v_columns, v_slots: split: the same of 64 values, for each 256 columns.
      p_slots: split: tiles of weights in flight between the warpgroups.
      stages: joined: key and value tiles in flight.
    """

    design: Literal["split", "joined"]
    groups: int = 1
    cluster: int = 1
    block_kv: int = 64
    k_columns: int = 128
    k_slots: int = 4
    v_columns: int = 128
    v_slots: int = 2
    p_slots: int = 2
    stages: int = 2


@dataclass(frozen=True)
class Shape:
    """Static facts of one call; `fold` blocks share a key head whose group is too large for one."""

    batch: int
    kv_heads: int
    group: int
    fold: int
    head_dim: int
    window: int | None
    max_q_len: int
    config: Config

    @property
    def halves(self) -> int:
        return self.head_dim // HALF

    @property
    def q_columns(self) -> int:
        """Columns of a product of queries and keys."""
        return self.config.k_columns if self.config.design == "split" else HALF

    @property
    def tokens(self) -> int:
        """Tokens of one 64-row tile."""
        return ROWS // self.group

    @property
    def cluster_tokens(self) -> int:
        return self.tokens * self.config.groups * self.config.cluster

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.max_q_len + ALIGN - 1, self.cluster_tokens)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.fold

    @property
    def clusters(self) -> int:
        return self.tiles * self.heads * self.batch

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block, the loading one included."""
        softmax = self.config.groups if self.config.design == "split" else 0
        return softmax + self.config.groups * self.halves + 1


@dataclass(frozen=True)
class Work:
    """Where a block's rows and keys lie; all traced int32.

    Token t of a sequence counts from `q_row`, the query row rounded down to 8; its position is
    `position + t`. It is the sequence's own from `live_from` to `live_to`, and to be written up to
    `store_to`. Key tile i of `steps` has rows from `k_row + i·block_kv`, the first at position
    `k_position + i·block_kv`.
    """

    head: jax.Array
    kv_head: jax.Array
    first_token: jax.Array
    q_row: jax.Array
    position: jax.Array
    live_from: jax.Array
    live_to: jax.Array
    store_to: jax.Array
    k_row: jax.Array
    k_position: jax.Array
    k_length: jax.Array
    steps: jax.Array


def div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x, jnp.int32(y))


def rem(x: jax.Array, y: int) -> jax.Array:
    return lax.rem(x, jnp.int32(y))


def _floor8(x: jax.Array) -> jax.Array:
    return div(x, ALIGN) * ALIGN


def meta_of(segments: Segments, rows: int) -> jax.Array:
    """[5, B]: the segments, and where the rows that each must write end."""
    ends = jnp.concatenate([segments.q_offsets[1:], jnp.full((1,), rows, jnp.int32)])
    return jnp.stack([*segments, ends]).astype(jnp.int32)


def own_work(shape: Shape, meta: Any) -> Work:
    """The work of the block that runs this, from `meta_of`."""
    block = lax.axis_index("block") if shape.config.cluster > 1 else jnp.int32(0)
    return work_of(shape, meta, lax.axis_index("tile"), block)


def work_of(shape: Shape, meta: Any, index: jax.Array, block: jax.Array) -> Work:
    """The work of a block of cluster `index`: heaviest query tiles first."""
    pairs = shape.heads * shape.batch
    tile, pair = shape.tiles - 1 - div(index, pairs), rem(index, pairs)
    head, b = rem(pair, shape.heads), div(pair, shape.heads)
    q_offset, q_length, k_offset, k_length, q_end = (meta[i, b] for i in range(5))
    q_base, k_base = _floor8(q_offset), _floor8(k_offset)
    q_shift, k_shift = q_offset - q_base, k_offset - k_base
    position = k_length - q_length - q_shift

    first = tile * shape.cluster_tokens
    low = jnp.maximum(first, q_shift)
    high = jnp.minimum(first + shape.cluster_tokens, q_shift + q_length) - 1
    window = shape.window
    first_key = 0 if window is None else jnp.maximum(position + low - window + 1, 0)
    k_low = _floor8(k_shift + first_key)
    keys = k_shift + position + high + 1 - k_low
    steps = div(keys + shape.config.block_kv - 1, shape.config.block_kv)
    steps = jnp.where(low <= high, jnp.maximum(steps, 0), 0)  # nothing to do past the sequence
    return Work(
        head=head,
        kv_head=div(head, shape.fold),
        first_token=first + block * (shape.tokens * shape.config.groups),
        q_row=q_base,
        position=position,
        live_from=q_shift,
        live_to=q_shift + q_length,
        store_to=q_end - q_base,
        k_row=k_base + k_low,
        k_position=k_low - k_shift,
        k_length=k_length,
        steps=steps,
    )


def group_token(shape: Shape, work: Work, group: Any) -> jax.Array:
    """First token of one of the block's 64-row tiles."""
    return work.first_token + group * shape.tokens
