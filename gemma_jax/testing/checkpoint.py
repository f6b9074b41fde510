"""Writes a random Hugging Face checkpoint with the published tensor names and shapes.

    python -m gemma_jax.testing.checkpoint --preset e2b --seed 0 --out DIR \
        [--set field=value ...] [--dtype bfloat16] [--shards 1] [--overwrite]

The directory holds `config.json` (`Gemma4ForCausalLM`, `gemma4_text`, the 12B too),
`generation_config.json` and safetensors, the unused K and V of KV-shared layers included; no
tokenizer. transformers, vLLM and this package load the same directory. The weights are those of
`gemma_jax.testing.weights`, made and written block by block on all cores: memory stays far below
the file size. Everything is written under a temporary name first, so DIR is complete or absent.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.checkpoint.atomic import new_directory
from gemma_jax.checkpoint.dtypes import STORED, STORED_NAMES
from gemma_jax.checkpoint.names import Shape, hf_shapes, unused_shapes
from gemma_jax.config import ModelConfig, RopeConfig
from gemma_jax.errors import ConfigError, GemmaError
from gemma_jax.testing.configs import named_config
from gemma_jax.testing.weights import BLOCK_ELEMENTS, random_block

DTYPES = {dtype.name: dtype for dtype in STORED.values()}
MAX_THREADS = 16
_ROPES = ("sliding_rope", "full_rope")
_FIXED = ("model_type", "dtype", "ignored_fields")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: where its bytes begin, counted from the start of the file."""

    name: str
    shape: Shape
    offset: int


def write_checkpoint(
    config: ModelConfig,
    out: str | Path,
    seed: int = 0,
    dtype: str = "bfloat16",
    *,
    shards: int = 1,
    overwrite: bool = False,
) -> Path:
    """Writes the checkpoint directory `out` and returns its path.

    Args:
      config: what to write; its `dtype` is replaced.
      out: a directory that does not exist yet, or is empty.
      seed: of the random weights.
      dtype: bfloat16, float16 or float32: the float32 values of the recipe, rounded once.
      shards: number of safetensors files; more than one come with an index.
      overwrite: replace a checkpoint that is there.

    Raises:
      ConfigError: `dtype`, `seed` or `shards` is not allowed.
      CheckpointError: `out` exists, cannot be written, or the disk has too little room.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, DTYPES))}")
    shapes = {f"model.{n}": s for n, s in (hf_shapes(config) | unused_shapes(config)).items()}
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= len(shapes):
        raise ConfigError(f"shards={shards!r}: expected an integer from 1 to {len(shapes)} tensors")
    out = Path(out)
    needed = sum(map(math.prod, shapes.values())) * DTYPES[dtype].itemsize
    with new_directory(out, overwrite=overwrite, needed_bytes=needed) as folder:
        _write_json(folder / "config.json", config.replace(dtype=dtype).to_hf())
        _write_json(folder / "generation_config.json", _generation_config(config))
        _write_weights(folder, shapes, seed, DTYPES[dtype], shards)
    return out


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    """The sampling defaults of the published base checkpoints."""
    eos = config.eos_token_id
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


# --- safetensors ----------------------------------------------------------------------------------


def _write_weights(
    folder: Path, shapes: dict[str, Shape], seed: int, dtype: np.dtype, shards: int
) -> None:
    weight_map = {}
    for number, part in enumerate(_split(shapes, shards), start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        name = name if shards > 1 else "model.safetensors"
        _write_file(folder / name, part, seed, dtype)
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        total = sum(map(math.prod, shapes.values())) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _split(shapes: dict[str, Shape], shards: int) -> list[dict[str, Shape]]:
    """Consecutive parts of roughly equal size, none of them empty."""
    parts: list[dict[str, Shape]] = [{}]
    left = sum(map(math.prod, shapes.values()))
    filled = 0
    for position, (name, shape) in enumerate(shapes.items()):
        open_parts = shards - len(parts)
        full = filled >= left / (open_parts + 1) or len(shapes) - position == open_parts
        if parts[-1] and open_parts and full:
            parts.append({})
            left -= filled
            filled = 0
        parts[-1][name] = shape
        filled += math.prod(shape)
    return parts


def _layout(shapes: dict[str, Shape], dtype: np.dtype) -> tuple[bytes, list[Tensor]]:
    """The file's header bytes and the place of every tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = []
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": STORED_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        ends.append((name, shape, begin))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [Tensor(name, shape, len(header) + begin) for name, shape, begin in ends]


def _write_file(path: Path, shapes: dict[str, Shape], seed: int, dtype: np.dtype) -> None:
    header, tensors = _layout(shapes, dtype)
    blocks = (
        (tensor, start)
        for tensor in tensors
        for start in range(0, math.prod(tensor.shape), BLOCK_ELEMENTS)
    )
    with path.open("wb") as file, ThreadPoolExecutor(_threads()) as pool:
        file.write(header)
        file.flush()

        def write(block: tuple[Tensor, int]) -> None:
            tensor, start = block
            count = min(BLOCK_ELEMENTS, math.prod(tensor.shape) - start)
            values = random_block(tensor.name, tensor.shape, seed, start, count)
            data = values.astype(dtype).view(np.uint8).data
            _write_at(file.fileno(), data, tensor.offset + start * dtype.itemsize)

        for _ in pool.map(write, blocks):
            pass


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


# --- command line ---------------------------------------------------------------------------------


def override(config: ModelConfig, settings: Sequence[str]) -> ModelConfig:
    """`config` with `field=value` settings applied; values are JSON, anything else is text.

    Setting `num_hidden_layers` alone repeats or cuts the layer pattern; setting `vocab_size` alone
    sets `vocab_size_per_layer_input` with it. `sliding_rope` and `full_rope` take JSON objects.

    Raises:
      ConfigError: a setting without `=`, an unknown field, or a value that is not allowed.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting!r}: expected field=value")
        changes[name] = _parse(name, text)
    depth = changes.get("num_hidden_layers")
    if "layer_types" not in changes and isinstance(depth, int):
        pattern = config.layer_types
        changes["layer_types"] = (pattern * (max(depth, 0) // len(pattern) + 1))[: max(depth, 0)]
    if "vocab_size" in changes:
        changes.setdefault("vocab_size_per_layer_input", changes["vocab_size"])
    return config.replace(**changes)


def _parse(name: str, text: str) -> Any:
    known = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in _FIXED]
    if name not in known:
        raise ConfigError(f"--set {name}: unknown field; expected one of {', '.join(known)}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if name in _ROPES:
        return _rope(name, value)
    return tuple(value) if isinstance(value, list) else value


def _rope(name: str, value: Any) -> RopeConfig:
    known = [f.name for f in dataclasses.fields(RopeConfig)]
    if not isinstance(value, dict) or set(value) - set(known):
        raise ConfigError(f"--set {name}={value!r}: expected a JSON object of {', '.join(known)}")
    return RopeConfig(**value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gemma_jax.testing.checkpoint",
        description="Write a random Hugging Face checkpoint (text decoder, no tokenizer).",
    )
    parser.add_argument("--preset", required=True, help="a published size or a tiny test config")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--out", required=True, type=Path, help="directory to create")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--shards", type=int, default=1, help="number of files (default 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in DIR")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        config = override(named_config(args.preset), args.settings)
        path = write_checkpoint(
            config, args.out, args.seed, args.dtype, shards=args.shards, overwrite=args.overwrite
        )
    except (GemmaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
