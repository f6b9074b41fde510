"""Compares a reference record with our model: teacher-forced everywhere, and free-running."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from gemma_jax.errors import RecordError
from gemma_jax.parity import bounds
from gemma_jax.parity.flips import (
    Flip,
    FlipClass,
    NoiseLimit,
    Verdict,
    candidate_margins,
    classify,
    count_classes,
    noise_limit,
)
from gemma_jax.parity.records import Candidates, Record, Stream, check_twin, check_vocabulary
from gemma_jax.parity.score import greedy, num_candidates, teacher_forced

if TYPE_CHECKING:
    from gemma_jax.llm import LLM

logger = logging.getLogger(__name__)

LoadModel = Callable[[str], "LLM"]
"""Dtype → our model in it; the caller keeps the settings."""

GREEDY_SHARE = 0.98
"""A record of fewer of its own best tokens was sampled, and a greedy run cannot follow it."""


@dataclass(frozen=True)
class Positions:
    """What was compared, one entry a teacher-forced token, streams one after another.

    Attributes:
      stream: [n] index of the stream.
      token: [n] index in its continuation.
      position: [n] tokens before it.
      expected: [n] the reference's choice.
      actual: [n] ours.
      margin: [n] the reference's best minus second best, nats.
      delta: [n] our log-probability of the reference's choice minus the reference's; NaN where we
        do not list it.
      worst_delta: [n] largest |Δlogprob| over the candidates that both list.
      float32: [n] our float32 choice; -1 where it was not run.
    """

    stream: np.ndarray
    token: np.ndarray
    position: np.ndarray
    expected: np.ndarray
    actual: np.ndarray
    margin: np.ndarray
    delta: np.ndarray
    worst_delta: np.ndarray
    float32: np.ndarray

    @property
    def flipped(self) -> np.ndarray:
        return self.expected != self.actual

    def of_stream(self, index: int) -> "Positions":
        """The entries of one stream."""
        inside = self.stream == index
        return Positions(*(getattr(self, f.name)[inside] for f in dataclasses.fields(self)))


@dataclass(frozen=True)
class FreeRun:
    """Our greedy run against the reference's own tokens.

    Attributes:
      batch: most sequences that ran together.
      agreed: per stream, tokens before the first difference.
      lengths: per stream, tokens of the reference.
      flips: the first difference of each stream that has one.
    """

    batch: int
    agreed: list[int]
    lengths: list[int]
    flips: list[Flip]

    @property
    def prefix_agreement(self) -> float:
        """Share of the reference's tokens that lie before the first difference."""
        return sum(self.agreed) / sum(self.lengths)

    @property
    def whole(self) -> int:
        """Streams that agree to their end."""
        return sum(a == n for a, n in zip(self.agreed, self.lengths, strict=True))


@dataclass
class Comparison:
    """Everything that one comparison found.

    Attributes:
      reference: the record.
      window: the model's sliding window, in tokens.
      dtype: of our run.
      limit: noise limit.
      positions: per token.
      flips: teacher-forced flips, in order.
      free: the free run, when asked for.
      trace: sub-blocks that differ from the reference on its own inputs, when asked for.
      ours: what ran on our side, for reports.
    """

    reference: Record
    window: int
    dtype: str
    limit: NoiseLimit
    positions: Positions
    flips: list[Flip]
    free: FreeRun | None = None
    trace: Any = None
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def unexplained(self) -> list[Flip]:
        """Unexplained flips, teacher-forced and free-running."""
        flips = [*self.flips, *(self.free.flips if self.free else [])]
        return [flip for flip in flips if flip.kind == FlipClass.UNEXPLAINED]

    @property
    def failed(self) -> bool:
        """Whether a flip is unexplained or a traced sub-block differs."""
        return bool(self.unexplained) or (self.trace is not None and self.trace.failed)

    @property
    def rate(self) -> bounds.Rate:
        """Flips of any class over tokens."""
        return bounds.Rate(len(self.flips), len(self.positions.token))

    @property
    def unexplained_rate(self) -> bounds.Rate:
        """Unexplained teacher-forced flips over tokens."""
        count = count_classes(self.flips)[FlipClass.UNEXPLAINED]
        return bounds.Rate(count, len(self.positions.token))

    def splits(self) -> dict[str, dict[str, bounds.Rate]]:
        """Flip rates by batch size of the reference, by position and by prompt length."""
        p, streams = self.positions, self.reference.streams
        where, prompt = bounds.position_label(self.window), bounds.prompt_label()
        batches = ["unknown" if s.batch is None else str(s.batch) for s in streams]
        prompts = [prompt(len(s.prompt)) for s in streams]
        labels = {
            "batch": [batches[i] for i in p.stream],
            "position": [where(i) for i in p.position.tolist()],
            "prompt_length": [prompts[i] for i in p.stream],
        }
        return {name: bounds.split_rates(x, p.flipped) for name, x in labels.items()}

    def survival(self) -> bounds.Survival:
        """Sequences without a flip in their first N tokens."""
        firsts: list[int | None] = []
        for index in range(len(self.reference.streams)):
            at = np.flatnonzero(self.positions.of_stream(index).flipped)
            firsts.append(int(at[0]) if at.size else None)
        lengths = [len(stream.tokens) for stream in self.reference.streams]
        return bounds.survival(lengths, firsts, self.rate)


