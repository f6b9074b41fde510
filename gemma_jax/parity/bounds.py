"""Bounds, not counts: upper limits of a flip rate, splits of positions, survival of sequences."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
POSITION_EDGES = (1024, 8192, 32_768)
PROMPT_EDGES = (64, 512, 2048, 8192, 32_768)


def upper_bound(events: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """One-sided Clopper-Pearson bound: the rate is below it with at least this confidence.

    It is the rate p at which `events` or fewer among `trials` would have probability
    1 − confidence: the `confidence` quantile of Beta(events + 1, trials − events). For no event
    that is 1 − (1 − confidence)^(1 / trials).

    Raises:
      ValueError: a negative number, or more events than trials.

    Source: C. J. Clopper and E. S. Pearson, Biometrika 26 (1934).
    """
    if not 0 <= events <= trials:
        raise ValueError(f"events={events}, trials={trials}: expected 0 <= events <= trials")
    if events == trials:
        return 1.0
    from scipy.special import betaincinv  # a fraction of a second to import

    return float(betaincinv(events + 1, trials - events, confidence))


def lower_bound(events: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """`upper_bound`'s counterpart: the rate is above it with at least this confidence.

    Raises:
      ValueError: a negative number, or more events than trials.
    """
    return 1 - upper_bound(trials - events, trials, confidence)


@dataclass(frozen=True)
class Rate:
    """How often something happened.

    Attributes:
      events: how many times.
      trials: of how many.
    """

    events: int
    trials: int

    @property
    def share(self) -> float:
        return self.events / self.trials if self.trials else 0.0

    @property
    def upper(self) -> float:
        """95 % upper bound."""
        return upper_bound(self.events, self.trials)

    def as_json(self) -> dict[str, float | int]:
        return {
            "flips": self.events,
            "tokens": self.trials,
            "rate": self.share,
            "upper_95": self.upper,
        }


def position_label(window: int) -> Callable[[int], str]:
    """Names the range of a position: below or above the window, then 1k, 8k, 32k."""
    return _labels((window, *(edge for edge in POSITION_EDGES if edge > window)))


def prompt_label() -> Callable[[int], str]:
    """Names the range of a prompt's length."""
    return _labels(PROMPT_EDGES)


def _labels(edges: Sequence[int]) -> Callable[[int], str]:
    names = [
        f"< {edges[0]}",
        *(f"{low} … {high - 1}" for low, high in itertools.pairwise(edges)),
        f">= {edges[-1]}",
    ]
    return lambda value: names[int(np.searchsorted(edges, value, side="right"))]


def split_rates(labels: Sequence[str], flipped: np.ndarray) -> dict[str, Rate]:
    """The rate of each label, in the order of first appearance.

    Args:
      labels: [n] of every position.
      flipped: [n] bool.
    """
    names, inverse = np.unique(np.asarray(labels), return_inverse=True)
    first = [int(np.argmax(inverse == i)) for i in range(len(names))]
    rates = {}
    for i in np.argsort(first):
        inside = inverse == i
        rates[str(names[i])] = Rate(int(flipped[inside].sum()), int(inside.sum()))
    return rates


@dataclass(frozen=True)
class Survival:
    """Share of sequences without a flip in their first N tokens.

    Attributes:
      tokens: [m] the values of N.
      observed: [m] Kaplan-Meier estimate, which counts a sequence up to its end.
      expected: [m] (1 − p)^N, flips being independent and equally likely everywhere.
      upper: [m] (1 − p)^N with the 95 % upper bound of p.
    """

    tokens: np.ndarray
    observed: np.ndarray
    expected: np.ndarray
    upper: np.ndarray

    def as_json(self) -> dict[str, list[float]]:
        names = ("tokens", "observed", "expected", "upper")
        return {name: np.round(getattr(self, name), 6).tolist() for name in names}


def survival(lengths: Sequence[int], first_flips: Sequence[int | None], rate: Rate) -> Survival:
    """The survival curve of sequences, at every N where it moves, and at the longest length.

    Args:
      lengths: tokens of each sequence.
      first_flips: index of the first flipped token of each sequence, `None` when there is none.
      rate: of flips over all tokens.
    """
    deaths = [n for n in first_flips if n is not None]
    at_risk = np.array(
        [n if n is not None else size for size, n in zip(lengths, first_flips, strict=True)]
    )
    tokens, observed, alive = [0], [1.0], 1.0
    for n in sorted(set(deaths)):
        # A flip of token n: alive after n tokens, dead after n + 1; censored at n means len == n.
        risk = int(((at_risk > n) | np.array([d == n for d in first_flips])).sum())
        alive *= 1 - deaths.count(n) / risk
        tokens.append(n + 1)
        observed.append(alive)
    longest = max(lengths)
    if tokens[-1] < longest:
        tokens.append(longest)
        observed.append(alive)
    steps = np.array(tokens)
    return Survival(steps, np.array(observed), (1 - rate.share) ** steps, (1 - rate.upper) ** steps)
