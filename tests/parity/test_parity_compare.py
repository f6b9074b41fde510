"""What a comparison says of flips: margins, classes, verdicts, free runs, rates and survival."""

import json
import math

import numpy as np
import pytest
from record_files import HEADER, TableModel, row, write

from gemma_jax.errors import RecordError
from gemma_jax.parity import bounds
from gemma_jax.parity.compare import compare
from gemma_jax.parity.flips import FLOAT32_LIMIT, FlipClass, margin_noise
from gemma_jax.parity.records import read_record
from gemma_jax.parity.summary import position_rows, result, text_table

PROMPT = [2, 3]
# Position 0 is sure, position 1 nearly tied, position 2 an exact tie.
TOP = [
    [[5, -0.1], [6, -2.6]],
    [[9, -0.7], [7, -0.75], [8, -3.0]],
    [[4, -0.7], [10, -0.7], [11, -5.0]],
]
FLOAT32_TOP = [TOP[0], [[7, -0.7], [9, -0.72], [8, -3.0]], [[10, -0.69], [4, -0.71], [11, -5.0]]]
FLOAT32 = HEADER | {"dtype": "float32"}


def record(tmp_path, top=TOP, header=HEADER, name="ref.jsonl"):
    tokens = [at[0][0] for at in TOP]
    return read_record(
        write(tmp_path / name, [row("a", PROMPT, top) | {"token_ids": tokens}], header)
    )


def model(*steps):
    """Loads a model that gives these candidates after 2, 3 and 4 tokens, whatever the dtype."""
    return lambda dtype: TableModel(
        lambda prefix: steps[len(prefix) - 2] if len(prefix) > 1 else []
    )


def by_dtype(bfloat16, float32):
    loaded = []

    def load(dtype):
        loaded.append(dtype)
        return model(*(float32 if dtype == "float32" else bfloat16))(dtype)

    return load, loaded


def swapped(at):
    (a, x), (b, y), *rest = TOP[at]
    return [*TOP[:at], [[b, x], [a, y], *rest], *TOP[at + 1 :]]


def test_equal_candidates_give_no_flip_and_no_difference(tmp_path):
    comparison = compare(record(tmp_path), model(*TOP), "bfloat16")
    assert comparison.flips == []
    assert not comparison.failed
    np.testing.assert_array_equal(comparison.positions.worst_delta, 0)
    assert comparison.positions.position.tolist() == [2, 3, 4]


def test_flip_above_the_noise_is_unexplained_and_says_where(tmp_path):
    comparison = compare(record(tmp_path), model(*swapped(0)), "bfloat16", noise=0.2)
    (flip,) = comparison.unexplained
    assert comparison.failed
    assert (flip.id, flip.position, flip.expected, flip.actual) == ("a", 2, 5, 6)
    assert flip.reference_margin == pytest.approx(2.5)
    assert "prompt 'a', position 2" in str(flip)


@pytest.mark.parametrize(
    ("noise", "kind"), [(0.06, FlipClass.NOISE), (0.04, FlipClass.UNEXPLAINED)]
)
def test_flip_is_noise_up_to_the_limit(tmp_path, noise, kind):
    (flip,) = compare(record(tmp_path), model(*swapped(1)), "bfloat16", noise=noise).flips
    assert flip.kind == kind


def test_tie_of_the_reference_is_a_tie_whatever_the_limit(tmp_path):
    tied = [*TOP[:2], [[10, -0.70001], [4, -0.70002], [11, -5.0]]]
    (flip,) = compare(record(tmp_path), model(*tied), "bfloat16").flips
    assert flip.kind == FlipClass.TIE


def test_sure_choice_against_a_tied_reference_is_unexplained(tmp_path):
    sure = [*TOP[:2], [[10, -0.1], [4, -2.5], [11, -5.0]]]
    (flip,) = compare(record(tmp_path), model(*sure), "bfloat16", noise=0.2).flips
    assert flip.kind == FlipClass.UNEXPLAINED


