"""Conversion between the two checkpoint formats: a load that keeps the bits, then a write."""

from pathlib import Path
from typing import Any

import jax

from gemma_jax.checkpoint.atomic import check_target
from gemma_jax.checkpoint.hf import DEFAULT_SHARD_BYTES, write_hf
from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError


def to_orbax(
    source: str | Path, target: str | Path, *, dtype: Any = None, overwrite: bool = False
) -> None:
    """Writes `source` (either format) as an orbax checkpoint, tokenizer and config included.

    Args:
      source: the checkpoint to read.
      target: the directory to create.
      dtype: "bfloat16" or "float32" to cast; None keeps the stored bits.
      overwrite: replace an existing checkpoint.
    Raises:
      CheckpointError: the source is broken, or the target exists or cannot be written.
    """
    from gemma_jax.checkpoint.orbax import save_orbax  # seconds to import

    _check_paths(source, target, overwrite)
    config, leaves = _load(source, dtype)
    save_orbax(leaves, config, target, files_from=source, overwrite=overwrite)


def to_hf(
    source: str | Path,
    target: str | Path,
    *,
    dtype: Any = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes `source` (either format) as text-only Hugging Face safetensors.

    Args and errors are those of `to_orbax`; a file holds at most `shard_bytes` of tensors.
    """
    _check_paths(source, target, overwrite)
    config, leaves = _load(source, dtype)
    write_hf(
        leaves, config, target, shard_bytes=shard_bytes, files_from=source, overwrite=overwrite
    )


def _load(source: str | Path, dtype: Any) -> tuple[ModelConfig, dict[str, jax.Array]]:
    config, leaves = load_checkpoint(source, dtype)
    return (config if dtype is None else config.replace(dtype=str(dtype))), leaves


def _check_paths(source: str | Path, target: str | Path, overwrite: bool) -> None:
    """Refuses, before anything is read, a target that exists or that holds the source."""
    source, target = Path(source).resolve(), Path(target)
    if source.is_relative_to(target.resolve()):
        raise CheckpointError(f"{target}: is the source or holds it; choose another directory")
    check_target(target, overwrite)
