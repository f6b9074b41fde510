"""Which format a checkpoint has, told from the files that are there."""

from pathlib import Path
from typing import Literal

from gemma_jax.checkpoint.hf import find_files

Format = Literal["hf", "orbax"]

MARKER = "gemma_jax.json"
FORMAT = {"format": "gemma_jax orbax", "version": 1}


def detect_format(path: str | Path) -> Format:
    """`"orbax"` for a directory that `save_orbax` wrote, `"hf"` for safetensors.

    Raises:
      CheckpointError: `path` does not exist or holds no weights.
    """
    path = Path(path)
    if (path / MARKER).is_file():
        return "orbax"
    find_files(path)
    return "hf"
