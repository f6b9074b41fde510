"""The KV cache: per owner layer one K and one V array, laid out `[pages, page, K, H]`.

A page table maps (row, page of the row) to a page. Without a table row b owns the pages
`b·n … (b+1)·n - 1` (contiguous storage), and a row is read by a reshape instead of a gather.

Full-attention layers store every position at slot = position. Sliding layers are rings of
`window_slots` ≥ window + largest chunk: slot = position mod window_slots, so that a chunk can be
written before its first query reads the oldest key of its window.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gemma_jax.config import LayerConfig, ModelConfig


@dataclass(frozen=True)
class CacheLayout:
    """Static sizes of a cache, in tokens a row; both capacities are multiples of `page_size`.

    A new layout compiles new programs, so callers round `full_slots` to declared buckets.
    """

    num_rows: int
    full_slots: int
    window_slots: int
    page_size: int

    @classmethod
    def plan(
        cls, config: ModelConfig, num_rows: int, max_len: int, max_chunk: int, page_size: int
    ) -> "CacheLayout":
        """The layout for rows of `max_len` tokens at most, prefilled by `max_chunk` at a time."""
        full = _round_up(max_len, page_size)
        window = _round_up(config.sliding_window + max_chunk, page_size)
        return cls(num_rows, full, min(full, window), page_size)

    def slots(self, layer: LayerConfig) -> int:
        """Tokens that one row of `layer` can hold."""
        return self.window_slots if layer.is_sliding else self.full_slots

    def pages_per_row(self, layer: LayerConfig) -> int:
        return self.slots(layer) // self.page_size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@jax.tree_util.register_dataclass
@dataclass
class KVCache:
    """K and V of every owner layer, [pages, page, K, H] each, and the page tables.

    A table is int32 [B, pages a row]; `None` is the identity (contiguous rows).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    full_table: jax.Array | None = None
    window_table: jax.Array | None = None

    def table(self, layer: LayerConfig) -> jax.Array | None:
        return self.window_table if layer.is_sliding else self.full_table


def init_cache(config: ModelConfig, layout: CacheLayout, dtype: jnp.dtype) -> KVCache:
    """An empty contiguous cache."""
    full, window = (n // layout.page_size for n in (layout.full_slots, layout.window_slots))
    rows = layout.num_rows
    return init_pages(config, rows * full, rows * window, layout.page_size, dtype)


def init_pages(
    config: ModelConfig,
    num_full_pages: int,
    num_window_pages: int,
    page_size: int,
    dtype: jnp.dtype,
) -> KVCache:
    """An empty cache of so many pages a full-attention and a sliding layer."""

    def empty(layer: LayerConfig) -> jax.Array:
        pages = num_window_pages if layer.is_sliding else num_full_pages
        return jnp.zeros((pages, page_size, layer.num_kv_heads, layer.head_dim), dtype)

    owners = config.owner_layers
    return KVCache(k=tuple(map(empty, owners)), v=tuple(map(empty, owners)))


def page_bytes(config: ModelConfig, page_size: int, itemsize: int) -> tuple[int, int]:
    """Bytes that one page takes over all full-attention layers, and over all sliding ones."""
    width = {True: 0, False: 0}
    for layer in config.owner_layers:
        width[layer.is_sliding] += 2 * layer.num_kv_heads * layer.head_dim
    return width[False] * page_size * itemsize, width[True] * page_size * itemsize


def cache_bytes(config: ModelConfig, layout: CacheLayout, itemsize: int) -> int:
    """Bytes that `init_cache` allocates."""
    slots = sum(layout.slots(x) * x.num_kv_heads * x.head_dim for x in config.owner_layers)
    return 2 * layout.num_rows * slots * itemsize


def write(
    pages: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    table: jax.Array | None,
    slots: int,
) -> jax.Array:
    """`pages` with `values` [B, T, K, H] stored at `positions` [B, T] where `valid`.

    Valid positions of one row must be distinct modulo `slots`.
    """
    num_pages, page_size = pages.shape[:2]
    slot = positions % slots
    page = _page_of(slot // page_size, table, slots // page_size)
    page = jnp.where(valid, page, num_pages)  # out of bounds: dropped
    return pages.at[page, slot % page_size].set(values, mode="drop", unique_indices=True)


def flat_slots(
    positions: jax.Array, valid: jax.Array, table: jax.Array | None, slots: int, page_size: int
) -> jax.Array:
    """page · page_size + offset of `positions` [B, T]; -1 where not `valid`."""
    slot = positions % slots
    page = _page_of(slot // page_size, table, slots // page_size)
    return jnp.where(valid, page * page_size + slot % page_size, -1)


def read_rows(pages: jax.Array, table: jax.Array | None, slots: int) -> jax.Array:
    """All slots of every row in slot order, [B, slots, K, H]."""
    rest = pages.shape[2:]
    if table is not None:
        pages = pages.at[table].get(mode="clip")
    return pages.reshape(-1, slots, *rest)


def read_positions(
    pages: jax.Array, positions: jax.Array, table: jax.Array | None, slots: int
) -> jax.Array:
    """The entries at `positions` [B, S], [B, S, K, H]; negative positions give arbitrary values."""
    page_size = pages.shape[1]
    slot = jnp.maximum(positions, 0) % slots
    page = _page_of(slot // page_size, table, slots // page_size)
    return pages.at[page, slot % page_size].get(mode="clip")


def slot_positions(end: jax.Array, slots: int) -> jax.Array:
    """Position stored in each slot of a row that holds positions [0, end): [B, slots].

    Slots never written give a negative position.
    """
    last = end[:, None] - 1
    return last - (last - jnp.arange(slots, dtype=end.dtype)) % slots


def _page_of(row_page: jax.Array, table: jax.Array | None, pages_per_row: int) -> jax.Array:
    rows = jnp.arange(row_page.shape[0], dtype=row_page.dtype)[:, None]
    if table is None:
        return rows * pages_per_row + row_page
    return table[rows, row_page]
