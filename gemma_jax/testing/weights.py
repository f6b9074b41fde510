"""Seeded random weights whose greedy streams vary: the recipe behind parity tests and benchmarks.

Every value is `mean + std · √3 · u` with `u` uniform on [−1, 1) in steps of 2^−15, so `mean` and
`std` are the moments of the tensor. D is the model width, H a head width, P the width of the
per-layer inputs, `fan_in` the last axis.

| tensor                                           | mean         | std           |
|--------------------------------------------------|--------------|---------------|
| `embed_tokens`                                   | 0            | 4 · D^−½      |
| `embed_tokens_per_layer`                         | 0            | 1/8           |
| `*_proj`, `per_layer_*` projections, experts     | 0            | fan_in^−½     |
| `router.proj`                                    | 0            | 1.5           |
| `q_norm`, `k_norm`                               | (2 · H^−½)^½ | mean / 10     |
| `post_attention_layernorm`                       | 0.5          | 0.05          |
| final `norm`                                     | 0            | 0.3           |
| every other norm                                 | 1            | 0.1           |
| `router.scale`, `router.per_expert_scale`        | 1            | 0.2           |
| `layer_scalar` (uniform on 0.75 … 1)             | 0.875        | 0.125 · 3^−½  |

Why these, found by experiment:

* Logits get a standard deviation near 4 · 0.3, hence top-1/top-2 margins of a few tenths of a nat.
* The head is the transposed embedding, so a residual stream that still holds its token's embedding
  would repeat that token. The random signs of the final norm undo it.
* The embedding enters at 4 against branches of 0.5 to 1, and attention scores have a standard
  deviation near 2: context chooses the next token, while a rounding error does not grow from layer
  to layer. With scores at 8 and an embedding at 1.5 streams vary as well, but float32 noise reaches
  1e-2 in the logits; a larger `post_attention_layernorm` ends in short cycles.

A tensor depends on `(seed, name, shape)` alone: the bits are those of numpy's PCG64, a stream that
numpy keeps fixed, seeded with the seed and a hash of the name. Any part can be made on its own.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np

from gemma_jax.checkpoint.names import hf_shapes, unused_shapes
from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError, ConfigError

PREFIXES = ("model.language_model.", "model.")
BLOCK_ELEMENTS = 1 << 20

EMBEDDING_RMS = 4.0
FINAL_NORM_STD = 0.3
SCORE_STD = 2.0
ROUTER_STD = 1.5
PER_LAYER_TABLE_STD = 1 / 8
POST_ATTENTION_MEAN = 0.5

_NORMS = (
    "input_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
    "post_per_layer_input_norm", "per_layer_projection_norm",
)  # fmt: skip
_PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection",
)  # fmt: skip


def strip_prefix(name: str) -> str:
    """`name` without a leading `model.` or `model.language_model.`."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def tensor_moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of one tensor: the table above.

    Raises:
      CheckpointError: the table has no row for `name`.
    """
    parts = strip_prefix(name).removesuffix(".weight").split(".")
    leaf = parts[-1]
    if leaf == "embed_tokens":
        return 0.0, EMBEDDING_RMS / math.sqrt(shape[-1])
    if leaf == "embed_tokens_per_layer":
        return 0.0, PER_LAYER_TABLE_STD
    if parts[-2:] == ["router", "proj"]:
        return 0.0, ROUTER_STD
    if parts[-2:] in (["router", "scale"], ["router", "per_expert_scale"]):
        return 1.0, 0.2
    if leaf in _PROJECTIONS:
        return 0.0, 1 / math.sqrt(shape[-1])
    if leaf in ("q_norm", "k_norm"):
        mean = math.sqrt(SCORE_STD / math.sqrt(shape[-1]))
        return mean, mean / 10
    if leaf == "post_attention_layernorm":
        return POST_ATTENTION_MEAN, POST_ATTENTION_MEAN / 10
    if leaf == "norm":
        return 0.0, FINAL_NORM_STD
    if leaf in _NORMS:
        return 1.0, 0.1
    if leaf == "layer_scalar":
        return 0.875, 0.125 / math.sqrt(3)
    raise CheckpointError(f"{name}: no row of the random-weight recipe fits this tensor name")


def random_block(
    name: str, shape: tuple[int, ...], seed: int, start: int, count: int
) -> np.ndarray:
    """Elements `start … start + count` (row-major order) of `random_tensor(name, shape, seed)`.

    Args:
      start: a multiple of 4 (four elements share one 64-bit word of the generator).

    Returns:
      [count] float32.
    """
    if start % 4:
        raise ValueError(f"start={start}: expected a multiple of 4")
    words = _bits(name, seed).advance(start // 4).random_raw(-(-count // 4))
    mean, std = tensor_moments(name, shape)
    values = words.astype("<u8", copy=False).view("<i2")[:count].astype(np.float32)
    values *= np.float32(std * math.sqrt(3) / 2**15)
    values += np.float32(mean)
    return values


def random_tensor_blocks(
    name: str, shape: tuple[int, ...], seed: int, block_elements: int = BLOCK_ELEMENTS
) -> Iterator[np.ndarray]:
    """The tensor as flat float32 pieces of `block_elements` in order; the last may be shorter."""
    size = math.prod(shape)
    for start in range(0, size, block_elements):
        yield random_block(name, shape, seed, start, min(block_elements, size - start))


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The float32 tensor of the recipe for a Hugging Face tensor name, with or without prefix."""
    return random_block(name, shape, seed, 0, math.prod(shape)).reshape(shape)


def random_weights(
    config: ModelConfig, seed: int, *, include_unused: bool = False
) -> dict[str, np.ndarray]:
    """Every tensor of a text decoder, by the `<rest>` part of its published name, float32.

    Args:
      include_unused: also the K and V tensors that KV-shared layers carry in released files.
    """
    shapes = hf_shapes(config) | (unused_shapes(config) if include_unused else {})
    return {name: random_tensor(name, shape, seed) for name, shape in shapes.items()}


def weights_checksum(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        value = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _bits(name: str, seed: int) -> np.random.PCG64:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected an integer of at least 0")
    digest = hashlib.blake2b(strip_prefix(name).encode(), digest_size=8).digest()
    return np.random.PCG64(np.random.SeedSequence([seed, int.from_bytes(digest, "little")]))
