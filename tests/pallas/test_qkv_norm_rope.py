"""Split, norm, RoPE and cache write in one kernel: against float64, its edges, what it refuses."""

from dataclasses import replace

import hypothesis.strategies as st
import jax
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
    run,
)

from gemma_jax.config import PRESETS, SLIDING
from gemma_jax.errors import UnsupportedError
from gemma_jax.model.attention import Attention
from gemma_jax.model.layers import rms_norm
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import qkv_norm_rope as op
from gemma_jax.pallas.cases.qkv_norm_rope import CASES, EPS, Heads, heads_case
from gemma_jax.pallas.device import Device

EDGES = {case.name: case for case in CASES if not case.bench}


def run_tile(heads, arrays, config):
    """The kernel with a tile of one's choice."""
    arrays = dict(arrays)
    caches = [arrays.pop(name, None) for name in ("k_cache", "v_cache", "slots")]

    def call(arrays, caches):
        return op._qkv_norm_rope_pallas(
            **arrays,
            num_groups=heads.groups,
            has_v=heads.has_v,
            eps=EPS,
            numerics=Numerics(heads.dtype, heads.rounding),
            cache=None if caches[0] is None else op.CacheWrite(*caches),
            config=config,
        )

    return compiled(lambda both: call(*both))((arrays, caches))


def with_nan(x, rows):
    x = np.array(x)
    x[rows] = np.nan
    return jax.device_put(x)


@edge_cases(CASES, "qkv_norm_rope: vllm")
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EDGES.values(), ids=list(EDGES))
def test_compiled_kernel_is_as_close_to_exact_as_plain_code(case):
    check_close_to_exact(case)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [515, 600, 1024])
@pytest.mark.parametrize("heads", [(1, 8, 256), (1, 8, 512), (16, 2, 256)])
def test_compiled_kernel_at_the_tiles_of_a_prefill(tokens, heads):
    check_close_to_exact(heads_case("prefill", Heads(tokens, *heads, page=16, rotated=0.25)))


def test_reference_is_what_the_model_computes():
    heads = Heads(6, 2, 4, 32, rotated=0.5)
    numerics = Numerics()

    def model(x):
        tables = tuple(t[None].astype(jnp.float32) for t in (x["cos"], x["sin"]))
        qkv = x["qkv"][None]
        q = apply_rope(rms_norm(qkv[..., :4, :], x["q_weight"], EPS, numerics), tables, numerics)
        k = apply_rope(rms_norm(qkv[..., 4, :], x["k_weight"], EPS, numerics), tables, numerics)
        return q[0], k[0], rms_norm(qkv[..., 5, :], None, EPS, numerics)[0]

    x = heads.inputs(0)
    out = compiled(lambda x: heads.call(**x, implementation="reference"))(x)
    assert_equal((out.q, out.k, out.v), compiled(model)(x))


@pytest.mark.parametrize("name", ["vllm", "vllm shared", "no cache", "31b full, k = v"])
def test_unfused_chain_computes_the_same(name):
    case = EDGES[name]
    inputs = case.inputs(0)
    unfused = compiled(lambda x: case.baselines["unfused"](**x))(inputs)
    assert_equal(unfused, run(case, inputs, "reference"))


@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 4]),
    tokens_a_tile=st.sampled_from([1, 2, 4]),
    heads_a_tile=st.sampled_from([1, 2]),
    owner=st.booleans(),
    has_v=st.booleans(),
    page=st.sampled_from([0, 2, 3]),
    rounding=st.sampled_from(["hf", "vllm"]),
)
def test_any_shape_in_any_tile(
    tokens, kv_heads, groups, tokens_a_tile, heads_a_tile, owner, has_v, page, rounding
):
    heads = Heads(
        tokens,
        kv_heads,
        groups,
        16,
        owner=owner,
        has_v=has_v and owner,
        page=page if owner else 0,
        rotated=0.5,
        rounding=rounding,
    )
    case = heads_case("hypothesis", heads)
    inputs = case.inputs(0)
    config = op.Config(tokens_a_tile, min(heads_a_tile, groups), 1)
    close_to_exact(run_tile(heads, inputs, config), case, inputs)


