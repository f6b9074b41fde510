"""Hugging Face safetensors checkpoints: found, checked as a whole, read tensor by tensor, written.

Source of names, prefixes and of which tensors a released file carries: the published checkpoints
(see `names.py`).
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gemma_jax.checkpoint import safetensors_io
from gemma_jax.checkpoint.atomic import new_directory
from gemma_jax.checkpoint.dtypes import BFLOAT16, FLOAT32, STORED, STORED_NAMES, compute_dtype
from gemma_jax.checkpoint.leaves import check_leaves
from gemma_jax.checkpoint.names import LeafSource, hf_shapes, leaf_sources, unused_shapes
from gemma_jax.checkpoint.place import Placer, ShardingFor
from gemma_jax.checkpoint.problems import Problems
from gemma_jax.checkpoint.safetensors_io import TensorInfo
from gemma_jax.checkpoint.side_files import copy_side_files, text_config_json
from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIXES = ("model.language_model.", "language_model.", "model.")
TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
DEFAULT_SHARD_BYTES = 5 << 30
_COMPARE_BLOCK = 16 << 20


class HfCheckpoint:
    """A checked safetensors checkpoint whose tensors are views over mapped files.

    `used` and `dropped` map a name to where it lies: `<rest>` names of the tensors that the text
    decoder needs, and full names of those it does not (towers, K and V of KV-shared layers, a tied
    lm_head).
    """

    def __init__(self, path: str | Path, config: ModelConfig):
        """Reads every header and checks names, shapes and dtypes.

        Raises:
          CheckpointError: a file, index or tensor that does not fit; the first ten are listed.
        """
        self.path = Path(path)
        self.config = config
        self.used: dict[str, TensorInfo] = {}
        self.dropped: dict[str, TensorInfo] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._check(_read_infos(self.path))

    def read(self, name: str) -> np.ndarray:
        """The tensor `<rest>` as a read-only view over the mapped file, in its stored dtype."""
        return self._view(self.used[name])

    def iter_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every used tensor as `(<rest> name, view)`, in the order of the model's leaves."""
        for source in leaf_sources(self.config).values():
            for part in source.parts:
                yield part.name, self.read(part.name)

    def _view(self, info: TensorInfo) -> np.ndarray:
        if info.path not in self._maps:
            self._maps[info.path] = safetensors_io.map_file(info.path)
        return info.view(self._maps[info.path])

    def _check(self, infos: list[TensorInfo]) -> None:
        problems = Problems(self.path)
        expected, unused = hf_shapes(self.config), unused_shapes(self.config)
        shapes = expected | unused
        shapes[LM_HEAD] = expected[EMBEDDING]
        for info in infos:
            rest = strip_prefix(info.name)
            if rest.startswith(TOWERS):
                self.dropped[info.name] = info
                continue
            if rest not in shapes:
                problems.add(f"{info.name} ({info}): unknown tensor, not part of this config")
                continue
            if rest in self.used:
                problems.add(f"{info.name}: duplicate of {self.used[rest].name}")
                continue
            _check_tensor(problems, info, shapes[rest])
            if rest in expected:
                self.used[rest] = info
            else:
                self.dropped[info.name] = info
        for name in sorted(set(expected) - set(self.used)):
            problems.add(f"{name}: missing; expected shape {list(expected[name])}")
        problems.check()
        for name, info in self.dropped.items():
            if strip_prefix(name) == LM_HEAD:
                self._check_tied(info)

    def _check_tied(self, head: TensorInfo) -> None:
        table = self.used[EMBEDDING]
        a, b = self._view(head), self._view(table)
        if head.dtype != table.dtype or not same_bits(a, b):
            raise CheckpointError(
                f"{self.path}: {head.name} ({head}) differs from {table.name} ({table});"
                " only tied embeddings are supported"
            )


def load_hf(
    path: str | Path,
    config: ModelConfig,
    dtype: Any = "auto",
    sharding_for: ShardingFor | None = None,
) -> dict[str, jax.Array]:
    """Leaf path → array for every parameter of the model, read from safetensors.

    Host memory beyond the arrays themselves stays below the largest leaf plus 1 GiB.

    Args:
      path: a directory (one file, shards with or without an index) or one .safetensors file.
      config: the text model that the files must hold.
      dtype: "bfloat16", "float32", "auto" (the config's), or None to keep each leaf as stored.
      sharding_for: leaf path and shape → where the leaf goes; None is the default device.
    Raises:
      CheckpointError: the files do not hold exactly this model.
      UnsupportedError: dtype float16.
    """
    target = None if dtype is None else compute_dtype(dtype, config)
    checkpoint = HfCheckpoint(path, config)
    if target is not None:
        _log_casts(checkpoint, target)
    placer = Placer(sharding_for)
    leaves = {
        leaf_path: placer.put(
            leaf_path, source, checkpoint.read, target or _stored_dtype(checkpoint, source)
        )
        for leaf_path, source in leaf_sources(config).items()
    }
    placer.wait()
    return leaves


