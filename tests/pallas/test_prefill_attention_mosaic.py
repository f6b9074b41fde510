"""Prefill attention on Hopper: both designs, interpreted, on batches whose padding is poisoned."""

from dataclasses import replace

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from kernel_checks import compiled

from gemma_jax.errors import UnsupportedError
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import prefill_attention_mosaic as mosaic
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.mosaic_work import ALIGN, Config, Shape, meta_of, work_of
from gemma_jax.pallas.prefill_attention import prefill_attention_reference
from gemma_jax.pallas.prefill_attention_mosaic import prefill_attention_mosaic
from gemma_jax.pallas.segments import Segments
from gemma_jax.testing import aot

HF = Numerics()
H200 = Device("NVIDIA H200", (9, 0), 132)
A100 = Device("NVIDIA A100", (8, 0), 108)
FULL, SLIDING = mosaic.default_config(512), mosaic.default_config(256)

# name: (key heads, group, head width), window, query lengths, context before them, spare rows
BATCHES = {
    "full, context, rows off the tiles": ((1, 8, 512), None, (3, 5), (130, 9), 3),
    "full, sixteen heads a group": ((1, 16, 512), None, (9,), (61,), 0),
    "full, padding behind": ((1, 8, 512), None, (1, 0, 4), (0, 0, 70), 91),
    "sliding, window inside a tile": ((1, 8, 256), 40, (21,), (90,), 5),
    "sliding, two heads a group": ((2, 2, 256), 70, (5, 40), (150, 0), 3),
}


def _slow_if(name):
    """Interpreting takes some ten seconds; one batch of each head width is enough for every run."""
    quick = ("full, context, rows off the tiles", "sliding, window inside a tile")
    return () if name in quick else (pytest.mark.slow,)


def arrays(heads, lengths, past, spare, seed=0):
    """(q, k, v, segments) of a packed batch; NaN in all rows of no sequence."""
    num_kv, group, head_dim = heads
    keys = [n + p for n, p in zip(lengths, past, strict=True)]
    segments = Segments.packed(np.array(lengths, np.int32), np.array(keys, np.int32))
    rng = np.random.default_rng(seed)

    def rows(used, shape, scale):
        total = max(64, -(-(used + spare) // 8) * 8)
        x = np.full((total, *shape), np.nan, np.float32)
        x[:used] = scale * rng.standard_normal((used, *shape))
        return jnp.asarray(x, jnp.bfloat16)

    scale = head_dim**-0.25
    q = rows(sum(lengths), (num_kv, group, head_dim), scale)
    k = rows(sum(keys), (num_kv, head_dim), scale)
    return q, k, rows(sum(keys), (num_kv, head_dim), 1.0), segments


def check(name, config=None):
    heads, window, lengths, past, spare = BATCHES[name]
    q, k, v, segments = arrays(heads, lengths, past, spare)
    options = {"window": window, "max_q_len": max(lengths), "numerics": HF}
    out = prefill_attention_mosaic(q, k, v, segments, **options, config=config)
    expected = prefill_attention_reference(
        *(x.astype(jnp.float32) for x in (q, k, v)),
        segments, **{**options, "numerics": Numerics("float32")},
    )  # fmt: skip
    assert out.shape == q.shape
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)
    assert not np.asarray(out, np.float32)[sum(lengths) :].any()


# The interpreter multiplies keys that the mask drops afterwards.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=_slow_if(n)) for n in BATCHES])
def test_interpreted_kernel_ignores_poisoned_padding(name):
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("full, context, rows off the tiles", replace(FULL, cluster=1)),
        ("sliding, window inside a tile", Config("split", groups=2, v_slots=3)),
    ],
)
def test_other_cuts_of_the_work_give_the_same(name, config):
    check(name, config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(BATCHES))
def test_compiled_kernel_ignores_poisoned_padding(name):
    check(name)


# --- geometry --------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    batch=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 300)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 200)),
    group=st.sampled_from([1, 2, 4, 8]),
    cluster=st.sampled_from([1, 2]),
    spare=st.integers(0, 200),
)
def test_each_row_is_stored_once_and_each_seen_key_loaded(batch, window, group, cluster, spare):
    lengths = np.array([n for n, _ in batch], np.int32)
    keys = lengths + np.array([p for _, p in batch], np.int32)
    rows = int(lengths.sum()) + spare
    config = replace(FULL, cluster=cluster)
    shape = Shape(
        batch=len(batch), kv_heads=1, group=group, fold=1, head_dim=512, window=window,
        max_q_len=max(1, int(lengths.max())), config=config,
    )  # fmt: skip
    segments = Segments.packed(lengths, keys)
    meta = np.asarray(compiled(lambda s: meta_of(s, rows))(segments))
    stored = np.zeros(rows, int)
    index, block = np.divmod(np.arange(shape.clusters * cluster, dtype=np.int32), cluster)
    works = compiled(
        lambda blocks: jax.vmap(lambda i, b: vars(work_of(shape, jnp.asarray(meta), i, b)))(*blocks)
    )((index, block))
    works = {name: np.asarray(x) for name, x in works.items()}
    stride = shape.tiles * shape.cluster_tokens
    for i in range(len(index)):
        work = {name: int(x[i]) for name, x in works.items()}
        for first in range(work["first_token"], max(work["store_to"], 1), stride):
            low, high = max(first, work["live_from"]), min(first + shape.tokens, work["store_to"])
            stored[work["q_row"] + low : work["q_row"] + max(low, high)] += 1
        tokens = range(work["first_token"], work["first_token"] + shape.tokens)
        for t in (t for t in tokens if work["live_from"] <= t < work["live_to"]):
            position = work["position"] + t
            first_key = 0 if window is None else max(0, position - window + 1)
            assert work["k_position"] <= first_key
            assert position < work["k_position"] + work["steps"] * config.block_kv
        assert work["k_row"] % ALIGN == work["q_row"] % ALIGN == 0
    np.testing.assert_array_equal(stored, 1)


