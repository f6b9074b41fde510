"""`prefill_attention` through Pallas' Triton lowering: flash attention with grouped heads packed.

One program takes a tile of query rows, tokens times the G heads that share a key head, and walks
the tiles of keys that any of its rows can see; tiles outside are never loaded. Without a window
only the tiles on the causal diagonal are masked. A running maximum and sum make the softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). Neighbouring
programs take neighbouring tiles of one sequence, which share keys in the L2 cache.

Scores and sums are float32; weights are rounded to the compute dtype before they are normalised,
the output once. With vLLM's rounding a tile is 32 keys and starts at a multiple of 32, which makes
the weights those of its Triton kernel.

Head widths are powers of two from 16; bf16 from sm_80, float32 without tensor cores.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.errors import UnsupportedError
from gemma_jax.model.attention import VLLM_BLOCK_ROWS, VLLM_PREFILL_TILE
from gemma_jax.numerics import MASK_VALUE, Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import SHARED_MEMORY, Device, current_device
from gemma_jax.pallas.dispatch import needs_gpu_or_interpreter
from gemma_jax.pallas.segments import Segments


@dataclass(frozen=True)
class Config:
    """How a tile is cut and run.

    Attributes:
      q_rows: query rows of a tile, tokens times grouped heads; a power of two.
      k_rows: keys of a tile; a power of two.
      num_warps, num_stages: of Triton.
      chunk: columns of a head taken at once; a narrower chunk saves registers and reads q again.
    """

    q_rows: int
    k_rows: int
    num_warps: int
    num_stages: int
    chunk: int


# (major version of the compute capability, head width)
_TILES = {
    (8, 256): Config(64, 64, 8, 2, 256),
    (8, 512): Config(32, 64, 8, 1, 128),
    (9, 256): Config(64, 32, 4, 2, 256),
    (9, 512): Config(64, 64, 8, 1, 512),
}
_FLOAT32 = Config(16, 16, 8, 1, 128)
_LITTLE_SHARED = Config(32, 64, 8, 1, 128)
_INTERPRETED = Config(32, 32, 4, 1, 256)


def default_config(head_dim: int, groups: int, numerics: Numerics, device: Device) -> Config:
    """The tile of a shape: tuned on an H200, for an A100 the largest that does not spill."""
    config = _base_config(head_dim, numerics, device)
    tall = max(config.q_rows, pl.next_power_of_2(groups))
    config = replace(config, q_rows=tall, chunk=min(config.chunk, head_dim))
    if numerics.matches_vllm and not numerics.is_float32:
        stages = 1 if _has_little_shared_memory(device) else 2
        return replace(config, k_rows=VLLM_PREFILL_TILE, num_stages=stages)
    return config


def _base_config(head_dim: int, numerics: Numerics, device: Device) -> Config:
    if numerics.is_float32:
        return _FLOAT32
    if device.capability is None:
        return _INTERPRETED
    if _has_little_shared_memory(device):
        return _LITTLE_SHARED
    major = 9 if device.shared_memory >= SHARED_MEMORY[9, 0] else 8
    return _TILES[major, 256 if head_dim <= 256 else 512]


def _has_little_shared_memory(device: Device) -> bool:
    """Consumer cards, and those that are not known."""
    return device.is_gpu and device.shared_memory < SHARED_MEMORY[8, 0]


class _Rows(NamedTuple):
    """The query rows of a program, each [q_rows], and the keys that they may see."""

    where: jax.Array  # in q as [N·K·G, H]; invalid rows point to some row of q
    out: jax.Array  # in the output; invalid rows point anywhere
    valid: jax.Array
    position: jax.Array  # among the keys
    low: jax.Array  # first key that any row sees
    high: jax.Array  # one past the last
    first: jax.Array  # position of the first row


class _State(NamedTuple):
    """Of each row: the running maximum, the sum of weights, and the weighted sum of values."""

    top: jax.Array  # [q_rows]
    total: jax.Array  # [q_rows]
    out: tuple[jax.Array, ...]  # chunks [q_rows, chunk]


class _Sizes(NamedTuple):
    rows: int  # N, of q
    batch: int
    num_kv: int
    groups: int
    head_dim: int
    tiles: int  # tiles of the longest sequence


def _prefill_attention_kernel(
    q_offsets_ref,  # [B]
    q_lengths_ref,  # [B]
    k_offsets_ref,  # [B]
    k_lengths_ref,  # [B]
    q_ref,  # [N·K·G, H]
    k_ref,  # [M·K, H]
    v_ref,  # [M·K, H]
    out_ref,  # [N·K·G, H]
    *,
    sizes: _Sizes,
    window: int | None,
    numerics: Numerics,
    config: Config,
):
    tile, b, head = _program(sizes)
    q_offset, q_length = triton.load(q_offsets_ref.at[b]), triton.load(q_lengths_ref.at[b])
    k_offset, k_length = triton.load(k_offsets_ref.at[b]), triton.load(k_lengths_ref.at[b])
    rows = _query_rows(tile, head, q_offset, q_length, k_length, sizes, window, config)

    step = functools.partial(
        _attend_tile, rows, q_ref, k_ref, v_ref, k_offset, head, _load_query(q_ref, rows, config)
    )
    step = functools.partial(
        step, num_kv=sizes.num_kv, window=window, numerics=numerics, config=config
    )
    state = _initial_state(rows, tile, sizes, window, numerics, config)
    state = _walk_keys(step, rows, window, config, state)

    total = jnp.where(state.total == 0.0, 1.0, state.total)[:, None]
    for c, out in enumerate(state.out):
        at = _at(out_ref, rows.out, c, config)
        triton.store(at, (out / total).astype(out_ref.dtype), mask=rows.valid[:, None])

    following = triton.load(q_offsets_ref.at[jnp.minimum(b + 1, sizes.batch - 1)])
    gap_end = jnp.where(b + 1 < sizes.batch, following, sizes.rows)
    _zero_gap(out_ref, tile, head, q_offset + q_length, gap_end, sizes, config)


def _program(sizes: _Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(tile, sequence, key head); later tiles see more keys and start first."""
    return sizes.tiles - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)


