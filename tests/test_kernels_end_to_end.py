"""The whole network with every kernel interpreted gives the tokens of the plain formulas."""

import logging

import numpy as np
import pytest
from model_helpers import random_leaves

from gemma_jax import LLM, SamplingParams
from gemma_jax.config import FULL, SLIDING
from gemma_jax.errors import UnsupportedError
from gemma_jax.pallas import dispatch
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.usefixtures("quick_compilation")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
CONFIG = TINY_CONFIGS["e2b-tiny"].replace(
    num_hidden_layers=3, layer_types=(SLIDING, FULL, SLIDING), num_kv_shared_layers=1,
    sliding_window=12, vocab_size=64, vocab_size_per_layer_input=64, head_dim=32,
    global_head_dim=64, hidden_size=32, intermediate_size=32, max_position_embeddings=64,
)  # fmt: skip
PROMPTS = [np.random.default_rng(0).integers(0, 64, n).tolist() for n in (1, 10, 40)]
"""Below the window of 12, across it in decode, and across it and two chunks of 32."""


@pytest.fixture(scope="module")
def leaves():
    return {dtype: random_leaves(CONFIG, dtype) for dtype in ("float32", "bfloat16")}


def run(leaves, prompts, dtype="float32", **settings):
    with LLM.from_leaves(CONFIG, leaves[dtype], max_model_len=64, dtype=dtype, **settings) as llm:
        return [o.outputs[0] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def logprobs(output):
    return [t[i].logprob for i, t in zip(output.token_ids, output.logprobs, strict=True)]


@pytest.mark.parametrize(
    ("prompts", "budget"),
    [(PROMPTS, 32), (PROMPTS[2:], 2048)],
    ids=["3 rows, chunks of 32", "1 row, one chunk"],
)
def test_pallas_kernels_give_the_tokens_of_the_reference(leaves, prompts, budget):
    settings = {"max_num_batched_tokens": budget}
    want = run(leaves, prompts, kernels="reference", **settings)
    got = run(leaves, prompts, kernels="pallas", **settings)
    for a, b in zip(want, got, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(logprobs(a), logprobs(b), atol=2e-4)
    assert len({tuple(o.token_ids) for o in want}) == len(prompts)


def test_in_bfloat16_tokens_are_equal_as_long_as_the_margin_exceeds_the_noise(leaves):
    want = run(leaves, PROMPTS, "bfloat16", kernels="reference")
    got = run(leaves, PROMPTS, "bfloat16", kernels="pallas")
    compared = 0
    for a, b in zip(want, got, strict=True):
        for token, other, top in zip(a.token_ids, b.token_ids, a.logprobs, strict=True):
            best, second = sorted((x.logprob for x in top.values()), reverse=True)[:2]
            if best - second <= 0.1:
                break  # from here on the texts may differ
            assert token == other
            compared += 1
    assert compared >= 4


# --- what cannot run, and what is chosen ---------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "settings", "message"),
    [
        ({"prefill_attention": "cudnn"}, {},
         r"prefill_attention: cudnn cannot take .*: needs an NVIDIA GPU"),
        ({"decode_attention": "pallas"}, {"dtype": "bfloat16", "rounding": "vllm"},
         r'decode_attention.*no Pallas kernel takes .*rounding="vllm"'),
        ({"residual_norm": "mosaic"}, {}, "residual_norm: has no implementation 'mosaic'"),
    ],
)  # fmt: skip
def test_a_named_kernel_that_cannot_run_raises_and_says_why(leaves, kernels, settings, message):
    with pytest.raises(UnsupportedError, match=message):
        run(leaves, PROMPTS[:1], kernels=kernels, **settings)


def test_automatic_choice_on_a_cpu_is_the_reference_everywhere(leaves, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, logger="gemma_jax.kernels"):
        run(leaves, PROMPTS, kernels="auto")
    lines = [r.getMessage() for r in caplog.records if r.name == "gemma_jax.kernels"]
    assert {line.split()[0] for line in lines} >= {"norm_matmul", "skinny_matmul", "gelu_mul"}
    assert all(": reference on " in line for line in lines)
