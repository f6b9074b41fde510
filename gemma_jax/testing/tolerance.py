"""Measured tolerances: how far a kernel may sit from exact, judged by plain `jnp` in its own dtype.

With `exact` the float32 or float64 reference and `plain` the same plain computation in the working
dtype, a kernel passes when at every element

    |kernel − exact| ≤ factor · max |plain − exact| + ulps · ulp(exact)

so a tolerance is never guessed, and a kernel less precise than plain code is found.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Deviation:
    """The largest absolute difference of two arrays, where it is, and both values there."""

    max_abs: float
    index: tuple[int, ...]
    actual: float
    expected: float

    def __str__(self) -> str:
        return (
            f"max |difference| {self.max_abs:.4g} at index {self.index}:"
            f" actual {self.actual:.8g}, expected {self.expected:.8g}"
        )


def deviation(actual: ArrayLike, expected: ArrayLike) -> Deviation:
    """The largest |actual − expected|, computed in float64; a NaN counts as infinite.

    Raises:
      ValueError: the shapes differ, or there is no element.
    """
    a, e = _float64(actual), _float64(expected)
    return _largest(a, e, _difference(a, e))


def ulp(values: ArrayLike, dtype: np.dtype | type) -> np.ndarray:
    """Spacing of `dtype` at each value, float64; the smallest normal's spacing at and near zero."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.maximum(np.abs(_float64(values)), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(magnitude))) * float(info.eps)


def assert_close_to_exact(
    kernel: ArrayLike,
    plain: ArrayLike,
    exact: ArrayLike,
    *,
    factor: float = 2.0,
    ulps: float = 4.0,
) -> Deviation:
    """Checks a kernel by the rule above, prints both deviations and returns the kernel's.

    Args:
      kernel: result in the working dtype, whose ulp is used.
      plain: plain `jnp` result in the working dtype, same shape.
      exact: float32 or float64 reference, same shape.

    Raises:
      AssertionError: some element is out; the message holds both deviations and the worst excess.
    """
    of_kernel, of_plain = deviation(kernel, exact), deviation(plain, exact)
    print(f"kernel {of_kernel}\nplain  {of_plain}")
    if not np.isfinite(of_plain.max_abs):
        raise AssertionError(f"the plain result is no yardstick: {of_plain}")
    k, e = _float64(kernel), _float64(exact)
    limit = factor * of_plain.max_abs + ulps * ulp(e, np.asarray(kernel).dtype)
    difference = _difference(k, e)
    if not (difference <= limit).all():
        worst = _largest(k, e, difference - limit)
        raise AssertionError(
            f"kernel {of_kernel}\nplain  {of_plain}\n"
            f"beyond {factor:g} x plain + {ulps:g} ulp by {worst.max_abs:.4g}"
            f" at index {worst.index}: kernel {worst.actual:.8g}, exact {worst.expected:.8g}"
        )
    return of_kernel


def _float64(values: ArrayLike) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def _difference(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {actual.shape}, expected {expected.shape}")
    if not actual.size:
        raise ValueError(f"nothing to compare: shape {actual.shape}")
    with np.errstate(invalid="ignore"):
        difference = np.abs(actual - expected)
    equal = actual == expected  # infinities that agree
    return np.where(equal, 0.0, np.where(np.isnan(difference), np.inf, difference))


def _largest(actual: np.ndarray, expected: np.ndarray, amount: np.ndarray) -> Deviation:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(amount)), amount.shape))
    return Deviation(float(amount[index]), index, float(actual[index]), float(expected[index]))
