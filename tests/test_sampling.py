"""Sampling on the device: filters against numpy, seeds that do not depend on the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_jax import sampling
from gemma_jax.batch_arrays import (
    CANDIDATE_BUCKETS,
    PromptPart,
    prompt_chunk,
    sampling_statics,
    sampling_table,
)
from gemma_jax.kernels import Kernels
from gemma_jax.sampling import (
    FUSED_STOP_IDS,
    NO_ID,
    RowState,
    SamplingStatics,
    advance,
    sample,
    token_logprobs,
)
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.sequence import Sequence

pytestmark = pytest.mark.fast

V = 96
run = jax.jit(sample, static_argnums=3)


def sequence(seed=0, prompt=(3, 4), eos=(1,), **params):
    params = SamplingParams(**params)
    key = np.array([seed, 17], np.uint32)
    return Sequence(list(prompt), params, 0, key, params.max_tokens or 16, eos)


def row_state(sequences, rows, vocab_size, penalties):
    """The state of rows whose prompts have just been read; rows past them have finished."""
    finished = np.arange(rows) >= len(sequences)
    zeros = np.zeros(rows, np.int32)
    state = RowState(zeros, zeros.copy(), zeros.copy(), finished)
    if penalties:
        parts = [whole(s, slot) for slot, s in enumerate(sequences)]
        chunk = prompt_chunk(parts, rows, 64, rows, vocab_size)
        state.prompt_seen, state.output_counts = chunk.prompt_seen, chunk.output_counts
    return state


def whole(sequence, slot):
    tokens = sequence.prompt_token_ids + sequence.token_ids
    return PromptPart(sequence, tokens, slot, 0, len(tokens), True)


def draw(logits, sequences, *, rows=None, suppressed=(), count=0, counts=None, statics=None):
    """The next token of every sequence: a list of ids."""
    rows = rows or len(sequences)
    statics = statics or sampling_statics(sequences, V)
    state = row_state(sequences, rows, V, statics.penalties)
    state.count[:] = count
    if counts is not None:
        state.output_counts[: len(counts)] = counts
    padded = np.zeros((rows, V), np.float32)
    padded[: len(sequences)] = logits
    tokens = run(jnp.asarray(padded), sampling_table(sequences, rows, suppressed), state, statics)
    return np.asarray(tokens)[: len(sequences)].tolist()


def random_logits(rows=1, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32)


# --- greedy, bias, penalties -------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_the_largest():
    logits = np.zeros((2, V), np.float32)
    logits[0, [7, 40, 90]] = 29.875
    logits[1, 95] = 1
    assert draw(logits, [sequence(temperature=0)] * 2) == [7, 95]


def test_greedy_and_sampled_rows_share_a_batch():
    logits = np.repeat(random_logits(), 2, 0)
    greedy, _ = draw(logits, [sequence(temperature=0), sequence(temperature=2.0)])
    assert greedy == int(logits[0].argmax())


def test_logit_bias_moves_the_choice_and_minus_infinity_suppresses():
    logits = random_logits()
    best, second = np.argsort(-logits[0])[:2].tolist()
    assert draw(logits, [sequence(temperature=0, logit_bias={5: 100})]) == [5]
    assert draw(logits, [sequence(temperature=0)], suppressed=(best,)) == [second]
    sampled = [sequence(seed=i, temperature=1.0) for i in range(200)]
    tokens = draw(np.repeat(logits, 200, 0), sampled, suppressed=(best, second))
    assert not {best, second} & set(tokens)


def test_suppression_wins_over_a_bias_on_the_same_id():
    assert draw(
        random_logits(), [sequence(temperature=0, logit_bias={5: 100})], suppressed=(5,)
    ) != [5]


@pytest.mark.parametrize("others", [0, FUSED_STOP_IDS], ids=["compared", "scattered"])
def test_no_stop_id_is_drawn_before_min_tokens(others):
    logits = np.zeros((1, V), np.float32)
    logits[0, [1, 60, 7]] = [9, 8, 7]
    stop_ids = (60, *range(70, 70 + others))
    row = sequence(temperature=0, min_tokens=3, stop_token_ids=stop_ids)
    assert draw(logits, [row], count=2) == [7]
    assert draw(logits, [row], count=3) == [1]


def test_penalties_are_those_of_the_formula():
    logits = random_logits(seed=3)
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    counts = np.zeros((1, V), np.int32)
    counts[0, [10, 11]] = [3, 1]
    row = sequence(temperature=0, prompt=(20, 21), **params)
    expected = logits[0].copy()
    for i in (10, 11, 20, 21):
        expected[i] = expected[i] / 1.5 if expected[i] > 0 else expected[i] * 1.5
    expected -= 0.4 * counts[0] + 0.7 * (counts[0] > 0)
    # Each id in turn is lifted to just above and just below the rest.
    for i in (10, 11, 20, 50):
        gap = float(np.delete(expected, i).max() - expected[i])
        for nudge, wins in ((1e-3, True), (-1e-3, False)):
            # A bias comes before the penalties, so it is scaled by the repetition penalty too.
            lifted = logits.copy()
            target = expected[i] + gap + nudge + 0.4 * counts[0, i] + 0.7 * (counts[0, i] > 0)
            seen = i in (10, 11, 20)
            lifted[0, i] = (target * 1.5 if target > 0 else target / 1.5) if seen else target
            assert (draw(lifted, [row], counts=counts) == [i]) == wins


def test_a_batch_mate_with_penalties_changes_nothing():
    logits = np.repeat(random_logits(seed=4), 2, 0)
    plain = sequence(seed=9, temperature=1.0, top_k=20)
    alone = draw(logits[:1], [plain])
    mate = sequence(temperature=0, presence_penalty=2.0, prompt=(5,))
    assert draw(logits, [plain, mate])[:1] == alone


# --- filters -----------------------------------------------------------------------------------


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict:
    """id → probability after min_p, top_k and top_p, in float64."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    order = [i for i in order if p[i] >= min_p * p.max()]
    order = order[:top_k] if top_k > 0 else order
    total, kept, mass = sum(p[i] for i in order), [], 0.0
    for i in order:
        if mass < top_p * total or not kept:
            kept.append(i)
        mass += p[i]
    total = sum(p[i] for i in kept)
    return {int(i): p[i] / total for i in kept}


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-6},
]
DRAWS = 4096


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(params):
    logits = random_logits(seed=8)
    rows = [sequence(seed=i, **params) for i in range(DRAWS)]
    tokens = draw(np.repeat(logits, DRAWS, 0), rows)
    expected = allowed(logits[0], **params)
    assert set(tokens) <= set(expected)
    observed = np.bincount(tokens, minlength=V)
    likely = [i for i, p in expected.items() if p * DRAWS >= 8]
    chi2 = sum((observed[i] - expected[i] * DRAWS) ** 2 / (expected[i] * DRAWS) for i in likely)
    # Mean n, standard deviation sqrt(2 n): five deviations above.
    assert chi2 < len(likely) + 5 * np.sqrt(2 * len(likely)) + 5


