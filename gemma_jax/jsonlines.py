"""Files of JSON lines that are written while they may be read: encoding, opening, locking."""

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from gemma_jax.errors import ConfigError


def encode_line(value: dict[str, Any]) -> bytes:
    """Return `value` as one line of UTF-8 JSON; NaN and infinities raise ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate (an id may hold one) has no UTF-8 form, but JSON can escape it.
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def open_output(path: Path) -> BinaryIO:
    """Return `path` open for reading and writing, made where it was absent; nothing is cut off.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error
    return os.fdopen(descriptor, "r+b", buffering=0 if _is_device(descriptor) else -1)


def is_regular(file: BinaryIO) -> bool:
    """Return whether an open file can be read back, unlike a pipe or a device."""
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _is_device(descriptor: int) -> bool:
    return not stat.S_ISREG(os.fstat(descriptor).st_mode)


def lock_output(file: BinaryIO, path: Path) -> None:
    """Keep other runs away from an open file until it is closed.

    Raises:
      ConfigError: another run has it open.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"output {path} is being written by another run") from None
