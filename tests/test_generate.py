"""Prefill and decode: one answer whatever the batch, the row, the chunks and the cache layout."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import F32, random_runner, shallow

from gemma_jax import generate
from gemma_jax.batch_arrays import prompt_chunk, row_state, sampling_statics, sampling_table
from gemma_jax.buckets import row_buckets
from gemma_jax.generate import Limits, plan, run_batch, score_tokens, split_batches
from gemma_jax.model import context
from gemma_jax.model.cache import CacheLayout, KVCache, cache_bytes
from gemma_jax.numerics import Numerics
from gemma_jax.runner import compiled_programs, make_program, prefill
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.sequence import Sequence

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = [
    "e2b-tiny",
    pytest.param("e4b-tiny", marks=pytest.mark.slow),
    "12b-tiny",
    "26b-a4b-tiny",
    pytest.param("31b-tiny", marks=pytest.mark.slow),
]
W = 24
LENGTHS = (1, W - 1, W, W + 1, 2 * W + 3)
STEPS = 40
LIMITS = Limits(8, 256, 256, page_size=32, decode_steps=8, cache_bytes=2**30)
TOLERANCE = 2e-4
NO_TOKEN = 999
"""An EOS outside the vocabulary: never drawn, and the shapes are those of a real one."""


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, n).tolist() for n in LENGTHS]


def sequence(prompt, steps=STEPS, eos=(NO_TOKEN,)):
    """A completion that samples, because the greedy streams of so few layers soon repeat."""
    params = SamplingParams(temperature=1.0, logprobs=1, max_tokens=steps)
    return Sequence(list(prompt), params, 0, np.array([7, 7], np.uint32), steps, eos)


def complete(runner, sequences, limits=LIMITS):
    """Runs the sequences as one batch and returns them."""
    for _ in run_batch(runner, sequences, limits):
        pass
    return sequences


def assert_same(results, expected):
    """Equal tokens, and log-probabilities within the tolerance of float32 sums."""
    for result, other in zip(results, expected, strict=True):
        assert result.token_ids == other.token_ids
        values = [[x.sampled for x in s.logprobs] for s in (result, other)]
        np.testing.assert_allclose(*values, atol=TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def _chunks_of_32_tokens():
    """Prompts of more than 32 tokens take two chunks; the cache of a sliding layer wraps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "MAX_CHUNK", 32)
        yield


@pytest.fixture(scope="module")
def e2b():
    return random_runner(shallow("e2b-tiny"))


@pytest.fixture(scope="module")
def e2b_results(e2b):
    return complete(e2b, [sequence(p) for p in prompts()])


# --- prefill + decode = one forward ------------------------------------------------------------


