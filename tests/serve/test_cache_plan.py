"""Sizes of the KV cache from free memory."""

import pytest

from gemma_jax.errors import ConfigError
from gemma_jax.serve.cache_plan import plan_cache

PAGE = 128
FULL, SLIDING = 6 * 1024 * PAGE, 12 * 1024 * PAGE  # bytes of a page of E2B in bfloat16


def plan(memory, **settings):
    defaults = {
        "page_size": PAGE, "page_bytes": (FULL, SLIDING), "window": 512, "max_chunk": 2048,
        "max_model_len": 131_072, "max_num_seqs": 256, "prefill_tokens": 16_384,
        "spare_pages": 1024,
    }  # fmt: skip
    return plan_cache(memory=memory, **defaults | settings)


def used(sizes):
    return sizes.num_full_pages * FULL + sizes.num_window_pages * SLIDING


def test_ample_memory_holds_every_slot_at_full_length_and_no_more():
    sizes = plan(2**40, max_num_seqs=4)
    assert sizes.num_full_pages == 4 * 1024 + 1024
    assert sizes.num_window_pages == 4 * 6 + 128 + sizes.ring_pages + 1024


@pytest.mark.parametrize("gib", [2, 5, 20, 100])
def test_short_memory_is_kept_to_and_leaves_sliding_pages_for_every_slot_first(gib):
    sizes = plan(gib * 2**30)
    assert used(sizes) <= gib * 2**30
    assert used(sizes) > 0.99 * gib * 2**30
    wanted = 256 * 6 + 128 + sizes.ring_pages + 1024
    assert sizes.num_window_pages == min(wanted, gib * 2**30 // 2 // SLIDING)


def test_models_without_sliding_layers_have_full_pages_only():
    sizes = plan(2**30, window=0, page_bytes=(FULL, 0))
    assert (sizes.num_window_pages, sizes.ring_pages) == (0, 0)
    assert sizes.num_full_pages == 2**30 // FULL


def test_too_little_memory_is_refused_with_its_setting():
    with pytest.raises(ConfigError, match="gpu_memory_utilization: 10 MiB"):
        plan(10 * 2**20)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        plan(-5)
