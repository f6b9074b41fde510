"""The contexts of `context` with attention, norms, RoPE and cache writes in GPU kernels.

What differs from the plain ones is only who computes: keys of a chunk stay flat rows that segments
describe, the cache is written in place by the kernel that makes k and v, and a single query a row
(decode, or the last row of a prompt under fast prefill) reads the cache itself.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gemma_jax.config import LayerConfig, LayerKind, ModelConfig
from gemma_jax.kernels import Kernels
from gemma_jax.model import cache as kv
from gemma_jax.model.attention import Attention, KeyBlock, Tables
from gemma_jax.model.cache import CacheLayout, KVCache
from gemma_jax.model.context import Context, DecodeContext, PrefillContext
from gemma_jax.model.invariant import InvariantContext
from gemma_jax.numerics import Numerics
from gemma_jax.pallas.decode_attention import decode_attention, decode_attention_step
from gemma_jax.pallas.decode_attention_config import queries_a_program
from gemma_jax.pallas.device import current_device
from gemma_jax.pallas.dispatch import Implementation
from gemma_jax.pallas.prefill_attention import prefill_attention
from gemma_jax.pallas.qkv_norm_rope import CacheWrite, QkvOutput, qkv_norm_rope
from gemma_jax.pallas.segments import Segments


def prefill_context(
    config: ModelConfig,
    numerics: Numerics,
    kernels: Kernels,
    layout: CacheLayout,
    cache: KVCache,
    start: jax.Array,
    lengths: jax.Array,
    chunk: int,
    has_past: bool,
) -> PrefillContext:
    """The context of a chunk for the wanted kernels; arguments as of `PrefillContext`."""
    kind = KernelPrefillContext
    if numerics.batch_invariant:
        kind = InvariantKernelPrefill
    elif _is_plain(kernels, "prefill_attention", numerics):
        kind = PrefillContext
    return kind(config, numerics, kernels, layout, cache, start, lengths, chunk, has_past)


def decode_context(
    config: ModelConfig,
    numerics: Numerics,
    kernels: Kernels,
    layout: CacheLayout,
    cache: KVCache,
    position: jax.Array,
    active: jax.Array,
) -> DecodeContext:
    """The context of a decode step for the wanted kernels; arguments as of `DecodeContext`."""
    kind = KernelDecodeContext
    if numerics.batch_invariant:
        kind = InvariantKernelDecode if kernels.default == "pallas" else InvariantContext
    elif _is_plain(kernels, "decode_attention", numerics):
        kind = DecodeContext
    return kind(config, numerics, kernels, layout, cache, position, active)


def reads_whole_tables(kernels: Kernels, numerics: Numerics) -> bool:
    """Whether a decode step costs the same whatever the width of its page tables.

    Plain attention reads every page that a table has room for; the kernels, and attention in tiles,
    read those in use.
    """
    return numerics.batch_invariant or not _is_plain(kernels, "decode_attention", numerics)


def _is_plain(kernels: Kernels, op: str, numerics: Numerics) -> bool:
    """Whether the plain formulas run: asked for, or chosen on a CPU and where rounding is exact.

    The kernels keep scores in float32. That suits "hf", whose bf16 scores are noise, but vLLM's
    rounding is reproduced in full, and float32 runs exist to be compared.
    """
    name = kernels.of(op)
    if name is not None:
        return name == "reference"
    return not current_device().is_gpu or numerics.matches_vllm or numerics.is_float32


class KeyRows(NamedTuple):
    """Keys and values of a chunk's sequences as flat rows [M, K, H]."""

    k: jax.Array
    v: jax.Array
    segments: Segments
    max_len: int
    uniform: bool