def compare(
    reference: Record,
    load: LoadModel,
    dtype: str,
    *,
    twin: Record | None = None,
    noise: float | None = None,
    free_run: bool = False,
    float32_everywhere: bool = False,
) -> Comparison:
    """Teacher-forces the reference's tokens through our model and classes every flip.

    Args:
      reference: with candidates at every position.
      load: gives our model in a dtype; each is closed before the next is asked for.
      dtype: of our run.
      twin: the reference's float32 record of the same tokens, which bfloat16 flips need.
      noise: limit in nats, instead of the measured one.
      free_run: also generate greedily from the reference's prompts.
      float32_everywhere: our float32 choice at every position, not only in sequences with flips.

    Raises:
      RecordError: the record does not fit the model, or the twin not the record.
    """
    if twin is not None:
        check_twin(reference, twin)
    if free_run:
        check_greedy(reference)
    limit = noise_limit(reference, twin, dtype, noise)
    streams = reference.streams
    k = num_candidates(streams)
    with load(dtype) as llm:
        for record in (reference, twin) if twin is not None else (reference,):
            check_vocabulary(record, llm.model_config.vocab_size)
        window = llm.model_config.sliding_window
        ours = list(_progress(teacher_forced(llm, streams, k), len(streams), dtype))
        runs = list(greedy(llm, streams, k)) if free_run else []
        batch = min(llm.max_num_seqs, len(streams))
    verdicts = limit.needs_verdict and twin is not None
    needed = _needs_float32(streams, ours, runs, verdicts, float32_everywhere)
    if dtype == "float32" or not needed:
        float32 = {i: ours[i] for i in needed}
    else:
        with load("float32") as llm:
            some = [streams[i] for i in needed]
            scored = _progress(teacher_forced(llm, some, k), len(some), "float32")
            float32 = dict(zip(needed, scored, strict=True))
    judge = Judge(streams, twin, float32, limit)
    flips = [
        judge.flip(i, int(t), candidates)
        for i, candidates in enumerate(ours)
        for t in np.flatnonzero(candidates.best != streams[i].candidates.best)
    ]
    positions = _positions(streams, ours, float32)
    free = free_run_of(streams, runs, batch, judge) if free_run else None
    return Comparison(reference, window, dtype, limit, positions, flips, free)


def _progress(steps, total: int, dtype: str):
    return tqdm(steps, total=total, unit="seq", desc=dtype, disable=None, leave=False)


def _needs_float32(
    streams: Sequence[Stream], ours, runs, verdicts: bool, everywhere: bool
) -> list[int]:
    """Indices of the streams whose float32 choices are wanted: for verdicts, those with flips."""
    if everywhere:
        return list(range(len(streams)))
    if not verdicts:
        return []
    wanted = {i for i, x in enumerate(ours) if (x.best != streams[i].candidates.best).any()}
    wanted |= {i for i, (ids, _) in enumerate(runs) if ids != streams[i].tokens.tolist()}
    return sorted(wanted)


