"""The safetensors container: headers checked, tensors viewed in place, files streamed out.

A file is 8 bytes of little-endian header length, a JSON header `name -> {dtype, shape,
data_offsets}` with offsets relative to the end of the header, then raw row-major data.
Source: the safetensors format description.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.checkpoint.dtypes import STORED, STORED_NAMES
from gemma_jax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    path: Path

    def view(self, mapped: np.memmap) -> np.ndarray:
        """The tensor as a read-only array over the mapped file: nothing is copied."""
        raw = mapped[self.begin : self.end].view(np.ndarray)
        return raw.view(STORED[self.dtype]).reshape(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def map_file(path: Path) -> np.memmap:
    """The bytes of a file, mapped read-only."""
    return np.memmap(path, np.uint8, mode="r")


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one file, in file order, every offset checked against the file's size.

    Raises:
      CheckpointError: unreadable or truncated file, bad header, offsets that are outside the data,
        overlap, leave gaps, or do not fit dtype and shape.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length < 2 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: header length {length} does not fit a file of {size} bytes;"
                    " the file is truncated or not safetensors"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    infos = [_tensor_info(path, n, e, 8 + length) for n, e in _parse(path, raw).items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    _check_layout(path, infos, 8 + length, size)
    return infos


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: header names {', '.join(twice)} twice")
        return out

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{path}: {name}: dtype {dtype!r} is not a safetensors dtype")
    if not (isinstance(shape, list) and all(map(_is_size, shape))):
        raise CheckpointError(f"{path}: {name}: shape {shape!r} is not a list of sizes")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
        raise CheckpointError(f"{path}: {name}: data_offsets {offsets!r} are not two offsets")
    begin, end = offsets
    expected = math.prod(shape) * ITEM_BITS[dtype] // 8
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name}: data_offsets span {end - begin} bytes, but {dtype} {shape}"
            f" takes {expected}"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end, path)


def _check_layout(path: Path, infos: list[TensorInfo], data_start: int, size: int) -> None:
    position = data_start
    for info in infos:
        if info.end > size:
            raise CheckpointError(
                f"{path}: truncated: {info.name} ({info}) ends at byte {info.end},"
                f" but the file has {size} bytes"
            )
        if info.begin != position:
            word = "overlaps the tensor before it" if info.begin < position else "follows a gap"
            raise CheckpointError(f"{path}: {info.name} ({info}) {word} at byte {info.begin}")
        position = info.end
    if position != size:
        raise CheckpointError(
            f"{path}: {size - position} bytes after the last tensor that the header names"
        )


def write_file(
    path: Path,
    plan: list[tuple[str, np.dtype, tuple[int, ...]]],
    tensors: Iterable[np.ndarray],
) -> None:
    """Writes one file tensor by tensor and flushes it to disk.

    Args:
      path: the new file.
      plan: name, dtype and shape of each tensor, in file order.
      tensors: the arrays in the same order; consumed one at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in plan:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": STORED_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            for start in range(0, data.size, _BLOCK_BYTES):
                file.write(data[start : start + _BLOCK_BYTES])
        file.flush()
        os.fsync(file.fileno())
