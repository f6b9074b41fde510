"""Element-wise layers: formulas, and the exact number of roundings under jit in both settings."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_helpers import BF16, F32, VLLM, as_bf16, as_f32, bf, gelu, mismatch, norm, normal

from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model.layers import (
    Embedding,
    add,
    gelu_mul,
    parameter,
    rms_norm,
    scale,
    softcap,
)
from gemma_jax.model.residual import Ops, Residual, matmul, project_gelu_mul
from gemma_jax.model.transformer import PerLayerEmbedding
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.fast

ROWS = [1, 33]
both = pytest.mark.parametrize("numerics", [BF16, VLLM], ids=["hf", "vllm"])


def roundings(function, *args) -> int:
    """Explicit roundings of a traced function."""
    return str(jax.make_jaxpr(function)(*args)).count("reduce_precision")


# --- norm --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_rounds_once(numerics, rows, weighted):
    x, w = normal(rows, 1536, scale=3.0), normal(1536, seed=1)
    weight = as_bf16(w) if weighted else None
    y = jax.jit(lambda x: rms_norm(x, weight, 1e-6, numerics))(as_bf16(x))
    assert mismatch(y, norm(x, w if weighted else None)) < 2e-3
    assert roundings(lambda x: rms_norm(x, weight, 1e-6, numerics), as_bf16(x)) == 1
    if weighted:
        assert mismatch(y, bf(norm(x) * w)) > 0.1  # rounding before the weight as well


def test_norm_multiplies_by_the_weight_itself_and_keeps_eps_inside_the_root():
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    y = rms_norm(x, jnp.full((4,), 2.0, jnp.float32), 3e-6, F32)
    np.testing.assert_allclose(y, 2 * 1e-3 / np.sqrt(1e-6 + 3e-6), rtol=1e-6)


# --- soft cap ----------------------------------------------------------------------------------


def all_finite_bf16() -> np.ndarray:
    """Every finite bfloat16, those below 2^-120 as zero: devices flush subnormal quotients."""
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    values = values[np.isfinite(values)]
    return np.where(np.abs(values) < 2.0**-120, 0, values)


@pytest.mark.parametrize("rows", [1, 255])
def test_softcap_rounds_three_times(rows):
    x = all_finite_bf16().reshape(rows, -1)
    y = np.asarray(jax.jit(lambda x: softcap(x, 30.0, BF16))(as_bf16(x)))
    chain = bf(bf(np.tanh(bf(x / np.float32(30)))) * np.float32(30))
    assert np.count_nonzero(y != chain) <= 8  # values of tanh beside a rounding boundary
    single = bf(np.tanh(x.astype(np.float64) / 30) * 30)
    assert np.count_nonzero(y != single) > 1500
    assert roundings(lambda x: softcap(x, 30.0, BF16), as_bf16(x)) == 3


def test_softcap_has_the_published_values():
    cap = jax.jit(lambda x: softcap(x, 30.0, BF16))
    published = {10: 9.6875, 20: 17.5, 30: 22.875, 50: 27.875, 100: 29.875, 104: 30.0}
    assert cap(as_bf16(list(published))).tolist() == list(published.values())
    y = np.abs(np.asarray(cap(as_bf16(all_finite_bf16()))))
    assert len(np.unique(y[(y >= 8) & (y <= 30)])) == 225
    assert set(np.asarray(cap(as_bf16(np.arange(80, 87.5, 0.5)))).tolist()) == {29.75}


def test_softcap_of_float32_is_smooth_and_none_is_no_cap():
    x = jnp.linspace(-200, 200, 64, dtype=jnp.float32)
    np.testing.assert_allclose(softcap(x, 30.0, F32), 30 * np.tanh(np.asarray(x) / 30), rtol=1e-5)
    np.testing.assert_array_equal(softcap(as_bf16(x), None, BF16), bf(x))


# --- gelu, sums, scales ------------------------------------------------------------------------


@both
@pytest.mark.parametrize("rows", ROWS)
def test_gelu_mul_rounds_the_activation_and_the_product(numerics, rows):
    # Far below zero 1 + tanh cancels, and the last bits of tanh are the device's own.
    gate = np.maximum(normal(rows, 512, scale=2.0), -1.0)
    up = normal(rows, 512, seed=1)
    args = as_bf16(gate), as_bf16(up)
    y = jax.jit(lambda g, u: gelu_mul(g, u, numerics))(*args)
    assert mismatch(y, bf(bf(gelu(gate)) * up)) < 2e-3
    assert mismatch(y, bf(gelu(gate) * up)) > 0.1
    assert roundings(lambda g, u: gelu_mul(g, u, numerics), *args) == 2


def test_gelu_is_the_tanh_form():
    y = gelu_mul(jnp.array([[1.0, -2.0, 0.5]], jnp.float32), jnp.ones((1, 3), jnp.float32), F32)
    np.testing.assert_allclose(y[0], [0.841192, -0.0454023, 0.345714], atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_a_chain_of_sums_and_scales_rounds_after_every_step(rows):
    r, y, s = normal(rows, 512), normal(rows, 512, seed=1), normal(1, 1, seed=2)

    @jax.jit
    def chain(r, y, s):
        return scale(add(add(r, y, BF16), y, BF16), s, BF16)

    got = chain(as_bf16(r), as_bf16(y), as_bf16(s))
    assert mismatch(got, bf(bf(bf(r + y) + y) * s)) == 0
    assert mismatch(got, bf((r + y + y) * s)) > 0.1


# --- modules -----------------------------------------------------------------------------------


def test_embedding_scales_by_the_rounded_root_and_its_head_does_not():
    table = normal(40, 1536, scale=0.05)
    embed = Embedding(40, 1536, BF16)
    embed.table[...] = as_bf16(table)
    ids = jnp.array([[0, 39, 7]])
    assert mismatch(embed(ids, BF16), bf(table[[0, 39, 7]] * np.float32(39.25))[None]) == 0
    h = normal(3, 1536, seed=2)
    assert mismatch(embed.logits(as_bf16(h), BF16), bf(h @ table.T)) < 0.02


@pytest.mark.parametrize("rows", ROWS)
def test_mlp_rounds_every_product_once(rows):
    d, f = 64, 96
    gate, up = normal(f, d, seed=1, scale=0.2), normal(f, d, seed=2, scale=0.2)
    down, h = as_bf16(normal(d, f, seed=3, scale=0.2)), as_bf16(normal(rows, d, seed=4))
    ones, ops = jnp.ones(d, jnp.bfloat16), Ops(BF16, AUTO, 1e-6)

    def block(h):
        matrix = as_bf16(np.stack([gate, up]))
        return matmul(project_gelu_mul(Residual(h), ones, matrix, ops)[1], down, ops)

    y = jax.jit(block)(h)
    x, down = as_f32(rms_norm(h, ones, 1e-6, BF16)), as_f32(down)
    gate, up = bf(gate), bf(up)
    active = bf(bf(gelu(bf(x @ gate.T))) * bf(x @ up.T))
    assert mismatch(y, bf(active @ down.T)) < 0.05
    unrounded = bf((gelu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert mismatch(y, unrounded) > 0.2


@pytest.mark.parametrize("numerics", [BF16, VLLM], ids=["hf", "vllm"])
def test_per_layer_inputs_use_rounded_scalars_for_vllm_only(numerics):
    # Wide enough (D = 2560) that the scalar of the context moves a tenth of the elements.
    config = TINY_CONFIGS["e4b-tiny"].replace(
        hidden_size=2560, num_attention_heads=4, vocab_size=32, vocab_size_per_layer_input=32,
        hidden_size_per_layer_input=16,
    )  # fmt: skip
    ple = PerLayerEmbedding(config, numerics)
    width = config.num_hidden_layers * 16
    table, weight = normal(32, width, scale=0.1), normal(16, seed=2)
    ple.table[...], ple.norm[...] = as_bf16(table), as_bf16(weight)
    # A projection that picks single channels makes the linear exact.
    projection = np.eye(width, 2560, dtype=np.float32)
    ple.projection[...] = as_bf16(projection)
    ids, h = np.array([[3, 31, 0]]), normal(1, 3, 2560, seed=3, scale=30.0)
    ops = Ops(numerics, Kernels(), config.rms_norm_eps)
    got = jax.jit(lambda i, h: ple(i, h, 2, 5, ops))(jnp.asarray(ids[0]), as_bf16(h[0]))[None]

    def expected(root, half):
        token = bf(table[ids] * np.float32(4)).reshape(1, 3, -1, 16)
        context = bf(h[..., :width] * np.float32(root)).reshape(token.shape)
        return bf(bf(norm(context, weight) + token) * np.float32(half))[:, :, 2:5]

    hf = expected(2560**-0.5, 2**-0.5)
    vllm = expected(0.019775390625, 0.70703125)
    right, wrong = (vllm, hf) if numerics is VLLM else (hf, vllm)
    assert got.shape == (1, 3, 3, 16)
    assert mismatch(got, right) < 0.02
    assert mismatch(got, wrong) > 0.05


def test_a_parameter_needs_one_axis_name_a_dimension():
    assert parameter(2, 3, axes="D F", dtype="float32")[...].shape == (2, 3)
    with pytest.raises(ValueError, match="axes='D'"):
        parameter(2, 3, axes="D", dtype="float32")


def test_a_float32_model_has_no_rounding_anywhere():
    x = jnp.ones((2, 8), jnp.float32)
    for function in (
        lambda x: rms_norm(x, x[0], 1e-6, F32),
        lambda x: softcap(x, 30.0, F32),
        lambda x: gelu_mul(x, x, F32),
        lambda x: scale(add(x, x, F32), x, F32),
    ):
        assert roundings(function, x) == 0
        assert as_f32(function(x)).dtype == np.float32
