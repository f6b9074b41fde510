"""Attention: masks, both engines' roundings against numpy loops, and blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import BF16, F32, VLLM, as_bf16, as_f32, bf, mismatch, normal

from gemma_jax.model.attention import (
    KeyBlock,
    attend,
    attend_in_blocks,
    causal_mask,
    vllm_decode_tile,
    vllm_splits_keys,
)

pytestmark = pytest.mark.fast

NEG = np.float32(-np.inf)
run_attend = jax.jit(attend, static_argnums=(3, 4, 5))
run_blocks = jax.jit(attend_in_blocks, static_argnums=(3, 4, 5))


def positions(*values) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


# --- masks -------------------------------------------------------------------------------------


def test_a_sliding_row_sees_itself_and_the_window_before_it():
    window, length = 512, 1100
    q = jnp.arange(length)[None]
    mask = np.asarray(causal_mask(q, q, window))[0]
    rows = np.arange(length)
    np.testing.assert_array_equal(mask.sum(1), np.minimum(rows + 1, window))
    assert mask[700, 700 - 511]
    assert not mask[700, 700 - 512]
    assert not mask[700, 701]


def test_a_full_row_sees_everything_before_it():
    q = jnp.arange(40)[None]
    mask = np.asarray(causal_mask(q, q, None))[0]
    np.testing.assert_array_equal(mask, np.tril(np.ones((40, 40), bool)))


def test_masks_compare_positions_not_places():
    mask = causal_mask(positions([5]), positions([7, -1, 3, 5, 1]), 3)
    assert mask[0, 0].tolist() == [False, False, True, True, False]


# --- transformers' rounding --------------------------------------------------------------------


def softmax(scores) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True, dtype=np.float32)


def inputs(t, s, k, g, h, *, sharp=0.35, batch=1):
    q = normal(batch, t, k, g, h, seed=1, scale=sharp)
    return q, normal(batch, s, k, h, seed=2), normal(batch, s, k, h, seed=3)


@pytest.mark.parametrize("t", [1, 24])
@pytest.mark.parametrize("window", [None, 9])
def test_eager_attention_rounds_scores_weights_and_output(t, window):
    q, k, v = inputs(t, 24, 2, 2, 64)
    q_pos, k_pos = jnp.arange(24 - t, 24)[None], jnp.arange(24)[None]

    def run(numerics, q, k, v):
        return run_attend(q, KeyBlock(k, v, k_pos), q_pos, window, numerics)

    exact_scores = np.einsum("btkgh,bskh->bkgts", q, k)
    mask = np.asarray(causal_mask(q_pos, k_pos, window))[:, None, None]

    def emulated(step):
        weights = step(softmax(np.where(mask, step(exact_scores), np.float32(-1e30))))
        return step(np.einsum("bkgts,bskh->btkgh", weights, v))

    got = run(BF16, *map(as_bf16, (q, k, v)))
    assert mismatch(got, emulated(bf)) < 0.02
    assert mismatch(got, bf(emulated(np.float32))) > 0.2
    exact = run(F32, *map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(exact, emulated(np.float32), atol=2e-6)


def test_a_row_that_sees_nothing_is_free_of_nan_in_both_settings():
    q, k, v = map(as_bf16, inputs(2, 32, 1, 1, 16))
    keys = KeyBlock(k, v, jnp.full((1, 32), -1))
    for numerics in (BF16, VLLM):
        assert np.isfinite(as_f32(run_attend(q, keys, positions([0, 1]), 8, numerics))).all()


# --- vLLM's rounding ---------------------------------------------------------------------------


def online(scores, values, tiles, start) -> tuple:
    """One row over its key tiles: maximum, sum and accumulator, float32, not yet divided."""
    m, total = start, np.float32(0)
    acc = np.zeros(values.shape[-1], np.float32)
    for tile in tiles:
        s = scores[tile]
        new = max(m, s.max(initial=NEG))
        new = np.float32(0) if np.isneginf(new) else new
        p = np.exp(s - new)
        alpha = np.exp(np.float32(m - new))
        total = total * alpha + p.sum(dtype=np.float32)
        acc = acc * alpha + bf(p) @ values[tile]
        m = new
    return m, total, acc


def tile_slices(first, last, tile, length):
    return [slice(j * tile, min((j + 1) * tile, length)) for j in range(first, last + 1)]


def visible_scores(q, k, position, window):
    scores = k @ q
    seen = np.arange(len(k)) <= position
    if window is not None:
        seen &= np.arange(len(k)) > position - window
    return np.where(seen, scores, NEG).astype(np.float32)


def prefill_row(q, k, v, t, first_position, block, window):
    """Row t of a step that began at `first_position`, by tiles of 32 keys.

    Rows share a program of `block` rows, whose tiles begin with the window of the first of them.
    """
    position = first_position + t
    start = first_position + t // block * block
    oldest = 0 if window is None else max(0, start - window + 1)
    scores = visible_scores(q, k, position, window)
    tiles = tile_slices(oldest // 32, position // 32, 32, len(k))
    _, total, acc = online(scores, v, tiles, NEG)
    return bf(acc / total)


def decode_row(q, k, v, position, tile, window):
    """The last row: 16 segments of tiles, each with its own maximum, merged in float32."""
    per_segment = -(-(position + 1) // (16 * tile))
    oldest = 0 if window is None else max(0, position - window + 1)
    first, last = oldest // tile, position // tile
    scores = visible_scores(q, k, position, window)
    parts = []
    for segment in range(16):
        low, high = segment * per_segment, (segment + 1) * per_segment - 1
        tiles = tile_slices(max(low, first), min(high, last), tile, len(k))
        if tiles:
            parts.append(online(scores, v, tiles, NEG))
    top = max(m for m, _, _ in parts)
    weights = [np.exp(m - top) for m, _, _ in parts]
    total = sum(w * t for w, (_, t, _) in zip(weights, parts, strict=True))
    acc = sum(w * a for w, (_, _, a) in zip(weights, parts, strict=True))
    return bf(acc / total)


def by_head(row, q, k, v, *args):
    """`row` for every KV head and group: [K, G, H]."""
    return np.stack(
        [[row(q[i, j], k[:, i], v[:, i], *args) for j in range(q.shape[1])] for i in range(len(q))]
    )


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("groups", [1, 4])
def test_vllm_prefill_matches_a_loop_over_tiles_of_32_keys(window, groups):
    length = 100
    q, k, v = inputs(length, length, 1, groups, 32, sharp=1.0)
    place = jnp.arange(length)[None]

    keys = KeyBlock(as_bf16(k), as_bf16(v), place)
    got = run_attend(as_bf16(q), keys, place, window, VLLM)
    loop = np.stack(
        [by_head(prefill_row, q[0, t], k[0], v[0], t, 0, 16 // groups, window)
         for t in range(length)]
    )[None]  # fmt: skip
    assert mismatch(got, loop) < 0.01
    assert mismatch(run_attend(as_bf16(q), keys, place, window, BF16), loop) > 0.2


def test_vllm_prefill_starts_a_row_at_zero_after_a_tile_that_it_cannot_see():
    # The block of rows 64 … 79 begins with tile 0, which rows 72 … 79 no longer see (W = 41).
    length, window = 80, 41
    q, k, v = inputs(length, length, 1, 1, 32, sharp=0.3)
    q, k = -np.abs(q), np.abs(k)  # every score far below 0: a start at 0 is the larger maximum
    place = jnp.arange(length)[None]
    keys = KeyBlock(as_bf16(k), as_bf16(v), place)
    got = as_f32(run_attend(as_bf16(q), keys, place, window, VLLM))[0]
    rows = range(72, 80)
    blocks = [by_head(prefill_row, q[0, t], k[0], v[0], t, 0, 16, window) for t in rows]
    alone = [by_head(prefill_row, q[0, t], k[0], v[0], t, 0, 1, window) for t in rows]
    assert mismatch(got[72:], blocks) < 0.02
    assert mismatch(np.stack(alone), blocks) > 0.1


@pytest.mark.parametrize(
    ("position", "window", "head_dim", "tile"),
    [(9, None, 32, 16), (299, None, 32, 16), (1500, None, 16, 16), (700, 300, 32, 16),
     (1700, 1024, 256, 32)],
)  # fmt: skip
def test_vllm_decode_matches_a_loop_over_16_segments(position, window, head_dim, tile):
    assert vllm_decode_tile(head_dim, window) == tile
    length = position + 1
    q, k, v = inputs(1, length, 2, 2, head_dim, sharp=16 / head_dim)
    first = 0 if window is None else max(0, length - window) // tile * tile
    keys = KeyBlock(as_bf16(k[:, first:]), as_bf16(v[:, first:]), jnp.arange(first, length)[None])
    got = run_attend(as_bf16(q), keys, positions([position]), window, VLLM, True)
    loop = by_head(decode_row, q[0, 0], k[0], v[0], position, tile, window)[None, None]
    assert mismatch(got, loop) < 0.02
    if length > 16 * tile:  # otherwise a segment is one tile and the split changes nothing here
        one = by_head(prefill_row, q[0, 0], k[0], v[0], 0, position, 1, window)[None, None]
        assert mismatch(one, loop) > 0.02


def test_vllm_splits_keys_for_single_tokens_of_few_rows():
    assert vllm_splits_keys(128, 1, 1)
    assert not vllm_splits_keys(129, 1, 1)
    assert vllm_splits_keys(8, 1, 16)
    assert not vllm_splits_keys(9, 1, 16)
    assert not vllm_splits_keys(1, 2, 1)


def test_vllm_decode_of_many_rows_follows_the_prefill_loop():
    position, length = 299, 300
    q, k, v = inputs(1, length, 2, 2, 32, sharp=0.5)
    keys = KeyBlock(as_bf16(k), as_bf16(v), jnp.arange(length)[None])
    got = run_attend(as_bf16(q), keys, positions([position]), None, VLLM, False)
    loop = by_head(prefill_row, q[0, 0], k[0], v[0], 0, position, 1, None)[None, None]
    assert mismatch(got, loop) < 0.02


def test_padding_keys_and_unused_slots_change_no_bit_of_vllm_decode():
    q, k, v = inputs(1, 50, 1, 2, 32)
    exact = KeyBlock(as_bf16(k), as_bf16(v), jnp.arange(50)[None])
    wide = KeyBlock(
        jnp.pad(exact.k, ((0, 0), (0, 46), (0, 0), (0, 0)), constant_values=9),
        jnp.pad(exact.v, ((0, 0), (0, 46), (0, 0), (0, 0)), constant_values=9),
        jnp.arange(96)[None],
    )
    a, b = (run_attend(as_bf16(q), x, positions([49]), None, VLLM, True) for x in (exact, wide))
    np.testing.assert_array_equal(as_f32(a), as_f32(b))


# --- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [F32, BF16, VLLM], ids=["f32", "hf", "vllm"])
@pytest.mark.parametrize("start", [0, 96])
def test_blocks_of_queries_give_what_the_whole_gives(numerics, start):
    window, length, block, past = 40, 128, 32, 64
    q, k, v = inputs(length, past + length, 2, 2, 32, batch=2, sharp=0.7)
    q, k, v = (jnp.asarray(x).astype(numerics.dtype) for x in (q, k, v))
    q_pos = jnp.broadcast_to(start + jnp.arange(length), (2, length))
    k_pos = jnp.broadcast_to(start - past + jnp.arange(past + length), (2, past + length))
    keys = KeyBlock(k, v, k_pos)
    whole = run_attend(q, keys, q_pos, window, numerics)
    blocks = run_blocks(q, keys, q_pos, window, block, numerics)
    if numerics is F32:
        np.testing.assert_allclose(blocks, whole, atol=2e-6)
    else:
        assert mismatch(blocks, as_f32(whole)) < 0.01
