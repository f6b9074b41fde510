"""Flips: positions where two engines choose different tokens, and why each may have happened.

With a the reference's choice and b ours, a flip has two margins, both at least 0: the reference's
log p(a) - log p(b), and ours, log p(b) - log p(a). The noise limit is what bfloat16 itself moves a
margin by, measured on the reference's own two runs. A flip is

- a *tie* when the reference gives a and b equal logits and our margin is within the limit,
- *noise* when both margins are within the limit and, in bfloat16, our float32 run and the
  reference's float32 run agree at that position,
- *unexplained* otherwise.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from gemma_jax.parity.records import Candidates, Record

NOISE_PERCENTILE = 99.9
FLOAT32_LIMIT = 1e-4
"""Margin in nats within which two float32 runs may choose different tokens."""


class FlipClass(StrEnum):
    """Why a flip happened."""

    TIE = "tie"
    NOISE = "noise"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Verdict:
    """The float32 runs at one position: the reference's choice and ours, `None` when not run.

    Attributes:
      reference_margin: between both choices in the reference's float32 run, 0 when they are equal.
    """

    reference: int | None = None
    ours: int | None = None
    reference_margin: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether both ran and chose alike, or tied within float32's own limit."""
        if self.reference is None or self.ours is None:
            return False
        return self.reference == self.ours or self.reference_margin <= FLOAT32_LIMIT


@dataclass(frozen=True)
class Flip:
    """One flip.

    Attributes:
      id: of the prompt.
      token: index in the continuation.
      position: tokens before it, prompt included.
      expected: the reference's choice.
      actual: ours.
      reference_margin: nats; infinite when the reference does not list our choice.
      our_margin: nats; infinite when we do not list the reference's choice.
      float32: the verdict of the float32 runs.
      kind: its class.
      reason: what makes it unexplained, else "".
    """

    id: str | int
    token: int
    position: int
    expected: int
    actual: int
    reference_margin: float
    our_margin: float
    float32: Verdict
    kind: FlipClass
    reason: str = ""

    def __str__(self) -> str:
        words = (
            f"prompt {self.id!r}, position {self.position} (token {self.token}): we choose"
            f" {self.actual} by {self.our_margin:.4f} nat, the reference {self.expected} by"
            f" {self.reference_margin:.4f}"
        )
        return f"{words}: {self.kind}" + (f" ({self.reason})" if self.reason else "")

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = asdict(self) | {"kind": str(self.kind)}
        for name in ("reference_margin", "our_margin"):
            value = fields[name]
            fields[name] = round(value, 7) if np.isfinite(value) else None
        return fields


@dataclass(frozen=True)
class NoiseLimit:
    """How far rounding alone may move a margin, in nats, and where the number comes from."""

    nats: float
    source: str
    needs_verdict: bool


def noise_limit(
    reference: Record, twin: Record | None, dtype: str, given: float | None = None
) -> NoiseLimit:
    """The limit of a comparison.

    Args:
      twin: the reference's exact float32 record of the same tokens.
      dtype: of our run.
      given: a limit that the caller sets.
    """
    both_float32 = dtype == "float32" and reference.dtype in (None, "float32")
    # A twin of a float32 record: the record's products were rounded, as TF32 does.
    needs_verdict = not both_float32 or twin is not None
    if given is not None:
        return NoiseLimit(given, "given", needs_verdict and twin is not None)
    if twin is not None:
        source = f"{NOISE_PERCENTILE} % of |Δmargin| between {reference.name} and {twin.name}"
        least = FLOAT32_LIMIT if both_float32 else 0.0
        return NoiseLimit(max(least, margin_noise(reference, twin)), source, True)
    if both_float32:
        return NoiseLimit(FLOAT32_LIMIT, "float32", False)
    return NoiseLimit(0.0, "no float32 record of the reference: only ties", True)


def margin_noise(record: Record, twin: Record) -> float:
    """99.9th percentile of |Δmargin| between a record and the float32 one of the same tokens.

    The margin is that of the float32 run's best two candidates. Where the other run does not list
    one of them, its last candidate's log-probability stands in: a lower bound of the change.
    """
    exact = {stream.id: stream.candidates for stream in twin.streams}
    changes = []
    for stream in record.streams:
        wide = exact[stream.id]
        values = stream.candidates.logprob_of(wide.ids[:, :2])
        listed = np.where(
            np.isfinite(stream.candidates.logprobs), stream.candidates.logprobs, np.inf
        )
        values = np.where(np.isnan(values), listed.min(-1, keepdims=True), values)
        changes.append(np.abs((values[:, 0] - values[:, 1]) - wide.margins))
    return float(np.percentile(np.concatenate(changes), NOISE_PERCENTILE))


def classify(
    reference_margin: float, our_margin: float, verdict: Verdict, limit: NoiseLimit
) -> tuple[FlipClass, str]:
    """The class of a flip, and the reason when it is unexplained."""
    if not np.isfinite(reference_margin):
        return FlipClass.UNEXPLAINED, "the reference does not list our choice"
    if not np.isfinite(our_margin):
        return FlipClass.UNEXPLAINED, "we do not list the reference's choice"
    tie = reference_margin == 0
    allowed = max(limit.nats, FLOAT32_LIMIT)
    if our_margin > allowed or (reference_margin > limit.nats and not tie):
        return FlipClass.UNEXPLAINED, f"a margin is above the limit of {limit.nats:.4g} nat"
    if tie:
        return FlipClass.TIE, ""
    if not limit.needs_verdict or verdict.agrees:
        return FlipClass.NOISE, ""
    if verdict.reference is None or verdict.ours is None:
        return FlipClass.UNEXPLAINED, "a float32 run is missing"
    return FlipClass.UNEXPLAINED, (
        f"in float32 the reference chooses {verdict.reference}, we {verdict.ours}"
    )


def candidate_margins(ids: Candidates, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """[T] log p(better) - log p(worse) in nats; infinite where one of them is not listed."""
    difference = ids.logprob_of(better) - ids.logprob_of(worse)
    return np.where(np.isnan(difference), np.inf, difference)


def count_classes(flips: Sequence[Flip]) -> dict[str, int]:
    """Class → number of flips."""
    return {str(kind): sum(flip.kind == kind for flip in flips) for kind in FlipClass}
