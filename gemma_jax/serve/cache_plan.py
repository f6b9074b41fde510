"""How many pages of each kind the KV cache gets from the memory that is free."""

from gemma_jax.errors import ConfigError
from gemma_jax.serve.pages import CacheSizes

DECODE_PAGES = 2
"""Sliding pages of a decoding row beyond its window: the one begun, and one to grow into."""


def plan_cache(
    *,
    page_size: int,
    page_bytes: tuple[int, int],
    memory: int,
    window: int,
    max_chunk: int,
    max_model_len: int,
    max_num_seqs: int,
    prefill_tokens: int,
    spare_pages: int,
) -> CacheSizes:
    """The sizes of a cache that fits into `memory` bytes.

    Wanted is what every slot at full length needs, and `spare_pages` more of each kind for prefixes
    that may come again. If memory is short, sliding layers, whose need is bounded, come first, up
    to half of it; full-attention layers get the rest.

    Args:
      page_size: tokens a page.
      page_bytes: of a page over all full-attention layers, and over all sliding ones.
      memory: bytes.
      window: positions that a sliding layer's query sees; 0 if there are none.
      max_chunk: most tokens of a sequence in one call.
      max_model_len: most tokens of a sequence.
      max_num_seqs: slots.
      prefill_tokens: most prompt tokens of one call.
      spare_pages: of each kind, beyond what the slots need.

    Raises:
      ConfigError: not even one short sequence fits.
    """
    ring = CacheSizes.min_ring_pages(window, max_chunk, page_size)
    longest = -(-max_model_len // page_size)
    full = max_num_seqs * longest + spare_pages
    sliding = 0
    if window:
        decoding = max_num_seqs * (-(-window // page_size) + DECODE_PAGES)
        sliding = min(full, decoding + -(-prefill_tokens // page_size) + ring + spare_pages)
    if full * page_bytes[0] + sliding * page_bytes[1] > memory:
        least = min(ring, longest) if window else 0
        half = memory // 2 // max(page_bytes[1], 1)
        sliding = max(min(sliding, half), least)
        full = min(full, (memory - sliding * page_bytes[1]) // max(page_bytes[0], 1))
    if full < 1:
        raise ConfigError(
            f"gpu_memory_utilization: {memory / 2**20:.0f} MiB are left for the KV cache, too few"
            f" for one page of {page_size} tokens beside a window; lower max_num_batched_tokens or"
            " max_num_seqs, or give it more memory"
        )
    return CacheSizes(page_size, full, sliding, window, ring)
