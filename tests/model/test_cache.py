"""The KV cache: rings, pages, dropped padding, and page tables in any order."""

import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import normal

from gemma_jax.model import cache as kv
from gemma_jax.model.cache import CacheLayout, cache_bytes, init_cache
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.fast

E2B = TINY_CONFIGS["e2b-tiny"]
PAGE, SLOTS, ROWS = 4, 12, 2


def empty():
    return jnp.zeros((ROWS * SLOTS // PAGE, PAGE, 1, 2), jnp.float32)


def values(count, seed=0):
    return jnp.asarray(normal(ROWS, count, 1, 2, seed=seed))


def span(start, count):
    return jnp.asarray([[start + i for i in range(count)]] * ROWS, jnp.int32)


def valid(count):
    return jnp.ones((ROWS, count), bool)


def test_layout_rounds_to_pages_and_bounds_sliding_layers():
    layout = CacheLayout.plan(E2B, num_rows=3, max_len=1000, max_chunk=64, page_size=32)
    assert (layout.full_slots, layout.window_slots) == (1024, 128)
    sliding, full = E2B.layers[0], E2B.layers[4]
    assert (layout.slots(sliding), layout.pages_per_row(sliding)) == (128, 4)
    assert (layout.slots(full), layout.pages_per_row(full)) == (1024, 32)
    short = CacheLayout.plan(E2B, 3, max_len=40, max_chunk=64, page_size=32)
    assert short.window_slots == short.full_slots == 64


def test_only_owner_layers_have_an_array_and_the_bytes_are_counted():
    layout = CacheLayout.plan(E2B, 3, 200, 32, 32)
    cache = init_cache(E2B, layout, jnp.dtype("bfloat16"))
    assert len(cache.k) == len(cache.v) == 5
    assert cache.k[0].shape == (3 * 3, 32, 1, 32)
    assert cache.k[4].shape == (3 * 7, 32, 1, 64)
    total = sum(x.nbytes for x in (*cache.k, *cache.v))
    assert cache_bytes(E2B, layout, itemsize=2) == total


def test_what_is_written_is_read_back_by_row_and_by_position():
    x = values(5)
    pages = kv.write(empty(), x, span(3, 5), valid(5), None, SLOTS)
    rows = kv.read_rows(pages, None, SLOTS)
    np.testing.assert_array_equal(rows[:, 3:8], x)
    assert not np.asarray(rows[:, :3]).any()
    assert not np.asarray(rows[:, 8:]).any()
    np.testing.assert_array_equal(kv.read_positions(pages, span(4, 3), None, SLOTS), x[:, 1:4])


def test_invalid_entries_are_dropped_and_touch_no_row():
    mask = valid(4).at[0, 2:].set(False).at[1].set(False)
    x = values(4)
    rows = kv.read_rows(kv.write(empty(), x, span(0, 4), mask, None, SLOTS), None, SLOTS)
    np.testing.assert_array_equal(rows[0, :2], x[0, :2])
    assert not np.asarray(rows[0, 2:]).any()
    assert not np.asarray(rows[1]).any()


def test_a_ring_overwrites_its_oldest_positions():
    x = values(SLOTS + 5)
    pages = empty()
    for start in range(0, SLOTS + 5, 3):
        part = x[:, start : start + 3]
        count = part.shape[1]
        pages = kv.write(pages, part, span(start, count), valid(count), None, SLOTS)
    newest = span(5, SLOTS)
    np.testing.assert_array_equal(kv.read_positions(pages, newest, None, SLOTS), x[:, 5:])
    held = kv.slot_positions(jnp.asarray([SLOTS + 5] * ROWS), SLOTS)
    rows = np.asarray(kv.read_rows(pages, None, SLOTS))
    for slot, position in enumerate(np.asarray(held[0])):
        np.testing.assert_array_equal(rows[:, slot], x[:, position])
    assert sorted(np.asarray(held[0]).tolist()) == list(range(5, SLOTS + 5))


def test_slots_never_written_have_negative_positions():
    held = np.asarray(kv.slot_positions(jnp.asarray([0, 5]), 8))
    assert (held[0] < 0).all()
    assert held[1].tolist()[:5] == [0, 1, 2, 3, 4]
    assert (held[1, 5:] < 0).all()


def test_shuffled_pages_hold_what_contiguous_rows_hold():
    table = jnp.asarray([[4, 0, 3], [1, 5, 2]], jnp.int32)
    contiguous = shuffled = empty()
    for start, count in ((0, 7), (7, 5), (12, 6)):
        x = values(count, seed=start)
        args = (x, span(start, count), valid(count))
        contiguous = kv.write(contiguous, *args, None, SLOTS)
        shuffled = kv.write(shuffled, *args, table, SLOTS)
    np.testing.assert_array_equal(
        kv.read_rows(shuffled, table, SLOTS), kv.read_rows(contiguous, None, SLOTS)
    )
    np.testing.assert_array_equal(
        kv.read_positions(shuffled, span(8, 9), table, SLOTS),
        kv.read_positions(contiguous, span(8, 9), None, SLOTS),
    )
    identity = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    np.testing.assert_array_equal(
        kv.read_rows(contiguous, identity, SLOTS), kv.read_rows(contiguous, None, SLOTS)
    )
    assert not np.array_equal(shuffled, contiguous)
