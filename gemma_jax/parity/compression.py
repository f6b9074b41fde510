"""Whether the name of a record says how the file is compressed."""

from pathlib import Path

from gemma_jax.errors import RecordError

_KINDS = {".gz": ("gzip", b"\x1f\x8b"), ".xz": ("xz", b"\xfd7zXZ\0")}
"""Suffix → name, and the first bytes of such a file."""


def check_compression(path: str | Path) -> None:
    """Refuses a compressed file under a plain name, and the other way round.

    Absent files and pipes are left to the reader.

    Raises:
      RecordError: with the name that it should have.
    """
    path = Path(path)
    start = _start(path)
    named = path.suffix if path.suffix in _KINDS else ""
    found = next((x for x, (_, magic) in _KINDS.items() if start.startswith(magic)), "")
    if found == named or not start:
        return
    if found:
        raise RecordError(f"{path}: looks {_KINDS[found][0]}-compressed; name it {found}")
    raise RecordError(
        f"{path}: not {_KINDS[named][0]}-compressed; name it without {named}, or record it again"
    )


def _start(path: Path) -> bytes:
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(max(len(magic) for _, magic in _KINDS.values()))
    except OSError:
        return b""