def test_filters_of_one_row_leave_the_others_alone():
    logits = np.repeat(random_logits(seed=8), 3 * 300, 0)
    kinds = [{"top_k": 3}, {"top_p": 0.3}, {}]
    rows = [sequence(seed=i, **kinds[i % 3]) for i in range(900)]
    tokens = draw(logits, rows)
    for kind, params in enumerate(kinds):
        expected = allowed(logits[0], **params)
        assert set(tokens[kind::3]) <= set(expected)
    assert len(set(tokens[2::3])) > 20


# --- seeds -------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_token_in_any_row_and_batch_size():
    logits = random_logits(4, seed=5)
    mine = sequence(seed=42, temperature=1.3, top_k=40, top_p=0.95)
    others = [sequence(seed=i, temperature=0.9, top_k=7) for i in range(3)]
    for count in range(5):
        alone = draw(logits[:1], [mine], count=count)
        mixed = draw(logits[[1, 2, 0, 3]], [*others[:2], mine, others[2]], rows=8, count=count)
        assert mixed[2] == alone[0]


@pytest.mark.parametrize("mate", [{}, {"top_k": 90}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_the_parameters_of_batch_mates_change_no_draw(mate):
    logits = np.repeat(random_logits(seed=6), 2, 0)
    for seed in range(20):
        for mine in (sequence(seed, temperature=1.5, top_k=40), sequence(seed, temperature=1.5)):
            assert draw(logits, [mine, sequence(**mate)])[0] == draw(logits[:1], [mine])[0]


def test_the_candidates_bucket_changes_no_draw():
    logits = random_logits(64, seed=6)
    rows = [sequence(seed=i, temperature=1.5, top_k=10, top_p=0.9) for i in range(64)]
    results = [
        draw(logits, rows, statics=SamplingStatics(greedy=False, candidates=n)) for n in (16, 64, 0)
    ]
    assert results[0] == results[1] == results[2]


WIDE = 200  # ids, more than the few candidates


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20), levels=st.integers(1, 6), top_k=st.integers(1, 64),
    eighths=st.integers(1, 8), min_p=st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_in_batch_invariant_mode_a_neighbour_that_sorts_all_changes_no_draw(
    seed, levels, top_k, eighths, min_p
):
    """Few levels tie often, and their sums meet top_p exactly."""
    rng = np.random.default_rng(seed)
    logits = np.log2(rng.integers(1, levels + 1, (16, WIDE))).astype(np.float32)
    asked = {"temperature": 1.0, "top_k": top_k, "top_p": eighths / 8, "min_p": min_p}
    mine = [sequence(i, **asked) for i in range(15)]
    results = []
    for last, candidates in (({"top_k": 1}, 64), ({"top_k": 65}, 0), ({}, 0), ({"top_p": 0.9}, 0)):
        rows = [*mine, sequence(99, **{"temperature": 1.0} | last)]
        statics = sampling_statics(rows, WIDE, batch_invariant=True)
        assert statics.candidates == candidates
        table, state = sampling_table(rows, 16, ()), row_state(rows, 16, WIDE, False)
        results.append(np.asarray(run(jnp.asarray(logits), table, state, statics))[:15].tolist())
    assert results[1:] == results[:1] * 3


def test_the_few_candidates_are_filtered_to_the_same_bits_among_all():
    """Each top_p is a sum of probabilities: one other bit of it keeps another candidate."""
    rng = np.random.default_rng(0)
    kept = -np.sort(-rng.normal(0, 1, (16, WIDE)).astype(np.float32))
    first = jax.nn.softmax(jnp.asarray(kept[:, :64]))
    sums = np.asarray(jnp.cumsum(first, axis=1) - first)[np.arange(16), np.arange(16, 32)]
    rows = [sequence(i, top_k=64 - 49 * (i % 2), top_p=float(p)) for i, p in enumerate(sums)]
    alike = jax.jit(sampling._filter_alike)
    table = sampling_table(rows, 16, ())
    few, every = alike(jnp.asarray(kept[:, :64]), table), alike(jnp.asarray(kept), table)
    np.testing.assert_array_equal(every[:, :64], few)
    assert not np.isfinite(every[:, 64:]).any()
    assert np.isfinite(few).sum(1).min() > 1


def test_seeds_and_steps_give_different_draws():
    logits = np.zeros((1, V), np.float32)
    by_seed = [draw(logits, [sequence(seed=i)])[0] for i in range(12)]
    by_step = [draw(logits, [sequence()], count=i)[0] for i in range(12)]
    assert len(set(by_seed)) > 6
    assert len(set(by_step)) > 6


# --- progress, log-probabilities ---------------------------------------------------------------


def test_a_row_finishes_at_a_stop_id_or_its_limit_and_then_stays():
    rows = [sequence(max_tokens=5), sequence(max_tokens=1), sequence(max_tokens=5), sequence()]
    table = sampling_table(rows, 4, ())
    state = row_state(rows, 4, V, penalties=False)
    state.finished[3] = True
    tokens = jnp.asarray([7, 8, 1, 9], jnp.int32)
    after = advance(state, table, tokens, ~jnp.asarray(state.finished))
    assert after.finished.tolist() == [False, True, True, True]
    assert after.count.tolist() == [1, 1, 1, 0]
    assert after.token.tolist() == [7, 8, 1, 0]


def test_only_active_rows_count_their_tokens():
    rows = [sequence(presence_penalty=1.0)] * 2
    state = jax.tree.map(jnp.asarray, row_state(rows, 2, V, penalties=True))
    active = jnp.asarray([True, False])
    after = advance(state, sampling_table(rows, 2, ()), jnp.asarray([7, 8], jnp.int32), active)
    assert np.flatnonzero(after.output_counts[0]).tolist() == [7]
    assert not np.asarray(after.output_counts[1]).any()


def test_logprobs_are_raw_and_ranked_with_ties_to_the_lower_id():
    logits = random_logits(2, seed=9)
    logits[0, [4, 9]] = 20.0
    tokens = jnp.asarray([9, int(np.argsort(-logits[1])[6])], jnp.int32)
    got = token_logprobs(jnp.asarray(logits), tokens, 5)
    x = logits.astype(np.float64)
    exact = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.top, -np.sort(-exact, -1)[:, :5], atol=1e-5)
    np.testing.assert_allclose(got.sampled, [exact[0, 9], exact[1, tokens[1]]], atol=1e-5)
    assert got.top_ids[0, :2].tolist() == [4, 9]
    assert got.rank.tolist() == [1, 7]


