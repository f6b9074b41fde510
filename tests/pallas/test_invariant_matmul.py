"""invariant_matmul: against float64, and the same bits for any number of rows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import check_close_to_exact, compiled, edge_cases, poison_out_of_bounds

from gemma_jax.errors import UnsupportedError
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import invariant_matmul as op
from gemma_jax.pallas.cases.invariant_matmul import CASES
from gemma_jax.pallas.device import Device

INVARIANT = Numerics("float32", batch_invariant=True)
H200 = Device("NVIDIA H200", (9, 0), 132)


@pytest.fixture
def nan_outside(monkeypatch):
    """Accesses past an end that no mask forbids give NaN."""
    poison_out_of_bounds(monkeypatch)


def arrays(rows, outputs=70, depth=1100, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return draw(rows, depth // 16 * 16), draw(outputs, depth // 16 * 16)


def multiply(x, w, **settings):
    call = functools.partial(op._invariant_matmul_triton, numerics=INVARIANT, **settings)
    return np.asarray(compiled(lambda x: call(x, w))(x), np.float32)


@edge_cases(CASES, "invariant_matmul: one past a share")
def test_is_as_close_to_float64_as_plain_jnp(case, nan_outside):
    check_close_to_exact(case)


def test_a_row_has_the_same_bits_in_any_number_of_rows():
    x, w = arrays(rows=200)
    whole = multiply(x, w)
    for rows in (1, 63, 64, 65, 129):
        assert op.default_config(rows, *w.shape, 4, H200).split == (rows <= op.MAX_SPLIT_ROWS)
        np.testing.assert_array_equal(multiply(x[:rows], w), whole[:rows])
    np.testing.assert_array_equal(multiply(x[77:78], w), whole[77:78])


@pytest.mark.parametrize("split", [False, True])
def test_shares_are_added_alike_in_one_program_and_in_several(split):
    x, w = arrays(rows=5)
    config = dataclasses.replace(op.default_config(5, *w.shape, 4, H200), split=split)
    tiles = dataclasses.replace(config, rows=128, outputs=128)
    expected = multiply(x, w)
    np.testing.assert_array_equal(multiply(x, w, config=config), expected)
    np.testing.assert_array_equal(multiply(x, w, config=tiles), expected)


def test_the_share_decides_the_bits_so_it_must_not_depend_on_the_rows():
    x, w = arrays(rows=5)
    config = op.default_config(5, *w.shape, 4, H200)
    other = dataclasses.replace(config, share=64)
    assert (multiply(x, w, config=other) != multiply(x, w, config=config)).any()
    shares = {op.default_config(n, f, 2048, 4, H200).share for n in (1, 9999) for f in (1, 99999)}
    assert shares == {op.share_of(2048)}


def test_partial_sums_are_what_the_product_adds():
    x, w = arrays(rows=3)
    parts = multiply(x, w, unfinished=True)
    assert parts.shape == (3, 3, 70)  # 1,088 are two shares of 512 and the rest
    total = INVARIANT.cast(jnp.asarray(parts[0] + parts[1] + parts[2]))
    np.testing.assert_array_equal(np.asarray(total, np.float32), multiply(x, w))


def test_what_the_kernel_cannot_take_is_refused():
    x, w = arrays(rows=2)
    call = functools.partial(op.invariant_matmul, implementation="triton", numerics=INVARIANT)
    with pytest.raises(UnsupportedError, match="multiple of 16, got 8"):
        call(x[:, :8], w[:, :8])
    with pytest.raises(UnsupportedError, match="dtypes bfloat16 and float32"):
        call(x.astype(jnp.bfloat16), w)
    with pytest.raises(ValueError, match=r"x\[2, 1088\], w\[70, 16\]"):
        call(x, w[:, :16])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "depth"), [(2560, 1536), (1536, 12_288), (24_576, 1536)])
def test_tensor_cores_add_alike_in_every_tile(outputs, depth):
    x, w = (y.astype(jnp.bfloat16) for y in arrays(4096, outputs, depth))
    call = functools.partial(op._invariant_matmul_triton, numerics=Numerics(batch_invariant=True))
    whole = np.asarray(call(x, w), np.float32)
    for rows in (1, 64, 100, 129, 1000):
        np.testing.assert_array_equal(np.asarray(call(x[:rows], w), np.float32), whole[:rows])
    np.testing.assert_array_equal(np.asarray(call(x[777:778], w), np.float32), whole[777:778])


@pytest.mark.gpu
@edge_cases(CASES)
def test_is_as_close_to_float64_on_a_gpu(case):
    check_close_to_exact(case)