def _tokens(tile, sizes: _Sizes, config: Config) -> tuple[jax.Array, jax.Array]:
    """Token of each row of a tile, and whether the row is in use: heads may not fill the tile."""
    row = lax.iota(jnp.int32, config.q_rows)
    per_tile = config.q_rows // sizes.groups
    return tile * per_tile + row // sizes.groups, row < per_tile * sizes.groups


def _row_index(row, head, sizes: _Sizes, config: Config) -> jax.Array:
    """Index in [N·K·G, H] of the row of q of each token, and the query head of each tile row."""
    group = lax.iota(jnp.int32, config.q_rows) % sizes.groups
    return (row * sizes.num_kv + head) * sizes.groups + group


def _query_rows(
    tile, head, q_offset, q_length, k_length, sizes: _Sizes, window: int | None, config: Config
) -> _Rows:
    token, used = _tokens(tile, sizes, config)
    per_tile = config.q_rows // sizes.groups
    past = k_length - q_length
    first = past + tile * per_tile
    last = jnp.minimum(first + per_tile, k_length) - 1
    held = jnp.minimum(token, q_length - 1)
    return _Rows(
        where=_row_index(jnp.maximum(q_offset + held, 0), head, sizes, config),
        out=_row_index(q_offset + token, head, sizes, config),
        valid=used & (token < q_length),
        position=past + token,
        low=jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0),
        high=jnp.where(tile * per_tile < q_length, last + 1, 0),
        first=first,
    )


def _load_query(q_ref, rows: _Rows, config: Config) -> jax.Array | None:
    """The tile of q if it is held throughout: when a head is one chunk."""
    if config.chunk < q_ref.shape[-1]:
        return None
    return _load_query_chunk(q_ref, rows, 0, config)


