"""skinny_matmul and norm_matmul: against float64, their edges, and what they refuse."""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_checks import compiled, edge_cases, poison_out_of_bounds

from gemma_jax.config import PRESETS
from gemma_jax.errors import UnsupportedError
from gemma_jax.model import layers
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import norm_matmul as norm_module
from gemma_jax.pallas import skinny_matmul as skinny_module
from gemma_jax.pallas.cases import norm_matmul as norm_cases
from gemma_jax.pallas.cases import skinny_matmul as skinny_cases
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.skinny_config import Config, Spec, default_config
from gemma_jax.pallas.skinny_kernels import grid_of, unsupported
from gemma_jax.testing.tolerance import assert_close_to_exact

ALL = [*skinny_cases.CASES, *norm_cases.CASES]
CASES = {f"{c.op}: {c.name}": c for c in ALL if not c.bench}
HF, VLLM, FLOAT32 = Numerics(), Numerics(rounding="vllm"), Numerics("float32")
DEVICES = [Device("NVIDIA H200", (9, 0), 132), Device("NVIDIA A100", (8, 0), 108)]
DESIGNS = [
    Config("rows", 2, 64, ahead=2, blocks=3),
    Config("rows", 4, 256, blocks=2),
    Config("dot", 8, 16),
    Config("dot", 4, 16, segments=4),
]


def leaves(call, arrays):
    """Results of `call(**arrays)`."""
    out = compiled(lambda arrays: call(**arrays))(arrays)
    return [np.asarray(x) for x in jax.tree.leaves(out)]


def run(case, implementation, inputs=None):
    inputs = case.inputs(0) if inputs is None else inputs
    return leaves(functools.partial(case.call, implementation=implementation), inputs)


def run_tiles(arrays, numerics, config):
    """norm_matmul's kernel with given tiles."""
    arrays = dict(arrays)
    update = None
    if "y" in arrays:
        update = norm_module.Update(arrays.pop("y"), arrays.pop("post_weight"))
    optional = {n: arrays.pop(n, None) for n in ("factor", "pre_weight", "gate_input")}
    call = functools.partial(
        norm_module._norm_matmul_triton, eps=1e-6, numerics=numerics, config=config
    )
    return leaves(call, {**arrays, "update": update, **optional})


def exact(case):
    """The reference in float64, on the CPU."""
    inputs = jax.tree.map(lambda x: np.asarray(x, np.float64), case.inputs(0))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return run(case, "reference", jax.tree.map(jnp.asarray, inputs))


def check(case, implementation="triton"):
    for kernel, plain, truth in zip(
        run(case, implementation), run(case, "reference"), exact(case), strict=True
    ):
        assert kernel.dtype == plain.dtype
        assert truth.dtype == np.float64
        assert_close_to_exact(kernel, plain, truth)


@pytest.fixture
def nan_outside(monkeypatch):
    """Accesses past an end that no mask forbids give NaN."""
    kernels = skinny_module._skinny_matmul_triton, norm_module._norm_matmul_triton
    poison_out_of_bounds(monkeypatch, *kernels)


@edge_cases(ALL, "skinny_matmul: 3 rows", "norm_matmul: product alone")
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(case, nan_outside):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_compiled_kernel_is_as_close_to_exact_as_plain_code(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["FIRST", "QKV", "GATE_UP", "PLE_GATE"])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_compiled_kernel_at_the_shapes_of_the_models(step, rows):
    check(norm_cases.step_case("model", getattr(norm_cases, step), rows, 2560, 1536))


