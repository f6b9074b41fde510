"""What the tests of the element-wise kernels share."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from gemma_jax.pallas import triton_api
from gemma_jax.testing.tolerance import assert_close_to_exact


def compiled(call):
    """`call` of a tree of arrays, compiled quickly rather than well on a CPU."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(call, compiler_options=options)


def run(case, inputs, implementation):
    return compiled(lambda arrays: case.call(**arrays, implementation=implementation))(inputs)


def run_exact(case, inputs):
    """The reference in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(_widened, inputs)
        return jax.tree.map(np.asarray, run(case, wide, "reference"))


def _widened(x):
    x = np.asarray(x)
    return jnp.asarray(x if x.dtype.kind in "iu" else x.astype(np.float64))


def check_close_to_exact(case, implementation="triton"):
    """Every result is as close to float64 as the reference in the working dtype is."""
    inputs = case.inputs(0)
    close_to_exact(run(case, inputs, implementation), case, inputs)


def close_to_exact(kernel, case, inputs):
    plain, exact = run(case, inputs, "reference"), run_exact(case, inputs)
    for k, p, e in zip(*map(jax.tree.leaves, (kernel, plain, exact)), strict=True):
        assert k.dtype == p.dtype
        assert_close_to_exact(np.asarray(k), np.asarray(p), e)


def check_equal(case, implementation):
    inputs = case.inputs(0)
    assert_equal(run(case, inputs, implementation), run(case, inputs, "reference"))


def assert_equal(actual, expected):
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(e, np.float32))


def record_ragged_accesses(monkeypatch):
    """A list that fills, while kernels are traced, with unmasked accesses that may pass an end.

    A GPU does not check bounds, and the interpreter hides it. An access without a mask is fine
    where its length divides the axis.
    """
    found = []

    def recorded(function):
        def wrapper(ref, *arguments, mask=None, **keywords):
            if mask is None:
                found.extend(_ragged(ref))
            return function(ref, *arguments, mask=mask, **keywords)

        return wrapper

    for name in ("load", "store"):
        monkeypatch.setattr(triton_api, name, recorded(getattr(triton_api, name)))
    return found


def _ragged(ref):
    """(axis size, access length) of each axis that does not divide."""
    indexer = ref.transforms[-1]
    lengths = iter(indexer.get_indexer_shape_static())
    for size, index in zip(indexer.shape, indexer.indices, strict=True):
        scalar = not hasattr(index, "size") or (hasattr(index, "shape") and index.shape == ())
        length = 1 if scalar else next(lengths)
        if math.gcd(size, length) != length:
            yield size, length
