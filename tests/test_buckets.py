"""Declared sizes: every request fits one, the last is the limit, and they are few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_jax.buckets import (
    MIN_CHUNK,
    chunk_buckets,
    decode_row_buckets,
    length_buckets,
    pick,
    prefill_row_buckets,
)
from gemma_jax.errors import CapacityError

pytestmark = pytest.mark.fast


def test_row_buckets_are_few_and_end_with_the_limit():
    assert prefill_row_buckets(1) == decode_row_buckets(1) == (1,)
    assert prefill_row_buckets(12) == (1, 4, 8, 12)
    assert decode_row_buckets(100) == (1, 4, 16, 64, 100)
    assert decode_row_buckets(256) == (1, 4, 16, 64, 128, 256)


def test_chunk_buckets_start_with_the_shortest_chunk():
    assert chunk_buckets(MIN_CHUNK) == (MIN_CHUNK,)
    assert chunk_buckets(200) == (32, 64, 128, 200)


def test_length_buckets_are_whole_pages_up_to_the_limit():
    assert length_buckets(1024, 128) == (128, 512, 1024)
    assert length_buckets(128, 128) == (128,)


@given(st.integers(1, 300_000), st.sampled_from([32, 128, 256]), st.data())
def test_every_length_fits_a_bucket_at_most_four_times_its_pages(max_pages, page, data):
    limit = max_pages * page
    buckets = length_buckets(limit, page)
    length = data.draw(st.integers(1, limit))
    size = pick(length, buckets, "length")
    assert length <= size <= max(page, 4 * (length + page))
    assert all(bucket % page == 0 for bucket in buckets)
    assert list(buckets) == sorted(set(buckets))
    assert len(buckets) <= 12


def test_a_value_beyond_the_largest_size_raises_with_both():
    assert pick(8, (4, 8), "rows") == 8
    with pytest.raises(CapacityError, match=r"rows=9: .* 8"):
        pick(9, (4, 8), "rows")
