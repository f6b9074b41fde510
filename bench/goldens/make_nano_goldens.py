"""Records what transformers gives each token of some texts, in bfloat16 and in float32.

    uv run --extra parity python -m bench.goldens.make_nano_goldens \
        --model gemma_jax/data/nano --texts valid.npy --out tests/parity/data/nano_held_out.npz
    … --texts valid.npy --greedy 160 --out tests/parity/data/nano_greedy.npz

Texts are a `.npy` of token ids (documents that each begin with BOS, as the validation split of the
training script; the first 40 longer than two windows are taken, cut after 400 tokens) or a JSONL of
`{"text": …}` or `{"token_ids": […]}` rows, where a text gets exactly one BOS. With `--greedy N`,
texts are the reference's own: the first 16 tokens of each document and its greedy float32
continuation, up to an end token or N tokens.
Teacher-forced, eager attention, both models loaded in their dtype. Every row of a sequence of n
tokens is kept, the last one (which predicts a token that is not there) left out: n − 1 rows.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.goldens import hf
from gemma_jax.config import ModelConfig
from gemma_jax.testing.goldens import TOP, TeacherForced, save_teacher_forced

DTYPES = ("bfloat16", "float32")
MIN_TEXTS = 20
MIN_TOKENS = 5000
NUM_DOCUMENTS = 40
MAX_DOCUMENT = 400
NUM_PROMPTS, PROMPT_TOKENS = 90, 16
END_IDS = (1, 106, 50)


def read_texts(path: Path, model: Path, config: ModelConfig) -> list[np.ndarray]:
    """Token ids of every text."""
    if path.suffix == ".npy":
        tokens = np.load(path).astype(np.int32)
        documents = np.split(tokens, np.flatnonzero(tokens == config.bos_token_id)[1:])
        long = [d[:MAX_DOCUMENT] for d in documents if len(d) > 2 * config.sliding_window]
        return long[:NUM_DOCUMENTS]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sequences = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        if "token_ids" in row:
            ids = row["token_ids"]
        elif "text" in row:
            text = tokenizer.encode(row["text"], add_special_tokens=False)
            ids = [config.bos_token_id, *text.ids]
        else:
            raise ValueError(f"{path}:{number}: expected a key 'text' or 'token_ids'")
        sequences.append(np.array(ids, np.int32))
    return sequences


def greedy_texts(model: Path, texts: Path, max_tokens: int) -> list[np.ndarray]:
    """Greedy float32 continuations of the first documents of `texts`, prompts included."""
    tokens = np.load(texts).astype(np.int32)
    starts = np.flatnonzero(tokens == tokens[0])
    prompts = [tokens[s : s + PROMPT_TOKENS] for s in starts if s + PROMPT_TOKENS <= len(tokens)]
    prompts = prompts[:NUM_PROMPTS]
    continued, _ = hf.greedy(hf.load(model, "float32"), prompts, max_tokens)
    return [
        np.concatenate([prompt, _until_end(row)])
        for prompt, row in zip(prompts, continued, strict=True)
    ]


def _until_end(tokens: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(np.isin(tokens, END_IDS))
    return tokens[: ends[0] + 1] if ends.size else tokens


def record(model: Path, dtype: str, sequences: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Best ids and their log-probabilities at every row: `{ids, logprobs}`, [rows, 5] each."""
    reference = hf.load(model, dtype)
    ids, logprobs = [], []
    for sequence in sequences:
        rows = hf.teacher_forced(reference, sequence)[:-1].log_softmax(-1)
        # A stable descending sort puts the lowest id first among equal logits, as argmax does.
        values, order = rows.sort(stable=True, dim=-1, descending=True)
        ids.append(order[:, :TOP].numpy().astype(np.int32))
        logprobs.append(values[:, :TOP].numpy())
    return {"ids": np.concatenate(ids), "logprobs": np.concatenate(logprobs)}


def make_golden(model: Path, texts: Path, greedy: int = 0) -> TeacherForced:
    """Runs both dtypes over all texts, or over `greedy`-token continuations of their beginnings.

    Raises:
      ValueError: too few texts or tokens, or no text longer than the sliding window.
    """
    config = ModelConfig.from_file(model)
    if greedy:
        sequences = greedy_texts(model, texts, greedy)
    else:
        sequences = read_texts(texts, model, config)
    rows = sum(len(sequence) - 1 for sequence in sequences)
    if len(sequences) < MIN_TEXTS or rows < MIN_TOKENS:
        raise ValueError(
            f"{texts}: {len(sequences)} texts and {rows} rows; expected at least {MIN_TEXTS}"
            f" and {MIN_TOKENS}"
        )
    longest = max(map(len, sequences))
    if longest <= 2 * config.sliding_window:
        raise ValueError(f"{texts}: longest text {longest} tokens; expected two windows at least")
    results = {dtype: record(model, dtype, sequences) for dtype in DTYPES}
    header = {"model": model.name, "attention": "eager", "versions": hf.versions()}
    return TeacherForced(
        header=header,
        sequences=tuple(sequences),
        top_ids={dtype: result["ids"] for dtype, result in results.items()},
        top_logprobs={dtype: result["logprobs"] for dtype, result in results.items()},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Record teacher-forced results of transformers.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint with tokenizer.json")
    parser.add_argument("--texts", type=Path, required=True, help=".npy of documents, or JSONL")
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="tokens to continue")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    golden = make_golden(args.model, args.texts, args.greedy)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_teacher_forced(args.out, golden)
    agree = golden.argmax("bfloat16") == golden.argmax("float32")
    print(
        f"{len(golden.sequences)} texts, {agree.size} rows, bfloat16 top-1 = float32 top-1 on"
        f" {agree.mean():.2%}, margin noise (99.9th percentile) {golden.margin_noise():.4f} nat"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
