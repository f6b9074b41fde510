"""Batch-invariant mode: not near, but the same bits, whatever else the engine does.

These programs are compiled as a user's are: what XLA makes of them is what is claimed.
"""

import dataclasses

import numpy as np
import pytest
from engine_helpers import complete, make_engine, request
from model_helpers import random_runner, shallow

from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model.cache import page_bytes
from gemma_jax.numerics import Numerics
from gemma_jax.score import score_tokens

LENGTHS = (1, 15, 16, 17, 23, 24, 25, 51)
STEPS = 40

ASKED = {
    5: {"top_k": 20, "top_p": 0.9},
    6: {"min_p": 0.02, "presence_penalty": 0.5},
    7: {"temperature": 0.0, "logit_bias": {7: 1.5}},
}
"""What some of the requests ask for in bfloat16; each mixture is a program of its own."""


@pytest.fixture(
    scope="module",
    params=[
        (AUTO, "float32"),
        pytest.param((AUTO, "bfloat16"), marks=pytest.mark.slow),
        pytest.param((Kernels("pallas"), "bfloat16"), marks=pytest.mark.gpu),
    ],
    ids=lambda x: f"{x[0]} {x[1]}",
)
def runner(request):
    kernels, dtype = request.param
    numerics = Numerics(dtype, batch_invariant=True)
    return random_runner(shallow("e2b-tiny"), numerics, kernels=kernels)


@pytest.fixture(scope="module")
def make_requests(runner):
    def make(seed=0, **settings):
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(3, 256, n).tolist() for n in LENGTHS]
        asked = {} if runner.numerics.is_float32 else ASKED
        return [
            request(p, STEPS, f"{seed}-{i}", **asked.get(i, {}) | settings)
            for i, p in enumerate(prompts)
        ]

    return make


def bits(outputs):
    """Tokens and log-probabilities as they are."""
    return [
        [
            (token, [(i, p.logprob) for i, p in row.items()])
            for token, row in zip(c.token_ids, c.logprobs, strict=True)
        ]
        for output in outputs
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(runner, make_requests):
    return bits(complete(make_engine(runner), make_requests()))


def test_alone_and_in_other_company_and_slots(runner, make_requests, expected):
    alone = [bits(complete(make_engine(runner), [one]))[0] for one in make_requests()[4:6]]
    assert alone == expected[4:6]
    order = [3, 0, 7, 5, 2, 4, 1, 6]
    engine = make_engine(runner, max_num_seqs=20, mixed_batched_tokens=None)
    mine = [make_requests()[i] for i in order]
    others = [*make_requests(seed=1), *mine, *make_requests(seed=2)]
    assert bits(complete(engine, others))[8:16] == [expected[i] for i in order]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 48, "decode_steps": 1},
        {"max_num_batched_tokens": 512, "decode_steps": 16, "page_size": 64},
    ],
    ids=str,
)
def test_however_prompts_are_cut_and_steps_are_grouped(runner, make_requests, expected, settings):
    assert bits(complete(make_engine(runner, **settings), make_requests())) == expected


@pytest.mark.slow
def test_preempted_and_computed_again(runner, make_requests, expected):
    page = 32 if runner.kernels == AUTO else 64  # a tile of keys stays inside of a page
    full, window = page_bytes(runner.config, page, runner.numerics.jnp_dtype.itemsize)
    engine = make_engine(runner, memory=5 * (full + window), page_size=page, prefix_caching=False)
    assert bits(complete(engine, make_requests())) == expected
    assert engine.stats().preemptions > 0


def test_with_pages_of_the_prefix_cache(runner, make_requests):
    engine = make_engine(runner)
    (first,) = complete(engine, [request(make_requests()[-1].prompt_token_ids, 20, "turn 1")])
    history = first.prompt_token_ids + first.outputs[0].token_ids  # its last keys are decode's
    turn = request([*history, 4, 5], 6, "turn 2")
    (second,) = complete(engine, [turn])
    assert second.num_cached_tokens == 64
    cold = make_engine(runner, prefix_caching=False)
    assert bits([second]) == bits(complete(cold, [dataclasses.replace(turn, request_id="cold")]))


@pytest.mark.slow
def test_whatever_the_neighbours_ask_for(runner, make_requests, expected):
    kinds = [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"presence_penalty": 1.0}]
    neighbours = [make_requests(seed=1, logprobs=5, **kind)[i] for i, kind in enumerate(kinds)]
    both = [x for pair in zip(make_requests()[:4], neighbours, strict=True) for x in pair]
    outputs = bits(complete(make_engine(runner, max_num_seqs=8), both))[::2]
    chosen = [[(t, dict(p)[t]) for t, p in row] for row in outputs]
    assert chosen == [[(t, dict(p)[t]) for t, p in row] for row in expected[:4]]


def test_scored_in_one_pass(runner, make_requests, expected):
    for one, row in list(zip(make_requests(), expected, strict=True))[1::3]:
        tokens = [token for token, _ in row]
        sequence = [*one.prompt_token_ids, *tokens]
        for chunk in (32, 128):
            scored = score_tokens(runner, sequence, max_chunk=chunk, page_size=32, k=1)
            values = [x.sampled for x in scored[-len(tokens) :]]
            assert values == [dict(p)[t] for t, p in row]
