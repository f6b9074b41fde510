"""The gated activation: against float64, its edges, what it refuses."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
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

from gemma_jax.errors import UnsupportedError
from gemma_jax.model import layers
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import gelu_mul as op
from gemma_jax.pallas.cases.gelu_mul import CASES, gate_case, mlp_case
from gemma_jax.pallas.device import Device

EDGES = {f"{case.op}: {case.name}": case for case in CASES if not case.bench}


def run_tile(inputs, config):
    """The kernel of the MLP with a tile of one's choice."""
    return compiled(lambda y: op._gelu_mul_pallas(y, y, 0, 1, numerics=Numerics(), config=config))(
        inputs["y"]
    )


@edge_cases(CASES, "gelu_mul: width 1", "gelu_gate: first layer")
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EDGES.values(), ids=list(EDGES))
def test_compiled_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
def test_compiled_activation_rounds_as_the_reference_for_every_bfloat16():
    bits = np.arange(65_536, dtype=np.uint16).view(jnp.bfloat16)
    gate = jnp.asarray(np.where(np.isfinite(bits.astype(np.float32)), bits, 0))
    y = jnp.stack([gate, jnp.ones_like(gate)])[None]
    plain = op.gelu_mul(y, numerics=Numerics(), implementation="reference")
    kernel = op.gelu_mul(y, numerics=Numerics(), implementation="triton")
    different = np.asarray(plain != kernel).sum()
    assert different <= 65  # a thousandth: values next to a rounding boundary


def test_gate_takes_the_slice_of_its_layer():
    case = gate_case("layer 2", 3, 4, 2, width=32)
    inputs = case.inputs(0)
    expected = layers.gelu_mul(inputs["gate"], inputs["inputs"][:, 2], Numerics())
    assert_equal(case.call(**inputs, implementation="reference"), expected)
    close_to_exact(case.call(**inputs, implementation="triton"), case, inputs)


@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 200), block=st.sampled_from([16, 64, 256]))
def test_any_shape_in_any_tile(rows, width, block):
    case = mlp_case("hypothesis", rows, width)
    inputs = case.inputs(0)
    close_to_exact(run_tile(inputs, op.Config(block, 1)), case, inputs)


@pytest.mark.parametrize("width", [64, 72])
def test_no_access_passes_an_end(width, monkeypatch):
    case = mlp_case("ends", 2, width)
    inputs = case.inputs(0)
    poison_out_of_bounds(monkeypatch, op._gelu_mul_pallas)
    close_to_exact(run_tile(inputs, op.Config(32, 1)), case, inputs)


def test_other_dtype_than_the_compute_dtype_is_refused():
    with pytest.raises(UnsupportedError, match="dtype float32, compute dtype bfloat16"):
        op.gelu_mul(jnp.zeros((1, 2, 8)), numerics=Numerics(), implementation="triton")


def test_old_gpu_is_refused(monkeypatch):
    v100 = Device("NVIDIA V100", (7, 0), 80)
    monkeypatch.setattr("gemma_jax.pallas.dispatch.current_device", lambda: v100)
    case = mlp_case("old", 1, 8)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8.0"):
        case.call(**case.inputs(0), implementation="pallas")


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"y\[2, 3, 8\]: expected \[N, 2, F\]"):
        op.gelu_mul(jnp.zeros((2, 3, 8)), numerics=Numerics())
    with pytest.raises(ValueError, match=r"inputs\[1, 4, 8\]: expected \[2, L, 8\]"):
        op.gelu_gate(jnp.zeros((2, 8)), jnp.zeros((1, 4, 8)), 0, numerics=Numerics())
