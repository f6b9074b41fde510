"""Teacher forcing: the log-probability of every token of a given sequence."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gemma_jax.batch_arrays import page_tables
from gemma_jax.buckets import chunk_buckets, length_buckets, pick
from gemma_jax.call_arrays import Chunk
from gemma_jax.model.cache import CacheLayout
from gemma_jax.runner import Runner
from gemma_jax.sequence import TokenLogprobs


def score_tokens(
    runner: Runner, token_ids: Sequence[int], *, max_chunk: int, page_size: int, k: int
) -> list[TokenLogprobs]:
    """Log-probability of each token after the first, given those before it, and of the best k.

    Every layer runs on every row, in chunks of at most `max_chunk` tokens, a multiple of the
    shortest chunk.
    """
    length = len(token_ids) - 1
    if length < 1:
        return []
    size = pick(min(length, max_chunk), chunk_buckets(max_chunk), "chunk")
    whole = -(-length // size) * size
    longest = -(-whole // page_size) * page_size
    slots = pick(whole, length_buckets(longest, page_size), "tokens of a sequence")
    layout = CacheLayout.plan(runner.config, 1, slots, size, page_size)
    pages = layout.full_slots // page_size, layout.window_slots // page_size
    tables = page_tables([range(pages[0])], [range(pages[1])], 1, pages)
    cache = runner.new_cache(*pages, page_size)
    scored: list[TokenLogprobs] = []
    for start in range(0, length, size):
        chunk, targets = _chunk(token_ids, start, size)
        cache, logprobs = runner.score(
            layout, cache, chunk, tables, targets, has_past=start > 0, k=k
        )
        values = jax.tree.map(lambda x: np.asarray(x)[0].tolist(), logprobs)
        rows = zip(values.sampled, values.rank, values.top_ids, values.top, strict=True)
        scored += [TokenLogprobs(*row) for row in list(rows)[: length - start]]
    return scored


def _chunk(token_ids: Sequence[int], start: int, size: int) -> tuple[Chunk, Any]:
    """One row's chunk that begins at `start`, and the token that follows each of its tokens."""
    part = token_ids[start : start + size + 1]
    count = len(part) - 1
    ids, targets = (np.zeros((1, size), np.int32) for _ in range(2))
    ids[0, :count], targets[0, :count] = part[:-1], part[1:]
    one = np.ones(1, np.int32)
    return Chunk(ids, one * start, one * count, one == 0, one * 0, one * 0), targets  # type: ignore[arg-type]
