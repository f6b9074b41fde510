"""Trains nano from scratch and writes it as a Hugging Face checkpoint.

    python -m bench.nano.train --output DIR        # minutes on one GPU; see docs/nano.md

AdamW on float32 weights; the forward pass casts them to bfloat16 and rounds as inference does. Rows
of 512 tokens begin at a document; all data stays on the device. The last line is one JSON object.
"""

import argparse
import functools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax import lax

from bench.nano.config import NANO, parameter_count
from bench.nano.corpus import FOLDER
from bench.nano.forward import BOS, Packed, logits, logits_and_partition
from bench.nano.tokenizer import PACKAGE_FOLDER
from gemma_jax.checkpoint.hf import write_hf
from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.checkpoint.names import leaf_shapes
from gemma_jax.config import ModelConfig
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.sharding import named_parameters

Weights = dict[str, jax.Array]
END_IDS = (1, 106)
PROMPTS = (
    "<bos>Once upon a time",
    "<bos>It was a fine morning, and",
    "<bos>",
    "<bos><|turn>user\nTell me a story about the king.<turn|>\n<|turn>model\n",
    "<bos><|turn>user\nWhat does Genesis 1:1 say?<turn|>\n<|turn>model\n",
    "<bos><|turn>user\nContinue: She opened the door and looked out.<turn|>\n<|turn>model\n",
)


@dataclass(frozen=True)
class TrainConfig:
    """How nano is trained; every field is a flag of the command.

    Attributes:
      steps: optimiser steps.
      minutes: when above 0, fewer steps are taken if `steps` would last longer than this.
      batch_size, length: rows of a step and tokens of a row.
      peak_lr, warmup: learning rate at the end of the warm-up, and its steps; cosine to 0 after it.
      weight_decay: on matrices and tables, not on norms and scalars.
      dropout: rate on the embedding and on each addition to the residual.
      z_loss: weight of the squared log-partition. It draws log Σ exp(logits) to 0, where bfloat16
        logits lie close together; without it they drift to 10 and more, in steps of 1/16.
      score_z_loss: the same for the attention scores, which bfloat16 rounds too; without it they
        drift to 200, in steps of 1, and one flipped rounding moves a probability by a factor e.
      init: checkpoint directory to go on from; empty starts from random weights.
      eval_every: steps between evaluations on the validation documents.
      seed: of initial weights, order of the data and dropout.
    """

    steps: int = 10_000
    minutes: float = 0.0
    batch_size: int = 64
    length: int = 512
    peak_lr: float = 3e-3
    warmup: int = 500
    weight_decay: float = 0.1
    dropout: float = 0.1
    z_loss: float = 2e-3
    score_z_loss: float = 3e-4
    init: str = ""
    eval_every: int = 500
    seed: int = 0


# --- weights --------------------------------------------------------------------------------------


def initial_weights(config: ModelConfig, seed: int, init: str = "") -> Weights:
    """Leaf path → float32 weights: those of `init`, else fan-in normal matrices, unit norms."""
    if init:
        return load_checkpoint(init, "float32")[1]
    rng = np.random.default_rng(seed)
    shapes = leaf_shapes(config).items()
    return {path: jnp.asarray(_initial(path, shape, rng)) for path, shape in shapes}


def _initial(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if path == "embed/table":
        return rng.normal(0.0, 0.03, shape).astype(np.float32)
    if path == "ple/table":
        return rng.normal(0.0, 0.05, shape).astype(np.float32)
    if len(shape) > 1:
        fan_in = math.prod(shape[1:]) if path.endswith("attention/out") else shape[-1]
        return rng.normal(0.0, fan_in**-0.5, shape).astype(np.float32)
    if path.endswith(("q_norm", "k_norm")):
        return np.full(shape, shape[0] ** -0.25, np.float32)  # scores of unit variance
    after_block = "/post_" in path or (path.endswith("ple/norm") and path != "ple/norm")
    return np.full(shape, 0.3 if after_block else 1.0, np.float32)


def merge(config: ModelConfig, weights: Weights, numerics: Numerics):
    """The model that holds `weights`, cast to the compute dtype."""
    model = abstract_model(config, numerics)
    graphdef, state = nnx.split(model)
    leaves = [weights[path].astype(numerics.jnp_dtype) for path in named_parameters(model)]
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))


# --- loss -----------------------------------------------------------------------------------------