def test_candidate_that_the_reference_does_not_list_is_unexplained(tmp_path):
    strange = [*TOP[:1], [[20, -0.7], [9, -0.7001]], TOP[2]]
    (flip,) = compare(record(tmp_path), model(*strange), "bfloat16", noise=9.0).flips
    assert (flip.kind, flip.reference_margin) == (FlipClass.UNEXPLAINED, math.inf)
    assert flip.as_json()["reference_margin"] is None


def test_float32_record_of_rounded_products_is_judged_by_its_exact_twin(tmp_path):
    rounded = record(tmp_path, TOP, FLOAT32, "tf32.jsonl")
    twin = record(tmp_path, FLOAT32_TOP, FLOAT32, "ieee.jsonl")
    (flip,) = compare(rounded, model(*swapped(1)), "float32").flips
    assert flip.kind == FlipClass.UNEXPLAINED
    comparison = compare(rounded, model(*swapped(1)), "float32", twin=twin)
    (flip,) = comparison.flips
    assert (flip.kind, flip.float32.agrees) == (FlipClass.NOISE, True)
    assert comparison.limit.nats == pytest.approx(0.07, rel=0.01)


def test_exact_twin_of_an_exact_record_leaves_the_limit_of_float32(tmp_path):
    exact = record(tmp_path, TOP, FLOAT32)
    assert compare(exact, model(*TOP), "float32", twin=exact).limit.nats == FLOAT32_LIMIT


def test_noise_needs_our_float32_run_to_agree_with_the_references(tmp_path):
    twin = record(tmp_path, FLOAT32_TOP, FLOAT32, "f32.jsonl")
    limit = margin_noise(record(tmp_path), twin)
    assert limit == pytest.approx(0.07, rel=0.01)  # 0.05 became -0.02
    for float32, kind in ((FLOAT32_TOP, FlipClass.NOISE), (TOP, FlipClass.UNEXPLAINED)):
        load, loaded = by_dtype(swapped(1), float32)
        comparison = compare(record(tmp_path), load, "bfloat16", twin=twin)
        assert comparison.limit.nats == pytest.approx(limit)
        (flip,) = comparison.flips
        assert (flip.kind, loaded) == (kind, ["bfloat16", "float32"])
        assert flip.float32.reference == 7


def test_without_a_float32_record_only_ties_are_explained(tmp_path):
    load, loaded = by_dtype(swapped(1), TOP)
    comparison = compare(record(tmp_path), load, "bfloat16")
    assert [flip.kind for flip in comparison.flips] == [FlipClass.UNEXPLAINED]
    assert "no float32 record" in comparison.limit.source
    assert loaded == ["bfloat16"]


def test_float32_runs_may_differ_within_a_ten_thousandth_of_a_nat(tmp_path):
    close = [[[5, -0.1], [6, -0.10005]], *TOP[1:]]
    far = [[[5, -0.1], [6, -0.1003]], *TOP[1:]]
    for top, failed in ((close, False), (far, True)):
        swap = [[[6, -0.1], [5, -0.10005]], *TOP[1:]]
        comparison = compare(record(tmp_path, top, FLOAT32), model(*swap), "float32")
        assert (len(comparison.flips), comparison.failed) == (1, failed)


def test_float32_choice_of_every_position_is_given_when_asked_for(tmp_path):
    load, _ = by_dtype(TOP, FLOAT32_TOP)
    comparison = compare(record(tmp_path), load, "bfloat16", float32_everywhere=True)
    assert comparison.positions.float32.tolist() == [5, 7, 10]
    (line,) = position_rows(comparison)
    assert (line["float32"], line["expected"], line["delta"]) == ([5, 7, 10], [5, 9, 4], [0, 0, 0])


