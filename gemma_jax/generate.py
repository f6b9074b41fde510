"""The offline loop: batches of sequences through prefill and decode calls until all have ended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gemma_jax.batch_arrays import (
    prompt_chunk,
    row_state,
    sampling_statics,
    sampling_table,
)
from gemma_jax.buckets import chunk_buckets, length_buckets, pick, row_buckets
from gemma_jax.engine_config import MAX_CHUNK, EngineConfig
from gemma_jax.model.cache import CacheLayout, KVCache, cache_bytes
from gemma_jax.runner import Chunk, Runner, StepOutput
from gemma_jax.sampling import NO_ID, Logprobs, RowState
from gemma_jax.sequence import Sequence as Completion
from gemma_jax.sequence import TokenLogprobs

MAX_SCORE_BYTES = 4 * 2**30
"""Bound on the attention scores of one prefill call, which plain attention writes to memory."""

INTERACTIVE_STEPS = 8
"""Decode steps a call while somebody watches or a stop string may hit."""


@dataclass(frozen=True)
class Limits:
    """What a batch may take: rows, prompt tokens a prefill call, context and cache memory."""

    max_rows: int
    prefill_tokens: int
    max_len: int
    page_size: int
    decode_steps: int
    cache_bytes: int

    @classmethod
    def of(cls, engine: EngineConfig, context_length: int, cache_bytes: int) -> "Limits":
        return cls(
            engine.max_num_seqs, engine.prefill_tokens(), context_length, engine.page_size,
            engine.decode_steps, cache_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Prefill:
    """How one group of a batch is prefilled: rows, chunk length and number of chunks."""

    rows: list[int]
    chunk: int
    chunks: int


def split_batches(
    runner: Runner, sequences: Sequence[Completion], limits: Limits
) -> list[list[Completion]]:
    """Sequences of similar length together, each batch within the row and memory limits."""
    batches: list[list[Completion]] = []
    room = 0
    for sequence in sorted(sequences, key=_total_length, reverse=True):
        if room == 0:
            batches.append([])
            room = _rows_that_fit(runner, sequence, limits)
        batches[-1].append(sequence)
        room -= 1
    return batches


def _total_length(sequence: Completion) -> int:
    return len(sequence.prompt_token_ids) + sequence.max_tokens


def _rows_that_fit(runner: Runner, longest: Completion, limits: Limits) -> int:
    """Rows of a batch whose longest sequence is `longest`; at least one."""
    layout, _ = plan(runner, [longest], limits)
    a_row = cache_bytes(runner.config, layout, runner.numerics.jnp_dtype.itemsize)
    return _whole_bucket(min(limits.max_rows, limits.cache_bytes // a_row), limits)


def _whole_bucket(rows: int, limits: Limits) -> int:
    """The largest declared number of rows up to `rows`, so that padding adds none; at least 1."""
    return max((n for n in row_buckets(limits.max_rows) if n <= rows), default=1)


def plan(
    runner: Runner, batch: Sequence[Completion], limits: Limits
) -> tuple[CacheLayout, list[Prefill]]:
    """The cache layout of a batch and the prefill calls that fill it."""
    lengths = [len(s.prompt_token_ids) for s in batch]
    slots = _slots(max(map(_total_length, batch)), limits)
    chunk = _chunk_length(runner, max(lengths), slots, limits)
    keys = slots if chunk < max(lengths) else chunk
    by_memory = MAX_SCORE_BYTES // _score_bytes(runner, chunk, keys)
    group = _whole_bucket(min(limits.prefill_tokens // chunk, by_memory), limits)
    rows = pick(len(batch), row_buckets(limits.max_rows), "rows")
    layout = CacheLayout.plan(runner.config, rows, slots, chunk, limits.page_size)
    groups = [list(range(i, min(i + group, len(batch)))) for i in range(0, len(batch), group)]
    return layout, [Prefill(g, chunk, -(-max(lengths[i] for i in g) // chunk)) for g in groups]


def _slots(tokens: int, limits: Limits) -> int:
    """The declared cache length for sequences of `tokens`."""
    buckets = length_buckets(_pages(limits.max_len, limits.page_size), limits.page_size)
    return pick(tokens, buckets, "tokens of a sequence")


def _chunk_length(runner: Runner, longest: int, slots: int, limits: Limits) -> int:
    """The declared chunk length for prompts of up to `longest` tokens, within the score memory."""
    max_chunk = min(MAX_CHUNK, limits.prefill_tokens)
    sizes = chunk_buckets(max_chunk)
    chunk = pick(min(longest, max_chunk), sizes, "chunk")
    while 256 < chunk < longest and _score_bytes(runner, chunk, slots) > MAX_SCORE_BYTES:
        chunk = sizes[sizes.index(chunk) - 1]
    return chunk


def _score_bytes(runner: Runner, queries: int, keys: int) -> int:
    """Bytes of one row's attention scores: float32, and their probabilities in bfloat16."""
    return runner.config.num_attention_heads * queries * keys * 6


