"""The Mosaic kernel for 24 to 64 rows: against float64, its cuts, and what it refuses."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from gemma_jax.config import PRESETS
from gemma_jax.errors import UnsupportedError
from gemma_jax.model.layers import gelu_mul
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import skinny_matmul as op
from gemma_jax.pallas import skinny_mosaic as mosaic
from gemma_jax.pallas.cases.skinny_matmul import GATE_UP, PLAIN, matmul_case
from gemma_jax.pallas.device import SHARED_MEMORY, Device
from gemma_jax.pallas.residual_norm import whole
from gemma_jax.pallas.skinny_mosaic import Config
from gemma_jax.testing.tolerance import assert_close_to_exact

H200, A100 = Device("NVIDIA H200", (9, 0), 132), Device("NVIDIA A100", (8, 0), 108)
NUMERICS = Numerics()
CUTS = [
    (PLAIN, 24, 24, 128, Config(8, 128, 2)),
    (PLAIN, 64, 32, 320, Config(32, 64, 3)),
    (PLAIN, 40, 16, 320, Config(16, 64, 2, splits=3)),
    (GATE_UP, 64, 32, 192, Config(16, 64, 2)),
    (GATE_UP, 32, 32, 128, Config(16, 128, 2)),
]


def multiplied(x, w, config):
    out = mosaic.multiply(x, w if w.ndim == 3 else w[None], numerics=NUMERICS, config=config)
    return np.asarray(whole(out, x.shape[0], NUMERICS))


def exact(x, w):
    """The reference in float64."""
    with jax.enable_x64(True):
        x, w = (jnp.asarray(np.asarray(a, np.float64)) for a in (x, w))
        return np.asarray(op.skinny_matmul_reference(x, w, numerics=NUMERICS))


@pytest.mark.parametrize(("parts", "b", "n", "k", "config"), CUTS, ids=lambda x: str(x))
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(parts, b, n, k, config):
    arrays = matmul_case("cut", b, n, k, parts=parts).inputs(0)
    plain = op.skinny_matmul_reference(**arrays, numerics=NUMERICS)
    assert_close_to_exact(multiplied(**arrays, config=config), np.asarray(plain), exact(**arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize("rows", [24, 32, 64])
@pytest.mark.parametrize(
    ("parts", "n", "k"),
    [(GATE_UP, 6144, 1536), (GATE_UP, 21504, 5376), (PLAIN, 1536, 12288), (PLAIN, 2560, 1536)],
)  # fmt: skip
def test_compiled_kernel_at_the_shapes_of_the_models(parts, n, k, rows, unfinished):
    arrays = matmul_case("model", rows, n, k, parts=parts).inputs(0)

    def call(implementation, x, w):
        out = op.skinny_matmul(
            x, w, numerics=NUMERICS, unfinished=unfinished, implementation=implementation
        )
        return whole(out, rows, NUMERICS)

    out, plain = (
        jax.jit(functools.partial(call, name))(**arrays) for name in ("mosaic", "reference")
    )
    with jax.default_device(jax.devices("cpu")[0]):
        truth = exact(**arrays)
    assert_close_to_exact(np.asarray(out), np.asarray(plain), truth)


def test_a_row_does_not_depend_on_the_others():
    arrays = matmul_case("rows", 32, 16, 128).inputs(0)
    config = Config(16, 64, 2, splits=2)
    alone = arrays["x"].at[1:].set(jnp.nan)
    first = multiplied(arrays["x"], arrays["w"], config)
    np.testing.assert_array_equal(multiplied(alone, arrays["w"], config)[0], first[0])


def test_partial_sums_add_up_to_the_product():
    arrays = matmul_case("sums", 24, 16, 256).inputs(0)
    sums = mosaic.multiply(
        arrays["x"], arrays["w"][None], numerics=NUMERICS, config=Config(16, 64, 2, splits=4)
    )
    assert sums.shape == (4, mosaic.ROWS, 16)
    assert sums.dtype == jnp.float32
    parts = [slice(i, i + 64) for i in range(0, 256, 64)]
    x, w = (np.asarray(arrays[name], np.float32) for name in "xw")
    expected = np.stack([x[:, part] @ w[:, part].T for part in parts])
    np.testing.assert_allclose(sums[:, :24], expected, rtol=1e-5, atol=1e-5)


def test_a_gate_is_taken_from_its_columns():
    arrays = matmul_case("gate", 24, 16, 128).inputs(0)
    gate = matmul_case("gate", 24, 8, 48).inputs(1)["x"].reshape(24, 3, 16)
    config = Config(8, 64, 2)
    flat = gate.reshape(24, 48)
    out = mosaic.multiply(
        arrays["x"], arrays["w"][None], flat, 16, numerics=NUMERICS, config=config
    )

    def reference(x, w, gate):
        return np.asarray(op.skinny_matmul_reference(x, w, gate, 1, numerics=NUMERICS))

    values = (arrays["x"], arrays["w"], gate)
    with jax.enable_x64(True):
        truth = reference(*(jnp.asarray(np.asarray(a, np.float64)) for a in values))
    assert_close_to_exact(np.asarray(out), reference(*values), truth)


# --- the op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [PLAIN, GATE_UP])
def test_the_op_takes_it_from_17_rows_on(parts):
    arrays = matmul_case("op", 24, 16, 64, parts=parts).inputs(0)
    out = op.skinny_matmul(**arrays, numerics=NUMERICS, implementation="pallas")
    z = np.einsum("bk,...nk->...bn", *(np.asarray(arrays[n], np.float64) for n in "xw"))
    expected = z if parts == PLAIN else gelu_mul(jnp.asarray(z[0]), jnp.asarray(z[1]), NUMERICS)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0.02, atol=0.02)


def test_only_a_hopper_gpu_prefers_it_to_xla(monkeypatch):
    def worth(device, rows, n=1536, dtype="bfloat16", gated=False):
        monkeypatch.setattr(op, "current_device", lambda: device)
        x, w = jnp.zeros((rows, 64), dtype), jnp.zeros((n, 64), dtype)
        return op.is_worth_it(x, w, Numerics(dtype), gated)

    assert worth(H200, 64)
    assert worth(H200, 24)
    assert worth(A100, 16)
    assert not worth(H200, 72)
    assert not worth(H200, 20)
    assert not worth(A100, 64)
    assert not worth(H200, 64, dtype="float32")
    assert not worth(H200, 64, n=256)
    assert not worth(Device("cpu", None), 64)
    assert worth(H200, 64, n=256, gated=True)


# --- cuts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize("name", list(PRESETS))
def test_cuts_of_the_models_fit(name, may_split):
    model = PRESETS[name]
    d = model.hidden_size
    for layer in model.layers:
        f, heads = layer.intermediate_size, layer.num_kv_heads * layer.num_groups
        shapes = [(2, f, d), (1, d, f), (1, heads * layer.head_dim, d), (1, d, heads * 64)]
        for shape in shapes:
            config = mosaic.default_config(*shape, H200, may_split)
            if config is None:  # a width of a test model
                assert any(size % 64 for size in shape[1:])
                continue
            plan = mosaic._Plan(64, *shape, NUMERICS, config)
            assert mosaic._problem(plan) is None
            assert mosaic.shared_bytes(config, 64, shape[0]) <= SHARED_MEMORY[9, 0]


@settings(max_examples=50, deadline=None)
@given(
    parts=st.sampled_from([1, 2]),
    eights=st.integers(1, 3000),
    chunks=st.integers(1, 400),
    may_split=st.booleans(),
)
def test_any_cut_fits(parts, eights, chunks, may_split):
    shape = (parts, 8 * eights, mosaic.SWIZZLE * chunks)
    config = mosaic.default_config(*shape, H200, may_split)
    assert config is not None
    assert mosaic._problem(mosaic._Plan(64, *shape, NUMERICS, config)) is None


def test_the_products_of_e2b_fill_the_gpu_once():
    shapes = [(2, 12288, 1536), (2, 6144, 1536), (1, 1536, 12288), (1, 1536, 6144), (1, 1536, 4096)]
    for parts, n, k in shapes:
        config = mosaic.default_config(parts, n, k, H200, may_split=True)
        assert config is not None
        assert 110 <= n // config.tile * config.splits <= 132


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((16, 64), "bfloat16", "16 rows"), ((20, 64), "bfloat16", "20 rows"),
     ((72, 64), "bfloat16", "72 rows"), ((64, 96), "bfloat16", "K none of 64"),
     ((64, 64), "float32", "needs bfloat16")],
)  # fmt: skip
def test_unsupported_inputs_are_named(shape, dtype, message):
    x, w = jnp.zeros(shape, dtype), jnp.zeros((8, shape[1]), dtype)
    with pytest.raises(UnsupportedError, match=message):
        op.skinny_matmul(x, w, numerics=NUMERICS, implementation="mosaic")


def test_other_gpus_are_refused():
    x, w = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((1, 8, 64), jnp.bfloat16)
    assert "compute capability 9.0" in (mosaic.unsupported(x, w, NUMERICS, A100) or "")


@pytest.mark.parametrize(
    ("config", "parts", "message"),
    [(Config(24), 1, "whole tiles"), (Config(16, 96), 1, "no stages of 96"),
     (Config(16, splits=4), 1, "for every split"), (Config(16, splits=2), 2, "whole sums"),
     (Config(16, stages=64), 1, "shared memory")],
)  # fmt: skip
def test_cuts_that_do_not_fit_are_named(config, parts, message):
    x, w = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((parts, 32, 128), jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=message):
        mosaic.multiply(x, w, numerics=NUMERICS, config=config)


@pytest.mark.parametrize(
    ("gate", "index", "message"),
    [((24, 2, 8), 0, r"expected \[B, L, N\]"), ((24, 16), 0, r"expected \[B, L, N\]"),
     ((24, 2, 16), 2, "gate_index=2: expected 0 to 1")],
)  # fmt: skip
def test_gates_that_do_not_fit_are_named(gate, index, message):
    x, w = jnp.zeros((24, 64), jnp.bfloat16), jnp.zeros((16, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        op.skinny_matmul(x, w, jnp.zeros(gate, jnp.bfloat16), index, numerics=NUMERICS)