# --- designs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", DESIGNS, ids=str)
@pytest.mark.parametrize("step", ["QKV", "GATE_UP", "PLE_GATE"])
def test_every_design_computes_every_step(step, config, nan_outside):
    case = norm_cases.step_case(step, getattr(norm_cases, step), 3, 21, 64, FLOAT32)
    out, plain = run_tiles(case.inputs(0), FLOAT32, config), run(case, "reference")
    for a, b in zip(out, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("config", [*DESIGNS, Config("columns", 4, 32, ahead=3)], ids=str)
@settings(max_examples=3, deadline=None)
@given(batch=st.integers(1, 4), n=st.integers(1, 40), chunks=st.integers(1, 3))
def test_any_sizes(config, batch, n, chunks):
    case = skinny_cases.matmul_case("any", batch, n, 64 * chunks, "float32")
    arrays = case.inputs(0)
    call = functools.partial(skinny_module._skinny_matmul_triton, numerics=FLOAT32, config=config)
    plain = run(case, "reference", arrays)
    np.testing.assert_allclose(leaves(call, arrays)[0], plain[0], rtol=1e-5, atol=2e-5)


def test_result_does_not_depend_on_the_number_of_blocks():
    case = norm_cases.step_case("blocks", norm_cases.FIRST, 1, 37, 128)
    arrays = case.inputs(0)
    configs = [Config("rows", 2, 64, blocks=blocks) for blocks in (1, 4, 19)]
    first, *others = (run_tiles(arrays, HF, config)[1] for config in configs)
    for out in others:
        np.testing.assert_array_equal(out, first)


@pytest.mark.parametrize("segments", [1, 4])
def test_float32_sums_along_k_lose_no_small_terms(segments):
    # A total of 2²⁸ is rounded to multiples of 32: each later chunk of 16 ones alone would vanish.
    x = np.ones((1, 1024), np.float32)
    x[0, :: 1024 // segments] = 2.0**28
    config = Config("dot", 8 // segments, 16, segments=segments)
    call = functools.partial(skinny_module._skinny_matmul_triton, numerics=FLOAT32, config=config)
    out = leaves(call, {"x": jnp.asarray(x), "w": jnp.ones((8, 1024), jnp.float32)})[0]
    np.testing.assert_allclose(out, np.full((1, 8), x.astype(np.float64).sum()), rtol=2.0**-23)


# --- the model's formulas ------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", [HF, VLLM, FLOAT32], ids=["hf", "vllm", "float32"])
def test_reference_is_the_model(numerics):
    case = norm_cases.step_case("mlp", norm_cases.GATE_UP, 3, 24, 96, numerics)
    i = case.inputs(1)

    def model(h, y, post_weight, pre_weight, w):
        h = layers.add(h, layers.rms_norm(y, post_weight, 1e-6, numerics), numerics)
        x = layers.rms_norm(h, pre_weight, 1e-6, numerics)
        z = numerics.einsum("bk,cnk->bcn", x, w)
        return h, layers.gelu_mul(z[:, 0], z[:, 1], numerics)

    tolerance = 1e-5 if numerics.is_float32 else 0.0
    for actual, wanted in zip(run(case, "reference", i), leaves(model, i), strict=True):
        wanted = np.asarray(wanted, np.float32)
        np.testing.assert_allclose(actual.astype(np.float32), wanted, tolerance, tolerance)


# --- tiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.kind)
@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16])
def test_tiles_of_the_models_divide_their_axes_or_are_masked(name, device, batch):
    config = PRESETS[name]
    d = config.hidden_size
    for layer in config.layers:
        f, heads = layer.intermediate_size, layer.num_kv_heads * (layer.num_groups + 2)
        shapes = [(2, f, d), (1, d, f), (1, heads * layer.head_dim, d)]
        shapes.append((1, d, layer.num_kv_heads * layer.num_groups * layer.head_dim))
        for parts, n, k in shapes:
            for prologue in (True, False):
                spec = Spec(batch, parts, n, k, HF)
                tile = default_config(spec, prologue, device)
                assert tile.design != "columns" or not prologue
                # Only "dot" reads along K without a mask.
                assert tile.design != "dot" or k % (tile.segments * tile.width) == 0
                assert grid_of(tile, spec)[0] >= 1


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((17, 64), "bfloat16", "17 rows"), ((1, 72), "bfloat16", "72 elements"),
     ((1, 64), "float32", "compute dtype bfloat16")],
)  # fmt: skip
def test_unsupported_inputs_are_named(shape, dtype, message):
    x, w = jnp.zeros(shape, dtype), jnp.zeros((8, shape[1]), dtype)
    with pytest.raises(UnsupportedError, match=message):
        skinny_module.skinny_matmul(x, w, numerics=HF, implementation="triton")
    with pytest.raises(UnsupportedError, match=message):
        norm_module.norm_matmul(x, w, eps=1e-6, numerics=HF, implementation="pallas")


def test_old_gpu_is_refused():
    x, w = jnp.zeros((1, 64), jnp.bfloat16), jnp.zeros((8, 64), jnp.bfloat16)
    reason = unsupported(x, w, HF, Device("NVIDIA V100", (7, 0), 80))
    assert reason is not None
    assert "compute capability 8.0" in reason


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": (8, 32)}, r"expected \[B, K\]"),
        ({"w": (3, 8, 64)}, "gate and up"),
        ({"w": (8, 64), "gate_input": (2, 9)}, "gate_input"),
    ],
)
def test_wrong_shapes_are_named(arrays, message):
    given: dict[str, Any] = {n: jnp.zeros(shape, jnp.bfloat16) for n, shape in arrays.items()}
    call = functools.partial(norm_module.norm_matmul, jnp.zeros((2, 64)), eps=1e-6, numerics=HF)
    with pytest.raises(ValueError, match=message):
        call(**given)


def test_tiles_that_do_not_divide_k_are_named():
    case = skinny_cases.matmul_case("segments", 1, 8, 96)
    config = Config("dot", 4, 64, segments=16)
    with pytest.raises(ValueError, match="does not divide K = 96"):
        skinny_module._skinny_matmul_triton(**case.inputs(0), numerics=HF, config=config)


def test_update_of_another_shape_is_named():
    h, w = jnp.zeros((2, 64)), jnp.zeros((8, 64))
    update = norm_module.Update(jnp.zeros((1, 64)), jnp.zeros(64))
    with pytest.raises(ValueError, match="the shape of h"):
        norm_module.norm_matmul(h, w, update=update, eps=1e-6, numerics=FLOAT32)
