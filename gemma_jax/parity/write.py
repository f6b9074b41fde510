"""Output files of the parity tools: complete or absent, compressed by their name."""

import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma_jax.errors import ConfigError


def write_text(path: str | Path, text: str) -> None:
    """Write a file under a temporary name first; `.gz` and `.xz` names compress it.

    Raises:
      ConfigError: the path cannot be written.
    """
    path, data = Path(path), text.encode("utf-8", errors="backslashreplace")
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".xz":
        data = lzma.compress(data)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be written: {error.strerror}") from error


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line; as `write_text`."""
    lines = (
        json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for row in rows
    )
    write_text(path, "".join(f"{line}\n" for line in lines))
