"""Kernels of a product of few rows with a large matrix: what the skinny ops share.

A decode step multiplies 1 to 16 rows x [B, K] by weights w [P, N, K] (P = 2 for gate|up, else 1).
Nothing but the reading of w counts, so each design keeps many weight loads in flight:

- "rows": the blocks together fill the GPU once; each keeps x in registers and walks over tiles of
  a few output rows at full depth K, the loads of the next tiles issued before the sums of this one.
- "columns": a block owns a few output rows and walks along K, several chunks ahead; for long K.
- "dot": tensor cores, w the left operand, x padded to 8 or 16 rows the right one. `segments` cuts
  K into S parts that become S·R rows of the left and S·B columns of the right operand; only the
  diagonal parts of the product are summed. So few output rows still fill a tile of 64.

The first weight loads of "rows" do not depend on x and are issued before the prologue that
computes it. The prologue is repeated by every block; block 0 stores the residual stream.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api

Activation = Literal["gelu_mul", "gelu_gate"]
Design = Literal["rows", "columns", "dot"]


@dataclass(frozen=True)
class Config:
    """Tile sizes of one product.

    Attributes:
      design: see the module.
      rows: output rows of a tile, of each of the P parts.
      width: elements of K that one load or one dot covers.
      depth: "rows": tiles loaded ahead; "columns": chunks loaded ahead.
      blocks: "rows": blocks of the grid.
      segments: "dot": parts of K side by side in one tile.
      num_warps, num_stages: of a block; stages are shared-memory buffers of "dot".
    """

    design: Design
    rows: int
    width: int
    depth: int = 1
    blocks: int = 0
    segments: int = 1
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True)
class Operands:
    """Arrays or refs of one call; None where the op has no such operand.

    Without `y`, `h` is multiplied as it is. Shapes: h, y [B, K]; post, pre [K]; factor [1];
    w [P, N, K]; ple [B, N].
    """

    h: Any
    w: Any
    y: Any = None
    post: Any = None
    factor: Any = None
    pre: Any = None
    ple: Any = None

    def names(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]


@dataclass(frozen=True)
class Spec:
    """What is static in a call: sizes, the activation and how to round."""

    batch: int
    parts: int
    out: int
    depth: int
    activation: Activation | None
    eps: float
    numerics: Numerics
    stores_h: bool

    @property
    def tiles_are_whole(self) -> Callable[[int], bool]:
        return lambda rows: self.out % rows == 0


# --- prologue ----------------------------------------------------------------------------------


def _normed(
    wide: list[jax.Array], weight: list[jax.Array] | None, spec: Spec, axis: int | None
) -> list[jax.Array]:
    """RMS norm of a row given in chunks, rounded once."""
    sums = [jnp.sum(c * c, axis=axis, keepdims=axis is not None) for c in wide]
    inverse = spec.numerics.inverse_root(sum(sums[1:], sums[0]) / spec.depth + spec.eps)
    scaled = [c * inverse for c in wide]
    if weight is not None:
        scaled = [c * w for c, w in zip(scaled, weight, strict=True)]
    return [triton_api.rounded(c, spec.numerics) for c in scaled]


def _residual(
    h: list[jax.Array], y: list[jax.Array], ops: "Chunks", spec: Spec, axis: int | None
) -> list[jax.Array]:
    """(h + norm(y)) · factor, rounded after the norm, the sum and the product."""
    normed = _normed(y, ops.post, spec, axis)
    out = [triton_api.rounded(a + b, spec.numerics) for a, b in zip(h, normed, strict=True)]
    if ops.factor is None:
        return out
    return [triton_api.rounded(c * ops.factor, spec.numerics) for c in out]


@dataclass(frozen=True)
class Chunks:
    """The vectors of the prologue, cut along K, in float32."""

    post: list[jax.Array] | None
    pre: list[jax.Array] | None
    factor: jax.Array | None


def _vector_chunks(ref: Any, starts: range, width: int, spec: Spec) -> list[jax.Array] | None:
    if ref is None:
        return None
    return [_load(ref, (_span(s, width),), spec.depth, s, width) for s in starts]


def _span(start: Any, width: int) -> jax.Array:
    return start + jnp.arange(width)


def _load(ref: Any, index: tuple, limit: int, start: int, width: int) -> jax.Array:
    """A chunk of a vector or row in float32; elements past the end of K read 0."""
    if start + width <= limit:
        return triton_api.load(ref.at[index]).astype(jnp.float32)
    mask = index[-1] < limit
    return triton_api.load(ref.at[index], mask=mask, other=0).astype(jnp.float32)


def _prologue(refs: Operands, h_out: Any, spec: Spec, width: int) -> list[list[jax.Array]]:
    """x of each batch row, in chunks [width] of float32; block 0 stores the residual stream."""
    starts = range(0, spec.depth, width)
    vectors = Chunks(
        _vector_chunks(refs.post, starts, width, spec),
        _vector_chunks(refs.pre, starts, width, spec),
        None if refs.factor is None else refs.factor[0].astype(jnp.float32),
    )
    rows = []
    for b in range(spec.batch):
        h = [_load(refs.h, (b, _span(s, width)), spec.depth, s, width) for s in starts]
        if refs.y is not None:
            y = [_load(refs.y, (b, _span(s, width)), spec.depth, s, width) for s in starts]
            h = _residual(h, y, vectors, spec, None)
        if h_out is not None:
            _store_h(h_out, b, h, starts, width, spec)
        rows.append(h if vectors.pre is None else _normed(h, vectors.pre, spec, None))
    return rows


def _store_h(h_out, b: int, h: list[jax.Array], starts: range, width: int, spec: Spec) -> None:
    first = pl.program_id(0) == 0
    for s, chunk in zip(starts, h, strict=True):
        index = _span(s, width)
        mask = (index < spec.depth) & first
        triton_api.store(h_out.at[b, index], chunk.astype(h_out.dtype), mask=mask)


# --- epilogue ----------------------------------------------------------------------------------


def _gelu(x: jax.Array) -> jax.Array:
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def _activated(parts: list[jax.Array], ple: jax.Array | None, spec: Spec) -> jax.Array:
    """The products of one tile, each rounded, after the activation."""
    if spec.activation is None:
        return parts[0]
    gate = triton_api.rounded(parts[0], spec.numerics)
    other = triton_api.rounded(parts[1], spec.numerics) if ple is None else ple
    return triton_api.rounded(_gelu(gate), spec.numerics) * other


def _finish(refs: Operands, out: Any, index: tuple, mask: Any, parts: list, spec: Spec) -> None:
    ple = None
    if refs.ple is not None:
        ple = triton_api.load(refs.ple.at[index], mask=mask, other=0).astype(jnp.float32)
    value = _activated(parts, ple, spec).astype(out.dtype)
    triton_api.store(out.at[index], value, mask=mask)


# --- designs -----------------------------------------------------------------------------------


def _weights(refs: Operands, row: jax.Array, column: jax.Array, mask: Any) -> jax.Array:
    at = refs.w.at[row[:, None], column[None, :]]
    return triton_api.load(at, mask=mask, other=None if mask is None else 0)


def _tile(
    refs: Operands, row: jax.Array, start: Any, width: int, ragged: bool, masks_rows: bool,
    spec: Spec,
) -> list[jax.Array]:  # fmt: skip
    """Rows `row` of each part, columns start … start + width: P arrays [rows, width]."""
    column = _span(start, width)
    mask = None
    if masks_rows:
        mask = jnp.broadcast_to((row < spec.out)[:, None], (row.size, width))
    if ragged:
        inside = jnp.broadcast_to((column < spec.depth)[None, :], (row.size, width))
        mask = inside if mask is None else mask & inside
    return [_weights(refs, p * spec.out + row, column, mask) for p in range(spec.parts)]


def _accumulate(total: jax.Array | None, w: jax.Array, x: jax.Array) -> jax.Array:
    product = w.astype(jnp.float32) * x[None, :]
    return product if total is None else total + product


def _rows_kernel(refs: Operands, h_out: Any, out: Any, config: Config, spec: Spec) -> None:
    block, rows, width = pl.program_id(0), config.rows, config.width
    starts = range(0, spec.depth, width)
    tiles = pl.cdiv(spec.out, rows)
    steps = pl.cdiv(tiles - block, config.blocks)

    def row_of(i):
        return (block + i * config.blocks) * rows + jnp.arange(rows)

    def load(i):
        ragged = [s + width > spec.depth for s in starts]
        row = row_of(i)
        return tuple(
            tuple(_tile(refs, row, s, width, cut, True, spec))
            for s, cut in zip(starts, ragged, strict=True)
        )

    ahead = tuple(load(i) for i in range(config.depth))
    xs = _prologue(refs, h_out, spec, width)

    def body(i, ahead):
        following = load(i + config.depth)
        row = row_of(i)
        for b in range(spec.batch):
            parts = []
            for p in range(spec.parts):
                total = None
                for c in range(len(starts)):
                    total = _accumulate(total, ahead[0][c][p], xs[b][c])
                parts.append(jnp.sum(total, axis=1))
            _finish(refs, out, (b, row), row < spec.out, parts, spec)
        return (*ahead[1:], following)

    lax.fori_loop(0, steps, body, ahead)


def _columns_kernel(refs: Operands, out: Any, config: Config, spec: Spec) -> None:
    rows, width = config.rows, config.width
    row = pl.program_id(0) * rows + jnp.arange(rows)
    starts = range(0, spec.depth, width)
    masks_rows = spec.out % rows != 0

    def load(start):
        ragged = start + width > spec.depth
        weights = _tile(refs, row, start, width, ragged, masks_rows, spec)
        index = _span(start, width)
        mask = (index < spec.depth) if ragged else None
        x = [
            triton_api.load(refs.h.at[b, index], mask=mask, other=0 if ragged else None)
            for b in range(spec.batch)
        ]
        return weights, x

    ahead = [load(s) for s in starts[: config.depth]]
    totals: dict[tuple[int, int], jax.Array] = {}
    for i in range(len(starts)):
        if i + config.depth < len(starts):
            ahead.append(load(starts[i + config.depth]))
        weights, x = ahead.pop(0)
        for b in range(spec.batch):
            for p in range(spec.parts):
                wide = x[b].astype(jnp.float32)
                totals[b, p] = _accumulate(totals.get((b, p)), weights[p], wide)
    for b in range(spec.batch):
        parts = [jnp.sum(totals[b, p], axis=1) for p in range(spec.parts)]
        _finish(refs, out, (b, row), row < spec.out, parts, spec)


def padded_batch(batch: int, segments: int) -> int:
    """Batch columns of the right operand of "dot", so that it has a power of two ≥ 16 in all."""
    return max(pl.next_power_of_2(batch), 16 // segments)


def _dot_kernel(refs: Operands, h_out: Any, out: Any, config: Config, spec: Spec) -> None:
    s, rows, width = config.segments, config.rows, config.width
    left = jnp.arange(rows * s)
    left_row = pl.program_id(0) * rows * s + left
    columns = padded_batch(spec.batch, s)
    left_mask = None
    if spec.out % rows:
        inside = left_row < spec.out * s
        left_mask = jnp.broadcast_to(inside[:, None], (rows * s, width))
    x_of = _right_operand(refs, h_out, columns, config, spec)

    def body(i, totals):
        start = i * width
        x, column = x_of(start).T, _span(start, width)
        return tuple(
            total + _product(refs, p * spec.out * s + left_row, column, left_mask, x, spec)
            for p, total in enumerate(totals)
        )

    zero = jnp.zeros((rows * s, columns * s), jnp.float32)
    totals = lax.fori_loop(0, spec.depth // s // width, body, (zero,) * spec.parts)
    parts = [_diagonal(total, rows, columns, s) for total in totals]
    row, batch = pl.program_id(0) * rows + jnp.arange(rows), jnp.arange(columns)
    mask = (row < spec.out)[:, None] & (batch < spec.batch)[None, :]
    _finish(refs, out, (batch[None, :], row[:, None]), mask, parts, spec)


def _product(refs: Operands, row, column, mask, x: jax.Array, spec: Spec) -> jax.Array:
    weights = _weights(refs, row, column, mask)
    return triton_api.dot(weights, x, precision=spec.numerics.precision)


def _diagonal(total: jax.Array, rows: int, columns: int, s: int) -> jax.Array:
    """[rows·S, columns·S] → [rows, columns]: the sum of the products of equal segments."""
    if s == 1:
        return total
    left, right = jnp.arange(rows * s), jnp.arange(columns * s)
    same = (left % s)[:, None] == (right % s)[None, :]
    total = jnp.where(same, total, 0.0)
    total = jnp.sum(total.reshape(rows, s, columns * s), axis=1)
    return jnp.sum(total.reshape(rows, columns, s), axis=2)


def _right_operand(refs: Operands, h_out, columns: int, config: Config, spec: Spec) -> Callable:
    """The function that gives x [columns·S, width] from a start on, in the compute dtype."""
    s, width = config.segments, config.width
    length = spec.depth // s
    right = jnp.arange(columns * s)
    batch, offset = right // s, right % s * length
    mask = jnp.broadcast_to((batch < spec.batch)[:, None], (right.size, width))
    stored = mask & (pl.program_id(0) == 0)

    def at(start):
        return batch[:, None], offset[:, None] + _span(start, width)[None, :]

    def matrix(ref, start):
        return triton_api.load(ref.at[at(start)], mask=mask, other=0).astype(jnp.float32)

    def scaled(chunk, inverse, ref, start):
        weight = triton_api.load(ref.at[at(start)[1]]).astype(jnp.float32)
        return triton_api.rounded(chunk * inverse * weight, spec.numerics)

    def inverse_of(chunk_of):
        def body(i, total):
            chunk = chunk_of(i * width)
            return total + jnp.sum(chunk * chunk, axis=1)

        total = lax.fori_loop(0, length // width, body, jnp.zeros(right.size, jnp.float32))
        if s > 1:
            total = jnp.sum(total.reshape(columns, s), axis=1)
            total = jnp.broadcast_to(total[:, None], (columns, s)).reshape(columns * s)
        return spec.numerics.inverse_root(total / spec.depth + spec.eps)[:, None]

    if refs.y is None and refs.pre is None:
        return lambda start: triton_api.load(refs.h.at[at(start)], mask=mask, other=0)
    factor = None if refs.factor is None else refs.factor[0].astype(jnp.float32)
    y_inverse = None if refs.y is None else inverse_of(lambda start: matrix(refs.y, start))

    def h_of(start):
        h = matrix(refs.h, start)
        if refs.y is not None:
            update = scaled(matrix(refs.y, start), y_inverse, refs.post, start)
            h = triton_api.rounded(h + update, spec.numerics)
        return h if factor is None else triton_api.rounded(h * factor, spec.numerics)

    def h_stored(start):
        h = h_of(start)
        if h_out is not None:
            triton_api.store(h_out.at[at(start)], h.astype(h_out.dtype), mask=stored)
        return h

    if refs.pre is None:
        return lambda start: h_stored(start).astype(refs.h.dtype)
    h_inverse = inverse_of(h_stored)
    return lambda start: scaled(h_of(start), h_inverse, refs.pre, start).astype(refs.h.dtype)


# --- call --------------------------------------------------------------------------------------


def _kernel(*flat: Any, names: list[str], config: Config, spec: Spec) -> None:
    refs = Operands(**dict(zip(names, flat, strict=False)))
    h_out, out = flat[-2] if spec.stores_h else None, flat[-1]
    if config.design == "rows":
        _rows_kernel(refs, h_out, out, config, spec)
    elif config.design == "columns":
        _columns_kernel(refs, out, config, spec)
    else:
        _dot_kernel(refs, h_out, out, config, spec)


def grid_of(config: Config, spec: Spec) -> tuple[int]:
    tiles = pl.cdiv(spec.out, config.rows)
    return (min(config.blocks, tiles),) if config.design == "rows" else (tiles,)


def call(operands: Operands, config: Config, spec: Spec, name: str) -> tuple[Any, jax.Array]:
    """(residual stream or None, product [B, N])."""
    names = operands.names()
    arrays = {n: getattr(operands, n) for n in names}
    s = config.segments
    arrays["w"] = arrays["w"].reshape(spec.parts * spec.out * s, spec.depth // s)
    dtype = operands.h.dtype
    shapes = [jax.ShapeDtypeStruct((spec.batch, spec.out), dtype)]
    if spec.stores_h:
        shapes.insert(0, jax.ShapeDtypeStruct((spec.batch, spec.depth), dtype))
    outputs = triton_api.pallas_call(
        lambda *flat: _kernel(*flat, names=names, config=config, spec=spec),
        name=name,
        out_shape=shapes,
        grid=grid_of(config, spec),
        in_specs=[triton_api.whole()] * len(names),
        out_specs=[triton_api.whole()] * len(shapes),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        cost_estimate=pl.CostEstimate(
            flops=2 * spec.batch * spec.parts * spec.out * spec.depth,
            bytes_accessed=operands.w.size * operands.w.dtype.itemsize,
            transcendentals=0,
        ),
    )(*arrays.values())
    return (outputs[0] if spec.stores_h else None), outputs[-1]
