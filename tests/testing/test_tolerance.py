"""Measured tolerances accept what plain code does and refuse what it does not."""

import ml_dtypes
import numpy as np
import pytest

from gemma_jax.testing.tolerance import assert_close_to_exact, deviation, ulp

EXACT = np.linspace(1, 2, 101).reshape(1, 101)
PLAIN = EXACT.astype(ml_dtypes.bfloat16)


def test_deviation_names_the_place_and_both_values():
    actual = EXACT.copy()
    actual[0, 7] += 0.5
    found = deviation(actual, EXACT)
    assert found.index == (0, 7)
    assert found.max_abs == pytest.approx(0.5)
    assert found.actual == pytest.approx(found.expected + 0.5)
    assert "index (0, 7)" in str(found)


def test_ulp_is_the_spacing_of_the_dtype():
    values = np.array([1.0, 1.5, 2.0, -6.0, 100.0])
    np.testing.assert_array_equal(ulp(values, np.float32), np.spacing(np.float32(abs(values))))
    np.testing.assert_array_equal(ulp(values, ml_dtypes.bfloat16), np.exp2([-7, -7, -6, -5, -1]))


def test_plain_rounding_passes_and_prints_both_deviations(capsys):
    assert_close_to_exact(PLAIN, PLAIN, EXACT)
    printed = capsys.readouterr().out
    assert "kernel max |difference|" in printed
    assert "plain  max |difference|" in printed


def test_an_error_beyond_the_measured_one_is_refused():
    kernel = PLAIN.copy()
    kernel[0, 3] += ml_dtypes.bfloat16(0.125)
    with pytest.raises(AssertionError, match=r"beyond 2 x plain \+ 4 ulp .* at index \(0, 3\)"):
        assert_close_to_exact(kernel, PLAIN, EXACT)


def test_nan_is_refused_on_either_side():
    kernel = PLAIN.copy()
    kernel[0, 3] = np.nan
    with pytest.raises(AssertionError, match="inf"):
        assert_close_to_exact(kernel, PLAIN, EXACT)
    with pytest.raises(AssertionError, match="no yardstick"):
        assert_close_to_exact(PLAIN, kernel, EXACT)


def test_equal_infinities_agree_and_shapes_must():
    infinite = np.array([np.inf, -np.inf])
    assert deviation(infinite, infinite).max_abs == 0
    with pytest.raises(ValueError, match="shapes differ"):
        deviation(np.zeros(2), np.zeros(3))
