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
from gemma_jax.sampling import Logprobs
from gemma_jax.sequence import TokenLogprobs


class ScoringPass:
    """One sequence's way through the network, a chunk a device call, in a KV cache of its own.

    Every layer runs on every row. The cache is made with the first chunk and dropped with the last.

    Args:
      runner: the model's programs.
      token_ids: the sequence.
      max_chunk: most tokens of a call, a multiple of the shortest chunk.
      page_size: tokens of a page.
      k: best ids to report at each position.
    Attributes:
      values: of each token after the first, as far as they have been taken.
    """

    def __init__(
        self, runner: Runner, token_ids: Sequence[int], *, max_chunk: int, page_size: int, k: int
    ):
        self._runner, self._token_ids, self._page_size, self._k = runner, token_ids, page_size, k
        self._length, self._queued = len(token_ids) - 1, 0
        self._size = pick(min(self._length, max_chunk), chunk_buckets(max_chunk), "chunk")
        self._cache: Any = None
        self.values: list[TokenLogprobs] = []

    @property
    def has_next(self) -> bool:
        """Whether a chunk has not been queued yet."""
        return self._queued < self._length

    @property
    def finished(self) -> bool:
        """Whether every token has its values."""
        return len(self.values) >= self._length

    def launch(self) -> Logprobs:
        """Queues the next chunk; its results for `take`, [1, T, …]."""
        if self._cache is None:
            self._layout, self._tables = self._plan()
            full, window = self._tables.full.shape[1], self._tables.window.shape[1]
            self._cache = self._runner.new_cache(full, window, self._page_size)
        start = self._queued
        chunk, targets = _chunk(self._token_ids, start, self._size)
        self._cache, logprobs = self._runner.score(
            self._layout, self._cache, chunk, self._tables, targets, has_past=start > 0, k=self._k
        )
        self._queued += self._size
        if not self.has_next:
            self._cache = None
        return logprobs

    def take(self, logprobs: Logprobs) -> None:
        """Reads the results of the oldest chunk that has not been read; waits for them."""
        values = jax.tree.map(lambda x: np.asarray(x)[0].tolist(), logprobs)
        rows = list(zip(values.sampled, values.rank, values.top_ids, values.top, strict=True))
        self.values += [TokenLogprobs(*row) for row in rows[: self._length - len(self.values)]]

    def _plan(self) -> tuple[CacheLayout, Any]:
        whole = -(-self._length // self._size) * self._size
        longest = -(-whole // self._page_size) * self._page_size
        slots = pick(whole, length_buckets(longest, self._page_size), "tokens of a sequence")
        layout = CacheLayout.plan(self._runner.config, 1, slots, self._size, self._page_size)
        pages = layout.full_slots // self._page_size, layout.window_slots // self._page_size
        return layout, page_tables([range(pages[0])], [range(pages[1])], 1, pages)


def score_tokens(
    runner: Runner, token_ids: Sequence[int], *, max_chunk: int, page_size: int, k: int
) -> list[TokenLogprobs]:
    """Log-probability of each token after the first, given those before it, and of the best k.

    Every layer runs on every row, in chunks of at most `max_chunk` tokens, a multiple of the
    shortest chunk.
    """
    scoring = ScoringPass(runner, token_ids, max_chunk=max_chunk, page_size=page_size, k=k)
    while scoring.has_next:
        scoring.take(scoring.launch())
    return scoring.values


def _chunk(token_ids: Sequence[int], start: int, size: int) -> tuple[Chunk, Any]:
    """One row's chunk that begins at `start`, and the token that follows each of its tokens."""
    part = token_ids[start : start + size + 1]
    count = len(part) - 1
    ids, targets = (np.zeros((1, size), np.int32) for _ in range(2))
    ids[0, :count], targets[0, :count] = part[:-1], part[1:]
    one = np.ones(1, np.int32)
    return Chunk(ids, one * start, one * count, one == 0, one * 0, one * 0), targets  # type: ignore[arg-type]
