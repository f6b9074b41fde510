"""The offline loop: batches of sequences through prefill and decode calls until all have ended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from gemma_jax.model.cache import CacheLayout, cache_bytes
from gemma_jax.runner import Chunk, Runner, StepOutput
from gemma_jax.sampling import NO_ID, Logprobs
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
    for sequence in sorted(sequences, key=_total_length, reverse=True):
        if not batches or not _fits(runner, [*batches[-1], sequence], limits):
            batches.append([])
        batches[-1].append(sequence)
    return batches


def _total_length(sequence: Completion) -> int:
    return len(sequence.prompt_token_ids) + sequence.max_tokens


def _fits(runner: Runner, batch: Sequence[Completion], limits: Limits) -> bool:
    if len(batch) > limits.max_rows:
        return False
    layout, _ = plan(runner, batch, limits)
    needed = cache_bytes(runner.config, layout, runner.numerics.jnp_dtype.itemsize)
    return len(batch) == 1 or needed <= limits.cache_bytes


def plan(
    runner: Runner, batch: Sequence[Completion], limits: Limits
) -> tuple[CacheLayout, list[Prefill]]:
    """The cache layout of a batch and the prefill calls that fill it."""
    lengths = [len(s.prompt_token_ids) for s in batch]
    slots = pick(
        max(map(_total_length, batch)),
        length_buckets(_pages(limits.max_len, limits.page_size), limits.page_size),
        "tokens of a sequence",
    )
    max_chunk = min(MAX_CHUNK, limits.prefill_tokens)
    chunk = pick(min(max(lengths), max_chunk), chunk_buckets(max_chunk), "chunk")
    heads = runner.config.num_attention_heads
    while chunk > 256 and chunk < max(lengths) and heads * chunk * slots * 6 > MAX_SCORE_BYTES:
        chunk //= 2
    keys = slots if chunk < max(lengths) else chunk
    by_memory = MAX_SCORE_BYTES // (heads * chunk * keys * 6)
    group = max(1, min(limits.prefill_tokens // chunk, by_memory, len(batch)))
    rows = pick(len(batch), row_buckets(limits.max_rows), "rows")
    layout = CacheLayout.plan(runner.config, rows, slots, chunk, limits.page_size)
    groups = [list(range(i, min(i + group, len(batch)))) for i in range(0, len(batch), group)]
    return layout, [Prefill(g, chunk, -(-max(lengths[i] for i in g) // chunk)) for g in groups]


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
    for group in groups:
        for chunk, has_past in _chunks(batch, group, rows, limits.max_rows):
            cache, state, output = runner.prefill(
                layout, cache, state, chunk, table, statics,
                has_past=has_past, wants_token=bool(chunk.ends.any()),
            )  # fmt: skip
            if output is not None:
                yield _take(output, [batch[i] for i in group.rows])

    stops = any(s.params.stop for s in batch)
    steps = min(limits.decode_steps, INTERACTIVE_STEPS if interactive or stops else 2**31)
    while not all(s.finished for s in batch):
        finished = np.ones(rows, bool)
        finished[: len(batch)] = [s.finished for s in batch]
        state.finished = jnp.asarray(finished)
        wanted = max(s.remaining for s in batch if not s.finished)
        cache, state, output = runner.decode(
            layout, cache, state, table, statics,
            steps=min(steps, wanted), max_steps=limits.decode_steps,
        )  # fmt: skip
        yield _take(output, batch)


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
    logprobs = output.logprobs
    if logprobs is not None:
        arrays = (logprobs.sampled, logprobs.rank, logprobs.top_ids, logprobs.top)
        logprobs = Logprobs(*map(np.asarray, arrays))
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
    max_chunk = min(MAX_CHUNK, limits.prefill_tokens)
    slots = pick(
        max(length, 1),
        length_buckets(_pages(limits.max_len, limits.page_size), limits.page_size),
        "tokens of a sequence",
    )
    size = pick(min(max(length, 1), max_chunk), chunk_buckets(max_chunk), "chunk")
    layout = CacheLayout.plan(runner.config, 1, slots, size, limits.page_size)
    cache = runner.new_cache(layout)
    scored: list[TokenLogprobs] = []
    for start in range(0, length, size):
        chunk = prompt_chunk([token_ids[:-1]], [0], start, size, 1, 1)
        targets = prompt_chunk([token_ids[1:]], [0], start, size, 1, 1).ids
        cache, logprobs = runner.score(layout, cache, chunk, targets, has_past=start > 0, k=k)
        values = Logprobs(*map(np.asarray, (
            logprobs.sampled, logprobs.rank, logprobs.top_ids, logprobs.top
        )))  # fmt: skip
        scored += [_at(values, (0, i)) for i in range(min(size, length - start))]
    return scored
