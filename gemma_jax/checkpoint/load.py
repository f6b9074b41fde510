"""One entry to read a checkpoint of either format."""

from pathlib import Path
from typing import Any

import jax

from gemma_jax.checkpoint.formats import detect_format
from gemma_jax.checkpoint.hf import load_hf
from gemma_jax.checkpoint.place import ShardingFor
from gemma_jax.checkpoint.side_files import load_config
from gemma_jax.config import ModelConfig


def load_checkpoint(
    path: str | Path,
    dtype: Any = "auto",
    sharding_for: ShardingFor | None = None,
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    """The config and the parameter leaves (path → array) of a safetensors or orbax checkpoint.

    Args:
      path: a directory, or one .safetensors file with its config.json beside it.
      dtype: "bfloat16", "float32", "auto" (the config's), or None to keep the stored dtypes.
      sharding_for: leaf path and shape → `jax.sharding.Sharding`; None is the default device.
    Raises:
      ConfigError: config.json is missing, invalid or quantized.
      CheckpointError: the weights are not exactly those of the config.
      UnsupportedError: dtype float16.
    """
    config = load_config(path)
    if detect_format(path) == "hf":
        return config, load_hf(path, config, dtype, sharding_for)
    from gemma_jax.checkpoint.orbax import load_orbax  # seconds to import, so only when needed

    return config, load_orbax(path, config, dtype, sharding_for)
