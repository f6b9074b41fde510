"""An `LLM` whose weights are drawn on the device, so that no checkpoint is needed."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gemma_jax.checkpoint.names import LeafSource, leaf_sources
from gemma_jax.config import ModelConfig
from gemma_jax.engine_config import EngineConfig
from gemma_jax.llm import LLM
from gemma_jax.model.transformer import abstract_model
from gemma_jax.sharding import leaf_shardings, make_mesh
from gemma_jax.testing.weights import tensor_moments

MAX_BLOCK = 1 << 24
"""Numbers drawn at a time, which bounds the memory of the generator."""

SMALL = 1 << 16
"""Leaves of up to this many numbers are cut from one draw of a fixed size, which compiles once."""


def random_llm(config: ModelConfig, seed: int = 0, **settings: Any) -> LLM:
    """A model of the given shape with random weights; prompts are token ids.

    Args:
      config: the network.
      seed: of the weights.
      **settings: the fields of `EngineConfig`.
    """
    numerics = EngineConfig(**settings).numerics(config)
    shardings = leaf_shardings(abstract_model(config, numerics), make_mesh())
    leaves = random_leaves(config, numerics.dtype, seed, shardings.__getitem__)
    return LLM.from_leaves(config, leaves, **settings)


def random_leaves(
    config: ModelConfig,
    dtype: str,
    seed: int,
    sharding_for: Callable[[str], jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Path → normal random array of every parameter, made on the device.

    Means and standard deviations are those of `gemma_jax.testing.weights`, so that activations and
    logits have realistic sizes; the numbers are not those of `gemma_jax.testing.checkpoint`.
    """
    key = jax.random.key(seed)
    leaves = {}
    for i, (path, source) in enumerate(leaf_sources(config).items()):
        arguments = jax.random.fold_in(key, i), *map(np.float32, leaf_moments(source))
        if source.size <= SMALL:
            values = _draw_small(dtype, *arguments)[: source.size].reshape(source.shape)
            leaves[path] = jax.device_put(values, sharding_for(path))
        else:
            leaves[path] = _drawer(source.shape, dtype, sharding_for(path))(*arguments)
    return leaves


def leaf_moments(source: LeafSource) -> tuple[float, float]:
    """Mean and standard deviation of a leaf; the tensors fused into one share them."""
    part = source.parts[0]
    return tensor_moments(part.name, part.shape)


@functools.partial(jax.jit, static_argnums=0)
def _draw_small(dtype: str, key: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    return (mean + std * jax.random.normal(key, (SMALL,), jnp.float32)).astype(dtype)


@functools.cache
def _drawer(shape: tuple[int, ...], dtype: str, sharding: jax.sharding.Sharding) -> Callable:
    blocks = 1
    while math.prod(shape) > blocks * MAX_BLOCK and shape[0] % (2 * blocks) == 0:
        blocks *= 2
    block_shape = (shape[0] // blocks, *shape[1:])

    def draw(key: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        def block(key: jax.Array) -> jax.Array:
            values = mean + std * jax.random.normal(key, block_shape, jnp.float32)
            return values.astype(dtype)

        return lax.map(block, jax.random.split(key, blocks)).reshape(shape)

    return jax.jit(draw, out_shardings=sharding)
