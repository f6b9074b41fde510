"""The whole network with every kernel interpreted gives the tokens of the plain formulas."""

import numpy as np
import pytest
from model_helpers import random_leaves

from gemma_jax import LLM, SamplingParams
from gemma_jax.config import FULL, SLIDING
from gemma_jax.testing.configs import TINY_CONFIGS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def tiny():
    config = TINY_CONFIGS["e2b-tiny"].replace(
        num_hidden_layers=4, layer_types=(SLIDING, FULL, SLIDING, FULL), num_kv_shared_layers=2,
        sliding_window=24, vocab_size=256, vocab_size_per_layer_input=256,
        max_position_embeddings=512,
    )  # fmt: skip
    return config, random_leaves(config)


def run(tiny, prompts, **settings):
    config, leaves = tiny
    with LLM.from_leaves(config, leaves, max_model_len=128, **settings) as llm:
        return [o.outputs[0] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("budget", [2048, 32], ids=["one chunk", "chunks of 32"])
def test_pallas_kernels_give_the_tokens_of_the_reference(tiny, budget):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (1, 23, 70)]
    settings = {"dtype": "float32", "max_num_batched_tokens": budget}
    want = run(tiny, prompts, kernels="reference", **settings)
    got = run(tiny, prompts, kernels="pallas", **settings)
    for a, b in zip(want, got, strict=True):
        assert a.token_ids == b.token_ids
        x, y = (
            [t[i].logprob for i, t in zip(o.token_ids, o.logprobs, strict=True)] for o in (a, b)
        )
        np.testing.assert_allclose(x, y, atol=2e-4)
    assert len({tuple(o.token_ids) for o in want}) == len(prompts)
