"""Products of 17 to 64 rows with a large matrix on Hopper: TMA and wgmma through Mosaic GPU.

    z = x wᵀ        out = z | gelu(z₀) · z₁ | gelu(z) · g        x [B, K], w [P, N, K], g [B, N]

The rows of x are the 64 rows of the left wgmma operand, outputs of w the columns of the right one.
One warpgroup copies, stage after stage, `width` columns of x and of `tile` outputs of each part
into shared memory; another multiplies. So w is read once, and x, which stays in the L2 cache, once
a tile: a block should have many outputs. There is about one block a core. Where that leaves too few
outputs a block, `splits` blocks share the depth, and the result is S partial sums, which the reader
adds in their order.

With fewer than 64 rows the rest of the left operand is whatever shared memory holds: rows of a
product do not touch each other.

Limits: bfloat16, B a multiple of 8, K of 64, compute capability 9.0, jax below 0.12 on a GPU; a CPU
interprets it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gemma_jax.errors import UnsupportedError
from gemma_jax.model.layers import gelu_tanh
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import SHARED_MEMORY, Device, current_device

ROWS = 64
"""Rows of a wgmma product."""
MAX_BATCH = 64
MIN_DEPTH = 512
MIN_ROWS = 24
"""Fewer than 17 rows are faster in `skinny_kernels`."""
SWIZZLE = 64
"""Columns of a swizzled tile of bfloat16."""

MAX_OUTPUTS = 192
"""Outputs of a block, of all parts: what leaves its registers to the epilogue."""
MAX_SPLITS = 16
STAGE_BYTES = 200 * 1024
"""Shared memory for stages."""
OTHER_BYTES = 1024
"""For barriers."""
CORES = 132
"""Of an H200, for which a CPU interprets."""


@dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
      tile: outputs of a block, of each of the P parts; a multiple of 8.
      width: columns of K of a stage, a multiple of 64.
      stages: stages in flight.
      splits: blocks that share the depth of a tile.
    """

    tile: int
    width: int = 64
    stages: int = 6
    splits: int = 1


