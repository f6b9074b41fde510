"""Decode attention and its fused step: the kernels against their definition, edges and errors."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import compiled, edge_cases

from gemma_jax.errors import UnsupportedError
from gemma_jax.model.attention import KeyBlock, attend
from gemma_jax.model.cache import read_rows, slot_positions
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import decode_attention as ops
from gemma_jax.pallas.cases import all_cases, array
from gemma_jax.pallas.cases.decode_attention import Geometry, attention_case
from gemma_jax.pallas.cases.decode_attention_step import step_case
from gemma_jax.pallas.decode_attention_config import Config, default_config
from gemma_jax.pallas.device import Device

H200 = Device("NVIDIA H200", (9, 0), 132)
A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108)
ATTENTION = [c for c in all_cases("decode_attention") if not c.bench]
STEP = [c for c in all_cases("decode_attention_step") if not c.bench]


def run(case, arrays, implementation):
    call = functools.partial(case.call, implementation=implementation)
    return compiled(lambda arrays: call(**arrays))(arrays)


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def exact(case, arrays):
    """The definition in float64."""
    with jax.enable_x64(True):
        floats = jnp.floating
        wide = {
            name: x if x is None or not jnp.issubdtype(x.dtype, floats) else array(x, "float64")
            for name, x in arrays.items()
        }
        out = run(case, wide, "reference")
        return jax.tree.map(np.asarray, out)


def check_close(case, arrays, found, against_plain=True):
    """No NaN, and an error of a few steps of the dtype, plus twice that of plain jnp if asked."""
    truth = exact(case, arrays)
    assert np.all(np.isfinite(np.asarray(found, np.float32)))
    bound = 4 * float(jnp.finfo(found.dtype).eps) * np.abs(truth).max()
    if against_plain:
        plain = run(case, arrays, "reference")
        bound += 2 * np.abs(np.asarray(plain, np.float64) - truth).max()
    error = np.abs(np.asarray(found, np.float64) - truth).max()
    assert error <= bound, (error, bound)


@edge_cases(ATTENTION, "decode_attention: window beyond the sequence")
def test_attention_interpreted(case):
    arrays = case.inputs(0)
    check_close(case, arrays, run(case, arrays, "triton"), against_plain=False)


@pytest.mark.gpu
@named(ATTENTION)
def test_attention_compiled(case):
    arrays = case.inputs(0)
    check_close(case, arrays, run(case, arrays, "triton"))


def changed(before, after):
    before, after = (np.asarray(x, np.float32) for x in (before, after))
    return ~((after == before) | (np.isnan(after) & np.isnan(before)))


def check_step(case):
    """The step attends as its reference does and writes the same entries of the cache."""
    arrays = case.inputs(0)
    plain, *caches = run(case, arrays, "reference")
    found, *found_caches = run(case, arrays, "triton")
    plain, found = (np.asarray(x, np.float64) for x in (plain, found))
    eps = float(jnp.finfo(arrays["qkv"].dtype).eps)
    np.testing.assert_allclose(found, plain, rtol=0, atol=8 * eps * np.abs(plain).max())
    for name, mine, theirs in zip(("k_cache", "v_cache"), found_caches, caches, strict=True):
        written = changed(arrays[name], theirs)
        np.testing.assert_array_equal(changed(arrays[name], mine), written)
        mine, theirs = (np.asarray(x, np.float32)[written] for x in (mine, theirs))
        least = eps * np.abs(theirs).max(
            initial=0
        )  # RoPE subtracts products: a small rest has their error
        np.testing.assert_allclose(mine, theirs, rtol=8 * eps, atol=least)
        if eps > 1e-3:  # another order of the sum of squares moves few values to the next bfloat16
            assert np.count_nonzero(mine != theirs) <= 0.01 * mine.size


@edge_cases(STEP, "decode_attention_step: shared")
def test_step_interpreted(case):
    check_step(case)


@pytest.mark.gpu
@named(STEP)
def test_step_compiled(case):
    check_step(case)


SPLIT = Geometry((150, 40, 1, 0), 1, 4, 32, 160, 16, paged=True)
ROWS = Geometry((90, 3), 2, 6, 32, 96, 32, queries=8)
CONFIGS = [
    (SPLIT, Config(16, 4, 2, 3, "kernel")),
    (SPLIT, Config(32, 4, 2, 8, "last")),
    (ROWS, Config(32, 4, 2, 2, "last")),
    (ROWS, Config(16, 4, 2, 3, "kernel", 32)),
    (Geometry((90, 3), 1, 2, 32, 48, 16, window=30), Config(64, 4, 2, 1)),
]


def check_config(geometry, config):
    case = attention_case("", geometry)
    arrays = case.inputs(1)
    call = functools.partial(
        ops._attention_pallas,
        slots=geometry.slots,
        window=geometry.window,
        numerics=Numerics(),
        config=config,
    )
    program = compiled(lambda arrays: (call(**arrays), call(**arrays)))
    first, second = program(arrays)  # the second finds the counters as the first leaves them
    check_close(case, arrays, first)
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize(("geometry", "config"), CONFIGS)
def test_every_configuration_interpreted(geometry, config):
    check_config(geometry, config)


@pytest.mark.gpu
@pytest.mark.parametrize(("geometry", "config"), CONFIGS)
def test_every_configuration_compiled(geometry, config):
    check_config(geometry, config)


def test_split_step_equals_the_unsplit_one():
    case = step_case("", Geometry((100, 17, 0), 1, 4, 32, 96, 16, window=70, paged=True), 2)
    arrays = case.inputs(2)
    call = functools.partial(
        ops._step_pallas, groups=4, eps=1e-6, slots=96, window=70, numerics=Numerics()
    )
    one, split = (
        compiled(lambda arrays, config=config: call(**arrays, config=config))(arrays)
        for config in (Config(32, 4, 2), Config(16, 4, 2, 4))
    )
    for a, b in zip(one, split, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.02, equal_nan=True
        )


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data):
    page = data.draw(st.sampled_from([8, 16, 48, 64]))
    slots = page * data.draw(st.integers(1, 4))
    window = data.draw(st.none() | st.integers(1, slots))
    longest = slots if window is None else 3 * slots
    queries = data.draw(st.integers(1, 4)) if window is None else 1
    lengths = tuple(data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=3)))
    kv_heads, groups = data.draw(st.sampled_from([(1, 8), (2, 3), (3, 1)]))
    paged = data.draw(st.booleans())
    geometry = Geometry(
        lengths, kv_heads, groups, 32, slots, page, window, queries, paged, "float32"
    )
    case = attention_case("", geometry)
    arrays = case.inputs(3)
    check_close(case, arrays, run(case, arrays, "triton"), against_plain=False)


# --- against the model -------------------------------------------------------------------------


def test_reference_is_the_attention_of_the_model():
    g = Geometry((203, 33), 2, 4, 32, 96, 16, window=40, paged=True, dtype="float32")
    case = attention_case("", g)
    arrays = case.inputs(4)
    table, lengths = arrays["page_table"], arrays["lengths"]
    k, v = (jnp.nan_to_num(read_rows(arrays[x], table, 96)) for x in ("k_cache", "v_cache"))
    keys = KeyBlock(k, v, slot_positions(lengths, 96))
    expected = attend(arrays["q"], keys, lengths[:, None] - 1, 40, Numerics("float32"))
    found = run(case, arrays, "reference")
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-6)


# --- what cannot be taken ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "compute dtype bfloat16"),
        ({"head_dim": 48}, "power of two"),
        ({"queries": 9}, "1 to 8 queries"),
    ],
)
def test_a_named_kernel_refuses_and_says_why(change, message):
    sizes = {"lengths": (9,), "kv_heads": 1, "groups": 2, "head_dim": 32, "slots": 16, "page": 16}
    arrays = attention_case("", Geometry(**{**sizes, **change})).inputs(0)
    with pytest.raises(UnsupportedError, match=message):
        ops.decode_attention(**arrays, slots=16, numerics=Numerics(), implementation="triton")


def test_bfloat16_with_the_rounding_of_vllm_is_refused():
    arrays = attention_case("", Geometry((9,), 1, 2, 32, 16, 16)).inputs(0)
    with pytest.raises(UnsupportedError, match="rounding"):
        ops.decode_attention(
            **arrays, slots=16, numerics=Numerics(rounding="vllm"), implementation="pallas"
        )


def test_an_old_gpu_is_refused():
    assert "8.0" in str(
        ops._problem({jnp.dtype("bfloat16")}, 256, 1, Numerics(), Device("V100", (7, 0)))
    )


# --- the tile table ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_tile_table(head_dim, device, rows):
    for programs, span in itertools.product((1, 8, 64, 128, 4096), (1, 64, 512, 8192, 131072)):
        config = default_config(programs, rows, head_dim, span, 2, device)
        check_tiles(config, programs, head_dim, span, device)


def check_tiles(config, programs, head_dim, span, device):
    tiles = -(-span // config.tile)
    assert 1 <= config.splits <= max(tiles, 1)
    assert config.rows >= 16
    assert config.tile & (config.tile - 1) == 0
    assert programs < device.num_cores or config.splits == 1
    tiles_kept = 2 * config.tile * head_dim * 2 * (config.num_stages - 1)
    queries, scores = config.rows * head_dim * 2, 8192
    assert tiles_kept + queries + scores <= device.shared_memory


def check_invariant(geometry):
    """A query's bits do not depend on what its call brings besides."""
    case, g = attention_case("any", geometry), geometry
    arrays = case.inputs(0)
    together = np.asarray(run(case, arrays, "triton"), np.float32)
    alone = dataclasses.replace(geometry, lengths=g.lengths[:1], queries=1)
    call = attention_case("alone", alone).call
    one = compiled(lambda arrays: call(**arrays, implementation="triton"))
    for row, length in enumerate(g.lengths):
        for query in range(g.queries):
            found = one(
                {
                    "q": arrays["q"][row : row + 1, query : query + 1],
                    "k_cache": arrays["k_cache"],
                    "v_cache": arrays["v_cache"],
                    "lengths": arrays["lengths"][row : row + 1] - (g.queries - 1 - query),
                    "page_table": arrays["page_table"][row : row + 1],
                }
            )
            assert length >= g.queries
            np.testing.assert_array_equal(np.asarray(found, np.float32)[0, 0], together[row, query])


def test_batch_invariant_queries_have_the_same_bits_alone_and_in_company():
    check_invariant(
        Geometry(
            (203, 70, 9), 1, 2, 32, 128, 32, 40, queries=4, paged=True, dtype="float32",
            batch_invariant=True,
        )
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window"), [(256, 512), (512, None)])
def test_batch_invariant_queries_have_the_same_bits_on_a_gpu(head_dim, window):
    check_invariant(
        Geometry(
            (2500, 700, 9), 1, 8, head_dim, 2560, 128, window, queries=4, paged=True,
            batch_invariant=True,
        )
    )  # fmt: skip
