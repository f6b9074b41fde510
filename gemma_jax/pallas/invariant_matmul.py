"""A matrix product whose every element is summed in one order, whatever the number of rows.

    z = x wᵀ        x [N, K], w [F, K]

K is cut into shares. Within a share the tensor cores add tile after tile from zero; the shares are
added in their order in float32, and the sum is rounded once. float32 has no tensor cores that keep
its digits: there one number is added after the other, and so that errors do not grow with the depth
a share is a sum of short chains. With many rows, or many outputs, one
program goes through all shares; with few of both every share has a program of its own, so that
enough of them read the weights, and the partial sums are added afterwards: the same additions.
Tiles are at least 64 rows for that reason, too: products of fewer rows would use other
instructions.

Limits: bfloat16 or float32, K a multiple of 16; compute capability 8.0, or a CPU (interpreted).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device, current_device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)

MIN_ROWS = 64
"""Rows of the smallest tile: from here on Hopper's tensor cores work by warpgroups."""
MAX_SPLIT_ROWS = 128
"""More rows have enough tiles without a program for each share."""
MAX_SPLIT_OUTPUTS = 8192
"""More outputs, likewise."""
_GROUP = 8
"""Row tiles that go through the outputs together, so that both operands stay in the L2 cache."""


def invariant_matmul_reference(
    x: jax.Array, w: jax.Array, *, numerics: Numerics, unfinished: bool = False
) -> jax.Array:
    """The product in plain jnp, in whatever order XLA adds; float64 gives the exact result."""
    del unfinished
    return numerics.einsum("nk,fk->nf", x, w)


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      rows, outputs, depth: of a tile, powers of two.
      chain: tiles that are added to one another before they are added to the share's sum; 0 adds
        every tile to that sum at once.
      share: depth of a share, a multiple of a tile's or a chain's. Depths and `chain` decide the
        bits, the rest does not.
      split: a program for each share.
      num_warps, num_stages: of the Triton compiler.
    """

    rows: int
    outputs: int
    depth: int
    chain: int
    share: int
    split: bool
    num_warps: int
    num_stages: int

    @property
    def step(self) -> int:
        """Depth that is added to a share's sum at once."""
        return self.depth * max(self.chain, 1)


def share_of(depth: int) -> int:
    """Depth of a share: by the product's depth alone."""
    return 512 if depth <= 2048 else 1024


def default_config(n: int, f: int, k: int, itemsize: int, device: Device) -> Config:
    """Large tiles for many rows; for few, small ones, so that all cores read weights."""
    share, depth = share_of(k), 64 if itemsize == 2 else 32
    split = n <= MAX_SPLIT_ROWS and f < MAX_SPLIT_OUTPUTS and k > share
    if itemsize == 4:
        return Config(MIN_ROWS, 64, depth, 2, share, split, 4, 2)
    if n <= MAX_SPLIT_ROWS:
        return Config(MIN_ROWS, 64, depth, 0, share, split, 4, 4 if device.at_least(9) else 3)
    if device.at_least(9):
        return Config(128, 128, depth, 0, share, False, 8, 4)
    return Config(128, 128, depth, 0, share, False, 8, 3)


@dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    n: int
    f: int
    k: int
    config: Config
    numerics: Numerics

    @property
    def shares(self) -> int:
        return pl.cdiv(self.k, self.config.share)

    @property
    def grid(self) -> tuple[int, int]:
        tiles = pl.cdiv(self.n, self.config.rows) * pl.cdiv(self.f, self.config.outputs)
        return tiles, self.shares if self.config.split else 1


def _tile_of(plan: _Plan) -> tuple[Any, Any]:
    """Row tile and output tile of this program."""
    rows, outputs = (pl.cdiv(plan.n, plan.config.rows), pl.cdiv(plan.f, plan.config.outputs))
    group = min(_GROUP, rows)
    index = pl.program_id(0)
    first = index // (group * outputs) * group
    size = jnp.minimum(rows - first, group)
    within = index % (group * outputs)
    return first + within % size, within // size


