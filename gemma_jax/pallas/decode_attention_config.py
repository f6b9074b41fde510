"""Tile sizes of `decode_attention`: how query rows, keys and splits share a GPU."""

from dataclasses import dataclass
from typing import Literal

from jax.experimental import pallas as pl

from gemma_jax.pallas.device import Device

MAX_QUERIES = 8
MIN_ROWS = 16
"""Rows of the smallest tensor-core product; fewer query rows are padded."""


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
      tile: keys a loop iteration.
      num_warps, num_stages: of the Triton compiler.
      splits: programs that share the keys of a row; 1 = one pass.
      combine: who merges the splits: "last" = the last of them, "kernel" = a second kernel.
      rows: query rows (tokens times heads of a group) a program, at least 16.
    """

    tile: int
    num_warps: int
    num_stages: int
    splits: int = 1
    combine: Literal["last", "kernel"] = "last"
    rows: int = MIN_ROWS


def default_config(
    programs: int,
    rows: int,
    head_dim: int,
    span: int,
    itemsize: int,
    device: Device,
    paged: bool = False,
) -> Config:
    """The tile table.

    The compiler keeps num_stages - 1 tiles in shared memory and loads the next one after it has
    used the present one: with two stages only other programs on the same core hide the memory's
    latency. Width 512 needs three stages, so tiles of 32. At width 256 few programs do better with
    long tiles, many with short ones. Pages cost twice the stages for the same tiles, as the number
    of a page is loaded ahead of it; many programs of width 512 do better without, and with four
    warps, so that more of them share a core.

    Args:
      programs: rows of the batch times KV heads, each a program of its own without splits.
      rows: query tokens times heads of a group.
      head_dim: width of a head.
      span: the most keys that one row can have to read: its window or its slots.
      itemsize: bytes of a cached number.
      device: what it will run on.
      paged: whether there is a page table.
    """
    wide, many = head_dim > 256, programs >= 16
    packed = min(max(MIN_ROWS, pl.next_power_of_2(rows)), 2 * MIN_ROWS)
    tile, stages = (64, 2) if not wide and not many else (32, 3)
    if itemsize == 4:
        tile, stages = 16, 2
    if wide and not device.at_least(9):
        packed, stages = MIN_ROWS, min(stages, 2 if rows > MIN_ROWS else 3)  # more spill
    splits = _splits(programs * -(-rows // packed), -(-span // tile), device)
    combine = "last" if splits <= 16 else "kernel"
    light = not wide or (many and packed == MIN_ROWS and device.at_least(9))
    if paged and not (wide and light):
        stages = 2 * stages - 1
    return Config(tile, 4 if light else 8, stages, splits, combine, packed)


def invariant_config(groups: int, head_dim: int, itemsize: int, device: Device) -> Config:
    """The one tile of batch-invariant attention: neither rows nor lengths change a sum's order.

    One program goes through the keys of a query in order, tiles at multiples of `tile`.
    """
    wide = head_dim > 256
    tile = 16 if itemsize == 4 else 32
    stages = 2 if itemsize == 4 or (wide and not device.at_least(9)) else 3
    rows = max(MIN_ROWS, pl.next_power_of_2(groups))
    if not wide or device.at_least(9):
        rows = max(rows, 2 * MIN_ROWS)
    return Config(tile, 8 if wide else 4, stages, 1, "last", rows)


def queries_a_program(groups: int) -> int:
    """Queries of one sequence that a batch-invariant call may hand in together."""
    return max(1, min(MAX_QUERIES, 2 * MIN_ROWS // groups))


def _splits(programs: int, tiles: int, device: Device) -> int:
    """Enough programs for the device, none without a tile.

    With many rows two a core, so that one long row does not hold up the others.
    """
    cores = device.num_cores if device.is_gpu else 4
    wanted = (2 if programs >= 16 else 1) * cores
    return max(1, min(tiles, wanted // programs, 64))
