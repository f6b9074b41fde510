"""Nano's tokenizer: a 4,096-entry BPE in Gemma's style, and the encoded training arrays.

    python -m bench.nano.tokenizer         # reads .carry/nano/*.jsonl, writes tokenizer and arrays

Gemma's style: special tokens at their published ids and recognised in text, spaces as U+2581 with
none added in front, byte tokens for what the vocabulary lacks, so that every text round-trips.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from bench.nano.corpus import FOLDER

VOCAB_SIZE = 4096
SPECIAL_TOKENS = {
    0: "<pad>",
    1: "<eos>",
    2: "<bos>",
    3: "<unk>",
    4: "<mask>",
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
}
_FIRST_ORDINARY = max(SPECIAL_TOKENS) + 1
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PACKAGE_FOLDER = Path(__file__).parents[2] / "gemma_jax" / "data" / "nano"

# Words keep the space before them; punctuation, digits and line breaks stand alone.
_WORDS = r"▁?\p{L}+|▁?\p{N}|\n+|▁+|[^▁\p{L}\p{N}\n]+"


def reserved_tokens() -> list[str]:
    """Tokens 0-106: the special ones at their ids, `<unusedN>` between them."""
    return [SPECIAL_TOKENS.get(i, f"<unused{i}>") for i in range(_FIRST_ORDINARY)]


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Replace(" ", "▁")


def learned_pieces(texts: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Characters and merged pieces in training order, and the merges, for the free ids."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = _normalizer()
    trained.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    free = VOCAB_SIZE - _FIRST_ORDINARY - len(_BYTES)
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=free, min_frequency=2, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    return vocabulary, [tuple(merge) for merge in model["merges"]]


def build(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """The tokenizer trained on plain `texts` (no special tokens in them)."""
    vocabulary, merges = learned_pieces(texts)
    names = [*reserved_tokens(), *_BYTES, *vocabulary]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = _normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in reserved_tokens()]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Content of tokenizer_config.json; it is the chat template that writes `<bos>`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "eot_token": "<turn|>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }


def read_documents(folder: Path, split: str) -> Iterator[str]:
    """Texts of one split, as the corpus builder wrote them."""
    with (folder / f"{split}.jsonl").open() as file:
        for line in file:
            yield json.loads(line)["text"]


def _plain(text: str) -> Iterator[str]:
    """The text between special tokens."""
    for name in SPECIAL_TOKENS.values():
        text = text.replace(name, "\0")
    return (part for part in text.split("\0") if part)


def encode(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """All documents one after the other, each beginning with `<bos>`: uint16 [tokens]."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.array(e.ids, np.uint16) for e in encoded])


def main() -> None:
    """Train, save to the package data, and write the encoded splits to the working folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--output", type=Path, default=PACKAGE_FOLDER)
    arguments = parser.parse_args()
    texts = (part for text in read_documents(arguments.folder, "train") for part in _plain(text))
    tokenizer = build(texts)
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.output / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2) + "\n"
    (arguments.output / "tokenizer_config.json").write_text(config)
    for split in ("train", "valid"):
        texts = list(read_documents(arguments.folder, split))
        tokens = encode(tokenizer, texts)
        np.save(arguments.folder / f"{split}.npy", tokens)
        characters = sum(map(len, texts)) / len(tokens)
        print(f"{split}: {len(tokens)} tokens of {characters:.2f} characters")


if __name__ == "__main__":
    main()