def _kernel(x_ref: Any, w_ref: Any, out_ref: Any, *, plan: _Plan) -> None:
    c = plan.config
    row_tile, output_tile = _tile_of(plan)
    rows = row_tile * c.rows + lax.iota(jnp.int32, c.rows)
    outputs = output_tile * c.outputs + lax.iota(jnp.int32, c.outputs)
    add_tile = functools.partial(_add_tile, x_ref, w_ref, rows, outputs, plan)
    empty = jnp.zeros((c.rows, c.outputs), jnp.float32)

    def add(first: Any, sums: jax.Array) -> jax.Array:
        if not c.chain:
            return add_tile(first, sums)
        return sums + lax.fori_loop(
            0, c.chain, lambda i, chain: add_tile(first + i * c.depth, chain), empty
        )

    def share(index: Any) -> jax.Array:
        first = index * c.share
        steps = pl.cdiv(min(c.share, plan.k), c.step)
        if plan.k > c.share:
            steps = (jnp.minimum(plan.k - first, c.share) + c.step - 1) // c.step
        return lax.fori_loop(0, steps, lambda i, sums: add(first + i * c.step, sums), empty)

    where, inside = _grid(rows, outputs, plan)
    if c.split:
        index = pl.program_id(1)
        triton.store(out_ref.at[(index, *where)], share(index), mask=inside)
        return
    total = lax.fori_loop(1, plan.shares, lambda s, total: total + share(s), share(0))
    triton.store(out_ref.at[where], total.astype(out_ref.dtype), mask=inside)


def _grid(rows: jax.Array, outputs: jax.Array, plan: _Plan) -> tuple[Any, jax.Array]:
    shape = (rows.shape[0], outputs.shape[0])
    where = (jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(outputs[None], shape))
    return where, (where[0] < plan.n) & (where[1] < plan.f)


def _add_tile(x_ref, w_ref, rows, outputs, plan: _Plan, first: Any, sums: jax.Array) -> jax.Array:
    """`sums` plus the products of one tile of the depth."""
    columns = first + lax.iota(jnp.int32, plan.config.depth)
    x = _load(x_ref, rows, plan.n, columns, plan)
    w = _load(w_ref, outputs, plan.f, columns, plan)
    return sums + triton.dot(x, w, trans_b=True, precision=plan.numerics.precision)


def _load(ref: Any, rows: jax.Array, count: int, columns: jax.Array, plan: _Plan) -> jax.Array:
    shape = (rows.shape[0], columns.shape[0])
    at = (jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None], shape))
    masks = []
    if count % rows.shape[0]:
        masks.append(at[0] < count)
    if plan.k % plan.config.step:
        masks.append(at[1] < plan.k)
    if not masks:
        return triton.load(ref.at[at])
    return triton.load(ref.at[at], mask=functools.reduce(jnp.logical_and, masks), other=0.0)


@functools.partial(jax.jit, static_argnames=("numerics", "config", "unfinished"))
def _invariant_matmul_triton(
    x: jax.Array,
    w: jax.Array,
    *,
    numerics: Numerics,
    unfinished: bool = False,
    config: Config | None = None,
) -> jax.Array:
    (n, k), f = x.shape, w.shape[0]
    config = config or default_config(n, f, k, x.dtype.itemsize, current_device())
    plan = _Plan(n, f, k, config, numerics)
    shape, dtype = ((plan.shares, n, f), jnp.float32) if config.split else ((n, f), x.dtype)
    out = triton.pallas_call(
        functools.partial(_kernel, plan=plan),
        name="invariant_matmul",
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=plan.grid,
        in_specs=[triton.whole(), triton.whole()],
        out_specs=triton.whole(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(x, w)
    if not config.split or unfinished:
        return out
    return numerics.cast(functools.reduce(jnp.add, list(out)))


def _unsupported(x: jax.Array, w: jax.Array, numerics: Numerics, device: Device) -> str | None:
    if {x.dtype, w.dtype} != {numerics.jnp_dtype}:
        return f"dtypes {x.dtype} and {w.dtype}, compute dtype {numerics.dtype}"
    if x.shape[1] % 16:
        return f"needs a depth that is a multiple of 16, got {x.shape[1]}"
    return needs_gpu_or_interpreter((8, 0))(device)


def invariant_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    numerics: Numerics,
    unfinished: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """x wᵀ in x's dtype: a row's bits depend on that row and on w only.

    Args:
      x: [N, K].
      w: [F, K].
      numerics: compute dtype and rounding.
      unfinished: the result may be partial sums [S, N, F] float32 for `residual_norm`.
      implementation: None picks the fastest that takes the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x{list(x.shape)}, w{list(w.shape)}: expected [N, K] and [F, K]")
    choices = {
        "triton": Choice(_invariant_matmul_triton, functools.partial(_unsupported, x, w, numerics)),
        "reference": Choice(invariant_matmul_reference),
    }
    shape = f"{x.dtype}{list(x.shape)}·{list(w.shape)}"
    run = dispatch("invariant_matmul", implementation, choices, shape)
    return run(x, w, numerics=numerics, unfinished=unfinished)
