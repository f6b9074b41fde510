"""Prefill attention: every implementation against float64, its edges, and what it refuses."""

import contextlib
from dataclasses import replace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_checks import compiled, edge_cases

from gemma_jax.config import PRESETS
from gemma_jax.errors import ConfigError, UnsupportedError
from gemma_jax.model.attention import KeyBlock, attend
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import prefill_attention_triton as triton
from gemma_jax.pallas.cases.prefill_attention import CASES, Batch, attention_case
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.prefill_attention import prefill_attention, prefill_attention_reference
from gemma_jax.pallas.segments import Segments
from gemma_jax.testing.tolerance import assert_close_to_exact

EDGES = {case.name: case for case in CASES if not case.bench}
HF, FLOAT32, VLLM = Numerics(), Numerics("float32"), Numerics(rounding="vllm")
H200 = Device("NVIDIA H200", (9, 0), 132)
A100 = Device("NVIDIA A100", (8, 0), 108)
A10 = Device("NVIDIA A10", (8, 6), 72)
V100 = Device("NVIDIA V100", (7, 0), 80)


def exact_attention(q, k, v, segments, window):
    """float64 in NumPy, a sequence at a time; zeros in the rows of none."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for q_offset, length, k_offset, keys in zip(*map(np.asarray, segments), strict=True):
        rows, seen = slice(q_offset, q_offset + length), slice(k_offset, k_offset + keys)
        position, key = np.arange(keys - length, keys)[:, None], np.arange(keys)
        mask = (key <= position) & (key > position - (window or keys + 1))
        scores = np.einsum("tkgh,skh->kgts", q[rows], k[seen])
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("kgts,skh->tkgh", weights, v[seen])
    return out


def program(case, implementation):
    return compiled(lambda arrays: case.call(**arrays, implementation=implementation))


def run(case, inputs, implementation):
    return np.asarray(program(case, implementation)(inputs), np.float32)


def window_of(case):
    """The window of a case, from the call it wraps."""
    return dict(zip(case.call.__code__.co_freevars, case.call.__closure__, strict=True))[
        "window"
    ].cell_contents


def check(case, implementation):
    inputs = case.inputs(0)
    plain, kernel = run(case, inputs, "reference"), run(case, inputs, implementation)
    exact = exact_attention(**inputs, window=window_of(case))
    assert_close_to_exact(kernel, plain, exact)
    np.testing.assert_array_equal(kernel[exact[:, 0, 0, 0] == 0.0], 0.0)


@edge_cases(CASES, "prefill_attention: padded, unequal")
def test_interpreted_kernel_is_as_close_to_exact_as_plain_code(case):
    check(case, "triton")


@pytest.mark.parametrize(
    "name", ["empty sequences", "chunk in a context, window", "padded, unequal"]
)
def test_xla_formulation_is_as_close_to_exact_as_the_reference(name):
    check(EDGES[name], "xla")


def test_reference_in_float64_is_exact():
    case = EDGES["chunk in a context, window"]
    inputs = case.inputs(1)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(np.asarray(inputs[n], np.float64)) for n in "qkv"}
        out = prefill_attention_reference(
            **wide, segments=inputs["segments"], window=24, max_q_len=30, numerics=HF
        )
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, exact_attention(**inputs, window=24), atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EDGES.values(), ids=list(EDGES))
@pytest.mark.parametrize("implementation", ["triton", "mosaic", "cudnn", "xla"])
def test_compiled_implementation_is_as_close_to_exact_as_plain_code(case, implementation):
    # Triton takes all of them; the others may refuse, and which they must take is tested below.
    refusal = UnsupportedError if implementation != "triton" else ()
    with contextlib.suppress(refusal):
        check(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads", [(1, 8, 256), (1, 8, 512), (2, 4, 256), (16, 2, 256), (4, 8, 512)]
)
@pytest.mark.parametrize("window", [None, 64, 512])
@pytest.mark.parametrize("implementation", ["triton", "mosaic", "cudnn"])
def test_compiled_kernel_at_the_tiles_of_the_models(heads, window, implementation):
    batches = [
        Batch((1, 129, 300), (511, 0, 73), spare=2),
        Batch((304, 128, 1), layout="uniform"),
        Batch((65, 0, 127, 64), spare=200),
    ]
    refusals = []
    for batch in batches:
        try:
            check(attention_case("tiles", heads, window, batch), implementation)
        except UnsupportedError as reason:
            refusals.append(str(reason))
    if implementation != "cudnn":  # it takes padded batches of narrow heads only
        assert refusals == []


# --- padding ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed():
    """A jitted packed batch of three sequences with dynamic lengths, and its arrays."""
    batch = Batch((30, 30, 30), (20, 20, 20))
    case = attention_case("hypothesis", (1, 4, 16), 12, batch, FLOAT32)
    return case.inputs(0), program(case, "triton")


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.tuples(*[st.integers(0, 30)] * 3),
    past=st.tuples(*[st.integers(0, 20)] * 3),
    gaps=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_any_lengths_and_gaps_and_nan_between_them(packed, lengths, past, gaps):
    inputs, call = packed
    starts = np.cumsum([0, *(n + g for n, g in zip(lengths, gaps, strict=True))])[:3]
    k_lengths = np.add(lengths, past)
    segments = Segments(
        *(jnp.array(x, jnp.int32) for x in (starts, lengths, [0, 50, 100], k_lengths))
    )
    if starts[-1] + lengths[-1] > 90:
        return
    used = [np.zeros(n, bool) for n in (90, 150)]
    for b in range(3):
        used[0][starts[b] : starts[b] + lengths[b]] = True
        used[1][50 * b : 50 * b + k_lengths[b]] = True
    arrays = {
        name: np.where(used[name != "q"].reshape(-1, *(1,) * (x.ndim - 1)), x, np.nan)
        for name, x in inputs.items()
        if name != "segments"
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    out = call({**arrays, "segments": segments})
    exact = exact_attention(**arrays, segments=segments, window=12)
    np.testing.assert_allclose(out, exact, atol=2e-5)


def cleaned(x):
    """Zeros in the place of NaN."""
    return np.where(np.isnan(np.asarray(x, np.float32)), np.array(0, x.dtype), x)


def test_padding_of_any_value_changes_no_bit():
    case = EDGES["padded, with context"]
    poisoned = case.inputs(0)
    clean = {k: cleaned(x) if k in "qkv" else x for k, x in poisoned.items()}
    np.testing.assert_array_equal(run(case, poisoned, "triton"), run(case, clean, "triton"))


def test_keys_behind_the_window_may_hold_nan():
    """A tile may hold keys that no row of it sees; the first row here sees key 33 at the least."""

    def behind(x):
        return np.where(np.arange(x.shape[0])[:, None, None] < 33, np.array(np.nan, x.dtype), x)

    case = attention_case("behind", (1, 8, 16), 8, Batch((3,), (40,)))
    inputs = case.inputs(0)
    poisoned = {k: behind(x) if k in ("k", "v") else x for k, x in inputs.items()}
    np.testing.assert_array_equal(run(case, poisoned, "triton"), run(case, inputs, "triton"))


# --- vLLM's rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(("window", "past"), [(None, 0), (7, 45), (40, 45)])
def test_vllm_rounding_is_that_of_the_model(implementation, window, past):
    length, heads = 50, (1, 4, 32)
    keys = past + length
    case = attention_case("vllm", heads, window, Batch((length,) * 2, (past,) * 2, "padded"), VLLM)
    inputs = case.inputs(3)
    q = inputs["q"].reshape(2, length, *inputs["q"].shape[1:])
    k, v = (inputs[n].reshape(2, keys, heads[0], heads[2]) for n in "kv")
    positions = jnp.broadcast_to(jnp.arange(keys), (2, keys))
    block = KeyBlock(k, v, positions)
    expected = compiled(lambda q: attend(q, block, positions[:, past:], window, VLLM))(q)
    got = run(case, inputs, implementation)
    expected = np.asarray(expected, np.float32).reshape(got.shape)
    # Only the order of float32 sums differs: a few outputs fall to the other side of a rounding.
    assert np.mean(got != expected) < 0.002
    np.testing.assert_allclose(got, expected, atol=np.abs(expected).max() * 2**-7)


# --- tiles and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("device", [A10, A100, H200, Device("cpu", None)], ids=lambda d: d.kind)
@pytest.mark.parametrize("numerics", [HF, FLOAT32, VLLM], ids=str)
def test_every_tile_of_a_preset_divides_its_head(device, numerics):
    layers = [layer for config in PRESETS.values() for layer in config.layers]
    for heads in {(layer.head_dim, layer.num_groups) for layer in layers}:
        config = triton.default_config(*heads, numerics, device)
        triton._check_config(config, heads[1], heads[0], numerics)
        for size in (config.q_rows, config.k_rows, config.chunk):
            assert size >= 16
            assert size & (size - 1) == 0


def arrays(heads=(1, 2, 16), rows=8, dtype=jnp.bfloat16):
    num_kv, groups, head_dim = heads
    kv = jnp.zeros((rows, num_kv, head_dim), dtype)
    return jnp.zeros((rows, num_kv, groups, head_dim), dtype), kv, kv


def attention(q, k, v, **changes):
    arguments = {
        "segments": Segments.padded(jnp.array([4, 3]), 4),
        "window": None,
        "max_q_len": 4,
        "numerics": HF,
    }
    return prefill_attention(q, k, v, **{**arguments, **changes})


@pytest.mark.parametrize(
    ("q_k_v", "changes", "said"),
    [
        (arrays((1, 2, 24)), {}, "head width 24"),
        (arrays((1, 2, 1024)), {}, "head width 1024"),
        (arrays(dtype=jnp.float16), {}, "float16"),
        (arrays(), {"window": 0}, "window 0"),
        (arrays(), {"implementation": "cudnn"}, "needs an NVIDIA GPU"),
        (arrays(), {"implementation": "xla", "numerics": VLLM}, "rounds otherwise than vLLM"),
        (arrays(), {"implementation": "mosaic", "numerics": VLLM}, "rounds otherwise than vLLM"),
    ],
)
def test_named_implementation_says_what_it_cannot_take(q_k_v, changes, said):
    with pytest.raises(UnsupportedError, match=said):
        attention(*q_k_v, **{"implementation": "triton", **changes})


def test_old_gpu_and_bad_tiles_are_refused():
    q, k, v = arrays()
    assert "7.0" in (triton.unsupported(q, k, v, None, V100) or "")
    assert triton.unsupported(q, k, v, None, A100) is None
    good = triton.default_config(16, 2, HF, A100)
    segments = Segments.padded(jnp.array([4, 3]), 4)
    for config, numerics, said in [
        (replace(good, q_rows=1), HF, "q_rows=1"),
        (replace(good, chunk=32), HF, "chunk=32"),
        (replace(good, k_rows=64), VLLM, "k_rows=64"),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            triton.prefill_attention_triton(
                q, k, v, segments, window=None, max_q_len=4, numerics=numerics, config=config
            )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": jnp.zeros((8, 2, 16))}, "differ in key heads"),
        ({"k": jnp.zeros((8, 16))}, "needs"),
        ({"max_q_len": 0}, "max_q_len=0"),
        ({"numerics": FLOAT32}, "q is bfloat16, the numerics are float32"),
        ({"uniform": True, "segments": Segments.packed(jnp.array([4, 2, 2]))}, "uniform"),
    ],
)
def test_shapes_that_make_no_batch_are_named(changes, said):
    q, k, v = arrays()
    if "k" in changes:
        changes = {**changes, "v": changes["k"]}
    with pytest.raises(ConfigError, match=said):
        attention(**{"q": q, "k": k, "v": v, **changes})