def forward(runner, tokens):
    """Log-probabilities of every token after the first from one forward pass without a past."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "MAX_CHUNK", 128)
        return [x.sampled for x in score_tokens(runner, tokens, LIMITS, 1)]


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_and_decode_steps_give_what_one_forward_over_all_rows_gives(name, request):
    if name == "e2b-tiny":
        runner, results = request.getfixturevalue("e2b"), request.getfixturevalue("e2b_results")
    else:
        runner = random_runner(shallow(name))
        results = complete(runner, [sequence(p) for p in prompts()])
    for result in results:
        assert len(result.token_ids) == STEPS
        assert len(set(result.token_ids)) > STEPS // 3
        whole = forward(runner, result.prompt_token_ids + result.token_ids)
        decoded = [x.sampled for x in result.logprobs]
        np.testing.assert_allclose(decoded, whole[-STEPS:], atol=TOLERANCE)


# --- one answer --------------------------------------------------------------------------------


def test_other_rows_of_the_batch_change_nothing(e2b, e2b_results):
    order = [3, 0, 4, 2, 1]
    shuffled = complete(e2b, [sequence(prompts()[i]) for i in order])
    assert_same(shuffled, [e2b_results[i] for i in order])
    others = [sequence(p) for p in prompts(seed=1)]
    others[2] = sequence(prompts()[2])
    assert_same([complete(e2b, others)[2]], [e2b_results[2]])


def test_alone_gives_what_the_batch_gives(e2b, e2b_results):
    assert_same(complete(e2b, [sequence(prompts()[3])]), [e2b_results[3]])


def test_a_row_alone_gathers_the_experts_that_its_batch_scans():
    runner = random_runner(shallow("26b-a4b-tiny"))
    batch = complete(runner, [sequence(p) for p in prompts()])
    assert_same(complete(runner, [sequence(prompts()[3])]), [batch[3]])


def test_fast_prefill_changes_no_result(e2b, e2b_results):
    plain = random_runner(shallow("e2b-tiny"), fast_prefill=False)
    batch = complete(plain, [sequence(p) for p in prompts()[:4]] + [sequence(prompts()[0])])
    assert_same(batch, [*e2b_results[:4], e2b_results[0]])


@pytest.mark.parametrize(("name", "splits"), [("12b-tiny", {False}), ("e2b-tiny", {False, True})])
def test_only_shared_layers_of_a_fast_prefill_split_their_keys_as_vllm(name, splits, monkeypatch):
    runner = random_runner(shallow(name), Numerics("bfloat16", "vllm"))
    batch, seen = [sequence(prompts()[3])], set()
    layout, (group,) = plan(runner, batch, LIMITS)
    chunk = prompt_chunk([batch[0].prompt_token_ids], group.rows, 0, 32, 1, 1)

    def record(q, keys, positions, window, numerics, split_keys=False):
        seen.add(split_keys)
        return q

    monkeypatch.setattr(context, "attend", record)
    program = make_program(runner.config, runner.numerics, layout)
    jax.eval_shape(
        lambda *x: prefill(program, False, True, True, sampling_statics(batch, 256), *x),
        runner.leaves, runner.new_cache(layout), row_state(batch, 1, 256, False), chunk,
        sampling_table(batch, 1, ()),
    )  # fmt: skip
    assert seen == splits


def test_chunk_sizes_change_no_result(e2b, e2b_results, monkeypatch):
    monkeypatch.setattr(generate, "MAX_CHUNK", 64)
    assert_same(complete(e2b, [sequence(p) for p in prompts()]), e2b_results)


def test_vllm_order_of_a_wrapped_window_reads_the_same_keys(e2b_results):
    # In float32 the roundings vanish, and what remains is where the keys are read.
    runner = random_runner(shallow("e2b-tiny"), Numerics("float32", "vllm"))
    assert_same(complete(runner, [sequence(p) for p in prompts()]), e2b_results)


def test_pages_in_any_order_change_no_result(e2b, e2b_results):
    """A cache with shuffled page tables, driven through the runner as an engine would."""
    layout, (group,) = plan(e2b, [sequence(p) for p in prompts()], LIMITS)
    batch = [sequence(p) for p in prompts()[:4]]
    rng = np.random.default_rng(3)

    def shuffled(slots):
        pages = slots // layout.page_size
        order = rng.permutation(layout.num_rows * pages).reshape(layout.num_rows, pages)
        return jnp.asarray(order, jnp.int32)

    empty = e2b.new_cache(layout)
    tables = shuffled(layout.full_slots), shuffled(layout.window_slots)
    cache = KVCache(empty.k, empty.v, *tables)
    statics, table = sampling_statics(batch, 256), sampling_table(batch, 8, ())
    state = row_state(batch, 8, 256, penalties=False)
    chunk = prompt_chunk([b.prompt_token_ids for b in batch], group.rows[:4], 0, 32, 8, 8)
    chunk.rows[:] = np.arange(8)  # an engine's rows and pages are its own; padding writes nothing
    cache, state, first = e2b.prefill(
        layout, cache, state, chunk, table, statics, has_past=False, wants_token=True
    )
    streams = [np.asarray(first.tokens)]
    for _ in range(4):
        cache, state, output = e2b.decode(
            layout, cache, state, table, statics, steps=8, max_steps=8
        )
        streams.append(np.asarray(output.tokens))
    streams = np.concatenate(streams, axis=1)[:4]
    assert streams.tolist() == [r.token_ids[:33] for r in e2b_results[:4]]


# --- the loop on the device --------------------------------------------------------------------


def test_rows_stop_by_themselves_at_eos_and_at_their_limit(e2b, e2b_results):
    eos = e2b_results[1].token_ids[5]
    batch = [sequence(p, eos=(eos,)) for p in prompts()]
    batch[3] = sequence(prompts()[3], steps=3, eos=(eos,))
    complete(e2b, batch)
    for row, result in enumerate(batch):
        stream = e2b_results[row].token_ids[: 3 if row == 3 else STEPS]
        end = stream.index(eos) + 1 if eos in stream else len(stream)
        assert result.token_ids == stream[:end]
        assert result.finish_reason == ("stop" if eos in stream else "length")
    assert batch[1].token_ids[-1] == eos
    assert batch[3].finish_reason == "length"


def test_cache_and_state_are_donated(e2b):
    batch = [sequence(p) for p in prompts()]
    layout, (group,) = plan(e2b, batch, LIMITS)
    cache = e2b.new_cache(layout)
    before = [*cache.k, *cache.v]
    state = row_state(batch, 8, 256, penalties=False)
    chunk = prompt_chunk([b.prompt_token_ids for b in batch], group.rows, 0, 32, 8, 8)
    cache, state, _ = e2b.prefill(
        layout, cache, state, chunk, sampling_table(batch, 8, ()), sampling_statics(batch, 256),
        has_past=False, wants_token=True,
    )  # fmt: skip
    assert all(x.is_deleted() for x in before)
    before = [*cache.k, *cache.v, state.position]
    e2b.decode(
        layout, cache, state, sampling_table(batch, 8, ()), sampling_statics(batch, 256),
        steps=1, max_steps=8,
    )  # fmt: skip
    assert all(x.is_deleted() for x in before)


@pytest.fixture
def compilations():
    """Counter of XLA compilations by function, from JAX's own events."""
    counts = Counter()

    def listen(name, _, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            counts[details.get("fun_name", "?")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_mixed_workload_compiles_no_more_than_the_declared_sizes(e2b, e2b_results, compilations):
    """2 chunk kinds of prefill and 1 decode a row bucket, each compiled once."""
    del e2b_results  # its programs are those of 8 rows
    before = compiled_programs()
    rng = np.random.default_rng(5)
    for size in (5, 6, 7, 8, 5, 8):
        lengths = rng.integers(1, 50, size)
        lengths[0] = 51
        batch = [sequence(rng.integers(3, 256, n), steps=STEPS) for n in lengths]
        complete(e2b, batch)
    assert compiled_programs() == before
    assert not {n for n in compilations if "prefill" in n or "decode" in n}


def test_a_program_is_compiled_once_for_fresh_and_for_returned_arrays(compilations):
    """The cache and state of a first call are new, those of a second come from the first."""
    config = shallow("12b-tiny").replace(num_hidden_layers=1, layer_types=())
    runner = random_runner(config)
    before = compiled_programs()
    limits = dataclasses.replace(LIMITS, max_rows=2, prefill_tokens=32)
    for _ in range(2):
        complete(
            runner, [sequence(range(3, 23), steps=12), sequence(range(5, 30), steps=12)], limits
        )
    assert compilations["jit(prefill)"] == compilations["jit(decode)"] == 1
    assert compiled_programs() - before == 2


# --- planning ----------------------------------------------------------------------------------


@pytest.mark.fast
def test_batches_hold_similar_lengths_and_keep_within_rows(e2b):
    sequences = [sequence(range(n), steps=4) for n in (3, 90, 5, 80, 4, 70, 6)]
    limits = dataclasses.replace(LIMITS, max_rows=3)
    batches = split_batches(e2b, sequences, limits)
    assert [[len(s.prompt_token_ids) for s in b] for b in batches] == [[90, 80, 70], [6, 5, 4], [3]]


@pytest.mark.fast
def test_batches_keep_within_the_cache_memory(e2b):
    sequences = [sequence(range(60), steps=4) for _ in range(8)]
    layout, _ = plan(e2b, sequences[:4], LIMITS)
    tight = dataclasses.replace(LIMITS, cache_bytes=cache_bytes(e2b.config, layout, 4))
    assert [len(b) for b in split_batches(e2b, sequences, tight)] == [4, 4]
    assert split_batches(e2b, sequences[:1], dataclasses.replace(tight, cache_bytes=1)) == [
        sequences[:1]
    ]


@pytest.mark.fast
def test_padding_of_the_rows_does_not_exceed_the_cache_memory(e2b):
    sequences = [sequence(range(60), steps=4) for _ in range(8)]
    layout, _ = plan(e2b, sequences[:1], LIMITS)
    five_rows = dataclasses.replace(LIMITS, cache_bytes=5 * cache_bytes(e2b.config, layout, 4))
    for batch in split_batches(e2b, sequences, five_rows):
        layout, _ = plan(e2b, batch, five_rows)
        assert cache_bytes(e2b.config, layout, 4) <= five_rows.cache_bytes


@pytest.mark.fast
def test_little_score_memory_shortens_chunks_to_declared_lengths(e2b, monkeypatch):
    monkeypatch.setattr(generate, "MAX_CHUNK", 1056)
    monkeypatch.setattr(generate, "MAX_SCORE_BYTES", 1)
    limits = dataclasses.replace(LIMITS, prefill_tokens=1056, max_len=4096)
    _, (group,) = plan(e2b, [sequence(range(2000), steps=4)], limits)
    assert group.chunk == 256


def test_score_takes_a_chunk_that_is_no_multiple_of_its_block(monkeypatch):
    monkeypatch.setattr(generate, "MAX_CHUNK", 96)
    runner = random_runner(shallow("12b-tiny").replace(num_hidden_layers=1, layer_types=()))
    ids = prompts()[4] * 2
    scored = [
        score_tokens(runner, ids, dataclasses.replace(LIMITS, prefill_tokens=n), 1)
        for n in (96, 32)
    ]
    values = [[x.sampled for x in s] for s in scored]
    np.testing.assert_allclose(*values, atol=TOLERANCE)


@pytest.mark.fast
def test_a_plan_uses_declared_sizes_only(e2b):
    for count, longest in ((1, 10), (3, 40), (7, 200)):
        layout, groups = plan(e2b, [sequence(range(longest), steps=9)] * count, LIMITS)
        assert isinstance(layout, CacheLayout)
        assert layout.num_rows in row_buckets(8)
        assert layout.full_slots >= longest + 9
        assert [i for g in groups for i in g.rows] == list(range(count))
        assert all(g.chunk * g.chunks >= longest for g in groups)
        assert all(g.chunk * len(g.rows) <= LIMITS.prefill_tokens for g in groups)


@pytest.mark.fast
def test_a_score_of_one_token_is_empty(e2b):
    assert score_tokens(e2b, [5], LIMITS, 1) == []
    assert F32 == e2b.numerics