@pytest.mark.parametrize("rounding", ["hf", "vllm"])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_channels_that_do_not_rotate_leave_as_the_norm_left_them(rounding, head_dim):
    heads = Heads(3, 1, 2, head_dim, rotated=0.25, rounding=rounding)
    inputs = heads.inputs(0)
    out = run(heads_case("tail", heads), inputs, "triton")
    queries = np.asarray(inputs["qkv"])[:, :, :2]
    normed = compiled(lambda x: rms_norm(*x, EPS, Numerics()))((queries, inputs["q_weight"]))
    half = head_dim // 2
    still = np.r_[half // 4 : half, half + half // 4 : head_dim]
    assert_equal(np.asarray(out.q)[..., still], np.asarray(normed)[..., still])


# --- padding and slots ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [op.Config(1, 1, 1), op.Config(4, 2, 1)])
def test_padding_tokens_reach_neither_other_tokens_nor_the_cache(config):
    heads = Heads(7, 1, 2, 16, page=4)
    inputs = heads.inputs(0)
    padding = np.asarray(inputs["slots"]) < 0
    poisoned = {
        **inputs,
        "qkv": with_nan(inputs["qkv"], padding),
        "cos": with_nan(inputs["cos"], padding),
    }
    clean, out = (run_tile(heads, x, config) for x in (inputs, poisoned))
    clean, out = (jax.tree.map(np.asarray, x) for x in (clean, out))
    assert_equal([x[~padding] for x in out[:3]], [x[~padding] for x in clean[:3]])
    assert_equal(out[3:], clean[3:])


def test_slots_that_nobody_writes_keep_what_they_held():
    heads = Heads(5, 2, 2, 16, page=4)
    inputs = heads.inputs(0)
    inputs["k_cache"] = with_nan(inputs["k_cache"], slice(None))
    out = run_tile(heads, inputs, op.Config(2, 2, 1))
    slots = np.asarray(inputs["slots"])
    written = np.zeros(heads.pages * heads.page, bool)
    written[slots[slots >= 0]] = True
    flat = np.asarray(out.k_cache, np.float32).reshape(written.size, -1)
    assert np.isnan(flat).all(axis=1).tolist() == (~written).tolist()


def test_slots_past_the_cache_are_dropped():
    heads = Heads(3, 1, 2, 16, page=4)
    inputs = heads.inputs(0)
    inputs["slots"] = jnp.asarray([1, heads.pages * 4, 10_000], jnp.int32)
    out = run(heads_case("past", heads), inputs, "triton")
    changed = (np.asarray(out.k_cache) != np.asarray(inputs["k_cache"])).any(axis=(2, 3))
    assert np.flatnonzero(changed).tolist() == [1]


@pytest.mark.parametrize("tokens", [8, 9])
def test_no_access_passes_an_end(tokens, monkeypatch):
    heads = Heads(tokens, 2, 4, 16, page=4)
    inputs = heads.inputs(0)
    poison_out_of_bounds(monkeypatch, op._qkv_norm_rope_pallas)
    out = run_tile(heads, inputs, op.Config(4, 2, 1))
    close_to_exact(out, heads_case("ends", heads), inputs)


def test_default_tiles_divide_the_heads_of_every_preset():
    for preset in PRESETS.values():
        for layer in preset.layers:
            for tokens in (1, 64, 511, 512, 16_384):
                config = op.default_config(tokens, layer.num_groups, layer.head_dim)
                assert layer.num_groups % config.block_heads == 0
                assert config.block_tokens & (config.block_tokens - 1) == 0
                assert config.block_tokens <= tokens


# --- refusals ------------------------------------------------------------------------------------


def test_head_width_that_is_no_power_of_two_is_refused():
    heads = Heads(2, 1, 2, 48)
    with pytest.raises(UnsupportedError, match="head width 48 is not a power of two"):
        heads.call(**heads.inputs(0), implementation="triton")


def test_other_dtype_than_the_compute_dtype_is_refused():
    heads = replace(Heads(2, 1, 2, 16), dtype="float16")
    inputs = heads.inputs(0)
    with pytest.raises(UnsupportedError, match="dtype float16"):
        replace(heads, dtype="bfloat16").call(**inputs, implementation="pallas")


def test_old_gpu_is_refused(monkeypatch):
    v100 = Device("NVIDIA V100", (7, 0), 80)
    monkeypatch.setattr("gemma_jax.pallas.dispatch.current_device", lambda: v100)
    heads = Heads(2, 1, 2, 16)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8.0, NVIDIA V100"):
        heads.call(**heads.inputs(0), implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((2, 1, 5, 16), jnp.bfloat16)}, "expected 4 heads on axis 2, got 5"),
        ({"cos": jnp.zeros((3, 8), jnp.bfloat16)}, r"cos\[3, 8\]: expected \[2, 8\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    heads = Heads(2, 1, 2, 16)
    with pytest.raises(ValueError, match=message):
        heads.call(**{**heads.inputs(0), **change})


def test_projection_of_the_model_has_the_layout_of_the_kernel():
    layer = next(x for x in PRESETS["e2b"].layers if x.kind == SLIDING and x.owns_kv)
    shape = jax.eval_shape(lambda: Attention(PRESETS["e2b"], layer, Numerics()).qkv[...]).shape
    assert shape == (1, layer.num_groups + 2, layer.head_dim, PRESETS["e2b"].hidden_size)
