"""The engine: one answer whatever the batch, the slot, the chunks, the steps and the pages."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from engine_helpers import NO_TOKEN, complete, make_engine, request
from model_helpers import random_runner, shallow

from gemma_jax.errors import CapacityError, RequestError, UnsupportedError
from gemma_jax.model import context
from gemma_jax.model.cache import CacheLayout, page_bytes
from gemma_jax.numerics import Numerics
from gemma_jax.program import make_program
from gemma_jax.runner import compiled_programs, prefill
from gemma_jax.sampling import SamplingStatics
from gemma_jax.score import score_tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = [
    "e2b-tiny",
    pytest.param("e4b-tiny", marks=pytest.mark.slow),
    pytest.param("12b-tiny", marks=pytest.mark.slow),
    "26b-a4b-tiny",
    pytest.param("31b-tiny", marks=pytest.mark.slow),
]
W = 24
LENGTHS = (1, W - 1, W, W + 1, 2 * W + 3)
STEPS = 40
TOLERANCE = 2e-4


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, n).tolist() for n in LENGTHS]


def requests(seed=0, **settings):
    return [request(p, name=f"{seed}-{i}", **settings) for i, p in enumerate(prompts(seed))]


def tokens(outputs):
    return [c.token_ids for output in outputs for c in output.outputs]


def assert_same(outputs, expected):
    """Equal tokens, and log-probabilities within the tolerance of float32 sums."""
    assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        values = [
            [row[t].logprob for t, row in zip(c.token_ids, c.logprobs, strict=True)]
            for c in (output.outputs[0], other.outputs[0])
        ]
        np.testing.assert_allclose(*values, atol=TOLERANCE)


@pytest.fixture(scope="module")
def e2b():
    return random_runner(shallow("e2b-tiny"))


@pytest.fixture(scope="module")
def expected(e2b):
    return complete(make_engine(e2b), requests())


# --- prefill + decode = one forward ------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_and_decode_steps_give_what_one_forward_over_all_rows_gives(name, request):
    if name == "e2b-tiny":
        runner, results = request.getfixturevalue("e2b"), request.getfixturevalue("expected")
    else:
        runner = random_runner(shallow(name))
        results = complete(
            make_engine(runner, max_num_batched_tokens=32, max_num_seqs=8), requests()
        )
    for result in results:
        (output,) = result.outputs
        assert len(output.token_ids) == STEPS
        assert len(set(output.token_ids)) > STEPS // 3
        sequence = result.prompt_token_ids + output.token_ids
        whole = score_tokens(runner, sequence, max_chunk=128, page_size=32, k=1)
        decoded = [x[t].logprob for t, x in zip(output.token_ids, output.logprobs, strict=True)]
        forward = [x.sampled for x in whole[-STEPS:]]
        np.testing.assert_allclose(decoded, forward, atol=TOLERANCE)


# --- one answer --------------------------------------------------------------------------------


def test_other_requests_and_other_slots_change_nothing(e2b, expected):
    order = [3, 0, 4, 2, 1]
    shuffled = complete(make_engine(e2b), [requests()[i] for i in order])
    assert_same(shuffled, [expected[i] for i in order])
    mixed = requests(seed=1)
    mixed[2] = requests()[2]
    assert_same([complete(make_engine(e2b), mixed)[2]], [expected[2]])


def test_alone_gives_what_the_batch_gives(e2b, expected):
    assert_same(complete(make_engine(e2b), [requests()[3]]), [expected[3]])


def test_a_request_that_joins_while_others_decode_gets_what_it_gets_alone(e2b, expected):
    late = {1: requests()[1], 3: requests()[3]}
    engine = make_engine(e2b, max_num_seqs=2)
    outputs = complete(engine, [requests()[4], *late.values(), requests()[0]])
    assert_same(outputs, [expected[i] for i in (4, 1, 3, 0)])


def test_a_row_alone_gathers_the_experts_that_its_batch_scans():
    runner = random_runner(shallow("26b-a4b-tiny"))
    batch = complete(make_engine(runner), requests())
    assert_same(complete(make_engine(runner), [requests()[3]]), [batch[3]])


def test_fast_prefill_changes_no_result(e2b, expected):
    plain = random_runner(shallow("e2b-tiny"), fast_prefill=False)
    assert_same(complete(make_engine(plain), requests()), expected)


@pytest.mark.parametrize(("chunk", "steps"), [(16, 1), (64, 16)])
def test_chunk_sizes_and_steps_a_call_change_no_result(e2b, expected, chunk, steps):
    engine = make_engine(
        e2b, max_num_batched_tokens=chunk, mixed_batched_tokens=chunk, decode_steps=steps
    )
    assert_same(complete(engine, requests()), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "steps"), [(16, 16), (32, 1), (64, 7), (128, 2), (256, 4), (512, 16)]
)
def test_chunks_up_to_the_longest_prompt_change_no_result(e2b, chunk, steps):
    rng = np.random.default_rng(2)
    long = [rng.integers(3, 256, n).tolist() for n in (300, 17, 511)]
    asked = [request(p, 20, name=str(i)) for i, p in enumerate(long)]
    reference = complete(make_engine(e2b, max_len=640, max_num_batched_tokens=512), asked)
    engine = make_engine(
        e2b, max_len=640, max_num_batched_tokens=chunk, mixed_batched_tokens=chunk,
        decode_steps=steps,
    )  # fmt: skip
    assert_same(complete(engine, asked), reference)


def test_vllm_order_of_a_wrapped_window_reads_the_same_keys(expected):
    # In float32 the roundings vanish, and what remains is where the keys are read.
    runner = random_runner(shallow("e2b-tiny"), Numerics("float32", "vllm"))
    assert_same(complete(make_engine(runner, rounding="vllm"), requests()), expected)


# --- pages -------------------------------------------------------------------------------------


def memory_for(runner, full, window, page=32):
    bytes_of = page_bytes(runner.config, page, 4)
    return full * bytes_of[0] + window * bytes_of[1]


def test_preempted_requests_give_the_same_tokens(e2b, expected):
    # Room for the longest alone and little more: 91 tokens are three pages.
    engine = make_engine(e2b, memory=memory_for(e2b, 5, 5), prefix_caching=False)
    assert_same(complete(engine, requests()), expected)
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_usage == 0


def test_penalties_count_again_after_a_preemption(e2b):
    asked = requests(presence_penalty=1.5, repetition_penalty=1.3, logit_bias={5: 2.0})
    reference = complete(make_engine(e2b), asked)
    engine = make_engine(e2b, memory=memory_for(e2b, 5, 5), prefix_caching=False)
    assert_same(complete(engine, asked), reference)
    assert engine.stats().preemptions > 0
    assert tokens(reference) != tokens(complete(make_engine(e2b), requests()))


def test_a_prefix_hit_gives_the_same_tokens_and_is_reported(e2b):
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 256, 70).tolist()
    asked = [request([*shared, *tail], name=str(i)) for i, tail in enumerate([[9], [8, 7, 6]])]
    cold = make_engine(e2b, prefix_caching=False)
    reference = [complete(cold, [one])[0] for one in asked]
    assert [r.num_cached_tokens for r in reference] == [0, 0]
    warm = make_engine(e2b)
    outputs = [complete(warm, [one])[0] for one in asked]
    assert_same(outputs, reference)
    assert [o.num_cached_tokens for o in outputs] == [0, 64]
    assert warm.stats().prefix_hit_tokens == 64
    again = complete(warm, [dataclasses.replace(asked[1], request_id="again")])
    assert_same(again, [reference[1]])
    assert again[0].num_cached_tokens == 64


def test_a_conversation_finds_its_own_answer_in_the_cache(e2b):
    engine = make_engine(e2b)
    (first,) = complete(engine, [request(prompts()[4], name="turn 1")])
    history = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = complete(engine, [request([*history, 4, 5], 20, name="turn 2")])
    assert second.num_cached_tokens == 64
    (alone,) = complete(make_engine(e2b), [request([*history, 4, 5], 20, name="turn 2")])
    assert_same([second], [alone])


def test_completions_of_one_request_differ_and_share_its_prompt(e2b):
    prompt = np.random.default_rng(6).integers(3, 256, 70).tolist()
    engine = make_engine(e2b)
    (output,) = complete(engine, [request(prompt, n=3)])
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert engine.stats().prefix_hit_tokens == 2 * 64


# --- prompt logprobs ---------------------------------------------------------------------------


def reported(output):
    """The log-probability of each prompt token after the first."""
    first, *rest = output.prompt_logprobs
    assert first is None
    return [p[t].logprob for t, p in zip(output.prompt_token_ids[1:], rest, strict=True)]


def test_prompts_are_scored_while_others_run_and_change_no_result(e2b, expected):
    longest = prompts()[-1]
    asked = [*requests(), request(longest, 3, "scored", n=2, prompt_logprobs=2)]
    asked += [request(p, 0, f"alone {i}", prompt_logprobs=0) for i, p in enumerate(prompts())]
    outputs = complete(make_engine(e2b), asked)
    assert_same(outputs[: len(expected)], expected)
    scored, *alone = outputs[len(expected) :]
    whole = score_tokens(e2b, longest, max_chunk=32, page_size=32, k=2)
    np.testing.assert_allclose(reported(scored), [x.sampled for x in whole], atol=TOLERANCE)
    assert all(2 <= len(position) <= 3 for position in scored.prompt_logprobs[1:])
    assert [len(c.token_ids) for c in scored.outputs] == [3, 3]
    for output in alone:
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    np.testing.assert_allclose(reported(alone[-1]), reported(scored), atol=TOLERANCE)


def test_the_logprobs_of_a_prompt_come_before_its_tokens(e2b):
    engine = make_engine(e2b, max_num_batched_tokens=16)
    engine.add(request(prompts()[-1], 4, prompt_logprobs=0))
    deltas = [delta for _ in range(100) if engine.has_work for delta in engine.step()]
    assert [delta.prompt_logprobs is not None for delta in deltas[:2]] == [True, False]
    assert deltas[0].token_ids == []
    assert sum(len(delta.token_ids) for delta in deltas) == 4
    assert not engine.has_work


def test_an_aborted_request_is_scored_no_further(e2b):
    engine = make_engine(e2b, max_num_batched_tokens=16)
    for steps in (0, 4):
        engine.add(request(prompts()[-1], steps, "x", prompt_logprobs=0))
        assert engine.stats().running + engine.stats().waiting == 1
        engine.step()
        engine.abort("x")
        assert not engine.has_work
    (output,) = complete(engine, [request(prompts()[1], 0, "x", prompt_logprobs=0)])
    assert len(output.prompt_logprobs) == len(prompts()[1])


def test_the_device_idles_only_while_there_is_work(e2b, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("gemma_jax.serve.engine.time.monotonic", lambda: next(clock))
    engine = make_engine(e2b)
    engine.add(request(prompts()[1], 2, "aborted"))
    engine.abort("aborted")
    complete(engine, [request(prompts()[1][:1], 0, "nothing to run", prompt_logprobs=0)])
    for _ in range(100):
        next(clock)  # nobody waits for anything
    (output,) = complete(engine, [request(prompts()[1], 2, "served")])
    assert len(output.outputs[0].token_ids) == 2
    assert 0 < engine.stats().idle_seconds < 100


def test_prompts_that_wait_to_be_scored_fill_the_queue(e2b):
    engine = make_engine(e2b, max_queue=2)
    for i in range(2):
        engine.add(request(prompts()[1], 0, f"waits {i}", prompt_logprobs=0))
    with pytest.raises(CapacityError, match=r"2 prompts wait to be scored, max_queue=2"):
        engine.add(request(prompts()[1], 0, "too many", prompt_logprobs=0))
    while engine.has_work:
        engine.step()
    engine.add(request(prompts()[1], 0, "later", prompt_logprobs=0))


def test_a_prompt_of_which_nothing_is_asked_ends_without_a_device_call(e2b):
    engine = make_engine(e2b)
    (output,) = complete(engine, [request([5, 6], 0, n=2)])
    assert [c.finish_reason for c in output.outputs] == ["length"] * 2
    assert output.prompt_logprobs is None
    assert engine.stats().device_calls == 0


# --- ends --------------------------------------------------------------------------------------


def test_rows_stop_by_themselves_at_eos_and_at_their_limit(e2b, expected):
    streams = tokens(expected)
    eos = streams[1][5]
    asked = requests(eos=(eos,))
    asked[3] = request(prompts()[3], 3, eos=(eos,))
    outputs = complete(make_engine(e2b), asked)
    for row, (output,) in enumerate(o.outputs for o in outputs):
        stream = streams[row][: 3 if row == 3 else STEPS]
        end = stream.index(eos) + 1 if eos in stream else len(stream)
        assert output.token_ids == stream[:end]
        assert output.finish_reason == ("stop" if eos in stream else "length")
    assert outputs[1].outputs[0].token_ids[-1] == eos
    assert outputs[3].outputs[0].finish_reason == "length"


def test_an_aborted_request_frees_its_pages_at_once_and_says_no_more(e2b, expected):
    engine, seen = make_engine(e2b), Counter()
    for one in requests():
        engine.add(one)
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id != "0-4" or not seen["aborted"]
            seen[delta.request_id] += len(delta.token_ids)
        if seen["0-4"] and not seen["aborted"]:
            used = engine.stats().kv_usage
            engine.abort("0-4")
            assert engine.stats().kv_usage < used
            seen["aborted"] = 1
    assert seen["0-4"] < STEPS
    assert [seen[f"0-{i}"] for i in range(4)] == [STEPS] * 4
    assert engine.stats().running == engine.stats().kv_usage == 0
    engine.abort("nobody")
    assert_same(complete(engine, requests()), expected)


def test_impossible_requests_are_refused_and_others_run(e2b, expected):
    engine = make_engine(e2b, memory=memory_for(e2b, 3, 3), max_queue=2)
    with pytest.raises(CapacityError, match="lower max_tokens"):
        engine.add(request(range(3, 100), 28))
    engine.add(requests()[0])
    with pytest.raises(RequestError, match="request_id='0-0'"):
        engine.add(requests()[0])
    engine.add(requests()[1])
    with pytest.raises(CapacityError, match="queue is full"):
        engine.add(requests()[2])
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        engine.add(dataclasses.replace(requests()[3], grammar="{}"))
    engine.abort("0-0")
    engine.abort("0-1")
    assert_same(complete(engine, [requests()[2]]), [expected[2]])


# --- programs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "splits"), [("12b-tiny", {False}), ("e2b-tiny", {False, True})])
def test_only_shared_layers_of_a_fast_prefill_split_their_keys_as_vllm(name, splits, monkeypatch):
    runner = random_runner(shallow(name), Numerics("bfloat16", "vllm"))
    calls, seen = [], set()

    def record(layout, cache, state, chunk, tables, table, statics, **_):
        calls.append((layout, (cache, state, chunk, tables, table)))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "prefill", record)
    engine = make_engine(runner, rounding="vllm")
    engine.add(request(prompts()[3], logprobs=None))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    ((layout, arguments),) = calls

    def attend(q, keys, positions, window, numerics, split_keys=False):
        seen.add(split_keys)
        return q

    monkeypatch.setattr(context, "attend", attend)
    program = make_program(runner.config, runner.numerics, layout)
    statics = SamplingStatics(greedy=False)
    jax.eval_shape(
        lambda *x: prefill(program, False, True, True, statics, *x), runner.leaves, *arguments
    )
    assert seen == splits


def test_cache_and_state_are_donated(e2b):
    engine = make_engine(e2b)
    engine.add(requests()[0])
    for _ in range(2):  # a prefill call and a decode call
        before = [*engine._cache.k, *engine._cache.v, engine._state.position]
        engine.step()
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


def test_a_mixed_workload_compiles_no_more_than_the_declared_sizes(e2b, compilations):
    def workload(engine, seed):
        rng = np.random.default_rng(seed)
        for size in (5, 1, 8, 3):
            lengths = rng.integers(1, 50, size)
            asked = [
                request(rng.integers(3, 256, n).tolist(), name=str(i))
                for i, n in enumerate(lengths)
            ]
            complete(engine, asked)

    engine = make_engine(e2b, decode_steps=4, max_num_batched_tokens=64)
    for seed in range(3):
        workload(engine, seed)
    before = compiled_programs()
    compilations.clear()
    workload(engine, 2)
    assert compiled_programs() == before
    assert not {n for n in compilations if "prefill" in n or "decode" in n}


def test_a_program_is_compiled_once_for_fresh_and_for_returned_arrays(compilations):
    """The cache and state of a first call are new, those of a second come from the first."""
    config = shallow("12b-tiny").replace(num_hidden_layers=1, layer_types=())
    runner = random_runner(config)
    before = compiled_programs()
    engine = make_engine(
        runner, max_num_seqs=2, max_num_batched_tokens=64, max_len=32, prefix_caching=False
    )
    for _ in range(2):
        complete(engine, [request(range(3, 23), 11, name="a"), request(range(5, 23), 11, name="b")])
    assert compilations["jit(prefill)"] == compilations["jit(decode)"] == 1
    assert compiled_programs() - before == 2


def test_score_takes_a_chunk_that_is_no_multiple_of_its_block(e2b):
    ids = prompts()[4] * 2
    scored = [score_tokens(e2b, ids, max_chunk=n, page_size=32, k=1) for n in (96, 32)]
    np.testing.assert_allclose(*[[x.sampled for x in s] for s in scored], atol=TOLERANCE)


@pytest.mark.fast
def test_a_score_of_one_token_is_empty(e2b):
    assert score_tokens(e2b, [5], max_chunk=32, page_size=32, k=1) == []


def test_layouts_are_static_and_equal_ones_are_one_program(e2b):
    layouts = [CacheLayout(4, 64, 64, 32) for _ in range(2)]
    programs = {id(make_program(e2b.config, e2b.numerics, layout)) for layout in layouts}
    assert len(programs) == 1
    assert NO_TOKEN >= e2b.config.vocab_size
