"""What the tests of the element-wise kernels share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gemma_jax.pallas import triton_api
from gemma_jax.testing.tolerance import assert_close_to_exact


def compiled(call):
    """`call` of a tree of arrays, compiled quickly rather than well on a CPU."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = quick if jax.default_backend() == "cpu" else {}
    return jax.jit(call, compiler_options=options)


def edge_cases(cases, *fast):
    """Parametrizes `case` by the cases that only test edges, those named `fast` marked so."""
    edges = {f"{case.op}: {case.name}": case for case in cases if not case.bench}
    assert edges.keys() >= set(fast)
    params = [
        pytest.param(case, id=name, marks=[pytest.mark.fast] if name in fast else [])
        for name, case in edges.items()
    ]
    return pytest.mark.parametrize("case", params)


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


def poison_out_of_bounds(monkeypatch, *wrappers):
    """From here on an access past the end of an axis that no mask forbids turns results into NaN.

    A GPU checks no bounds and the interpreter hides it: it clamps loads and drops stores.
    `wrappers` are the jitted ones of the kernels: what they traced before would not be checked.
    """
    for wrapper in wrappers:
        wrapper.clear_cache()
    load, store = triton_api.load, triton_api.store

    def checked_load(ref, *, mask=None, **keywords):
        value = load(ref, mask=mask, **keywords)
        return jnp.where(_out_of_bounds(ref, mask), _poison(value.dtype), value)

    def checked_store(ref, value, *, mask=None):
        store(
            ref, jnp.where(_out_of_bounds(ref, mask).any(), _poison(value.dtype), value), mask=mask
        )

    monkeypatch.setattr(triton_api, "load", checked_load)
    monkeypatch.setattr(triton_api, "store", checked_store)


def _poison(dtype):
    floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.asarray(jnp.nan if floating else jnp.iinfo(dtype).max, dtype)


def _out_of_bounds(ref, mask):
    """Which elements of an access lie outside the array although the mask lets them through."""
    indexer = ref.transforms[-1]
    shape = indexer.get_indexer_shape_static()
    outside, axis = jnp.zeros(shape, bool), 0
    for size, index in zip(indexer.shape, indexer.indices, strict=True):
        if hasattr(index, "start"):
            index = index.start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            axis += 1
        outside |= (index < 0) | (index >= size)
    return outside if mask is None else outside & mask
