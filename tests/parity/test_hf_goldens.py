"""Float32 greedy parity with transformers, from recorded streams of tiny random models."""

from pathlib import Path

import adapter
import numpy as np
import pytest
from compare import (
    FLOAT32_LOGIT_TOLERANCE,
    FLOAT32_TIE_MARGIN,
    find_flips,
    logit_differences,
)

from gemma_jax.llm import LLM
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.goldens import load_golden
from gemma_jax.testing.weights import random_weights, weights_checksum

DATA = Path(__file__).parent / "data" / "hf"
MIN_TOKENS = 20_000
MAX_BYTES = 3 * 2**20


@pytest.fixture(scope="module", params=sorted(TINY_CONFIGS))
def golden(request):
    return load_golden(DATA / f"{request.param}.npz")


@pytest.fixture(scope="module")
def llm(golden, tmp_path_factory):
    config = TINY_CONFIGS[golden.header["config"]]
    folder = tmp_path_factory.mktemp("golden") / "model"
    write_checkpoint(config, folder, golden.header["seed"], "float32")
    rows = len(golden.prompts)  # one prefill call takes them all: fewer programs to compile
    with LLM(folder, max_num_seqs=rows, max_num_batched_tokens=256 * rows) as llm:
        yield llm


def test_goldens_cover_every_config_and_enough_tokens():
    goldens = {path.stem: load_golden(path) for path in DATA.glob("*.npz")}
    assert set(goldens) == set(TINY_CONFIGS)
    assert sum(golden.tokens.size for golden in goldens.values()) >= MIN_TOKENS
    assert sum(path.stat().st_size for path in DATA.iterdir()) <= MAX_BYTES


def test_prompts_surround_the_window(golden):
    window = TINY_CONFIGS[golden.header["config"]].sliding_window
    lengths = {len(prompt) for prompt in golden.prompts}
    assert {1, window - 1, window, window + 1, 2 * window + 3} <= lengths


def test_streams_vary(golden):
    golden.check_variety()


def test_recipe_rebuilds_the_recorded_weights(golden):
    config = TINY_CONFIGS[golden.header["config"]]
    rebuilt = random_weights(config, golden.header["seed"])
    assert weights_checksum(rebuilt) == golden.header["weights_sha256"]


def test_teacher_forced_logits_match_transformers(golden, llm):
    sequences = [
        np.concatenate([prompt, tokens[:-1]])
        for prompt, tokens in zip(golden.prompts, golden.tokens, strict=True)
    ]
    count = golden.tokens.shape[1]
    logits = [rows[-count:] for rows in adapter.teacher_force(llm, sequences)]
    flips = find_flips([x.argmax(-1) for x in logits], golden.tokens, golden.margins)
    print(*flips, sep="\n")
    assert [str(flip) for flip in flips if flip.margin > FLOAT32_TIE_MARGIN] == []
    differences = logit_differences(golden, logits)
    print(differences)
    assert max(differences.values()) <= FLOAT32_LOGIT_TOLERANCE


def test_free_running_tokens_match_transformers(golden, llm):
    outputs = adapter.free_run(llm, golden.prompts, golden.tokens.shape[1])
    worst, ties = 0.0, []
    for row, output in enumerate(outputs):
        flips = find_flips(
            [output.token_ids], golden.tokens[row : row + 1], golden.margins[row:][:1]
        )
        same = flips[0].position if flips else len(output.token_ids)
        ties += flips[:1]
        for t in range(same):
            best = golden.top_ids[row, t, 0]
            expected = golden.top_logits[row, t, 0] - golden.logsumexp[row, t]
            worst = max(worst, abs(output.logprobs[t][int(best)].logprob - float(expected)))
    print(*ties, f"max |Δlogprob| of the chosen tokens {worst:.1e}", sep="\n")
    assert [str(flip) for flip in ties if flip.margin > FLOAT32_TIE_MARGIN] == []
    assert worst <= FLOAT32_LOGIT_TOLERANCE