# --- arrays of a batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"temperature": 0.0}], SamplingStatics(greedy=True)),
        ([{"temperature": 0.0, "top_k": 3}], SamplingStatics(greedy=True)),
        ([{}], SamplingStatics(greedy=False)),
        ([{"top_k": 5}], SamplingStatics(greedy=False, candidates=64)),
        ([{"top_k": 5}, {"top_k": 80}], SamplingStatics(greedy=False, candidates=0)),
        ([{"top_k": 5}, {}], SamplingStatics(greedy=False, candidates=0)),
        ([{"top_p": 0.9}], SamplingStatics(greedy=False, candidates=0)),
        ([{"temperature": 0.0, "logprobs": 3}], SamplingStatics(greedy=True, logprobs=5)),
        (
            [{"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 0.1}],
            SamplingStatics(greedy=True, penalties=True),
        ),
    ],
    ids=str,
)
def test_statics_are_the_least_that_the_batch_needs(rows, expected):
    assert sampling_statics([sequence(**row) for row in rows], V) == expected


def test_a_large_vocabulary_is_sorted_partially():
    rows = [sequence(top_k=CANDIDATE_BUCKETS[-1])]
    assert sampling_statics(rows, 262_144).candidates == 1024
    rows = [sequence(top_k=CANDIDATE_BUCKETS[-1] + 1)]
    assert sampling_statics(rows, 262_144).candidates == 0


