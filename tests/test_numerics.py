"""Precision rules: bf16 constants, rounding that survives jit, what a float32 model does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from gemma_jax.numerics import Numerics

pytestmark = pytest.mark.fast

HF, VLLM = Numerics("bfloat16", "hf"), Numerics("bfloat16", "vllm")
F32 = Numerics("float32")


def bf(x):
    """float32 values rounded to the nearest bfloat16 by numpy."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


CONSTANTS = {
    1536: (39.25, 0.0255126953125),
    2560: (50.5, 0.019775390625),
    2816: (53.0, 0.018798828125),
    3840: (62.0, 0.01611328125),
    5376: (73.5, 0.01361083984375),
    1024: (32.0, 0.03125),
    512: (22.625, 0.044189453125),
    256: (16.0, 0.0625),
}


@pytest.mark.parametrize("width", CONSTANTS)
def test_model_constants_are_rounded_to_the_compute_dtype(width):
    root, inverse = CONSTANTS[width]
    assert float(HF.constant(width**0.5)) == root
    assert float(VLLM.constant(width**0.5)) == root
    assert float(VLLM.scalar(width**-0.5)) == inverse
    assert float(HF.scalar(width**-0.5)) == np.float32(width**-0.5)
    assert float(F32.constant(width**0.5)) == np.float32(width**0.5)


def test_the_half_root_of_the_per_layer_inputs_is_rounded_by_vllm_only():
    assert float(VLLM.scalar(2.0**-0.5)) == 0.70703125
    assert float(HF.scalar(2.0**-0.5)) == np.float32(2.0**-0.5)


def test_rounding_is_to_the_nearest_even_bfloat16_also_under_jit():
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x = np.concatenate([x, [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 0.0]]).astype(np.float32)
    for round_trip in (HF.round, jax.jit(HF.round)):
        np.testing.assert_array_equal(np.asarray(round_trip(x)), bf(x))
    assert HF.cast(jnp.asarray(x)).dtype == jnp.bfloat16


def test_a_float32_model_rounds_nowhere():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(64), jnp.float32)
    np.testing.assert_array_equal(F32.round(x), x)
    assert F32.cast(x).dtype == jnp.float32


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_linear_is_rounded_once_before_what_follows_in_the_same_program(rows):
    rng = np.random.default_rng(rows)
    # Small integers: every float32 sum is exact, so the order of summation cannot matter.
    x = rng.integers(-8, 9, (rows, 96)).astype(ml_dtypes.bfloat16)
    w = rng.integers(-8, 9, (80, 96)).astype(ml_dtypes.bfloat16)

    @jax.jit
    def linear_and_more(x, w):
        return HF.einsum("td,fd->tf", x, w).astype(jnp.float32) + 0.3

    exact = x.astype(np.float32) @ w.astype(np.float32).T
    assert (bf(exact) != exact).any()
    np.testing.assert_array_equal(np.asarray(linear_and_more(x, w)), bf(exact) + np.float32(0.3))


def test_float32_matrix_products_ask_for_the_highest_precision():
    assert F32.precision == lax.Precision.HIGHEST
    text = str(jax.make_jaxpr(lambda x: F32.einsum("ij,jk->ik", x, x))(jnp.ones((2, 2))))
    assert "HIGHEST" in text


def test_norms_take_a_power_like_transformers_or_an_rsqrt_like_vllm():
    x = jnp.float32(3.0)
    assert "rsqrt" in str(jax.make_jaxpr(VLLM.inverse_root)(x))
    assert "pow" in str(jax.make_jaxpr(HF.inverse_root)(x))
