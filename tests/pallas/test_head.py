"""Candidates of a draw: equal to top_k of the capped logits, ties included."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_checks import assert_equal, check_equal, compiled, edge_cases, poison_out_of_bounds, run

from gemma_jax.errors import UnsupportedError
from gemma_jax.model.layers import softcap
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import head as op
from gemma_jax.pallas.cases.head import CASES, SOFTCAP, candidates_case
from gemma_jax.pallas.device import Device

EDGES = {f"{case.op}: {case.name}": case for case in CASES if not case.bench}


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@edge_cases(CASES, "top_candidates: few ids", "top_candidates: one id")
def test_two_passes_equal_the_reference(case, implementation):
    check_equal(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_compiled_two_passes_equal_the_reference(case):
    check_equal(case, "triton")


@pytest.mark.gpu
def test_compiled_soft_cap_equals_the_reference_for_every_bfloat16():
    bits = np.arange(65_536, dtype=np.uint16).view(jnp.bfloat16)
    logits = np.where(np.isfinite(bits.astype(np.float32)), bits, 0)
    # One value a block of ids: the maximum of the block is the value, capped.
    spread = jnp.full((256, 256, op.BLOCK_IDS), -jnp.inf, jnp.bfloat16)
    spread = spread.at[:, :, 3].set(jnp.asarray(logits).reshape(256, 256)).reshape(256, -1)
    kernel = op._block_best_pallas(spread, SOFTCAP, Numerics()).reshape(-1)
    assert_equal(kernel, softcap(jnp.asarray(logits), SOFTCAP, Numerics()))


def test_reference_is_what_the_model_computes():
    logits = candidates_case("model", 3, 5, 300).inputs(0)["logits"]
    capped = softcap(logits, SOFTCAP, Numerics())
    best = op.top_candidates(logits, 5, SOFTCAP, numerics=Numerics(), implementation="reference")
    assert_equal(best, jax.lax.top_k(capped, 5))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_lowest_id_wins_among_logits_that_the_cap_makes_equal(implementation):
    logits = jnp.full((2, 700), -5.0, jnp.bfloat16)
    # 200 and 300 cap to the same 30; the larger raw logit comes later.
    logits = logits.at[0, [270, 650]].set(jnp.asarray([200, 300], jnp.bfloat16))
    logits = logits.at[1, [269, 3]].set(jnp.asarray([200, 300], jnp.bfloat16))
    best = op.top_candidates(logits, 3, SOFTCAP, numerics=Numerics(), implementation=implementation)
    assert best.id.tolist() == [[270, 650, 0], [3, 269, 0]]


@settings(max_examples=3, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocabulary=st.integers(1, 1500),
    k=st.integers(1, 20),
    spread=st.sampled_from([1.0, 30.0, 300.0]),
)
def test_any_vocabulary(rows, vocabulary, k, spread):
    case = candidates_case("hypothesis", rows, min(k, vocabulary), vocabulary, spread)
    check_equal(case, "triton")
    check_equal(case, "xla")


def test_padding_of_the_last_block_never_wins():
    case = candidates_case("padding", 2, 1, 300, softcap=None)
    inputs = {"logits": jnp.full((2, 300), -jnp.inf, jnp.bfloat16).at[:, 299].set(-1e30)}
    for implementation in ("triton", "xla"):
        assert run(case, inputs, implementation).id.tolist() == [[299], [299]]


@pytest.mark.parametrize("vocabulary", [512, 700])
def test_no_access_passes_an_end(vocabulary, monkeypatch):
    logits = candidates_case("ends", 2, 1, vocabulary).inputs(0)["logits"]
    expected = op._block_best_xla(logits, SOFTCAP, Numerics())
    poison_out_of_bounds(monkeypatch)  # its wrapper is not jitted
    best = compiled(lambda z: op._block_best_pallas(z, SOFTCAP, Numerics()))(logits)
    assert_equal(best, expected)


def test_other_dtypes_are_refused():
    with pytest.raises(UnsupportedError, match="dtype float16"):
        op.top_candidates(
            jnp.zeros((1, 8), jnp.float16), 1, None, numerics=Numerics(), implementation="triton"
        )


def test_old_gpu_is_refused(monkeypatch):
    v100 = Device("NVIDIA V100", (7, 0), 80)
    monkeypatch.setattr("gemma_jax.pallas.dispatch.current_device", lambda: v100)
    case = candidates_case("old", 1, 1, 8)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8.0"):
        case.call(**case.inputs(0), implementation="pallas")


@pytest.mark.parametrize("k", [0, 9])
def test_k_outside_the_vocabulary_is_named(k):
    with pytest.raises(ValueError, match=rf"k={k}: expected 1 … 8"):
        op.top_candidates(jnp.zeros((1, 8)), k, None, numerics=Numerics())
