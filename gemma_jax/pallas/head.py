"""Best candidates of soft-capped logits, without the capped logits in memory.

    top_candidates:  the k largest softcap(logits_i), best first, the lower id first on a tie

The capped values round to the compute dtype, which makes ties common: above 8 the capped bf16
logits take 225 values. The op therefore compares capped, rounded values.

Two passes. The first reads the logits once and writes the best value of each block of ids; the
second looks into k blocks only: a value outside the k blocks with the largest maxima (lower block
first on a tie) has k values before it, one from each of them, so the answer lies inside.

Limits: bfloat16 or float32, compute capability 8.0 or a CPU (interpreted). Source of the soft cap:
transformers 5.17 `Gemma4ForCausalLM`.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model import layers
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)

BLOCK_IDS = 256
"""Ids a block of the first pass, and the unit that the second looks into."""

MIN_CANDIDATE_ROWS = 8
"""From here on two passes beat XLA's own top-k, which sorts a row after the other."""


class Candidates(NamedTuple):
    """Capped logits float32 and ids int32, [N, k], best first."""

    value: jax.Array
    id: jax.Array


# --- reference and plain jnp made for speed ------------------------------------------------------


def top_candidates_reference(
    logits: jax.Array, k: int, softcap: float | None, *, numerics: Numerics
) -> Candidates:
    """The op in plain jnp."""
    value, ids = lax.top_k(layers.softcap(logits, softcap, numerics), k)
    return Candidates(value, ids.astype(jnp.int32))


def _block_best_xla(logits: jax.Array, softcap: float | None, numerics: Numerics) -> jax.Array:
    """The largest capped value of each block of `BLOCK_IDS` ids, float32 [N, blocks]."""
    n, v = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -v % BLOCK_IDS)), constant_values=-jnp.inf)
    blocks = layers.softcap(padded, softcap, numerics).reshape(n, -1, BLOCK_IDS)
    return jnp.max(blocks, axis=-1)


# --- kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Blocks of `BLOCK_IDS` ids that a program takes (a power of two), and its warps."""

    blocks: int
    num_warps: int


def default_config(num_rows: int) -> Config:
    """Few rows need many programs to fill the GPU."""
    return Config(8, 4) if num_rows <= 4 else Config(16, 4)


def _kernel(
    logits_ref: Any,
    value_ref: Any,
    *,
    softcap: float | None,
    config: Config,
    numerics: Numerics,
) -> None:
    """Some blocks of one row."""
    row, first = pl.program_id(0), pl.program_id(1) * config.blocks
    block = first + lax.iota(jnp.int32, config.blocks)
    ids = block[:, None] * BLOCK_IDS + lax.iota(jnp.int32, BLOCK_IDS)[None]
    inside = ids < logits_ref.shape[1]
    z = triton.load(logits_ref.at[row, ids], mask=inside, other=-jnp.inf).astype(jnp.float32)
    z = jnp.where(inside, _cap(z, softcap, numerics), -jnp.inf)
    triton.store(value_ref.at[row, block], jnp.max(z, axis=1), mask=block < value_ref.shape[1])


def _cap(z: jax.Array, softcap: float | None, numerics: Numerics) -> jax.Array:
    if softcap is None:
        return z
    z = triton.rounded(z / jnp.float32(softcap), numerics)
    z = triton.rounded(jnp.tanh(z), numerics)
    return triton.rounded(z * jnp.float32(softcap), numerics)


# --- wrapper -------------------------------------------------------------------------------------


def _block_best_pallas(
    logits: jax.Array, softcap: float | None, numerics: Numerics, config: Config | None = None
) -> jax.Array:
    """As `_block_best_xla`."""
    n, v = logits.shape
    config = config or default_config(n)
    blocks = pl.cdiv(v, BLOCK_IDS)
    return triton.pallas_call(
        functools.partial(_kernel, softcap=softcap, config=config, numerics=numerics),
        name="block_best",
        out_shape=jax.ShapeDtypeStruct((n, blocks), jnp.float32),
        grid=(n, pl.cdiv(blocks, config.blocks)),
        in_specs=[triton.whole()],
        out_specs=triton.whole(),
        num_warps=config.num_warps,
        num_stages=1,
    )(logits)


def _candidates(
    block_best: Any, logits: jax.Array, k: int, softcap: float | None, *, numerics: Numerics
) -> Candidates:
    n, v = logits.shape
    maxima = block_best(logits, softcap, numerics)
    blocks = lax.top_k(maxima, min(k, maxima.shape[1]))[1]
    blocks = jnp.sort(blocks, axis=-1)  # positions in order of id, so that ties go to the lower
    ids = blocks[..., None] * BLOCK_IDS + jnp.arange(BLOCK_IDS, dtype=blocks.dtype)
    ids = ids.reshape(n, -1).astype(jnp.int32)
    raw = jnp.take_along_axis(logits, jnp.minimum(ids, v - 1), axis=-1)
    value = jnp.where(ids < v, layers.softcap(raw, softcap, numerics), -jnp.inf)
    value, at = lax.top_k(value, k)
    return Candidates(value, jnp.take_along_axis(ids, at, axis=-1))


# --- public op -----------------------------------------------------------------------------------


def top_candidates(
    logits: jax.Array,
    k: int,
    softcap: float | None,
    *,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> Candidates:
    """The k largest soft-capped logits of logits [N, V], ordered as `lax.top_k` orders them.

    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: k is below 1 or above V.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k={k}: expected 1 … {logits.shape[1]}, the vocabulary")
    kernel = functools.partial(_candidates, _block_best_pallas)
    many = logits.shape[0] >= MIN_CANDIDATE_ROWS
    choices = {
        "triton": Choice(kernel, functools.partial(_unsupported, logits), lambda _: many),
        "xla": Choice(functools.partial(_candidates, _block_best_xla), preferred=lambda _: many),
        "reference": Choice(top_candidates_reference),
    }
    shape = f"{logits.dtype}{list(logits.shape)}"
    run = dispatch("top_candidates", implementation, choices, shape)
    return run(logits, k, softcap, numerics=numerics)


def _unsupported(logits: jax.Array, device: Device) -> str | None:
    if logits.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {logits.dtype}"
    return needs_gpu_or_interpreter((8, 0))(device)
