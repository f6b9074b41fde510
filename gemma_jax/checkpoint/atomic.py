"""Directories that appear whole or not at all: written under a temporary name, then renamed."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from gemma_jax.errors import CheckpointError


@contextlib.contextmanager
def new_directory(target: Path, *, overwrite: bool, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty directory beside `target` that takes its name when the block succeeds.

    When the block fails the temporary directory is removed and `target` is as it was. A killed
    process can leave a directory called `.<name>.<hex>.tmp`, which is safe to delete (and, killed
    between the two renames of an overwrite, the old checkpoint as `.<name>.<hex>.tmp.old`).

    Args:
      target: the directory to create. It may exist when it is empty.
      overwrite: allow an existing checkpoint (a directory with a config.json) to be replaced.
      needed_bytes: refuse at once when the disk has less room than this.
    Raises:
      CheckpointError: the target exists, or the disk is full, or it cannot be written.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(target, needed_bytes)
        temporary.mkdir()
        yield temporary
        _move_into_place(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """Raises CheckpointError when `target` exists and may not be replaced."""
    if not os.path.lexists(target):
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{target}: exists already; choose another name or pass --overwrite")
    if not (target.is_dir() and (target / "config.json").is_file()):
        raise CheckpointError(
            f"{target}: not overwritten, because it is not a checkpoint (no config.json inside)"
        )


def _check_room(target: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{target}: needs {needed_bytes / 1e9:.2f} GB, but the disk has"
            f" {free / 1e9:.2f} GB free"
        )


def _move_into_place(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`; an old checkpoint there stays until the last moment."""
    if not (target.is_dir() and any(target.iterdir())):
        os.rename(temporary, target)
        return
    if target.is_symlink():
        target = target.resolve()
    old = temporary.with_name(f"{temporary.name}.old")
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