def default_config(
    parts: int, n: int, k: int, device: Device, may_split: bool = False
) -> Config | None:
    """The cut that gives the busiest core least to do; None if nothing fits.

    Args:
      parts, n, k: P, N and K.
      device: what it will run on.
      may_split: whether the caller takes partial sums.
    """
    cores = device.num_cores if device.is_gpu else CORES
    tiles = [t for t in range(8, MAX_OUTPUTS // parts + 1, 8) if n % t == 0]
    splits = range(1, min(MAX_SPLITS, k // SWIZZLE) + 1) if may_split and parts == 1 else (1,)
    cuts = [(tile, split) for tile in tiles for split in splits]
    if not cuts or k % SWIZZLE:
        return None
    tile, split = min(cuts, key=lambda cut: _cost(*cut, parts, n, k, cores))
    row = 2 * (ROWS + parts * tile)  # bytes of one column of a stage
    room = min(STAGE_BYTES, SHARED_MEMORY[9, 0] - OTHER_BYTES - 2 * _epilogue_size(ROWS, tile))
    wide = k % (2 * SWIZZLE) == 0 and k // (2 * SWIZZLE) >= split
    width = 2 * SWIZZLE if wide and room >= 6 * SWIZZLE * row else SWIZZLE
    steps = -(-k // width // split)
    return Config(tile, width, max(2, min(room // (width * row), steps)), split)


def _epilogue_size(rows: int, tile: int) -> int:
    """Numbers of the output and of a gate."""
    return 2 * rows * tile


def _cost(tile: int, splits: int, parts: int, n: int, k: int, cores: int) -> int:
    """Numbers that the busiest core reads, with what the partial sums cost in the same unit.

    That is eight a sum on an H200: they are float32, written once and read by the next kernel.
    """
    rounds = -(-n // tile * splits // cores)
    depth = -(-k // SWIZZLE // splits) * SWIZZLE
    return rounds * depth * (ROWS + parts * tile) + (8 * splits * n if splits > 1 else 0)


@dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    batch: int
    parts: int
    n: int
    k: int
    numerics: Numerics
    config: Config
    gate_column: int | None = None  # of the gate's array where the gate begins

    @property
    def row_groups(self) -> int:
        """Warpgroups that multiply, each 64 rows of x."""
        return -(-self.batch // ROWS)

    @property
    def tiles(self) -> int:
        return self.n // self.config.tile


@dataclass(frozen=True)
class _Work:
    """Share of a block; traced int32."""

    tile: jax.Array
    split: jax.Array
    first: jax.Array
    steps: jax.Array


def _own_work(plan: _Plan) -> _Work:
    c, block = plan.config, lax.axis_index("block")
    split, tile = lax.div(block, jnp.int32(plan.tiles)), lax.rem(block, jnp.int32(plan.tiles))
    chunks = plan.k // c.width
    first, stop = (lax.div((split + i) * chunks, jnp.int32(c.splits)) for i in (0, 1))
    return _Work(tile, split, first, stop - first)


@dataclass(frozen=True)
class _Gate:
    """g in device memory, its tile in shared memory and the barrier that says it is there."""

    source: Any
    tile: Any
    full: Any


def _group_rows(plan: _Plan, group: int) -> int:
    """Rows that a row group really has."""
    return min(ROWS, plan.batch - group * ROWS)


def _load_gate(plan: _Plan, work: _Work, gate: _Gate) -> None:
    tile = plan.config.tile
    columns = pl.ds((plan.gate_column or 0) + work.tile * tile, tile)
    for g in range(plan.row_groups):
        rows = _group_rows(plan, g)
        source = gate.source.at[pl.ds(g * ROWS, rows), columns]
        plgpu.copy_gmem_to_smem(source, gate.tile.at[g, pl.ds(0, rows)], gate.full)


def _load_stages(plan: _Plan, work: _Work, x: Any, w: Any, refs: tuple[Any, ...]) -> None:
    """The copying warpgroup: fills a stage as soon as every reader has given it back."""
    x_smem, w_smem, full, empty = refs
    c = plan.config

    @pl.loop(0, work.steps)
    def _fill(i):
        slot, columns = lax.rem(i, c.stages), pl.ds((work.first + i) * c.width, c.width)
        pl.when(i >= c.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
        for g in range(plan.row_groups):
            rows = _group_rows(plan, g)
            source = x.at[pl.ds(g * ROWS, rows), columns]
            target = x_smem.at[slot, g, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source, target, full.at[slot])
        for p in range(plan.parts):
            outputs = pl.ds(p * plan.n + work.tile * c.tile, c.tile)
            plgpu.copy_gmem_to_smem(w.at[outputs, columns], w_smem.at[slot, p], full.at[slot])

    @pl.loop(jnp.maximum(work.steps, c.stages), work.steps + c.stages)
    def _wait_for_the_last(i):
        plgpu.barrier_wait(empty.at[lax.rem(i, c.stages)])


def _multiply(plan: _Plan, work: _Work, group: Any, refs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """A multiplying warpgroup: z of its rows and of each part, float32 [64, tile]."""
    x_smem, w_smem, full, empty = refs
    stages = plan.config.stages

    def scope(*sums: Any) -> tuple[jax.Array, ...]:
        @pl.loop(0, work.steps)
        def _step(i):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(full.at[slot])
            for p, total in enumerate(sums):
                plgpu.wgmma(total, x_smem.at[slot, group], w_smem.at[slot, p].transpose((1, 0)))
            plgpu.wgmma_wait(plan.parts)  # those of the step before are done
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(i - 1, stages)]))

        out = tuple(total[...] for total in sums)
        plgpu.barrier_arrive(empty.at[lax.rem(work.steps - 1, stages)])
        return out

    sums = [
        plgpu.WGMMAAccumulatorRef((ROWS, plan.config.tile), jnp.float32) for _ in range(plan.parts)
    ]
    return pl.run_scoped(scope, *sums)


def _kernel(*refs: Any, plan: _Plan) -> None:
    """Refs: x, w, with a gate its array; out; scratch as in `_scratch`."""
    gate = None
    if plan.gate_column is not None:
        x, w, source, out, *stages, out_smem, gate_smem, gate_full = refs
        gate = _Gate(source, gate_smem, gate_full)
    else:
        x, w, out, *stages, out_smem = refs
    work, columns = _own_work(plan), plan.config.tile
    group = lax.axis_index("warpgroup")

    @pl.when(group == plan.row_groups)
    def _loader():
        if gate is not None:
            _load_gate(plan, work, gate)
        _load_stages(plan, work, x, w, tuple(stages))

    @pl.when(group < plan.row_groups)
    def _multiplier():
        products = _multiply(plan, work, group, tuple(stages))
        outputs = pl.ds(work.tile * columns, columns)
        if plan.config.splits > 1:
            out[work.split, pl.ds(group * ROWS, ROWS), outputs] = products[0]
            return
        if gate is not None:
            plgpu.barrier_wait(gate.full)
            layout = plgpu.Layout.WGMMA
            factor = plgpu.load(gate.tile.at[group], layout=layout, optimized=False)
            products = (*products, factor.astype(jnp.float32))
        out_smem[group] = _activated(products, plan.numerics).astype(out.dtype)
        plgpu.commit_smem()
        _store(plan, group, out_smem, out, outputs)
        plgpu.wait_smem_to_gmem(0)


def _store(plan: _Plan, group: Any, out_smem: Any, out: Any, outputs: Any) -> None:
    """The rows that there are of a group's tile."""
    last = plan.row_groups - 1
    rest = _group_rows(plan, last)

    def copy(rows: int) -> None:
        source = out_smem.at[group, pl.ds(0, rows)]
        plgpu.copy_smem_to_gmem(source, out.at[pl.ds(group * ROWS, rows), outputs])

    if rest == ROWS:
        copy(ROWS)
        return
    pl.when(group == last)(lambda: copy(rest))
    pl.when(group < last)(lambda: copy(ROWS))


def _activated(products: tuple[jax.Array, ...], numerics: Numerics) -> jax.Array:
    """z, or gelu(z₀) times z₁ or g; each product and the gelu are rounded first."""
    if len(products) == 1:
        return products[0]
    gate, factor = (triton.rounded(z, numerics) for z in products)
    return triton.rounded(gelu_tanh(gate), numerics) * factor


# --- call -----------------------------------------------------------------------------------------


def _scratch(plan: _Plan) -> list[Any]:
    """x and w of the stages, barriers that say full and empty, the output on its way out."""
    c = plan.config
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, SWIZZLE)), swizzle(2 * SWIZZLE))
    groups = plan.row_groups
    x_shape, w_shape = (c.stages, groups, ROWS, c.width), (c.stages, plan.parts, c.tile, c.width)
    scratch = [
        plgpu.SMEM(x_shape, jnp.bfloat16, transforms=swizzled),
        plgpu.SMEM(w_shape, jnp.bfloat16, transforms=swizzled),
        plgpu.Barrier(num_arrivals=groups + plan.parts, num_barriers=c.stages),
        plgpu.Barrier(num_arrivals=groups, num_barriers=c.stages),
        plgpu.SMEM((groups, ROWS if c.splits == 1 else 8, c.tile), jnp.bfloat16),
    ]
    if plan.gate_column is not None:
        scratch.append(plgpu.SMEM((groups, ROWS, c.tile), jnp.bfloat16))
        scratch.append(plgpu.Barrier(num_arrivals=groups))
    return scratch


def shared_bytes(config: Config, batch: int, parts: int) -> int:
    """Shared memory of a block."""
    rows = -(-batch // ROWS) * ROWS
    stage = (rows + parts * config.tile) * config.width
    return 2 * (config.stages * stage + _epilogue_size(rows, config.tile)) + OTHER_BYTES


def unsupported(x: jax.Array, w: jax.Array, numerics: Numerics, device: Device) -> str | None:
    """Why the kernel cannot take these inputs; None if it can. A CPU interprets it."""
    if device.is_gpu and device.capability != (9, 0):
        return f"needs compute capability 9.0, {device.kind} has another"
    if device.is_gpu and jax.__version_info__ >= (0, 12):
        return f"is not tried on jax {jax.__version__}"
    if numerics.is_float32 or x.dtype != jnp.bfloat16 or w.dtype != x.dtype:
        return f"needs bfloat16, got {x.dtype}, {w.dtype} and compute dtype {numerics.dtype}"
    if x.shape[0] not in range(MIN_ROWS, MAX_BATCH + 1, 8):
        return f"{x.shape[0]} rows, no multiple of 8 from {MIN_ROWS} to {MAX_BATCH}"
    parts, n, k = w.shape
    if default_config(parts, n, k, device) is None:
        return f"w {list(w.shape)}: N is no multiple of 8 or K none of {SWIZZLE}"
    return None


def _problem(plan: _Plan) -> str | None:
    c = plan.config
    if plan.n % c.tile or c.tile % 8:
        return f"{plan.n} outputs are not whole tiles of {c.tile}, a multiple of 8"
    if plan.k % c.width or c.width % SWIZZLE or plan.k // c.width < c.splits:
        return f"a depth of {plan.k} has no stages of {c.width} for every split"
    if c.splits > 1 and (plan.parts > 1 or plan.gate_column is not None):
        return "an activation needs whole sums"
    needed = shared_bytes(c, plan.batch, plan.parts)
    if needed > SHARED_MEMORY[9, 0]:
        return f"needs {needed} bytes of shared memory"
    return None


@functools.partial(jax.jit, static_argnames=("gate_column", "numerics", "config"))
def multiply(
    x: jax.Array,
    w: jax.Array,
    gate: jax.Array | None = None,
    gate_column: int = 0,
    *,
    numerics: Numerics,
    config: Config,
) -> jax.Array:
    """x wᵀ, gelu(gate) · up where w has two parts, or gelu(x wᵀ) · g.

    Args:
      x: [B, K] bfloat16, B a multiple of 8 up to 64.
      w: [P, N, K] bfloat16, P 1 or 2.
      gate: [B, G] bfloat16; g are its N columns from `gate_column`, a multiple of 8, on.
      config: how the work is cut.
    Returns:
      [B, N] bfloat16, or with `splits` partial sums [S, 64, N] float32, rows from B on undefined.
    Raises:
      UnsupportedError: inputs or a config that the kernel cannot take.
    """
    (batch, k), (parts, n, _) = x.shape, w.shape
    plan = _Plan(batch, parts, n, k, numerics, config, None if gate is None else gate_column)
    device = current_device()
    if problem := unsupported(x, w, numerics, device) or _problem(plan):
        raise UnsupportedError(f"skinny_matmul: mosaic: {config}: {problem}")
    out = jax.ShapeDtypeStruct((batch, n), x.dtype)
    if config.splits > 1:
        out = jax.ShapeDtypeStruct((config.splits, plan.row_groups * ROWS, n), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out,
        scratch_types=_scratch(plan),
        grid=(plan.tiles * config.splits,),
        grid_names=("block",),
        num_threads=plan.row_groups + 1,
        thread_name="warpgroup",
        kernel_name="skinny_mosaic",
        interpret=None if device.is_gpu else plgpu.InterpretGPUParams(),
    )(x, w.reshape(parts * n, k), *([] if gate is None else [gate]))
