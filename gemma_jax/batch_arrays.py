"""Sequences to the arrays that the programs take: sampling table, row state, prompt chunks.

The arrays are numpy's; the runner places them on the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gemma_jax.buckets import pick
from gemma_jax.errors import RequestError
from gemma_jax.runner import Chunk
from gemma_jax.sampling import NO_ID, RowState, SamplingStatics, SamplingTable
from gemma_jax.sequence import Sequence as Completion

CANDIDATE_BUCKETS = (64, 256, 1024)
"""Largest top_k served by a partial sort; anything larger sorts the vocabulary."""
LOGPROB_BUCKETS = (0, 1, 5, 20)
ID_LIST_BUCKETS = (4, 16, 64, 256, 1024)
# Larger values of a request mean the same as these, which the arrays can hold.
_MAX_INT32 = int(np.iinfo(np.int32).max)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def sampling_statics(sequences: Sequence[Completion], vocab_size: int) -> SamplingStatics:
    """The compile-time needs of a batch."""
    params = [s.params for s in sequences]
    sampled = [p for p in params if p.temperature > 0]
    asked = [p.logprobs for p in params if p.logprobs is not None]
    logprobs = min(pick(max(asked), LOGPROB_BUCKETS, "logprobs"), vocab_size) if asked else None
    filters = [p for p in sampled if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    return SamplingStatics(
        greedy=not sampled,
        candidates=_candidates([p.top_k for p in sampled], vocab_size) if filters else None,
        penalties=any(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1 for p in params
        ),
        logprobs=logprobs,
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


def check_id_lists(sequence: Completion, suppressed: Sequence[int]) -> None:
    """Raises RequestError when a request names more ids than the programs take."""
    lists = {
        "stop_token_ids (with EOS ids)": sequence.stop_ids,
        "logit_bias (with suppressed ids)": _biases(sequence, suppressed),
    }
    for name, ids in lists.items():
        if len(ids) > ID_LIST_BUCKETS[-1]:
            raise RequestError(f"{name}: {len(ids)} ids; at most {ID_LIST_BUCKETS[-1]} are allowed")


def _id_lists(lists: Sequence[Sequence[float]], rows: int, fill: float, dtype: Any) -> Any:
    longest = max(map(len, lists), default=0)
    width = pick(longest, ID_LIST_BUCKETS, "ids of a request") if longest else 0
    out = np.full((rows, width), fill, dtype)
    for i, values in enumerate(lists):
        out[i, : len(values)] = values
    return out


def row_state(
    sequences: Sequence[Completion], rows: int, vocab_size: int, penalties: bool
) -> RowState:
    """The state before prefill; rows past the sequences are finished from the start."""
    finished: Any = np.ones(rows, bool)
    finished[: len(sequences)] = False
    prompt_seen: Any = None
    output_counts: Any = None
    if penalties:
        prompt_seen = np.zeros((rows, vocab_size), bool)
        output_counts = np.zeros((rows, vocab_size), np.int32)
        for i, sequence in enumerate(sequences):
            prompt_seen[i, sequence.prompt_token_ids] = True
    zeros: Any = np.zeros(rows, np.int32)
    return RowState(zeros, zeros.copy(), zeros.copy(), finished, prompt_seen, output_counts)


def prompt_chunk(
    prompts: Sequence[Sequence[int]], rows: Sequence[int], start: int, length: int, size: int,
    num_rows: int,
) -> Chunk:  # fmt: skip
    """Tokens start … start + length - 1 of each prompt, for batch rows `rows`.

    Padded to `size` rows; padding rows name the row `num_rows`, which does not exist.
    """
    ids: Any = np.zeros((size, length), np.int32)
    starts: Any = np.full(size, start, np.int32)
    lengths: Any = np.zeros(size, np.int32)
    ends: Any = np.zeros(size, bool)
    batch_rows: Any = np.full(size, num_rows, np.int32)
    batch_rows[: len(rows)] = rows
    for i, prompt in enumerate(prompts):
        part = prompt[start : start + length]
        ids[i, : len(part)] = part
        lengths[i] = len(part)
        ends[i] = start < len(prompt) <= start + length
    return Chunk(ids, starts, lengths, ends, batch_rows)