def next_token_loss(z: jax.Array, ids: jax.Array, counted: jax.Array) -> jax.Array:
    """Sum over counted targets of the cross-entropy of z [B, T, V] against the next token, nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(z[:, :-1], ids[:, 1:])
    return jnp.sum(jnp.where(counted, losses, 0.0))


def training_loss(weights: Weights, ids, key, config: ModelConfig, numerics, train: TrainConfig):
    """Mean loss of `ids` [B, T] over every token but the BOS ones, with both z-losses."""
    counted = ids[:, 1:] != BOS
    model = merge(config, weights, numerics)
    z, scores = logits_and_partition(model, ids, numerics, train.dropout, key)
    partition = jnp.square(jax.nn.logsumexp(z[:, :-1], axis=-1))
    penalty = train.z_loss * jnp.sum(jnp.where(counted, partition, 0.0))
    loss = (next_token_loss(z, ids, counted) + penalty) / jnp.maximum(jnp.sum(counted), 1)
    return loss + train.score_z_loss * scores


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """All tokens of a split on the device, and where documents begin in them."""

    tokens: jax.Array  # [N + length] int32
    starts: jax.Array  # [documents] int32

    @classmethod
    def load(cls, path: Path, length: int) -> "Data":
        """The split in `path` (uint16 .npy), padded so that every start has a whole row."""
        tokens = np.load(path).astype(np.int32)
        starts = np.flatnonzero(tokens == BOS).astype(np.int32)
        return cls(jnp.asarray(np.pad(tokens, (0, length))), jnp.asarray(starts))

    def rows(self, documents: jax.Array, length: int) -> jax.Array:
        """Rows of `length` tokens that begin at `documents` [B]: int32 [B, length]."""
        return rows_at(self.tokens, self.starts[documents], length)


def rows_at(tokens: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """[B, length] slices of `tokens` that begin at `starts` [B]."""
    return tokens[starts[:, None] + jnp.arange(length, dtype=starts.dtype)[None]]


# --- training -------------------------------------------------------------------------------------


def optimiser(train: TrainConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate, gradients clipped by global norm."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-8),
        optax.add_decayed_weights(train.weight_decay, mask=_decayed),
    )


def _decayed(weights: Weights) -> dict[str, bool]:
    return {path: weight.ndim > 1 for path, weight in weights.items()}


def learning_rate(train: TrainConfig, step: jax.Array, total: jax.Array) -> jax.Array:
    """Linear warm-up to the peak, then a cosine that ends at 0 with step `total`."""
    step = step.astype(jnp.float32)
    rise = (step + 1) / train.warmup
    done = jnp.clip((step - train.warmup) / jnp.maximum(total - train.warmup, 1), 0.0, 1.0)
    return train.peak_lr * jnp.minimum(rise, 0.5 * (1.0 + jnp.cos(jnp.pi * done)))


def make_run(config: ModelConfig, train: TrainConfig, data: Data, numerics: Numerics):
    """The compiled `run(weights, state, first, count, total)`: steps first … first + count - 1.

    Returns weights, optimiser state and the mean training loss.
    """
    transform = optimiser(train)

    def step(tokens, starts, total, i, carry):
        weights, state, loss_sum = carry
        key = jax.random.fold_in(jax.random.key(train.seed, impl="rbg"), i)
        pick, drop = jax.random.split(key)
        documents = jax.random.randint(pick, (train.batch_size,), 0, starts.shape[0])
        ids = rows_at(tokens, starts[documents], train.length)
        loss, gradients = jax.value_and_grad(training_loss)(
            weights, ids, drop, config, numerics, train
        )
        updates, state = transform.update(gradients, state, weights)
        rate = learning_rate(train, i, total)
        weights = jax.tree.map(lambda w, u: w - rate * u, weights, updates)
        return weights, state, loss_sum + loss

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def run(tokens, starts, weights, state, first, count, total):
        body = functools.partial(step, tokens, starts, total)
        carry = weights, state, jnp.float32(0.0)
        weights, state, loss_sum = lax.fori_loop(first, first + count, body, carry)
        return weights, state, loss_sum / count

    return functools.partial(run, data.tokens, data.starts), transform


@functools.partial(jax.jit, static_argnums=(2, 3))
def _document_loss(weights: Weights, ids: jax.Array, config: ModelConfig, numerics: Numerics):
    """Sum and number of losses over the first document of each row of `ids` [B, T]."""
    first = Packed.from_ids(ids).segments == 1
    counted = first[:, 1:]
    z = logits(merge(config, weights, numerics), ids, numerics)
    return next_token_loss(z, ids, counted), jnp.sum(counted)


def validation_loss(config, train: TrainConfig, data: Data, weights, numerics) -> float:
    """Mean loss a token over all validation documents, each by itself, in nats."""
    total = count = 0.0
    documents = np.arange(data.starts.shape[0])
    for chunk in np.array_split(documents, max(1, -(-len(documents) // train.batch_size))):
        padded = np.resize(chunk, train.batch_size)
        rows = data.rows(jnp.asarray(padded), train.length)
        rows = jnp.where((np.arange(train.batch_size) < len(chunk))[:, None], rows, 0)
        loss, counted = _document_loss(weights, rows, config, numerics)
        total, count = total + float(loss), count + float(counted)
    return total / count


def fit(config: ModelConfig, train: TrainConfig, folder: Path, numerics: Numerics):
    """Trains; returns the last weights and a record of every evaluation."""
    splits = {name: Data.load(folder / f"{name}.npy", train.length) for name in ("train", "valid")}
    run, transform = make_run(config, train, splits["train"], numerics)
    weights = initial_weights(config, train.seed, train.init)
    state = transform.init(weights)
    history, clock = [], Clock(train)
    step = 0
    while step < clock.total:
        count = min(train.eval_every, clock.total - step)
        numbers = (jnp.int32(n) for n in (step, count, clock.total))
        weights, state, loss = run(weights, state, *numbers)
        valid = validation_loss(config, train, splits["valid"], weights, numerics)
        step += count
        record = {"step": step, "train_loss": float(loss), "valid_loss": valid,
                  "seconds": clock.tick(count)}  # fmt: skip
        print(json.dumps(record), flush=True)
        history.append(record)
    return weights, history


class Clock:
    """The number of steps: as configured, or fewer when a time budget allows no more.

    The first interval compiles, so that the second one decides.
    """

    def __init__(self, train: TrainConfig):
        self.total = train.steps
        self._budget = 60 * train.minutes
        self._began = self._last = time.perf_counter()
        self._ticks = self._done = 0

    def tick(self, steps: int) -> float:
        """Seconds since the start, after an interval of `steps` steps."""
        now = time.perf_counter()
        self._ticks, self._done = self._ticks + 1, self._done + steps
        if self._budget and self._ticks == 2:
            left = self._began + self._budget - now
            affordable = self._done + int(left * steps / (now - self._last))
            self.total = max(self._done, min(self.total, affordable))
            print(
                f"{(now - self._last) / steps:.4f} s a step, {self.total} steps in all", flush=True
            )
        self._last = now
        return round(now - self._began, 1)


# --- samples --------------------------------------------------------------------------------------


def sample_texts(config, weights, numerics, count: int, temperature: float, seed: int) -> list[str]:
    """A continuation of each prompt of `PROMPTS`, up to `count` new tokens or the end."""
    tokenizer = tokenizers.Tokenizer.from_file(str(PACKAGE_FOLDER / "tokenizer.json"))
    prompts = [tokenizer.encode(p, add_special_tokens=False).ids for p in PROMPTS]
    w = config.sliding_window
    length = -(-(max(map(len, prompts)) + count) // w) * w
    ids = np.zeros((len(prompts), length), np.int32)
    lengths = np.array([len(p) for p in prompts], np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    done = _sample_loop(weights, ids, lengths, count, temperature, seed, config, numerics)
    return [_until_end(tokenizer, row, start) for row, start in zip(done, lengths, strict=True)]


@functools.partial(jax.jit, static_argnums=(3, 6, 7))
def _sample_loop(weights, ids, lengths, count, temperature, seed, config, numerics):
    model = merge(config, weights, numerics)
    row = jnp.arange(ids.shape[0])

    def step(i, ids):
        z = logits(model, ids, numerics)[row, lengths + i - 1]
        floor = lax.top_k(z, 64)[0][:, -1:]
        z = jnp.where(z >= floor, z / temperature, -jnp.inf)
        key = jax.random.fold_in(jax.random.key(seed), i)
        return ids.at[row, lengths + i].set(jax.random.categorical(key, z).astype(ids.dtype))

    return lax.fori_loop(0, count, step, ids)


def _until_end(tokenizer: tokenizers.Tokenizer, row: np.ndarray, start: int) -> str:
    ids = [int(i) for i in row]
    ends = [i for i, token in enumerate(ids) if i >= start and token in END_IDS]
    return tokenizer.decode(ids[: ends[0] + 1] if ends else ids, skip_special_tokens=False)


# --- command --------------------------------------------------------------------------------------


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="holds train.npy, valid.npy")
    parser.add_argument("--output", type=Path, required=True, help="a new checkpoint directory")
    for name, default in asdict(TrainConfig()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--sample-tokens", type=int, default=250)
    return parser.parse_args()


def main() -> None:
    """Train, save, sample, and print the result as one JSON line."""
    arguments = _arguments()
    train = TrainConfig(**{name: getattr(arguments, name) for name in asdict(TrainConfig())})
    numerics = Numerics("bfloat16")
    print(json.dumps({"elements": parameter_count(NANO), **asdict(train)}), flush=True)
    weights, history = fit(NANO, train, arguments.folder, numerics)
    stored = {path: np.asarray(w.astype(jnp.bfloat16)) for path, w in weights.items()}
    write_hf(stored, NANO, arguments.output, files_from=PACKAGE_FOLDER)
    for text in sample_texts(NANO, weights, numerics, arguments.sample_tokens, 0.7, train.seed):
        print("-----", text, sep="\n")
    device = jax.devices()[0].device_kind
    print(json.dumps({"result": history[-1], "train": asdict(train), "device": device}))


if __name__ == "__main__":
    main()