def _pages(tokens: int, page_size: int) -> int:
    """`tokens` rounded up to whole pages."""
    return -(-tokens // page_size) * page_size


Event = tuple[Completion, list[int], str]
"""A sequence, the tokens that it gained in one call, and the text that they made final."""


def run_batch(
    runner: Runner,
    batch: Sequence[Completion],
    limits: Limits,
    suppressed: Sequence[int] = (),
    interactive: bool = False,
) -> Iterator[list[Event]]:
    """Runs a batch to its end, yielding after every device call.

    Args:
      suppressed: ids that are never generated.
      interactive: fewer decode steps a call, so that text arrives sooner.
    """
    config = runner.config
    layout, groups = plan(runner, batch, limits)
    rows = layout.num_rows
    statics = sampling_statics(batch, config.vocab_size)
    table = sampling_table(batch, rows, suppressed)
    state = row_state(batch, rows, config.vocab_size, statics.penalties)
    cache = runner.new_cache(layout)
    first_tokens = []  # every group is queued before the first is waited for
    for group in groups:
        for chunk, has_past in _chunks(batch, group, rows, limits.max_rows):
            cache, state, output = runner.prefill(
                layout, cache, state, chunk, table, statics,
                has_past=has_past, wants_token=bool(chunk.ends.any()),
            )  # fmt: skip
            if output is not None:
                first_tokens.append((output, [batch[i] for i in group.rows]))
    for output, sequences in first_tokens:
        yield _take(output, sequences)

    host_stops = any(s.params.stop for s in batch)
    steps = min(limits.decode_steps, INTERACTIVE_STEPS) if interactive or host_stops else None
    decode = _Decode(runner, layout, table, statics, limits.decode_steps, steps)
    decode.start(cache, state)
    while not all(s.finished for s in batch):
        yield _take(decode.next(batch, ahead=not host_stops), batch)


class _Decode:
    """Decode calls of one batch; while the host reads one call's tokens, the next one runs.

    A stop string ends a row on the host only, so such a batch is not run ahead.
    """

    def __init__(self, runner, layout, table, statics, max_steps: int, steps: int | None):
        self._runner, self._layout = runner, layout
        self._table, self._statics = table, statics
        self._max_steps, self._steps = max_steps, steps or max_steps
        self._queued: list[StepOutput] = []

    def start(self, cache: KVCache, state: RowState) -> None:
        self._cache, self._state = cache, state

    def next(self, batch: Sequence[Completion], ahead: bool) -> StepOutput:
        """The output of the next call, [B, max_steps]."""
        left = max(s.remaining for s in batch if not s.finished)
        if not self._queued:
            self._finish_stopped(batch)
            self._call(left)
        if ahead and left > self._steps:
            self._call(left - self._steps)
        return self._queued.pop(0)

    def _call(self, left: int) -> None:
        self._cache, self._state, output = self._runner.decode(
            self._layout, self._cache, self._state, self._table, self._statics,
            steps=min(self._steps, left), max_steps=self._max_steps,
        )  # fmt: skip
        self._queued.append(output)

    def _finish_stopped(self, batch: Sequence[Completion]) -> None:
        """Tells the device which rows a stop string has ended."""
        if any(s.params.stop for s in batch):
            finished = np.ones(self._layout.num_rows, bool)
            finished[: len(batch)] = [s.finished for s in batch]
            self._state.finished = jnp.asarray(finished)


def _chunks(
    batch: Sequence[Completion], group: Prefill, num_rows: int, max_rows: int
) -> Iterator[tuple[Chunk, bool]]:
    """The chunks of a group, and whether each continues an earlier one."""
    prompts = [batch[i].prompt_token_ids for i in group.rows]
    size = pick(len(prompts), row_buckets(max_rows), "rows")
    for i in range(group.chunks):
        chunk = prompt_chunk(prompts, group.rows, i * group.chunk, group.chunk, size, num_rows)
        yield chunk, i > 0


def _take(output: StepOutput, sequences: Sequence[Completion]) -> list[Event]:
    """Hands the tokens of one call to their sequences."""
    tokens = np.asarray(output.tokens)
    logprobs = jax.tree.map(np.asarray, output.logprobs)
    events: list[Event] = []
    for row, sequence in enumerate(sequences):
        gained, text = [], ""
        for column, token in enumerate(tokens[row].tolist()):
            if token == NO_ID or sequence.finished:
                break
            values = None if logprobs is None else _at(logprobs, (row, column))
            text += sequence.append(token, values)
            gained.append(token)
        if gained:
            events.append((sequence, gained, text))
    return events


def _at(logprobs: Logprobs, index: tuple[int, int]) -> TokenLogprobs:
    return TokenLogprobs(
        float(logprobs.sampled[index]),
        int(logprobs.rank[index]),
        logprobs.top_ids[index].tolist(),
        logprobs.top[index].tolist(),
    )


def score_tokens(
    runner: Runner, token_ids: Sequence[int], limits: Limits, k: int
) -> list[TokenLogprobs]:
    """Log-probability of each token after the first, given those before it."""
    length = len(token_ids) - 1
    slots = _slots(max(length, 1), limits)
    size = _chunk_length(runner, max(length, 1), slots, limits)
    layout = CacheLayout.plan(runner.config, 1, slots, size, limits.page_size)
    cache = runner.new_cache(layout)
    scored: list[TokenLogprobs] = []
    for start in range(0, length, size):
        chunk = prompt_chunk([token_ids[:-1]], [0], start, size, 1, 1)
        targets = prompt_chunk([token_ids[1:]], [0], start, size, 1, 1).ids
        cache, logprobs = runner.score(layout, cache, chunk, targets, has_past=start > 0, k=k)
        values = jax.tree.map(np.asarray, logprobs)
        scored += [_at(values, (0, i)) for i in range(min(size, length - start))]
    return scored
