"""Two checkpoints of any format compared bit for bit."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_jax.checkpoint.formats import detect_format
from gemma_jax.checkpoint.hf import HfCheckpoint, same_bits
from gemma_jax.checkpoint.names import hf_shapes, leaf_sources
from gemma_jax.checkpoint.side_files import load_config
from gemma_jax.config import ModelConfig
from gemma_jax.errors import CheckpointError

_NOT_WEIGHTS = {"model_type", "dtype", "ignored_fields"}


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    `compared` counts the tensors that the text decoder uses; `different` and `config_differences`
    say what is not equal; `dropped` maps each checkpoint to the tensors in it that are not used.
    """

    compared: int
    different: tuple[str, ...]
    config_differences: tuple[str, ...]
    dropped: dict[str, tuple[str, ...]]

    @property
    def ok(self) -> bool:
        return not self.different and not self.config_differences


def verify(a: str | Path, b: str | Path) -> VerifyReport:
    """Compares every used tensor of two checkpoints: dtype, shape and bits.

    Raises:
      CheckpointError: one of them cannot be read, or they hold models of different shapes.
    """
    configs = load_config(a), load_config(b)
    if hf_shapes(configs[0]) != hf_shapes(configs[1]):
        changes = "; ".join(_config_differences(*configs)) or "none in the fields"
        raise CheckpointError(f"{a} and {b} hold different models ({changes})")
    readers = [_Reader(path, config) for path, config in zip((a, b), configs, strict=True)]
    compared, different = 0, []
    for (name, x), (_, y) in zip(readers[0].tensors(), readers[1].tensors(), strict=True):
        compared += 1
        if not same_bits(x, y):
            different.append(_difference(name, x, y))
    return VerifyReport(
        compared,
        tuple(different),
        _config_differences(*configs),
        {str(reader.path): reader.dropped for reader in readers},
    )


def grouped(names: tuple[str, ...]) -> list[str]:
    """Names with layer numbers folded into `*` and counted, for display."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [f"{name} ({n})" if n > 1 else name for name, n in sorted(counts.items())]


class _Reader:
    """The used tensors of one checkpoint, in the order of the model's leaves."""

    def __init__(self, path: str | Path, config: ModelConfig):
        self.path, self.config = path, config
        self._hf = HfCheckpoint(path, config) if detect_format(path) == "hf" else None
        self.dropped = tuple(sorted(self._hf.dropped)) if self._hf else ()

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        if self._hf:
            yield from self._hf.iter_tensors()
            return
        from gemma_jax.checkpoint.orbax import iter_leaves  # seconds to import

        sources = leaf_sources(self.config)
        for path, leaf in iter_leaves(self.path, self.config):
            yield from sources[path].split(leaf).items()


def _difference(name: str, x: np.ndarray, y: np.ndarray) -> str:
    if x.dtype != y.dtype:
        return f"{name}: {x.dtype} against {y.dtype}"
    return f"{name}: {int(np.sum(x != y))} of {x.size} elements differ in value"


def _config_differences(a: ModelConfig, b: ModelConfig) -> tuple[str, ...]:
    fields = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in _NOT_WEIGHTS]
    return tuple(
        f"{name}: {getattr(a, name)!r} against {getattr(b, name)!r}"
        for name in fields
        if getattr(a, name) != getattr(b, name)
    )