def test_padding_ids_match_nothing():
    rows = [sequence(stop_token_ids=(7, 8), logit_bias={3: 1.5})]
    table = sampling_table(rows, 4, suppressed=(9,))
    assert table.stop_ids[0].tolist() == [1, 7, 8, NO_ID]
    assert (table.stop_ids[1:] == NO_ID).all()
    assert table.bias_ids[0].tolist() == [3, 9, NO_ID, NO_ID]
    assert table.bias_values[0].tolist() == [1.5, -np.inf, 0, 0]


def test_a_chunk_is_right_padded_and_names_its_slots():
    rows = [sequence(prompt=p) for p in ([5, 6, 7], [8], [9, 10, 11, 12])]
    rows[2].token_ids += [13]
    parts = [
        PromptPart(rows[0], [5, 6, 7], 4, 0, 2, ends=False),
        PromptPart(rows[1], [8], 0, 0, 1, ends=True),
        PromptPart(rows[2], [9, 10, 11, 12, 13], 2, 3, 2, ends=True),
    ]
    chunk = prompt_chunk(parts, 4, 2, 8, None)
    assert chunk.ids.tolist() == [[5, 6], [8, 0], [12, 13], [0, 0]]
    assert chunk.start.tolist() == [0, 0, 3, 0]
    assert chunk.lengths.tolist() == [2, 1, 2, 0]
    assert chunk.ends.tolist() == [False, True, True, False]
    assert chunk.rows.tolist() == [4, 0, 2, 8]
    assert chunk.counts.tolist() == [0, 0, 1, 0]
    counted = prompt_chunk(parts, 4, 2, 8, V)
    assert np.flatnonzero(counted.prompt_seen[2]).tolist() == [9, 10, 11, 12]
    assert np.flatnonzero(counted.output_counts[2]).tolist() == [13]
    assert not counted.prompt_seen[0].any()


def test_tables_are_plain_arrays_of_the_declared_dtypes():
    table = sampling_table([sequence()], 2, ())
    kinds = {f.name: getattr(table, f.name).dtype.name for f in dataclasses.fields(table)}
    assert {kinds[n] for n in ("temperature", "top_p", "min_p", "bias_values")} == {"float32"}
    assert {kinds[n] for n in ("top_k", "stop_ids", "max_tokens")} == {"int32"}
    assert kinds["key"] == "uint32"


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_two_passes_for_candidates_draw_the_same_tokens(implementation):
    rows = [sequence(temperature=0.8, top_k=8, top_p=0.9, seed=i) for i in range(9)]
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (9, 700)), jnp.float32)
    logits = logits.at[:, 5:300].set(-jnp.inf)
    statics, table = sampling_statics(rows, 700), sampling_table(rows, 9, ())
    state = row_state(rows, 9, 700, False)
    assert statics.candidates == 64
    want = sample(logits, table, state, statics, Kernels("reference"))
    kernels = Kernels.parse({"top_candidates": implementation})
    np.testing.assert_array_equal(sample(logits, table, state, statics, kernels), want)
    assert len(set(want.tolist())) > 1
