"""Records greedy streams of tiny random models with transformers, in float32.

    uv run --extra parity python -m bench.goldens.make_hf_goldens --out tests/parity/data

One file a configuration of `gemma_jax.testing.configs`. The weights come from the recipe of
`gemma_jax.testing.weights`, so a reader rebuilds them from the seed and checks their checksum.
Prompts are random ids of the lengths 1, 2, 17, W−1, W, W+1 and 2W+3, three of each, where W is the
sliding window.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.goldens import hf
from gemma_jax.config import ModelConfig
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.goldens import (
    COLUMN_STRIDE,
    MIN_DISTINCT_SHARE,
    TOP,
    Golden,
    save_golden,
    select_columns,
)
from gemma_jax.testing.weights import random_weights, weights_checksum

PROMPTS_A_LENGTH = 3
MAX_TOKENS = 128
FIRST_ORDINARY_ID = 3


def prompt_lengths(window: int) -> list[int]:
    """Short prompts, and those around the sliding window."""
    return [1, 2, 17, window - 1, window, window + 1, 2 * window + 3]


def make_prompts(config: ModelConfig, seed: int) -> list[np.ndarray]:
    """Random ids after one BOS; a prompt of one token is a random id alone."""
    generator = np.random.Generator(np.random.PCG64(seed))
    prompts = []
    for length in prompt_lengths(config.sliding_window):
        for _ in range(PROMPTS_A_LENGTH):
            ids = generator.integers(FIRST_ORDINARY_ID, config.vocab_size, length, dtype=np.int32)
            if length > 1:
                ids[0] = config.bos_token_id
            prompts.append(ids)
    return prompts


def make_golden(name: str, seed: int, max_tokens: int) -> Golden:
    """Runs one configuration and returns its record."""
    config = TINY_CONFIGS[name]
    with tempfile.TemporaryDirectory() as folder:
        model = hf.load(write_checkpoint(config, Path(folder) / name, seed, "float32"), "float32")
    prompts = make_prompts(config, seed)
    tokens, logits = hf.greedy(model, prompts, max_tokens)
    top = logits.topk(TOP, -1)
    column_ids = select_columns(config.vocab_size, seed)
    header = {
        "config": name,
        "seed": seed,
        "dtype": "float32",
        "attention": "eager",
        "weights_sha256": weights_checksum(random_weights(config, seed)),
        "versions": hf.versions(),
        "one_forward_max_abs": _against_one_forward(model, prompts, tokens, logits),
    }
    return Golden(
        header=header,
        prompts=tuple(prompts),
        tokens=tokens,
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        logsumexp=logits.logsumexp(-1).numpy(),
        column_ids=column_ids,
        columns=logits[:, ::COLUMN_STRIDE, torch.tensor(column_ids, dtype=torch.long)].numpy(),
    )


def _against_one_forward(model, prompts, tokens, logits) -> float:
    """Largest |Δlogit| of cached decoding and one forward: the noise of the reference itself."""
    worst = 0.0
    for prompt, generated, expected in zip(prompts, tokens, logits, strict=True):
        whole = hf.teacher_forced(model, np.concatenate([prompt, generated[:-1]]))
        worst = max(worst, float((whole[len(prompt) - 1 :] - expected).abs().max()))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description="Record greedy float32 streams of transformers.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--config", action="append", choices=tuple(TINY_CONFIGS), help="only this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    total = 0
    for name in args.config or TINY_CONFIGS:
        golden = make_golden(name, args.seed, args.max_tokens)
        total += golden.tokens.size
        print(
            f"{name}: {golden.tokens.size} tokens, distinct share"
            f" {golden.distinct_shares.min():.2f} … {golden.distinct_shares.max():.2f}"
            f" (at least {MIN_DISTINCT_SHARE}), median margin {np.median(golden.margins):.3f} nat,"
            f" smallest {golden.margins.min():.2e},"
            f" reference noise {golden.header['one_forward_max_abs']:.1e}",
            flush=True,
        )
        golden.check_variety()
        save_golden(args.out / f"{name}.npz", golden)
    print(f"{total} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
