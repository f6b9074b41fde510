"""A checkpoint as vLLM wants it: with the K and V tensors that KV-shared layers never use.

Published files carry them and vLLM 0.25.1 refuses a file without their `k_norm`; a checkpoint that
was written without them gets a folder of links and one more file.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gemma_jax.checkpoint.dtypes import STORED
from gemma_jax.checkpoint.hf import EMBEDDING, INDEX, SINGLE, HfCheckpoint
from gemma_jax.checkpoint.load import load_config
from gemma_jax.checkpoint.names import unused_shapes
from gemma_jax.checkpoint.safetensors_io import write_file

UNUSED_FILE = "unused-kv.safetensors"
USED_FILE = "used.safetensors"
"""The link to a checkpoint's single file, whose own name would make readers ignore the index."""


@contextmanager
def vllm_checkpoint(path: Path) -> Iterator[Path]:
    """The folder to give vLLM: `path`, or a temporary one that has what `path` lacks.

    The added projections are 0 and the added norms 1: vLLM computes K and V of a shared layer and
    throws them away.

    Raises:
      CheckpointError, ConfigError: not a safetensors checkpoint of a Gemma 4 decoder.
    """
    folder = path if path.is_dir() else path.parent
    checkpoint = HfCheckpoint(path, load_config(path))
    embedding = checkpoint.used[EMBEDDING]
    prefix = embedding.name.removesuffix(EMBEDDING)
    missing = {
        prefix + name: shape
        for name, shape in unused_shapes(checkpoint.config).items()
        if prefix + name not in checkpoint.dropped
    }
    if not missing:
        yield folder
        return
    infos = [*checkpoint.used.values(), *checkpoint.dropped.values()]
    with tempfile.TemporaryDirectory(prefix="gemma-jax-vllm-") as name:
        copy = Path(name)
        for file in folder.iterdir():
            if file.name != INDEX:
                (copy / _linked(file.name)).symlink_to(file.resolve())
        dtype = STORED[embedding.dtype]
        write_file(
            copy / UNUSED_FILE,
            [(tensor, dtype, shape) for tensor, shape in missing.items()],
            (np.full(s, "norm" in tensor, dtype) for tensor, s in missing.items()),
        )
        weight_map = {info.name: _linked(info.path.name) for info in infos}
        weight_map |= dict.fromkeys(missing, UNUSED_FILE)
        (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield copy


def _linked(name: str) -> str:
    return USED_FILE if name == SINGLE else name