class _KernelContext(Context):
    """One kernel for norms, RoPE and the cache write of heads, one for attention over the cache."""

    _chunk_positions: jax.Array  # [B, T], where new keys go
    _valid: jax.Array  # [B, T]
    _slots: dict[LayerKind, jax.Array]

    def _split(
        self, attention: Attention, qkv: jax.Array, tables: Tables, cache: CacheWrite | None = None
    ) -> QkvOutput:
        layer = attention.layer
        owner = cache is not None
        cos, sin = (t.reshape(-1, t.shape[-1]).astype(self.numerics.jnp_dtype) for t in tables)
        out = qkv_norm_rope(
            qkv, attention.q_norm[...], attention.k_norm[...] if owner else None, cos, sin,
            num_groups=qkv.shape[2] - (_kv_heads(layer) if owner else 0),
            has_v=owner and not layer.k_eq_v, eps=attention.eps, numerics=self.numerics,
            cache=cache, implementation=self.ops.kernels.of("qkv_norm_rope"),
        )  # fmt: skip
        if out.k_cache is not None and out.v_cache is not None:
            self._k[layer.index], self._v[layer.index] = out.k_cache, out.v_cache
        return out

    def _cache_write(self, layer: LayerConfig) -> CacheWrite:
        if layer.kind not in self._slots:
            slots, table = self.layout.slots(layer), self._cache.table(layer)
            size = self.layout.page_size
            flat = kv.flat_slots(self._chunk_positions, self._valid, table, slots, size)
            self._slots[layer.kind] = flat.reshape(-1)
        i = layer.index
        return CacheWrite(self._k[i], self._v[i], self._slots[layer.kind])

    def _attend_cache(
        self,
        layer: LayerConfig,
        q: jax.Array,
        ends: jax.Array,
        table: jax.Array | None,
        implementation: Implementation | None,
    ) -> jax.Array:
        """Attention of q [M, R, K, G, H], whose last query is at `ends` - 1: [M·R, K·G·H]."""
        out = decode_attention(
            q, self._k[layer.kv_source], self._v[layer.kv_source], ends,
            slots=self.layout.slots(layer), window=layer.window, page_table=table,
            numerics=self.numerics, implementation=implementation,
        )  # fmt: skip
        return out.reshape(q.shape[0] * q.shape[1], -1)


