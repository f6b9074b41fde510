"""Sizes of a skinny product, and the design and tiles that multiply it fastest.

`skinny_kernels` says what the designs are.
"""

from dataclasses import dataclass
from typing import Literal

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.device import Device

RESIDENT_K = 2560
"""Widest x that "rows" keeps in registers."""

Activation = Literal["gelu_mul", "gelu_gate"]
Design = Literal["rows", "columns", "dot"]


@dataclass(frozen=True)
class Spec:
    """What is static in a call: B, P, N, K, the activation and how to round."""

    batch: int
    parts: int
    n: int
    k: int
    numerics: Numerics
    activation: Activation | None = None
    eps: float = 0.0
    stores_h: bool = False


@dataclass(frozen=True)
class Config:
    """Tile sizes of one product.

    Attributes:
      design: see `skinny_kernels`.
      rows: output rows of a tile, of each of the P parts.
      width: elements of K that one load or one dot covers.
      ahead: "rows": tiles loaded in advance; "columns": chunks loaded in advance.
      blocks: "rows": blocks of the grid.
      segments: "dot": parts of K side by side in one tile.
      num_warps, num_stages: of a block; stages are shared-memory buffers of "dot".
    """

    design: Design
    rows: int
    width: int
    ahead: int = 1
    blocks: int = 0
    segments: int = 1
    num_warps: int = 4
    num_stages: int = 1


def default_config(spec: Spec, has_prologue: bool, device: Device) -> Config:
    """The fastest on an H200 at E2B's shapes (docs/kernels.md).

    One or two rows with a prologue keep x in registers; one row without one streams along K while
    that is short; everything else goes to the tensor cores.
    """
    if has_prologue and spec.batch <= 2 and spec.k <= RESIDENT_K:
        return _rows_config(spec, device)
    if not has_prologue and spec.batch <= 2 and spec.k <= 512:
        return Config("columns", 4, 256, ahead=2)
    if not has_prologue and spec.batch == 1 and spec.k in (2048, 4096):
        return Config("columns", 2, 2048, ahead=spec.k // 2048)
    return _dot_config(spec, device)


def _rows_config(spec: Spec, device: Device) -> Config:
    """Few outputs: small tiles, so that every core has some. Else as many blocks as fit at once."""
    per_thread = spec.batch * spec.parts * spec.k
    if per_thread > 6144:
        return _dot_config(spec, device)
    if spec.batch == 1 and spec.n * spec.parts < 32 * device.num_cores:
        return Config("rows", 2, 512, blocks=min(5 * device.num_cores, -(-spec.n // 2)))
    if per_thread > 3072 and not device.at_least(9):
        return Config("rows", 2, 256, blocks=2 * device.num_cores)  # larger tiles spill
    blocks = (3 if per_thread <= 3072 else 2) * device.num_cores
    return Config("rows", 4, 256, blocks=blocks)


def _dot_config(spec: Spec, device: Device) -> Config:
    """A tile of 64 rows; K in up to four segments, to give every core a block.

    More segments, hence fewer outputs a tile, would read x more often.
    """
    segments = 1
    for more in (2, 4):
        fills = spec.n * segments >= 64 * device.num_cores
        if not fills and spec.k % (more * 64) == 0:
            segments = more
    length = spec.k // segments
    width = next(w for w in (128, 64, 32, 16) if length % w == 0)
    if spec.numerics.is_float32:
        width = min(width, 32)
    rows = 64 // segments // (spec.parts if segments == 1 else 1)
    stages = min(max(length // width, 2), 6 if spec.parts == 1 else 4)
    return Config("dot", rows, width, segments=segments, num_stages=stages)