def test_tiles_outside_the_window_are_not_loaded():
    shape = Shape(
        batch=1, kv_heads=1, group=8, fold=1, head_dim=256, window=512, max_q_len=4096,
        config=SLIDING,
    )  # fmt: skip
    segments = Segments.packed(np.array([4096], np.int32))
    work = work_of(shape, meta_of(segments, 4096), jnp.int32(4), jnp.int32(0))
    span = 512 + shape.cluster_tokens - 1 + ALIGN - 1
    assert int(work.steps) <= -(-span // SLIDING.block_kv)


# --- what it refuses -------------------------------------------------------------------------


def test_reasons_to_refuse():
    q, k, v, _ = arrays((1, 8, 256), (64,), (0,), 0)
    assert mosaic.unsupported(q, k, v, None, H200) is None
    assert "compute capability 9.0" in mosaic.unsupported(q, k, v, None, A100)
    assert "bfloat16" in mosaic.unsupported(q.astype(jnp.float32), k, v, None, H200)
    assert "256 or 512" in mosaic.unsupported(q[..., :128], k, v, None, H200)
    assert "divide 64" in mosaic.unsupported(q[:, :, :3], k, v, None, H200)
    assert "multiples of 8" in mosaic.unsupported(q, k[:63], v[:63], None, H200)
    assert "64 query and key rows" in mosaic.unsupported(q[:32], k, v, None, H200)
    assert "positive window" in mosaic.unsupported(q, k, v, 0, H200)


def test_a_jax_that_searches_layouts_for_minutes_is_refused_on_a_gpu(monkeypatch):
    q, k, v, _ = arrays((1, 8, 256), (64,), (0,), 0)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert "layouts in minutes" in mosaic.unsupported(q, k, v, None, H200)
    assert mosaic.unsupported(q, k, v, None, Device("cpu", None)) is None


def test_refusal_is_an_error():
    q, k, v, segments = arrays((1, 8, 256), (64,), (0,), 0)
    with pytest.raises(UnsupportedError, match=r"mosaic.*multiples of 8"):
        prefill_attention_mosaic(q[:60], k, v, segments, window=None, max_q_len=64, numerics=HF)
    with pytest.raises(UnsupportedError, match="bfloat16 numerics"):
        prefill_attention_mosaic(
            q, k, v, segments, window=None, max_q_len=64, numerics=Numerics("float32")
        )


@pytest.mark.parametrize(
    "config",
    [
        Config("split", k_columns=96),
        Config("split", v_columns=48),
        Config("split", block_kv=96),
        Config("joined", groups=2),
        Config("split", k_slots=9),
    ],
)
def test_cuts_that_do_not_divide_or_fit_are_refused(config):
    q, k, v, segments = arrays((1, 8, 512), (64,), (0,), 0)
    with pytest.raises(UnsupportedError, match="config"):
        prefill_attention_mosaic(
            q, k, v, segments, window=None, max_q_len=64, numerics=HF, config=config
        )


# --- compiled for a GPU that is not there ----------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("heads", [(2, 4, 512), (1, 16, 512), (8, 2, 256)])
def test_kernel_of_the_other_models_compiles_for_an_h200_with_few_spills(heads, capfd):
    num_kv, group, head_dim = heads
    struct = jax.ShapeDtypeStruct
    q = struct((4096, num_kv, group, head_dim), jnp.bfloat16)
    k = struct((4096, num_kv, head_dim), jnp.bfloat16)
    segments = Segments(*[struct((2,), jnp.int32)] * 4)

    def call(q, k, v, segments):
        window = None if head_dim == 512 else 512
        return prefill_attention_mosaic(
            q, k, v, segments, window=window, max_q_len=2048, numerics=HF
        )

    aot.compile_for(aot.target_mesh("h200"), call, q, k, k, segments)
    kernels = [r for r in aot.parse_ptxas(capfd.readouterr().err) if "prefill" in r.name]
    assert kernels
    assert max(r.spill_bytes for r in kernels) <= 32