def test_free_run_stops_at_the_first_divergence_and_classes_it(tmp_path):
    comparison = compare(
        record(tmp_path), model(*swapped(1)), "bfloat16", noise=0.01, free_run=True
    )
    free = comparison.free
    assert (free.agreed, free.whole, free.prefix_agreement) == ([1], 0, pytest.approx(1 / 3))
    assert [flip.kind for flip in free.flips] == [FlipClass.UNEXPLAINED]
    assert len(comparison.unexplained) == 2  # teacher-forced and free-running


def test_free_run_against_a_sampled_record_is_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", PROMPT, TOP) | {"token_ids": [6, 7, 10]}])
    with pytest.raises(RecordError, match="only 0 of 3 tokens are the engine's best"):
        compare(read_record(path), model(*TOP), "bfloat16", free_run=True)


def test_sequence_longer_than_the_context_is_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", [2] * 40, TOP)])
    with pytest.raises(RecordError, match=r"r\.jsonl, line 2, row 'a': 43 tokens, but the cont"):
        compare(read_record(path), model(*TOP), "bfloat16")


def test_result_is_strict_json_and_the_table_has_every_split(tmp_path):
    comparison = compare(record(tmp_path), model(*swapped(0)), "bfloat16", free_run=True)
    values = json.loads(json.dumps(result(comparison), allow_nan=False))
    assert values["classes"] == {"tie": 0, "noise": 0, "unexplained": 1}
    assert values["flips_rate"]["upper_95"] == pytest.approx(bounds.upper_bound(1, 3))
    assert values["splits"]["position"] == {"< 8": values["flips_rate"]}
    assert values["splits"]["batch"].keys() == {"4"}
    table = text_table(values)
    for words in ("33.3333%", "batch 4", "prompt length < 64", "position 2: the reference chooses"):
        assert words in table


# --- bounds -------------------------------------------------------------------------------------


def test_no_flip_in_n_tokens_bounds_the_rate_by_the_rule_of_three():
    assert bounds.upper_bound(0, 100_000) == pytest.approx(1 - 0.05 ** (1 / 100_000))
    assert bounds.upper_bound(0, 100_000) == pytest.approx(3 / 100_000, rel=0.01)


@pytest.mark.parametrize(("events", "trials"), [(1, 10), (5, 50), (26, 9830)])
def test_bound_is_where_so_few_events_have_five_per_cent(events, trials):
    from scipy.stats import binom

    bound = bounds.upper_bound(events, trials)
    assert bounds.lower_bound(events, trials) <= events / trials <= bound
    assert binom.cdf(events, trials, bound) == pytest.approx(0.05)


def test_bound_of_nothing_measured_is_one():
    assert bounds.upper_bound(0, 0) == bounds.upper_bound(3, 3) == 1.0
    with pytest.raises(ValueError, match="events=4, trials=3"):
        bounds.upper_bound(4, 3)


def test_positions_are_split_at_the_window_and_at_1k_8k_32k():
    label = bounds.position_label(512)
    assert [label(n) for n in (511, 512, 1024, 8191, 8192, 40_000)] == [
        "< 512", "512 … 1023", "1024 … 8191", "1024 … 8191", "8192 … 32767", ">= 32768",
    ]  # fmt: skip
    assert bounds.position_label(1024)(1023) == "< 1024"


def test_split_rates_add_up():
    rates = bounds.split_rates(["b", "a", "b", "b"], np.array([True, False, False, True]))
    assert rates == {"b": bounds.Rate(2, 3), "a": bounds.Rate(0, 1)}


def test_survival_follows_kaplan_and_meier():
    curve = bounds.survival([4, 4, 2, 4], [1, None, None, 3], bounds.Rate(2, 14))
    assert curve.tokens.tolist() == [0, 2, 4]
    np.testing.assert_allclose(curve.observed, [1.0, 3 / 4, 3 / 4 * 1 / 2])
    np.testing.assert_allclose(curve.expected, (1 - 2 / 14) ** np.array([0, 2, 4]))
    assert (curve.upper <= curve.expected).all()
