"""Batch-invariant forward passes: a token's numbers do not depend on what else a call computes.

Every token, of a prompt or generated, goes the same way: its row reads the keys of its sequence
from the cache, in tiles that begin at multiples of `TILE` and are added in order of position. Which
call brought the token, how the prompt was cut, which pages were found in the prefix cache, and who
else is in the batch then cannot change a bit, provided that products and norms of a row do not
either. On a CPU they do not because all rows pass through one loop body of `CPU_ROWS` rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.config import LayerConfig
from gemma_jax.model import cache as kv
from gemma_jax.model.attention import causal_mask
from gemma_jax.model.cache import KVCache
from gemma_jax.model.context import DecodeContext
from gemma_jax.numerics import MASK_VALUE, Numerics

TILE = 64
"""Keys that are added at a time."""


class InvariantContext(DecodeContext):
    """One token a row; several rows may belong to one sequence, in order of position."""

    def _attend_newest(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        source = layer.kv_source
        return attend_in_tiles(
            q[:, 0], self._k[source], self._v[source], self.positions[:, 0], self._valid[:, 0],
            slots=self.layout.slots(layer), window=layer.window,
            page_table=self._cache.table(layer), numerics=self.numerics,
        )  # fmt: skip


def rows_of_sequences(cache: KVCache, sequence: jax.Array) -> KVCache:
    """The cache with the page tables of each row's sequence, `sequence` [N]."""
    tables = cache.full_table, cache.window_table
    full, window = (None if t is None else t[sequence] for t in tables)
    return dataclasses.replace(cache, full_table=full, window_table=window)


def attend_in_tiles(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    position: jax.Array,
    valid: jax.Array,
    *,
    slots: int,
    window: int | None,
    page_table: jax.Array | None,
    numerics: Numerics,
) -> jax.Array:
    """Attention of one query a row over the cache: [N, K, G, H] in the compute dtype.

    Rounds as transformers' eager attention: scores, weights and output once each. Tiles that a row
    cannot see add exact zeros.

    Args:
      q: [N, K, G, H].
      k_pages: [pages, page, K, H].
      v_pages: as `k_pages`.
      position: int32 [N], of each query, which sees it and what comes before.
      valid: bool [N]; the others give anything.
      slots: tokens that a sequence can hold; position p is at slot p mod slots.
      window: a query sees the window - 1 positions before it; None = all.
      page_table: int32 [N, slots // page] or None.
      numerics: compute dtype and rounding.
    """
    low = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(position - window + 1, 0)
        low = jnp.min(jnp.where(valid, first, jnp.iinfo(jnp.int32).max)) // TILE
    stop = jnp.max(jnp.where(valid, position, -1)) // TILE + 1

    def tile(j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions [N, TILE] of the tile, and the scores [N, K, G, TILE] against its keys."""
        keys = jnp.broadcast_to(j * TILE + jnp.arange(TILE), (q.shape[0], TILE))
        k = kv.read_positions(k_pages, keys, page_table, slots)
        scores = numerics.einsum("nkgh,nskh->nkgs", q, k).astype(jnp.float32)
        mask = causal_mask(position[:, None], keys, window)[:, :, None]
        return keys, jnp.where(mask, scores, MASK_VALUE)

    def raise_top(j: jax.Array, top: jax.Array) -> jax.Array:
        return jnp.maximum(top, jnp.max(tile(j)[1], axis=-1))

    def add_weights(j: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.sum(jnp.exp(tile(j)[1] - top[..., None]), axis=-1)

    def add_values(j: jax.Array, out: jax.Array) -> jax.Array:
        keys, scores = tile(j)
        weights = numerics.cast(jnp.exp(scores - top[..., None]) / total[..., None])
        v = kv.read_positions(v_pages, keys, page_table, slots)
        return out + jnp.einsum(
            "nkgs,nskh->nkgh", weights, v,
            precision=numerics.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    rows = q.shape[:3]
    top = lax.fori_loop(low, stop, raise_top, jnp.full(rows, MASK_VALUE, jnp.float32))
    total = lax.fori_loop(low, stop, add_weights, jnp.zeros(rows, jnp.float32))
    out = lax.fori_loop(low, stop, add_values, jnp.zeros(q.shape, jnp.float32))
    return numerics.cast(out)
