"""The nano model against recorded transformers runs, teacher-forced in bfloat16 and float32."""

from pathlib import Path

import adapter
import numpy as np
import pytest
from compare import FLOAT32_TIE_MARGIN, find_flips

import gemma_jax
from gemma_jax.llm import LLM
from gemma_jax.testing.goldens import load_teacher_forced

NANO = Path(gemma_jax.__file__).parent / "data" / "nano"
DATA = Path(__file__).parent / "data"
MIN_TOP1 = {"greedy": 0.995, "held_out": 0.994}
"""On the reference's own greedy tokens, and on held-out text, where the model hesitates more: we
measured 99.50 % there, and another CPU may round a few sums the other way. Transformers itself
keeps 99.2 % of its top-1 there between bfloat16 and float32."""
MIN_TOP1_OVERALL = 0.995
FLOAT32_LOGPROB_TOLERANCE = 4e-4
"""On the held-out rows transformers float32 is at most 5.9e-5 from its own float64 run, ours 1.3e-4
(both 3.1e-6 on average), and they are 2.1e-4 from each other at one row; twice that is allowed."""
MIN_TEXTS = 20
PROMPT_TOKENS = 16
MIN_ROWS = 5000


@pytest.fixture(scope="module", params=list(MIN_TOP1))
def texts(request):
    return request.param


@pytest.fixture(scope="module")
def record(texts):
    return load_teacher_forced(DATA / f"nano_{texts}.npz")


def _logprobs(record, dtype):
    """[rows, V] log-probabilities of our run."""
    with LLM(NANO, dtype=dtype) as llm:
        logits = [x[:-1] for x in adapter.teacher_force(llm, record.sequences)]
    rows = np.concatenate(logits).astype(np.float64)
    peak = rows.max(-1, keepdims=True)
    return rows - peak - np.log(np.exp(rows - peak).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def bfloat16(record):
    return _logprobs(record, "bfloat16")


@pytest.fixture(scope="module")
def float32(record):
    return _logprobs(record, "float32")


def test_texts_are_many_and_cross_the_window(record):
    assert len(record.sequences) >= MIN_TEXTS
    assert len(record.argmax("bfloat16")) >= MIN_ROWS
    assert max(map(len, record.sequences)) > 128


def test_float32_logprobs_match_transformers(record, float32):
    flips = find_flips(
        [float32.argmax(-1)], [record.argmax("float32")], [record.margins("float32")]
    )
    print(*flips, sep="\n")
    assert [str(flip) for flip in flips if flip.margin > FLOAT32_TIE_MARGIN] == []
    ours = np.take_along_axis(float32, record.top_ids["float32"], axis=-1)
    assert np.abs(ours - record.top_logprobs["float32"]).max() <= FLOAT32_LOGPROB_TOLERANCE


def test_bfloat16_top1_matches_transformers(record, texts, bfloat16):
    agree = bfloat16.argmax(-1) == record.argmax("bfloat16")
    print(f"{texts}: top-1 agreement {agree.mean():.4%} of {agree.size} rows")
    assert agree.mean() >= MIN_TOP1[texts]


def test_bfloat16_top1_matches_transformers_over_all_texts():
    agree = []
    for name in MIN_TOP1:
        record = load_teacher_forced(DATA / f"nano_{name}.npz")
        agree.append(_logprobs(record, "bfloat16").argmax(-1) == record.argmax("bfloat16"))
    assert np.concatenate(agree).mean() >= MIN_TOP1_OVERALL


def test_every_bfloat16_flip_is_inside_the_reference_noise(record, bfloat16):
    noise = record.margin_noise()
    flips = find_flips(
        [bfloat16.argmax(-1)], [record.argmax("bfloat16")], [record.margins("bfloat16")]
    )
    print(f"noise {noise:.4f} nat", *flips, sep="\n")
    assert [str(flip) for flip in flips if flip.margin > noise] == []


def test_float32_agrees_where_bfloat16_flips(record, bfloat16, float32):
    flipped = bfloat16.argmax(-1) != record.argmax("bfloat16")
    np.testing.assert_array_equal(float32.argmax(-1)[flipped], record.argmax("float32")[flipped])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_free_running_tokens_follow_the_greedy_record(dtype):
    """Exact in float32; in bfloat16 the agreement is reported, since one flip changes the rest."""
    sequences = load_teacher_forced(DATA / "nano_greedy.npz").sequences[:24]
    prompts = [ids[:PROMPT_TOKENS] for ids in sequences]
    with LLM(NANO, dtype=dtype, max_num_seqs=24) as llm:
        completions = adapter.free_run(llm, prompts, max(map(len, sequences)) - PROMPT_TOKENS)
    agreed = [
        _agreement(completion.token_ids, ids[PROMPT_TOKENS:])
        for completion, ids in zip(completions, sequences, strict=True)
    ]
    print(f"{dtype}: prefix agreement {np.mean(agreed):.1%}, {agreed.count(1.0)} of 24 whole")
    assert np.mean(agreed) == 1.0 if dtype == "float32" else np.mean(agreed) > 0.25


def _agreement(tokens, expected):
    """Share of `expected` before the first difference."""
    differs = np.flatnonzero(np.asarray(tokens[: len(expected)]) != expected)
    return (differs[0] if differs.size else len(expected)) / len(expected)
