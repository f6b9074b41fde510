"""Tiny checkpoints on disk, written with the safetensors package, not with our own writer."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from gemma_jax.config import ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = ("e2b-tiny", "e4b-tiny", "12b-tiny", "26b-a4b-tiny", "31b-tiny")


@dataclasses.dataclass
class Source:
    """A checkpoint to write: change `tensors` or `config_json`, then `write`."""

    path: Path
    config: ModelConfig
    tensors: dict[str, np.ndarray]
    config_json: dict

    def write(self, shards: int = 1, index: bool = True) -> Path:
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config_json))
        if shards == 1:
            save_file(self.tensors, self.path / "model.safetensors")
            return self.path
        names = list(self.tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: self.tensors[name] for name in names[i::shards]}
            save_file(part, self.path / file)
            weight_map |= dict.fromkeys(part, file)
        if index:
            text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
            (self.path / "model.safetensors.index.json").write_text(text)
        return self.path

    def rename(self, prefix: str) -> None:
        """Replaces the prefix `model.` of every tensor."""
        self.tensors = {prefix + n.removeprefix("model."): t for n, t in self.tensors.items()}


def same(a, b) -> bool:
    """Equal dtype, shape and bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
