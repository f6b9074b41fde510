"""Random models in memory, and the roundings of the numerics page redone in numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gemma_jax.checkpoint.names import leaf_sources
from gemma_jax.config import FULL, SLIDING, ModelConfig
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.runner import Runner
from gemma_jax.sharding import leaf_shardings, make_mesh
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.weights import random_weights

BF16 = Numerics("bfloat16", "hf")
VLLM = Numerics("bfloat16", "vllm")
F32 = Numerics("float32")


def bf(x) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def as_bf16(x) -> jnp.ndarray:
    return jnp.asarray(np.asarray(x, np.float32).astype(ml_dtypes.bfloat16))


def as_f32(x) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """float32 normal values that are exact in bfloat16."""
    return bf(scale * np.random.default_rng(seed).standard_normal(shape))


def mismatch(actual, expected) -> float:
    """Share of the elements that differ."""
    return float(np.mean(as_f32(actual) != np.asarray(expected, np.float32)))


def gelu(x) -> np.ndarray:
    """gelu_tanh of float32 values."""
    x = np.asarray(x, np.float32)
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def norm(x, weight=None, eps: float = 1e-6) -> np.ndarray:
    """RMS norm in float32 with one bf16 rounding."""
    x = np.asarray(x, np.float32)
    y = x * (np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) ** np.float32(-0.5)
    return bf(y if weight is None else y * np.asarray(weight, np.float32))


def shallow(name: str) -> ModelConfig:
    """A tiny config cut to its few kinds of layers: compilation is what tests spend time on."""
    config = TINY_CONFIGS[name]
    shared = 2 if config.num_kv_shared_layers else 0
    kinds = (SLIDING, FULL, SLIDING, FULL) if shared else (SLIDING, FULL, FULL)
    return config.replace(
        num_hidden_layers=len(kinds), layer_types=kinds, num_kv_shared_layers=shared,
        sliding_window=24, vocab_size=256, vocab_size_per_layer_input=256,
        max_position_embeddings=512,
    )  # fmt: skip


def random_leaves(config: ModelConfig, dtype: str = "float32", seed: int = 0) -> dict:
    """Path → array of every parameter leaf, from the random-weight recipe."""
    weights = random_weights(config, seed)
    leaves = {}
    for path, source in leaf_sources(config).items():
        out = np.empty(source.shape, np.float32)
        source.fill(out, weights.__getitem__)
        leaves[path] = jnp.asarray(out.astype(jnp.dtype(dtype)))
    return leaves


def random_runner(config: ModelConfig, numerics: Numerics = F32, **settings) -> Runner:
    """A runner over `random_leaves`, placed as `LLM` places them."""
    shardings = leaf_shardings(abstract_model(config, numerics), make_mesh())
    leaves = random_leaves(config, numerics.dtype)
    placed = {path: jax.device_put(leaf, shardings[path]) for path, leaf in leaves.items()}
    return Runner(config, numerics, placed, **settings)
