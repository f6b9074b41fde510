"""Orbax checkpoints: the model's leaves as the model holds them, so that loading is a plain read.

A directory holds `gemma_jax.json` (format and version), `config.json`, the tokenizer files of the
source, and `params/`: one PyTree of nested dictionaries whose keys are the parts of the leaf path.
"""

import asyncio
import contextlib
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gemma_jax.checkpoint.atomic import new_directory
from gemma_jax.checkpoint.dtypes import compute_dtype
from gemma_jax.checkpoint.formats import FORMAT, MARKER
from gemma_jax.checkpoint.leaves import check_leaves
from gemma_jax.checkpoint.names import leaf_sources
from gemma_jax.checkpoint.place import ShardingFor, default_sharding
from gemma_jax.checkpoint.side_files import config_json, copy_side_files
from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

PARAMS = "params"
_CHUNK_BYTES = 64 << 20
_BATCH_BYTES = 512 << 20


def save_orbax(
    leaves: Mapping[str, Any],
    config: ModelConfig,
    out_dir: str | Path,
    *,
    files_from: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the leaves to a new directory, which appears only when it is complete.

    Args:
      leaves: leaf path → array, as the model holds them.
      config: the model they belong to.
      out_dir: the new directory.
      files_from: a checkpoint whose config and tokenizer files are taken over.
      overwrite: replace an existing checkpoint.
    Raises:
      CheckpointError: leaves that do not fit the config, an existing directory, a full disk.
    """
    check_leaves(leaves, leaf_sources(config), "save_orbax")
    total = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves.values())
    tree = _nested(leaves)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with new_directory(Path(out_dir), overwrite=overwrite, needed_bytes=total) as folder:
        with _checkpointer(_largest(leaves)) as checkpointer, _errors_named(out_dir, "written"):
            args = ocp.args.PyTreeSave(tree, save_args=save_args)
            checkpointer.save(folder.resolve() / PARAMS, args=args)
        (folder / "config.json").write_text(config_json(config, files_from))
        copy_side_files(files_from, folder)
        (folder / MARKER).write_text(json.dumps(FORMAT) + "\n")


def load_orbax(
    path: str | Path,
    config: ModelConfig,
    dtype: Any = "auto",
    sharding_for: ShardingFor | None = None,
) -> dict[str, jax.Array]:
    """Leaf path → array for every parameter of the model, restored straight to its devices.

    Args and errors are those of `load_hf`.
    """
    stored = stored_leaves(path, config)
    target = None if dtype is None else compute_dtype(dtype, config)
    casts = sum(target is not None and leaf.dtype != target for leaf in stored.values())
    if casts:
        logger.info("%s: casting %d leaves to %s", path, casts, target)
    restore_args = {
        leaf_path: ocp.ArrayRestoreArgs(
            sharding=sharding_for(leaf_path, leaf.shape) if sharding_for else default_sharding(),
            dtype=target or leaf.dtype,
        )
        for leaf_path, leaf in stored.items()
    }
    return _restore(path, stored, restore_args)


def iter_leaves(path: str | Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Every leaf as `(path, numpy array)` in the model's order, some 512 MiB at a time."""
    stored = stored_leaves(path, config)
    batch: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf_path, leaf in stored.items():
        batch[leaf_path] = leaf
        if sum(map(_bytes, batch.values())) > _BATCH_BYTES or len(batch) == len(stored):
            yield from _restore_numpy(path, batch).items()
            batch = {}
    if batch:
        yield from _restore_numpy(path, batch).items()


def stored_leaves(path: str | Path, config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaf path → shape and dtype on disk, checked against the model, in the model's order."""
    _check_marker(Path(path))
    with _checkpointer(0) as checkpointer, _errors_named(path, "read"):
        metadata = checkpointer.metadata((Path(path) / PARAMS).resolve())
        tree = None if metadata.item_metadata is None else metadata.item_metadata.tree
    if tree is None:
        raise CheckpointError(f"{path}: {PARAMS}/ holds no readable orbax data")
    found = _flat(tree)
    sources = leaf_sources(config)
    check_leaves(found, sources, path)
    return {p: jax.ShapeDtypeStruct(found[p].shape, np.dtype(found[p].dtype)) for p in sources}


def _check_marker(path: Path) -> None:
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MARKER}: cannot be read ({error})") from None
    if marker != FORMAT:
        raise CheckpointError(f"{path / MARKER}: holds {marker!r}, expected {FORMAT!r}")


def _restore_numpy(
    path: str | Path, batch: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    return _restore(path, batch, {p: ocp.RestoreArgs(restore_type=np.ndarray) for p in batch})


def _restore(
    path: str | Path, leaves: dict[str, jax.ShapeDtypeStruct], restore_args: dict[str, Any]
) -> dict[str, Any]:
    args = ocp.args.PyTreeRestore(
        _nested(leaves), restore_args=_nested(restore_args), partial_restore=True
    )
    with _checkpointer(_largest(leaves)) as checkpointer, _errors_named(path, "read"):
        restored = _flat(checkpointer.restore((Path(path) / PARAMS).resolve(), args=args))
    return {leaf_path: restored[leaf_path] for leaf_path in leaves}


# --- helpers --------------------------------------------------------------------------------------


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _largest(leaves: Mapping[str, Any]) -> int:
    return max(map(_bytes, leaves.values()))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, node in tree.items():
        if isinstance(node, Mapping):
            flat |= _flat(node, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = node
    return flat


@contextlib.contextmanager
def _checkpointer(largest_bytes: int) -> Iterator[ocp.Checkpointer]:
    """A synchronous checkpointer with about one large leaf in flight and a silent log.

    What goes wrong is raised; orbax would also log each failure as several stack traces.
    """
    in_flight_gb = largest_bytes // 10**9 + 1
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        save_concurrent_gb=in_flight_gb,
        restore_concurrent_gb=in_flight_gb,
    )
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _patient_event_loops(), ocp.Checkpointer(handler) as checkpointer:
                yield checkpointer
    finally:
        absl.setLevel(level)


@contextlib.contextmanager
def _errors_named(path: str | Path, verb: str) -> Iterator[None]:
    """Turns what orbax raises for broken files or a full disk into one error that names `path`."""
    try:
        yield
    except Exception as error:  # orbax raises a plain Exception for a leaf that is cut short
        cause = error.__cause__ or error  # tensorstore's word names the leaf
        reason = (str(cause).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path}: orbax data cannot be {verb} ({type(cause).__name__}: {reason})"
        ) from error


@contextlib.contextmanager
def _patient_event_loops() -> Iterator[None]:
    """Makes orbax's event loops end only when all of their reads have.

    orbax closes its loop at the first error, while tensorstore still works on the other leaves;
    each of those would then print a stack trace, from a thread of C++ where nobody can catch it.
    """
    policy = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_PatientPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)


class _PatientPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


class _PatientLoop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        waiting = () if self.is_closed() else asyncio.all_tasks(self)
        if waiting:
            self.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        super().close()
