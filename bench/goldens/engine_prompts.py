"""Seeded prompts of the engine goldens: 64 a model, from one token to 4,063.

A prompt is made of phrases of 16 tokens from a book of 64, cut to its length, BOS first: nano's are
cut from held-out text, the others' are random ids. A book keeps the committed files small, since
every record repeats its prompts.
"""

from pathlib import Path

import numpy as np

from gemma_jax.config import ModelConfig
from gemma_jax.testing.goldens import load_teacher_forced

NUM_PROMPTS = 64
PHRASES, PHRASE_TOKENS = 64, 16
FIRST_ORDINARY_ID = 110
SHORT = (8, 24, 48, 80)
LONGEST = 4063
"""With the 32 tokens that follow and vLLM's one more, the random models' context of 4,096."""

NANO_TEXTS = Path(__file__).parents[2] / "tests" / "parity" / "data" / "nano_held_out.npz"


def prompt_lengths(window: int) -> list[int]:
    """Tile edges, window edges, a few hundred tokens, one or two of 1k, 2k and 4k; then short."""
    tiles = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    edges = [window - 1, window, window + 1, 2 * window + 3]
    middle = [127, 128, 129, 200, 255, 256, 257, 320, 511, 512, 513]
    return sorted({*tiles, *edges, *middle, 1023, 1024, 1025, 2048, LONGEST})


def make_prompts(name: str, config: ModelConfig, seed: int) -> list[np.ndarray]:
    """`NUM_PROMPTS` arrays of token ids, ascending lengths."""
    generator = np.random.Generator(np.random.PCG64(seed))
    book = _text_book(generator) if name == "nano" else _random_book(config, generator)
    lengths = prompt_lengths(config.sliding_window)
    lengths += generator.choice(SHORT, NUM_PROMPTS - len(lengths)).tolist()
    return [_prompt(config, book, length, generator) for length in sorted(lengths)]


def _prompt(
    config: ModelConfig, book: np.ndarray, length: int, generator: np.random.Generator
) -> np.ndarray:
    """One BOS and phrases; a single token is an ordinary id."""
    phrases = generator.integers(0, len(book), -(-length // PHRASE_TOKENS))
    ids = book[phrases].reshape(-1)[:length].copy()
    if length > 1 and config.bos_token_id is not None:
        ids[0] = config.bos_token_id
    return ids


def _random_book(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    shape = (PHRASES, PHRASE_TOKENS)
    return generator.integers(FIRST_ORDINARY_ID, config.vocab_size, shape, dtype=np.int32)


def _text_book(generator: np.random.Generator) -> np.ndarray:
    """Pieces of held-out text without its first tokens, where BOS and turn marks stand."""
    texts = load_teacher_forced(NANO_TEXTS).sequences
    body = [ids[PHRASE_TOKENS : len(ids) - len(ids) % PHRASE_TOKENS] for ids in texts]
    pieces = np.concatenate(body).reshape(-1, PHRASE_TOKENS)
    return pieces[generator.choice(len(pieces), PHRASES, replace=False)].astype(np.int32)