def write_hf(
    leaves: Mapping[str, Any],
    config: ModelConfig,
    out_dir: str | Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    files_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the leaves as a text-only Hugging Face checkpoint (`Gemma4ForCausalLM`).

    Args:
      leaves: leaf path → array, as the model holds them.
      config: the model they belong to.
      out_dir: the new directory; appears only when it is complete.
      shard_bytes: a file holds at most this many bytes of tensors (a larger tensor gets its own).
      files_from: a checkpoint whose config and tokenizer files are taken over.
      overwrite: replace an existing checkpoint.
    Raises:
      CheckpointError: leaves that do not fit the config, an existing directory, a full disk.
    """
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes={shard_bytes}: expected at least 1")
    sources = leaf_sources(config)
    check_leaves(leaves, sources, "write_hf")
    shards = _plan_shards(leaves, sources, shard_bytes)
    total = sum(np.dtype(leaves[p].dtype).itemsize * s.size for p, s in sources.items())
    with new_directory(Path(out_dir), overwrite=overwrite, needed_bytes=total) as folder:
        tensors = _split_all(leaves, sources)
        weight_map = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
            taken = (next(tensors) for _ in shard)
            safetensors_io.write_file(folder / name, shard, taken)
            weight_map |= {tensor: name for tensor, _, _ in shard}
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (folder / "config.json").write_text(text_config_json(config, files_from))
        copy_side_files(files_from, folder)


def strip_prefix(name: str) -> str:
    """The `<rest>` part of a published tensor name."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True when two arrays have the same dtype, shape and bits; NaN payloads and -0 count."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    word = np.dtype(f"u{a.dtype.itemsize}")
    flat_a, flat_b = a.reshape(-1).view(word), b.reshape(-1).view(word)
    return all(
        np.array_equal(flat_a[i : i + _COMPARE_BLOCK], flat_b[i : i + _COMPARE_BLOCK])
        for i in range(0, flat_a.size, _COMPARE_BLOCK)
    )


# --- finding and checking files -------------------------------------------------------------------


def find_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a checkpoint and, when there is an index, its weight map.

    Raises:
      CheckpointError: nothing there, or an index that is broken or names a missing shard.
    """
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    if (path / SINGLE).is_file():
        return [path / SINGLE], None
    if (path / INDEX).is_file():
        weight_map = _read_index(path / INDEX)
        return [path / name for name in sorted(set(weight_map.values()))], weight_map
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: holds no .safetensors file")
    return files, None


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map")
    problems = Problems(path)
    for name in sorted({str(name) for name in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            problems.add(f"shard {name!r} is not the name of a .safetensors file beside the index")
        elif not (path.parent / name).is_file():
            tensor = next(t for t, shard in weight_map.items() if shard == name)
            problems.add(f"shard {name} is missing (it holds {tensor}, among others)")
    problems.check()
    return weight_map


def _read_infos(path: Path) -> list[TensorInfo]:
    files, weight_map = find_files(path)
    problems = Problems(path)
    infos: dict[str, TensorInfo] = {}
    for file in files:
        try:
            found = safetensors_io.read_header(file)
        except CheckpointError as error:
            problems.add(str(error))
            continue
        for info in found:
            if info.name in infos:
                other = infos[info.name]
                problems.add(
                    f"{info.name}: duplicate, {other} in {other.path.name}"
                    f" and {info} in {file.name}"
                )
            infos[info.name] = info
    problems.check()
    if weight_map is not None:
        _check_index(problems, infos, weight_map)
    return list(infos.values())


def _check_index(
    problems: Problems, infos: dict[str, TensorInfo], weight_map: dict[str, str]
) -> None:
    for name in sorted(set(infos) | set(weight_map)):
        if name not in infos:
            problems.add(f"{name}: missing from {weight_map[name]}, where the index puts it")
        elif name not in weight_map:
            problems.add(f"{name} ({infos[name]}): in {infos[name].path.name}, not in the index")
        elif infos[name].path.name != weight_map[name]:
            problems.add(
                f"{name}: in {infos[name].path.name}, but the index says {weight_map[name]}"
            )
    problems.check()


def _check_tensor(problems: Problems, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype not in STORED:
        problems.add(
            f"{info.name}: dtype {info.dtype} (shape {list(info.shape)}), expected one of"
            f" {', '.join(STORED)} (shape {list(shape)})"
        )
    elif info.shape != shape:
        problems.add(
            f"{info.name}: shape {list(info.shape)} ({info.dtype}), expected {list(shape)}"
        )


def _stored_dtype(checkpoint: HfCheckpoint, source: LeafSource) -> np.dtype:
    """The dtype that holds every part of a leaf exactly."""
    kinds = {STORED[checkpoint.used[part.name].dtype] for part in source.parts}
    return kinds.pop() if len(kinds) == 1 else FLOAT32


def _log_casts(checkpoint: HfCheckpoint, target: np.dtype) -> None:
    counts = Counter(info.dtype for info in checkpoint.used.values())
    counts.pop(STORED_NAMES[target], None)
    if counts:
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        level = logging.WARNING if target == BFLOAT16 and "F32" in counts else logging.INFO
        logger.log(level, "%s: casting %s tensors to %s", checkpoint.path, text, target)


# --- writing --------------------------------------------------------------------------------------

Plan = list[tuple[str, np.dtype, tuple[int, ...]]]


def _plan_shards(
    leaves: Mapping[str, Any], sources: Mapping[str, LeafSource], shard_bytes: int
) -> list[Plan]:
    shards: list[Plan] = [[]]
    room = shard_bytes
    for path, source in sources.items():
        dtype = np.dtype(leaves[path].dtype)
        for part in source.parts:
            size = int(np.prod(part.shape)) * dtype.itemsize
            if size > room and shards[-1]:
                shards.append([])
                room = shard_bytes
            shards[-1].append((f"model.{part.name}", dtype, part.shape))
            room -= size
    return shards


def _split_all(
    leaves: Mapping[str, Any], sources: Mapping[str, LeafSource]
) -> Iterator[np.ndarray]:
    for path, source in sources.items():
        yield from source.split(np.asarray(leaves[path])).values()