def _positions(
    streams: Sequence[Stream], ours: Sequence[Candidates], float32: dict[int, Candidates]
) -> Positions:
    parts = []
    for i, (stream, candidates) in enumerate(zip(streams, ours, strict=True)):
        top, steps = stream.candidates, np.arange(len(stream.tokens))
        shared = candidates.logprob_of(top.ids) - top.logprobs  # NaN: not shared
        worst = np.where(np.isfinite(shared), np.abs(shared), 0.0).max(-1)
        wide = float32[i].best if i in float32 else np.full(len(steps), -1)
        parts.append(
            (
                np.full(len(steps), i), steps, len(stream.prompt) + steps, top.best,
                candidates.best, top.margins, shared[:, 0], worst, wide,
            )
        )  # fmt: skip
    return Positions(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Judge:
    """Gives a flip its margins, verdict and class.

    Attributes:
      streams: of the reference.
      twin: the reference's float32 record.
      float32: stream index → our float32 candidates.
      limit: noise limit.
    """

    streams: Sequence[Stream]
    twin: Record | None
    float32: dict[int, Candidates]
    limit: NoiseLimit

    def flip(self, index: int, t: int, ours: Candidates) -> Flip:
        """The flip at token `t` of stream `index`."""
        stream = self.streams[index]
        top = stream.candidates
        a, b = top.best[t : t + 1], ours.best[t : t + 1]
        row, our_row = _row(top, t), _row(ours, t)
        margins = (
            float(candidate_margins(row, a, b)[0]),
            float(candidate_margins(our_row, b, a)[0]),
        )
        verdict = self._verdict(index, t)
        kind, reason = classify(*margins, verdict, self.limit)
        return Flip(
            stream.id, t, len(stream.prompt) + t, int(a[0]), int(b[0]), *margins, verdict,
            kind, reason,
        )  # fmt: skip

    def _verdict(self, index: int, t: int) -> Verdict:
        ours = int(self.float32[index].best[t]) if index in self.float32 else None
        if self.twin is None:
            return Verdict(None, ours)
        # The twin may hold more rows than the record, in another order.
        rows = {stream.id: stream for stream in self.twin.streams}
        row = _row(rows[self.streams[index].id].candidates, t)
        reference = int(row.best[0])
        if ours is None or ours == reference:
            return Verdict(reference, ours)
        margin = candidate_margins(row, row.best, np.array([ours], np.int32))
        return Verdict(reference, ours, float(margin[0]))


def _row(candidates: Candidates, t: int) -> Candidates:
    return Candidates(candidates.ids[t : t + 1], candidates.logprobs[t : t + 1])


# --- free-running -------------------------------------------------------------------------------


def check_greedy(reference: Record) -> None:
    """Refuses a record that a greedy run cannot follow.

    Raises:
      RecordError: it was sampled, or given its tokens.
    """
    same = sum(int((s.tokens == s.candidates.best).sum()) for s in reference.streams)
    if same < GREEDY_SHARE * reference.num_tokens:
        raise RecordError(
            f"{reference.name}: only {same} of {reference.num_tokens} tokens are the engine's best;"
            " a free run needs a greedy record, made from --prompts"
        )


def free_run_of(
    streams: Sequence[Stream],
    runs: Sequence[tuple[list[int], Candidates]],
    batch: int,
    judge: Judge,
) -> FreeRun:
    """Greedy runs of ours against the tokens of the reference's streams."""
    agreed, flips = [], []
    for i, (stream, (ids, candidates)) in enumerate(zip(streams, runs, strict=True)):
        differs = np.flatnonzero(np.array(ids) != stream.tokens)
        agreed.append(int(differs[0]) if differs.size else len(stream.tokens))
        if differs.size:
            flips.append(judge.flip(i, int(differs[0]), candidates))
    return FreeRun(batch, agreed, [len(s.tokens) for s in streams], flips)
