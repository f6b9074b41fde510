"""On a GPU, nano gives with kernels the tokens that it gives without, unless two nearly tied."""

from importlib import resources
from pathlib import Path

import pytest

from gemma_jax import LLM, SamplingParams
from gemma_jax.testing.goldens import load_teacher_forced

pytestmark = pytest.mark.gpu

NANO = str(resources.files("gemma_jax") / "data" / "nano")
RECORD = Path(__file__).with_name("data") / "nano_greedy.npz"
GREEDY = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, logprobs=2)
PROMPT_LENGTHS = (1, 7, 16, 40, 63, 64, 65, 90)
"""In tokens; nano's window is 64."""
FLOAT32_MARGIN = 1e-4


@pytest.fixture(scope="module")
def record():
    return load_teacher_forced(RECORD)


def completions(record, **settings):
    prompts = [
        record.sequences[i][: PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]].tolist() for i in range(24)
    ]
    with LLM(NANO, max_model_len=512, **settings) as llm:
        return [o.outputs[0] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def margin_at_first_difference(want, got):
    """Between the two best tokens of `want`, in nats; None if all tokens are the same."""
    for i, (a, b) in enumerate(zip(want.token_ids, got.token_ids, strict=True)):
        if a != b:
            best = sorted((x.logprob for x in want.logprobs[i].values()), reverse=True)
            return best[0] - best[1]
    return None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", "pallas"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 32},
        {"max_num_seqs": 8},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 32},
    ],
    ids=["32 rows", "8 rows", "1 row", "chunks of 32"],
)
def test_nano_tokens_with_kernels_are_those_without(record, dtype, kernels, settings):
    limit = FLOAT32_MARGIN if dtype == "float32" else record.margin_noise()
    want = completions(record, dtype=dtype, kernels="reference", **settings)
    got = completions(record, dtype=dtype, kernels=kernels, **settings)
    margins = [margin_at_first_difference(a, b) for a, b in zip(want, got, strict=True)]
    print(f"{margins.count(None)} of {len(margins)} whole")
    assert [m for m in margins if m is not None and m > limit] == []
