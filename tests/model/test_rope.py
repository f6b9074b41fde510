"""RoPE: the published frequencies, the rotation, and its roundings in both settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import BF16, F32, VLLM, as_bf16, as_f32, bf, mismatch, normal

from gemma_jax.config import FULL_ROPE, SLIDING_ROPE, RopeConfig
from gemma_jax.model.rope import apply_rope, inverse_frequencies, rope_tables

pytestmark = pytest.mark.fast


def test_default_frequencies_are_the_published_ones():
    f = inverse_frequencies(SLIDING_ROPE, 256)
    assert f.shape == (128,)
    assert f[0] == 1.0
    assert f[1] == np.float32(0.93057203)  # 0.93057215 would be an inexact float32 power
    assert f[127] == np.float32(1.0746078e-4)


def test_proportional_frequencies_rotate_a_quarter_of_the_full_width():
    f = inverse_frequencies(FULL_ROPE, 512)
    assert f.shape == (256,)
    assert np.count_nonzero(f) == 64
    assert f[1] == np.float32(0.94746351)
    assert f[63] == pytest.approx(0.03337625, abs=5e-9)
    assert not f[64:].any()


def test_frequencies_are_reciprocals_of_rounded_powers():
    powers = np.array([1e4 ** (2 * j / 256) for j in range(128)]).astype(np.float32)
    np.testing.assert_array_equal(inverse_frequencies(SLIDING_ROPE, 256), np.float32(1) / powers)
    # Rounding the float64 frequency instead is an ulp off in a third of the entries.
    direct = np.array([1e4 ** (-2 * j / 256) for j in range(128)]).astype(np.float32)
    assert np.count_nonzero(direct != np.float32(1) / powers) > 40


def test_factor_divides_the_frequencies():
    halved = RopeConfig("default", 10_000.0, factor=2.0)
    expected = inverse_frequencies(SLIDING_ROPE, 64) / 2
    np.testing.assert_array_equal(inverse_frequencies(halved, 64), expected)


@pytest.mark.parametrize("numerics", [F32, BF16, VLLM], ids=["f32", "hf", "vllm"])
def test_channels_that_do_not_rotate_pass_through_bit_for_bit(numerics):
    x = jnp.asarray(normal(1, 3, 2, 512)).astype(numerics.dtype)
    tables = rope_tables(jnp.array([[0, 77, 131_071]]), FULL_ROPE, 512, numerics)
    y = apply_rope(x, tables, numerics)
    for still in (slice(64, 256), slice(320, 512)):
        np.testing.assert_array_equal(as_f32(y[..., still]), as_f32(x[..., still]))
    assert mismatch(y[:, 1:, :, :64], as_f32(x[:, 1:, :, :64])) > 0.5


def test_position_zero_changes_nothing():
    x = as_bf16(normal(1, 1, 2, 256))
    y = apply_rope(x, rope_tables(jnp.zeros((1, 1), int), SLIDING_ROPE, 256, BF16), BF16)
    np.testing.assert_array_equal(as_f32(y), as_f32(x))


def test_scores_depend_on_the_distance_of_positions_only():
    q, k = (jnp.asarray(normal(1, 1, 256, seed=s)) for s in (1, 2))

    def score(m, n):
        a, b = (rope_tables(jnp.array([[p]]), SLIDING_ROPE, 256, F32) for p in (m, n))
        return float(jnp.vdot(apply_rope(q, a, F32), apply_rope(k, b, F32)))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=2e-3)
    assert abs(score(9, 4) - score(9, 6)) > 0.1


def test_tables_are_float32_angles_then_rounded_to_the_compute_dtype():
    positions = np.arange(900)
    angles = positions[:, None].astype(np.float32) * inverse_frequencies(SLIDING_ROPE, 256)
    cos, sin = rope_tables(jnp.asarray(positions), SLIDING_ROPE, 256, F32)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), atol=2e-7)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), atol=2e-7)
    rounded = rope_tables(jnp.asarray(positions), SLIDING_ROPE, 256, BF16)
    assert mismatch(rounded[0], bf(cos)) < 1e-4
    assert mismatch(rounded[1], bf(sin)) < 1e-4


def rotated(x, cos, sin, step):
    """The rotation with `step` after each product; one rounding of each sum."""
    low, high = np.split(x, 2, axis=-1)
    first = step(low * cos) - step(high * sin)
    return bf(np.concatenate([first, step(high * cos) + step(low * sin)], axis=-1))


@pytest.mark.parametrize("rows", [1, 37])
def test_rotation_rounds_three_times_for_hf_and_once_for_vllm_also_under_jit(rows):
    x = normal(1, rows, 4, 256, seed=rows)
    positions = jnp.arange(5, 5 + rows)[None]

    def run(numerics):
        def program(x):
            tables = rope_tables(positions, SLIDING_ROPE, 256, numerics)
            return apply_rope(x, tables, numerics), tables

        y, tables = jax.jit(program)(as_bf16(x))
        return y, (np.asarray(t)[:, :, None] for t in tables)

    y, tables = run(BF16)
    three = rotated(x, *tables, bf)
    assert mismatch(y, three) == 0
    y, tables = run(VLLM)
    once = rotated(x, *tables, lambda product: product)
    assert mismatch(y, once) == 0
    assert np.mean(three != once) > 0.1
