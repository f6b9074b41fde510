"""What a model is, so that a record says which one made it: hashes of configuration and weights."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from gemma_jax.checkpoint.load import load_config
from gemma_jax.model_source import resolve_model

SAMPLED_BYTES = 2**20
"""Bytes of each weights file that its hash covers after the header: a whole model takes minutes."""


def model_identity(model: str | Path) -> dict[str, Any]:
    """Name, vocabulary size and hashes of a checkpoint.

    Returns:
      name: the folder's.
      vocab_size: of the model, not of the tokenizer.
      config_sha256: over the network's settings, whatever their order or nesting in config.json.
      weights_sha256: over the tensor tables and the first MiB of every safetensors file; `None`
        for other formats.

    Raises:
      CheckpointError, ConfigError: no such model, or its config.json cannot be read.
    """
    path = resolve_model(model)
    folder = path if path.is_dir() else path.parent
    config = load_config(path)
    settings = config.to_hf()
    settings.pop("dtype", None)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {
        "name": folder.name,
        "vocab_size": config.vocab_size,
        "config_sha256": digest,
        "weights_sha256": _weights_hash(folder),
    }


def _weights_hash(folder: Path) -> str | None:
    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            digest.update(file.read(min(length, 2**27)))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest() if files else None
