"""The files of a checkpoint that are not weights: config, tokenizer, generation settings."""

import json
import shutil
from pathlib import Path
from typing import Any

from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError

SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_side_files(source: str | Path | None, target: Path) -> None:
    """Copies the tokenizer, chat template and generation config that `source` has."""
    if source is None:
        return
    folder = checkpoint_folder(source)
    for name in SIDE_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def checkpoint_folder(path: str | Path) -> Path:
    """The directory of a checkpoint that was named by its directory or by its weights file."""
    path = Path(path)
    return path.parent if path.is_file() else path


def load_config(path: str | Path) -> ModelConfig:
    """The `ModelConfig` of a checkpoint directory or weights file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    return ModelConfig.from_file(checkpoint_folder(path) / "config.json")


def config_json(config: ModelConfig, source: str | Path | None) -> str:
    """The text of a config.json: that of `source` with the dtype of `config`, or made from it."""
    data = _source_config(source)
    if data is None:
        data = config.to_hf()
    for part in (data, data.get("text_config")):
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            part["dtype"] = config.dtype
    return _text(data)


def text_config_json(config: ModelConfig, source: str | Path | None) -> str:
    """As `config_json`, but always of a text-only model: towers are not part of what we write."""
    data = _source_config(source)
    if data is None or data.get("model_type") != "gemma4_text":
        data = config.to_hf()
    data.pop("torch_dtype", None)
    return _text(data | {"architectures": ["Gemma4ForCausalLM"], "dtype": config.dtype})


def _source_config(source: str | Path | None) -> dict[str, Any] | None:
    if source is None:
        return None
    return json.loads((checkpoint_folder(source) / "config.json").read_text())


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
