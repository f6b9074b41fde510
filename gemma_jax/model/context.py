"""What the queries of one call attend to: cache writes, key selection and masks, layer by layer.

A context lives for one traced forward pass. It takes the cache in, gathers the updated arrays and
gives the cache out; layers call `attend` and know nothing of slots, rings or pages.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gemma_jax.config import FULL, SLIDING, LayerConfig, LayerKind, ModelConfig
from gemma_jax.kernels import Kernels
from gemma_jax.model import cache as kv
from gemma_jax.model.attention import (
    VLLM_PREFILL_TILE,
    Attention,
    KeyBlock,
    Tables,
    attend,
    attend_in_blocks,
    vllm_splits_keys,
)
from gemma_jax.model.cache import CacheLayout, KVCache
from gemma_jax.model.residual import Ops
from gemma_jax.model.rope import rope_tables
from gemma_jax.numerics import Numerics

LOCAL_BLOCK = 256
"""Queries a block of windowed prefill attention."""


class Context:
    """What all contexts share: RoPE tables, the donors' keys, cache in and out."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        kernels: Kernels,
        layout: CacheLayout,
        cache: KVCache,
        positions: jax.Array,
    ):
        self.config, self.numerics, self.layout = config, numerics, layout
        self.ops = Ops(numerics, kernels, config.rms_norm_eps)
        self.positions = positions  # [B, T]
        self._cache = cache
        self._k, self._v = list(cache.k), list(cache.v)
        self._keys: dict[int, KeyBlock] = {}
        self._tables = self._rope(positions)

    @property
    def cache(self) -> KVCache:
        """The cache with everything written so far."""
        return dataclasses.replace(self._cache, k=tuple(self._k), v=tuple(self._v))

    def _rope(self, positions: jax.Array) -> dict[LayerKind, Tables]:
        c = self.config
        return {
            SLIDING: rope_tables(positions, c.sliding_rope, c.head_dim, self.numerics),
            FULL: rope_tables(positions, c.full_rope, c.global_head_dim, self.numerics),
        }

    def _fold(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[N, ...] -> [B, T, ...], rows as in `positions` [B, T]."""
        return x.reshape(*positions.shape, *x.shape[1:])

    def _attend(
        self, layer: LayerConfig, q: jax.Array, keys: KeyBlock, may_split: bool = True
    ) -> jax.Array:
        rows, length = q.shape[:2]
        split = may_split and vllm_splits_keys(rows, length, self.config.num_key_value_heads)
        return attend(q, keys, self.positions, layer.window, self.numerics, split)

    def _write(self, layer: LayerConfig, k, v, positions: jax.Array, valid: jax.Array) -> None:
        slots, table = self.layout.slots(layer), self._cache.table(layer)
        i = layer.index
        self._k[i] = kv.write(self._k[i], k, positions, valid, table, slots)
        self._v[i] = kv.write(self._v[i], v, positions, valid, table, slots)

    def _all_slots(self, layer: LayerConfig, end: jax.Array) -> KeyBlock:
        """Everything the cache holds for rows of `end` [B] tokens."""
        slots, table = self.layout.slots(layer), self._cache.table(layer)
        k, v = (kv.read_rows(x[layer.index], table, slots) for x in (self._k, self._v))
        return KeyBlock(k, v, kv.slot_positions(end, slots))

    def _at_positions(self, layer: LayerConfig, positions: jax.Array) -> KeyBlock:
        slots, table = self.layout.slots(layer), self._cache.table(layer)
        k, v = (
            kv.read_positions(x[layer.index], positions, table, slots) for x in (self._k, self._v)
        )
        return KeyBlock(k, v, positions)


class PrefillContext(Context):
    """A chunk of T consecutive tokens a row, right-padded: positions start … start + length - 1.

    `has_past` (static) says whether any row continues an earlier chunk; without it nothing is read
    from the cache.
    """

    def __init__(
        self, config, numerics, kernels, layout, cache, start, lengths, chunk: int, has_past: bool
    ):
        steps = jnp.arange(chunk, dtype=start.dtype)
        super().__init__(config, numerics, kernels, layout, cache, start[:, None] + steps)
        self._start, self._end = start, start + lengths
        self._valid = steps < lengths[:, None]
        self._has_past = has_past
        self._chunk_positions, self._chunk_tables = self.positions, self._tables
        self._rows: jax.Array | None = None

    def select_rows(self, rows: jax.Array) -> None:
        """From here on the queries are the rows `rows` [B, R] of the chunk only."""
        self._rows = rows
        self.positions = jnp.take_along_axis(self._chunk_positions, rows, axis=1)
        self._tables = self._rope(self.positions)

    def take(self, x: jax.Array) -> jax.Array:
        """The selected rows of x [B·T, D]: [B·R, D]; all rows before `select_rows`."""
        if self._rows is None:
            return x
        rows = self._rows[..., None]
        taken = jnp.take_along_axis(self._fold(x, self._chunk_positions), rows, axis=1)
        return taken.reshape(-1, x.shape[-1])

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [N, K, C, H], stores an owner's k and v, attends: [N, K·G·H]."""
        tables = self._tables[attention.layer.kind]
        q, k, v = attention.split(self._fold(qkv, self.positions), tables, self.numerics)
        return self._attend_prefill(attention.layer, q, k, v)

    def attend_narrowed(self, attention: Attention, q: jax.Array, kv: jax.Array) -> jax.Array:
        """`attend` with q [B·R, K, G, H] of the selected rows and kv [B·T, K, c, H] of all rows."""
        kind = attention.layer.kind
        q = attention.queries(self._fold(q, self.positions), self._tables[kind], self.numerics)
        kv = self._fold(kv, self._chunk_positions)
        k, v = attention.keys_and_values(kv, self._chunk_tables[kind], self.numerics)
        return self._attend_prefill(attention.layer, q, k, v)

    def _attend_prefill(self, layer: LayerConfig, q, k, v) -> jax.Array:
        if layer.owns_kv:
            self._keys[layer.index] = self._store(layer, k, v)
        keys = self._keys[layer.kv_source]
        length = q.shape[1]
        if layer.window is not None and self._rows is None and _is_blocked(length):
            keys = self._with_window_before(layer, keys)
            out = attend_in_blocks(
                q, keys, self.positions, layer.window, LOCAL_BLOCK, self.numerics
            )
        else:
            # vLLM shortens a prefill for KV-shared layers only; an owner is one of many queries.
            out = self._attend(layer, q, keys, may_split=not layer.owns_kv)
        return out.reshape(self.positions.size, -1)

    def _store(self, layer: LayerConfig, k, v) -> KeyBlock:
        fresh = KeyBlock(k, v, self._chunk_positions)
        if not self._has_past:
            self._write(layer, k, v, self._chunk_positions, self._valid)
            return fresh
        if layer.is_sliding:
            past = self._at_positions(layer, self._past_positions(layer))
            self._write(layer, k, v, self._chunk_positions, self._valid)
            return KeyBlock(*(jnp.concatenate(x, axis=1) for x in zip(past, fresh, strict=True)))
        self._write(layer, k, v, self._chunk_positions, self._valid)
        return self._all_slots(layer, self._end)

    def _past_positions(self, layer: LayerConfig) -> jax.Array:
        """The window before the chunk, widened to a whole number of vLLM's key tiles: [B, W']."""
        width = -(-(layer.window or 0) // VLLM_PREFILL_TILE) * VLLM_PREFILL_TILE
        return self._start[:, None] - width + jnp.arange(width, dtype=self._start.dtype)

    def _with_window_before(self, layer: LayerConfig, keys: KeyBlock) -> KeyBlock:
        """Puts an empty window before a first chunk, so that every block of queries has one."""
        if self._has_past:
            return keys
        past = self._past_positions(layer)
        width = past.shape[1]
        heads = ((0, 0), (width, 0), (0, 0), (0, 0))
        positions = jnp.concatenate([past, keys.positions], axis=1)
        return KeyBlock(jnp.pad(keys.k, heads), jnp.pad(keys.v, heads), positions)


class DecodeContext(Context):
    """One token a row at `position` [B]; rows not `active` [B] write nothing."""

    def __init__(self, config, numerics, kernels, layout, cache, position, active):
        super().__init__(config, numerics, kernels, layout, cache, position[:, None])
        self._end = position + 1
        self._valid = active[:, None]

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [B, K, C, H], stores an owner's k and v, attends: [B, K·G·H]."""
        layer = attention.layer
        tables = self._tables[layer.kind]
        q, k, v = attention.split(self._fold(qkv, self.positions), tables, self.numerics)
        if layer.owns_kv:
            self._write(layer, k, v, self.positions, self._valid)
        return self._attend_newest(layer, q).reshape(self.positions.size, -1)

    def _attend_newest(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        """Attention of q [B, 1, K, G, H] once the cache holds the token's own key."""
        if layer.owns_kv:
            self._keys[layer.index] = self._visible(layer)
        return self._attend(layer, q, self._keys[layer.kv_source])

    def _visible(self, layer: LayerConfig) -> KeyBlock:
        if not (self.numerics.matches_vllm and layer.window):
            return self._all_slots(layer, self._end)
        # vLLM's tiles are aligned to absolute positions, so the ring is read in position order.
        tile = VLLM_PREFILL_TILE  # a multiple of the decode tiles
        first = jnp.maximum(self._end - layer.window, 0) // tile * tile
        width = -(-layer.window // tile) * tile + tile
        positions = first[:, None] + jnp.arange(width, dtype=first.dtype)
        return self._at_positions(layer, positions)


def _is_blocked(length: int) -> bool:
    return length > LOCAL_BLOCK and length % LOCAL_BLOCK == 0
