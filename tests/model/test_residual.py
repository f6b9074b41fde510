"""The residual stream over some dozens of rows: our products, sums finished by the next kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gemma_jax.kernels import Kernels
from gemma_jax.model import residual
from gemma_jax.model.residual import Ops, Residual
from gemma_jax.numerics import Numerics

ROWS, D, F, P = 24, 128, 64, 16
PLAIN, PALLAS = (Ops(Numerics(), Kernels(name), 1e-6) for name in ("reference", "pallas"))


@pytest.fixture
def draw(monkeypatch):
    """Small arrays, and products taken by our kernel where the ops name one."""
    monkeypatch.setattr(residual, "is_worth_it", lambda *arguments, **rest: True)
    generator = np.random.default_rng(0)
    return lambda *shape: jnp.asarray(generator.standard_normal(shape), jnp.bfloat16)


def assert_equal_to_rounding(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        # Sums in another order: a few values fall on the other side of a rounding.
        assert np.mean(np.abs(a - b) > 1e-6) < 0.05
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


def test_partial_sums_reach_the_stream_as_a_whole_product_does(draw):
    x, matrix = draw(ROWS, F * 4), draw(D, F * 4) / 16
    h, weights, scalar = draw(ROWS, D), (draw(D), draw(D)), draw(1)

    def norm(ops):
        branch = residual.multiply_branch(x, matrix, ops)
        return branch, Residual(h, branch, weights[0], scalar).norm(weights[1], ops)

    sums, results = norm(PALLAS)
    assert sums.ndim == 3
    assert_equal_to_rounding(results, norm(PLAIN)[1])


def test_every_product_of_a_layer_is_the_plain_one(draw):
    stream = Residual(draw(ROWS, D), draw(ROWS, D), draw(D))
    weight, matrix, pair = draw(D), draw(F, D) / 12, draw(2, F, D) / 12
    gate, inputs = draw(P, D) / 12, draw(ROWS, 3, P)

    def products(ops):
        return (
            residual.project(stream, weight, matrix, ops),
            residual.project_gelu_mul(stream, weight, pair, ops),
            residual.project_gate(stream, gate, inputs, 1, ops),
        )

    assert_equal_to_rounding(products(PALLAS), products(PLAIN))