class KernelPrefillContext(_KernelContext, PrefillContext):
    """`PrefillContext` whose owner layers leave `KeyRows` for the layers that share them."""

    def __init__(self, config, numerics, kernels, layout, cache, start, lengths, chunk, has_past):
        super().__init__(config, numerics, kernels, layout, cache, start, lengths, chunk, has_past)
        self._rows_of: dict[int, KeyRows] = {}
        self._slots: dict[LayerKind, jax.Array] = {}
        self._lengths = lengths

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [N, K, C, H], stores an owner's k and v, attends: [N, K·G·H]."""
        layer = attention.layer
        if not layer.owns_kv:
            q = self._split(attention, qkv, self._tables[layer.kind]).q
            return self._attend_rows(layer, q)
        past = self._past(layer)
        out = self._split(attention, qkv, self._tables[layer.kind], self._cache_write(layer))
        self._rows_of[layer.index] = self._key_rows(layer, out, past)
        return self._attend_chunk(layer, out.q)

    def attend_narrowed(self, attention: Attention, q: jax.Array, kv: jax.Array) -> jax.Array:
        """`attend` with q [B·R, K, G, H] of the selected rows and kv [B·T, K, c, H] of all rows."""
        layer = attention.layer
        past = self._past(layer)
        out = self._split(attention, kv, self._chunk_tables[layer.kind], self._cache_write(layer))
        self._rows_of[layer.index] = self._key_rows(layer, out, past)
        return self._attend_rows(layer, self._split(attention, q, self._tables[layer.kind]).q)

    def _past(self, layer: LayerConfig) -> KeyBlock | None:
        """The window before the chunk, read before the chunk overwrites the ring."""
        if not (self._has_past and layer.is_sliding):
            return None
        return self._at_positions(layer, self._past_positions(layer))

    def _key_rows(self, layer: LayerConfig, out: QkvOutput, past: KeyBlock | None) -> KeyRows:
        assert out.k is not None  # an owner's
        assert out.v is not None
        chunk = self._chunk_positions.shape[1]
        if not self._has_past:
            segments = Segments.padded(self._lengths, chunk)
            return KeyRows(out.k, out.v, segments, chunk, uniform=True)
        end = self._start + self._lengths
        if past is None:  # a full layer: the cache holds everything
            slots, table = self.layout.slots(layer), self._cache.table(layer)
            k, v = (kv.read_rows(x[layer.index], table, slots) for x in (self._k, self._v))
            segments = Segments.padded(self._lengths, chunk, slots, end)
            return KeyRows(_flat(k), _flat(v), segments, slots, uniform=False)
        fresh = (self._fold(x, self._chunk_positions) for x in (out.k, out.v))
        k, v = (jnp.concatenate(x, axis=1) for x in zip(past[:2], fresh, strict=True))
        width = past.positions.shape[1]
        seen = jnp.minimum(self._start, width)
        segments = Segments.padded(self._lengths, chunk, width + chunk, seen + self._lengths)
        segments = segments._replace(k_offsets=segments.k_offsets + width - seen)
        return KeyRows(_flat(k), _flat(v), segments, width + chunk, uniform=False)

    def _attend_chunk(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        rows = self._rows_of[layer.kv_source]
        out = prefill_attention(
            q, rows.k, rows.v, rows.segments, window=layer.window,
            max_q_len=self._chunk_positions.shape[1], max_k_len=rows.max_len,
            uniform=rows.uniform, numerics=self.numerics,
            implementation=self.ops.kernels.of("prefill_attention"),
        )  # fmt: skip
        return out.reshape(out.shape[0], -1)

    def _attend_rows(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        """Attention of the current queries, which are the whole chunk or the selected rows."""
        if self._rows is None:
            return self._attend_chunk(layer, q)
        if self._rows.shape[1] != 1:
            raise ValueError(f"{self._rows.shape[1]} selected rows a sequence: expected one")
        return self._attend_cache(
            layer, q[:, None], jnp.where(self._lengths > 0, self.positions[:, 0] + 1, 0),
            self._cache.table(layer), self.ops.kernels.of("decode_attention"),
        )  # fmt: skip


class KernelDecodeContext(DecodeContext):
    """`DecodeContext` with everything between two projections in one kernel."""

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [B, K, C, H], stores an owner's k and v, attends: [B, K·G·H]."""
        layer, source = attention.layer, attention.layer.kv_source
        cos, sin = (t[:, 0].astype(self.numerics.jnp_dtype) for t in self._tables[layer.kind])
        out, self._k[source], self._v[source] = decode_attention_step(
            qkv, self._k[source], self._v[source],
            jnp.where(self._valid[:, 0], self._end, 0),
            attention.q_norm[...], attention.k_norm[...] if layer.owns_kv else None, cos, sin,
            groups=layer.num_groups, eps=attention.eps, slots=self.layout.slots(layer),
            window=layer.window, page_table=self._cache.table(layer), numerics=self.numerics,
            implementation=self.ops.kernels.of("decode_attention"),
        )  # fmt: skip
        return out.reshape(out.shape[0], -1)


class InvariantKernelPrefill(KernelPrefillContext):
    """Batch-invariant prefill: queries read the cache a few at a time, as those of decode do."""

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [N, K, C, H], stores an owner's k and v, attends: [N, K·G·H]."""
        layer = attention.layer
        cache = self._cache_write(layer) if layer.owns_kv else None
        q = self._split(attention, qkv, self._tables[layer.kind], cache).q
        return self._attend_pages(layer, q)

    def attend_narrowed(self, attention: Attention, q: jax.Array, kv: jax.Array) -> jax.Array:
        """`attend` with q [B·R, K, G, H] of the selected rows and kv [B·T, K, c, H] of all rows."""
        layer = attention.layer
        tables = self._chunk_tables[layer.kind]
        self._split(attention, kv, tables, self._cache_write(layer))
        q = self._split(attention, q, self._tables[layer.kind]).q
        return self._attend_pages(layer, q)

    def _attend_pages(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        rows, length = self.positions.shape
        count = math.gcd(length, queries_a_program(layer.num_groups))
        last = self.positions.reshape(rows, -1, count)[..., -1]
        used = self.positions.reshape(rows, -1, count)[..., 0] < self._end[:, None]
        ends = jnp.where(used, last + 1, 0).reshape(-1)
        table = self._cache.table(layer)
        if table is not None:
            table = jnp.repeat(table, length // count, axis=0)
        q = q.reshape(-1, count, *q.shape[1:])
        return self._attend_cache(layer, q, ends, table, "pallas")


class InvariantKernelDecode(_KernelContext, DecodeContext):
    """Batch-invariant decode: the kernels of `InvariantKernelPrefill`, one query a row."""

    def __init__(self, config, numerics, kernels, layout, cache, position, active):
        super().__init__(config, numerics, kernels, layout, cache, position, active)
        self._chunk_positions = self.positions
        self._slots = {}

    def attend(self, attention: Attention, qkv: jax.Array) -> jax.Array:
        """Norms and rotates qkv [B, K, C, H], stores an owner's k and v, attends: [B, K·G·H]."""
        layer = attention.layer
        cache = self._cache_write(layer) if layer.owns_kv else None
        q = self._split(attention, qkv, self._tables[layer.kind], cache).q
        ends = jnp.where(self._valid[:, 0], self._end, 0)
        return self._attend_cache(layer, q[:, None], ends, self._cache.table(layer), "pallas")


def _kv_heads(layer: LayerConfig) -> int:
    return 1 if layer.k_eq_v else 2


def _flat(x: jax.Array) -> jax.Array:
    """[B, S, K, H] -> [B·S, K, H]."""
    return x.reshape(-1, *x.shape[2:])
