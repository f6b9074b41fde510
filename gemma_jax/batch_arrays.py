"""Completions to the arrays that the programs take: sampling table, prompt chunks, page tables.

The arrays are numpy's; the runner places them on the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_jax.buckets import ID_LIST_BUCKETS, pick
from gemma_jax.call_arrays import Chunk, DecodeRows, PageTables
from gemma_jax.sampling import FEW_CANDIDATES, NO_ID, SamplingStatics, SamplingTable
from gemma_jax.sequence import Sequence as Completion

CANDIDATE_BUCKETS = (FEW_CANDIDATES, 256, 1024)
"""Largest top_k served by a partial sort; anything larger sorts the vocabulary."""
LOGPROB_BUCKETS = (0, 1, 5, 20)
# Larger values of a request mean the same as these, which the arrays can hold.
_MAX_INT32 = int(np.iinfo(np.int32).max)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def sampling_statics(
    sequences: Sequence[Completion], vocab_size: int, batch_invariant: bool = False
) -> SamplingStatics:
    """The compile-time needs of a batch.

    With `batch_invariant` draws have `FEW_CANDIDATES` when no row asks for more, and otherwise sort
    the whole vocabulary; no row sees a difference between these two.
    """
    params = [s.params for s in sequences]
    sampled = [p for p in params if p.temperature > 0]
    asked = [p.logprobs for p in params if p.logprobs is not None]
    logprobs = min(pick(max(asked), LOGPROB_BUCKETS, "logprobs"), vocab_size) if asked else None
    filters = [p for p in sampled if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    candidates = _candidates([p.top_k for p in sampled], vocab_size) if filters else None
    if batch_invariant and sampled and candidates != FEW_CANDIDATES:
        candidates = 0
    return SamplingStatics(
        greedy=not sampled,
        candidates=candidates,
        penalties=any(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in params
        ),
        logprobs=logprobs,
        batch_invariant=batch_invariant and bool(sampled),
    )


def _candidates(top_ks: list[int], vocab_size: int) -> int:
    if any(k <= 0 for k in top_ks) or max(top_ks) > CANDIDATE_BUCKETS[-1]:
        return 0
    size = pick(max(top_ks), CANDIDATE_BUCKETS, "top_k")
    return size if size < vocab_size else 0


def sampling_table(
    sequences: Sequence[Completion], rows: int, suppressed: Sequence[int]
) -> SamplingTable:
    """The sampling parameters of `sequences`, padded to `rows`."""

    def column(value: Callable[[Completion], Any], fill: float, dtype: Any) -> Any:
        out = np.full(rows, fill, dtype)
        out[: len(sequences)] = [value(s) for s in sequences]
        return out

    key: Any = np.zeros((rows, 2), np.uint32)
    for i, sequence in enumerate(sequences):
        key[i] = sequence.key
    biases = [_biases(s, suppressed) for s in sequences]
    return SamplingTable(
        temperature=column(lambda s: min(s.params.temperature, _MAX_FLOAT32), 0, np.float32),
        top_k=column(lambda s: min(s.params.top_k, _MAX_INT32), 0, np.int32),
        top_p=column(lambda s: s.params.top_p, 1, np.float32),
        min_p=column(lambda s: s.params.min_p, 0, np.float32),
        presence_penalty=column(lambda s: s.params.presence_penalty, 0, np.float32),
        frequency_penalty=column(lambda s: s.params.frequency_penalty, 0, np.float32),
        repetition_penalty=column(
            lambda s: min(s.params.repetition_penalty, _MAX_FLOAT32), 1, np.float32
        ),
        min_tokens=column(lambda s: min(s.params.min_tokens, s.max_tokens), 0, np.int32),
        max_tokens=column(lambda s: s.max_tokens, 0, np.int32),
        key=key,
        stop_ids=_id_lists([s.stop_ids for s in sequences], rows, NO_ID, np.int32),
        bias_ids=_id_lists([[i for i, _ in b] for b in biases], rows, NO_ID, np.int32),
        bias_values=_id_lists([[v for _, v in b] for b in biases], rows, 0, np.float32),
    )


def _biases(sequence: Completion, suppressed: Sequence[int]) -> list[tuple[int, float]]:
    bias = dict(sequence.params.logit_bias or {})
    bias |= dict.fromkeys(suppressed, -np.inf)
    return list(bias.items())


def _id_lists(lists: Sequence[Sequence[float]], rows: int, fill: float, dtype: Any) -> Any:
    longest = max(map(len, lists), default=0)
    width = pick(longest, ID_LIST_BUCKETS, "ids of a request") if longest else 0
    out = np.full((rows, width), fill, dtype)
    for i, values in enumerate(lists):
        out[i, : len(values)] = values
    return out


@dataclass(frozen=True)
class PromptPart:
    """Consecutive tokens of one completion, for one row of a prefill call.

    Attributes:
      completion: whose.
      tokens: its prompt and everything generated so far.
      slot: its place in the row state.
      start, length: the tokens start … start + length - 1.
      ends: they are the last, so that the next token is due.
    """

    completion: Completion
    tokens: Sequence[int]
    slot: int
    start: int
    length: int
    ends: bool


def prompt_chunk(
    parts: Sequence[PromptPart], size: int, length: int, num_slots: int, vocab_size: int | None
) -> Chunk:
    """The parts padded to `size` rows of `length` tokens; padding rows name the slot `num_slots`.

    With `vocab_size` the ids of prompts that end are counted, for penalties.
    """
    ids: Any = np.zeros((size, length), np.int32)
    start, lengths, counts = (np.zeros(size, np.int32) for _ in range(3))
    ends: Any = np.zeros(size, bool)
    slots = np.full(size, num_slots, np.int32)
    for i, part in enumerate(parts):
        ids[i, : part.length] = part.tokens[part.start : part.start + part.length]
        start[i], lengths[i], ends[i], slots[i] = part.start, part.length, part.ends, part.slot
        counts[i] = len(part.tokens) - len(part.completion.prompt_token_ids)
    chunk = Chunk(*map(_untyped, (ids, start, lengths, ends, slots, counts)))
    if vocab_size is not None:
        chunk.prompt_seen, chunk.output_counts = _counted(parts, size, vocab_size)
    return chunk


def _counted(parts: Sequence[PromptPart], size: int, vocab_size: int) -> tuple[Any, Any]:
    prompt_seen, output_counts = (
        np.zeros((size, vocab_size), bool),
        np.zeros((size, vocab_size), np.int32),
    )
    for i, part in enumerate(parts):
        if part.ends:
            prompt = part.completion.prompt_token_ids
            prompt_seen[i, prompt] = True
            np.add.at(output_counts[i], part.tokens[len(prompt) :], 1)
    return prompt_seen, output_counts


def decode_rows(
    slots: Sequence[int], limits: Sequence[int], size: int, num_slots: int
) -> DecodeRows:
    """The rows of a decode call, padded to `size`."""
    rows, most = np.full(size, num_slots, np.int32), np.zeros(size, np.int32)
    rows[: len(slots)], most[: len(slots)] = slots, limits
    return DecodeRows(_untyped(rows), _untyped(most))


def page_tables(
    full: Sequence[Sequence[int]],
    window: Sequence[Sequence[int]],
    size: int,
    widths: tuple[int, int],
) -> PageTables:
    """The page tables of a call, padded to `size` rows of `widths` pages."""
    return PageTables(*(_table(t, size, n) for t, n in zip((full, window), widths, strict=True)))


def _table(rows: Sequence[Sequence[int]], size: int, width: int) -> Any:
    out: Any = np.zeros((size, width), np.int32)
    for i, pages in enumerate(rows):
        out[i, : len(pages)] = pages[:width]
    return out


def _untyped(x: Any) -> Any:
    """numpy's arrays stand for the device's; the programs place them."""
    return x
