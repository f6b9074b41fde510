"""Residual sum and the norms around it: against float64, its edges, what it refuses."""

import hypothesis.strategies as st
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from kernel_checks import (
    assert_equal,
    check_close_to_exact,
    close_to_exact,
    compiled,
    edge_cases,
    poison_out_of_bounds,
)

from gemma_jax.config import PRESETS
from gemma_jax.errors import UnsupportedError
from gemma_jax.model.layers import add, rms_norm, scale
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import residual_norm as op
from gemma_jax.pallas.cases.residual_norm import CASES, EPS, Rows, rows_case
from gemma_jax.pallas.device import Device

EDGES = {case.name: case for case in CASES if not case.bench}


def run_tile(rows, inputs, config):
    """The kernel with a tile of one's choice."""
    numerics = Numerics(rows.dtype)
    return compiled(
        lambda x: op._residual_norm_pallas(**x, eps=EPS, numerics=numerics, config=config)
    )(inputs)


@edge_cases(CASES, "residual_norm: no next norm, scalar")
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EDGES.values(), ids=list(EDGES))
def test_compiled_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
@pytest.mark.parametrize("width", sorted({x.hidden_size for x in PRESETS.values()} | {1025}))
def test_compiled_kernel_at_the_tiles_of_a_prefill(width):
    check_close_to_exact(rows_case("prefill", Rows(777, width, scalar=True)))


@pytest.mark.parametrize("scalar", [False, True])
def test_reference_is_what_the_model_computes(scalar):
    rows, numerics = Rows(3, 96, scalar=scalar), Numerics()

    def model(x):
        h = add(x["x"], rms_norm(x["y"], x["post_weight"], EPS, numerics), numerics)
        if scalar:
            h = scale(h, x["scalar"], numerics)
        return h, rms_norm(h, x["pre_weight"], EPS, numerics)

    x = rows.inputs(0)
    reference = compiled(lambda x: rows.call(**x, implementation="reference"))(x)
    assert_equal(reference, compiled(model)(x))


@settings(max_examples=3, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 130),
    block_rows=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([16, 32, 128]),
    pre_norm=st.booleans(),
    scalar=st.booleans(),
)
def test_any_shape_in_any_tile(rows, width, block_rows, chunk, pre_norm, scalar):
    shape = Rows(rows, width, pre_norm, scalar)
    case = rows_case("hypothesis", shape)
    inputs = case.inputs(0)
    close_to_exact(run_tile(shape, inputs, op.Config(block_rows, chunk, 1)), case, inputs)


def test_a_row_of_nan_stays_alone():
    rows = Rows(5, 48)
    inputs = rows.inputs(0)
    poisoned = {**inputs, "y": inputs["y"].at[2].set(jnp.nan)}
    clean, out = (run_tile(rows, x, op.Config(2, 32, 1)) for x in (inputs, poisoned))
    for a, b in zip(out, clean, strict=True):
        assert jnp.isnan(a[2].astype(jnp.float32)).all()
        assert_equal(jnp.delete(a, 2, axis=0), jnp.delete(b, 2, axis=0))


@pytest.mark.parametrize(("rows", "width"), [(4, 64), (5, 72)])
def test_no_access_passes_an_end(rows, width, monkeypatch):
    shape = Rows(rows, width, scalar=True)
    inputs = shape.inputs(0)
    poison_out_of_bounds(monkeypatch, op._residual_norm_pallas)
    out = run_tile(shape, inputs, op.Config(2, 32, 1))
    close_to_exact(out, rows_case("ends", shape), inputs)


def test_an_access_past_an_end_would_be_found(monkeypatch):
    poison_out_of_bounds(monkeypatch, op._residual_norm_pallas)
    monkeypatch.setattr(op, "_both", lambda *_: None)
    out = run_tile(Rows(4, 72), Rows(4, 72).inputs(0), op.Config(2, 32, 1))
    assert jnp.isnan(out.h.astype(jnp.float32)).any()


def test_rows_wider_than_the_registers_are_refused():
    rows = Rows(1, op.MAX_WIDTH + 1)
    with pytest.raises(UnsupportedError, match="rows of 16385 elements, more than 16384"):
        rows.call(**rows.inputs(0), implementation="triton")


def test_other_dtype_than_the_compute_dtype_is_refused():
    inputs = Rows(1, 8, dtype="float32").inputs(0)
    with pytest.raises(UnsupportedError, match="dtype float32, compute dtype bfloat16"):
        Rows(1, 8).call(**inputs, implementation="pallas")


def test_old_gpu_is_refused(monkeypatch):
    v100 = Device("NVIDIA V100", (7, 0), 80)
    monkeypatch.setattr("gemma_jax.pallas.dispatch.current_device", lambda: v100)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8.0"):
        Rows(1, 8).call(**Rows(1, 8).inputs(0), implementation="triton")


def test_shapes_that_differ_are_named():
    inputs = Rows(2, 8).inputs(0)
    with pytest.raises(ValueError, match=r"x\[2, 8\], y\[1, 8\]: expected the same"):
        Rows(2, 8).call(**{**inputs, "y": inputs["y"][:1]})
