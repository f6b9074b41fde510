"""Live comparison with transformers on random weights that no golden holds (extra `parity`)."""

from pathlib import Path

import adapter
import numpy as np
import pytest
from compare import FLOAT32_LOGIT_TOLERANCE, FLOAT32_TIE_MARGIN, find_flips

import gemma_jax
from gemma_jax.llm import LLM
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.goldens import load_teacher_forced

pytestmark = pytest.mark.parity

SEED = 20_260
MAX_TOKENS = 48
NANO = Path(gemma_jax.__file__).parent / "data" / "nano"
NANO_RECORD = Path(__file__).parent / "data" / "nano_greedy.npz"
NANO_TEXTS = 6


@pytest.fixture(scope="module")
def hf():
    from bench.goldens import hf

    return hf


@pytest.fixture(scope="module", params=sorted(TINY_CONFIGS))
def checkpoint(request, tmp_path_factory):
    config = TINY_CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("live") / "model"
    return config, write_checkpoint(config, folder, SEED, "float32", shards=2)


@pytest.fixture(scope="module")
def streams(hf, checkpoint):
    """Prompts, transformers' greedy tokens [R, T] and its logits [R, T, V]."""
    config, folder = checkpoint
    window = config.sliding_window
    generator = np.random.default_rng(SEED)
    lengths = (1, 5, window - 1, window, window + 1, 2 * window + 3)
    prompts = [generator.integers(3, config.vocab_size, n).astype(np.int32) for n in lengths]
    tokens, logits = hf.greedy(hf.load(folder, "float32"), prompts, MAX_TOKENS)
    return prompts, tokens, logits.numpy()


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint[1], max_num_seqs=8) as llm:
        yield llm


def _margins(logits):
    best = np.sort(logits, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


def test_float32_logits_match_over_the_whole_vocabulary(streams, llm):
    prompts, tokens, expected = streams
    sequences = [np.concatenate([p, t[:-1]]) for p, t in zip(prompts, tokens, strict=True)]
    logits = np.stack([x[-MAX_TOKENS:] for x in adapter.teacher_force(llm, sequences)])
    print(f"max |Δlogit| {np.abs(logits - expected).max():.1e}")
    assert np.abs(logits - expected).max() <= FLOAT32_LOGIT_TOLERANCE


def test_float32_greedy_tokens_match(streams, llm):
    prompts, tokens, expected = streams
    outputs = adapter.free_run(llm, prompts, MAX_TOKENS)
    for output, reference, margins in zip(outputs, tokens, _margins(expected), strict=True):
        flips = find_flips([output.token_ids], [reference], [margins])[:1]
        print(*flips)
        assert [str(flip) for flip in flips if flip.margin > FLOAT32_TIE_MARGIN] == []


def test_bfloat16_checkpoint_of_every_config_loads_in_transformers(hf, checkpoint, tmp_path):
    config, _ = checkpoint
    model = hf.load(write_checkpoint(config, tmp_path / "model", SEED, "bfloat16"), "bfloat16")
    assert str(model.dtype) == "torch.bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recorded_nano_run_is_what_transformers_gives_now(hf, dtype):
    record = load_teacher_forced(NANO_RECORD)
    model = hf.load(NANO, dtype)
    sequences = record.sequences[:NANO_TEXTS]
    logits = np.concatenate([hf.teacher_forced(model, s)[:-1].numpy() for s in sequences])
    agree = logits.argmax(-1) == record.argmax(dtype)[: len(logits)]
    assert agree.mean() >= 0.999