def _load_query_chunk(q_ref, rows: _Rows, c: int, config: Config) -> jax.Array:
    return triton.load(_at(q_ref, rows.where, c, config))


def _at(ref, index: jax.Array, c: int, config: Config):
    """Chunk c of the rows `index` of a ref [rows, H]."""
    columns = c * config.chunk + lax.iota(jnp.int32, config.chunk)
    return ref.at[index[:, None], columns[None, :]]


def _walk_keys(step, rows: _Rows, window: int | None, config: Config, state: _State) -> _State:
    """The state after all tiles that some row sees; without a window most need no mask.

    A window is short: loops of their own for its edges would each fill the pipeline anew.
    """
    start, end = rows.low // config.k_rows, pl.cdiv(rows.high, config.k_rows)
    if window is None:
        whole = jnp.minimum(jnp.maximum((rows.first + 1) // config.k_rows, start), end)
        state = lax.fori_loop(start, whole, functools.partial(step, masked=False), state)
        start = whole
    return lax.fori_loop(start, end, functools.partial(step, masked=True), state)


def _initial_state(
    rows: _Rows, tile, sizes: _Sizes, window: int | None, numerics: Numerics, config: Config
) -> _State:
    zeros = jnp.zeros((config.q_rows, config.chunk), jnp.float32)
    top = jnp.full((config.q_rows,), MASK_VALUE, jnp.float32)
    if numerics.matches_vllm and not numerics.is_float32 and window is not None:
        top = jnp.where(_sees_no_first_tile(rows, tile, sizes, window, config), 0.0, top)
    return _State(
        top,
        jnp.zeros((config.q_rows,), jnp.float32),
        (zeros,) * (sizes.head_dim // config.chunk),
    )


def _sees_no_first_tile(rows: _Rows, tile, sizes: _Sizes, window: int, config: Config) -> jax.Array:
    """Rows whose block in vLLM's kernel starts with a tile that they cannot see: maximum 0."""
    block = max(VLLM_BLOCK_ROWS // sizes.groups, 1)
    token, _ = _tokens(tile, sizes, config)
    block_position = rows.position - token % block

    def first_tile(position):
        return jnp.maximum(position - window + 1, 0) // VLLM_PREFILL_TILE

    return first_tile(block_position) < first_tile(rows.position)


def _attend_tile(
    rows: _Rows,
    q_ref,
    k_ref,
    v_ref,
    k_offset,
    head,
    query: jax.Array | None,
    j,
    state: _State,
    *,
    masked: bool,
    num_kv: int,
    window: int | None,
    numerics: Numerics,
    config: Config,
) -> _State:
    """The state after the keys of tile j."""
    key = j * config.k_rows + lax.iota(jnp.int32, config.k_rows)
    # Keys that no row sees may hold NaN; in their place stands one that some row sees.
    seen = jnp.clip(key, rows.low, rows.high - 1) if masked else key
    where = (k_offset + seen) * num_kv + head
    dot = functools.partial(triton.dot, precision=numerics.precision)

    scores = jnp.zeros((config.q_rows, config.k_rows), jnp.float32)
    for c in range(len(state.out)):
        q = _load_query_chunk(q_ref, rows, c, config) if query is None else query
        scores += dot(q, triton.load(_at(k_ref, where, c, config)), trans_b=True)
    exp, scores = _exponential(scores, numerics)
    if masked:
        scores = jnp.where(_visible(key, rows.position, window), scores, MASK_VALUE)

    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = exp(scores - top[:, None])
    rescale = exp(state.top - top)
    total = state.total * rescale + jnp.sum(weights, axis=1)
    weights = weights.astype(v_ref.dtype)
    out = tuple(
        acc * rescale[:, None] + dot(weights, triton.load(_at(v_ref, where, c, config)))
        for c, acc in enumerate(state.out)
    )
    return _State(top, total, out)


def _exponential(scores: jax.Array, numerics: Numerics):
    """exp and its argument: base 2 saves a product, but rounds otherwise than vLLM's base e."""
    if numerics.matches_vllm:
        return jnp.exp, scores
    return jnp.exp2, scores * math.log2(math.e)


def _visible(key: jax.Array, position: jax.Array, window: int | None) -> jax.Array:
    mask = key[None, :] <= position[:, None]
    return mask if window is None else mask & (key[None, :] > position[:, None] - window)


def _zero_gap(out_ref, tile, head, start, end, sizes: _Sizes, config: Config) -> None:
    """Zeros rows [start, end), which no sequence has; its programs share the blocks among them."""
    per_tile = config.q_rows // sizes.groups
    blocks = pl.cdiv(jnp.maximum(end - start, 0), per_tile)
    zeros = jnp.zeros((config.q_rows, config.chunk), out_ref.dtype)

    def clear(i, _):
        token, used = _tokens(tile + i * sizes.tiles, sizes, config)
        valid = (used & (start + token < end))[:, None]
        index = _row_index(start + token, head, sizes, config)
        for c in range(sizes.head_dim // config.chunk):
            at = _at(out_ref, index, c, config)
            triton.store(at, zeros, mask=valid)
        return _

    lax.fori_loop(0, pl.cdiv(jnp.maximum(blocks - tile, 0), sizes.tiles), clear, 0)


def unsupported(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, device: Device
) -> str | None:
    """Why the kernel cannot take these inputs on `device`; None if it can."""
    head_dim = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: needs bfloat16 or float32 throughout"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"head width {head_dim}: needs a power of two from 16"
    if head_dim > 512:
        return f"head width {head_dim}: no tile above 512 fits the registers"
    if window is not None and window < 1:
        return f"window {window}: needs at least 1"
    return needs_gpu_or_interpreter((8, 0))(device)


@functools.partial(jax.jit, static_argnames=("window", "max_q_len", "numerics", "config"))
def prefill_attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    window: int | None,
    max_q_len: int,
    numerics: Numerics,
    config: Config | None = None,
) -> jax.Array:
    """`prefill_attention` by the Triton kernel.

    Raises:
      UnsupportedError: it cannot take these inputs or this config.
    """
    device = current_device()
    reason = unsupported(q, k, v, window, device)
    if reason is not None:
        raise UnsupportedError(f"prefill_attention: triton: {reason}")
    rows, num_kv, groups, head_dim = q.shape
    config = config or default_config(head_dim, groups, numerics, device)
    _check_config(config, groups, head_dim, numerics)
    tiles = pl.cdiv(max_q_len, config.q_rows // groups)
    sizes = _Sizes(rows, segments.q_offsets.shape[0], num_kv, groups, head_dim, tiles)
    kernel = functools.partial(
        _prefill_attention_kernel, sizes=sizes, window=window, numerics=numerics, config=config
    )
    out = triton.pallas_call(
        kernel,
        name=f"prefill_attention_{head_dim}",
        out_shape=jax.ShapeDtypeStruct((rows * num_kv * groups, head_dim), q.dtype),
        grid=(tiles, sizes.batch, num_kv),
        in_specs=[triton.whole()] * 7,
        out_specs=triton.whole(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(*segments, *(x.reshape(-1, head_dim) for x in (q, k, v)))
    return out.reshape(q.shape)


def _check_config(config: Config, groups: int, head_dim: int, numerics: Numerics) -> None:
    problem = None
    if config.q_rows < groups:
        problem = f"q_rows={config.q_rows} is less than the {groups} heads of a group"
    elif head_dim % config.chunk:
        problem = f"chunk={config.chunk} does not divide the head width {head_dim}"
    elif numerics.matches_vllm and not numerics.is_float32 and config.k_rows != VLLM_PREFILL_TILE:
        problem = f"k_rows={config.k_rows} is not the {VLLM_PREFILL_TILE} of vLLM's rounding"
    if problem is not None:
        raise UnsupportedError(f"prefill_attention: triton: {problem}")
