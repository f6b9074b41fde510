"""Kernels of a product of few rows with a large matrix: what the skinny ops share.

A decode step multiplies 1 to 16 rows x [B, K] by weights w [P, N, K] (P = 2 for gate|up, else 1).
Nothing but the reading of w counts, so each design keeps many weight loads in flight:

- "rows": the blocks together fill the GPU once; each keeps x in registers and walks over tiles of
  a few output rows at full depth K, the loads of the next tiles issued before the sums of this one.
- "columns": a block owns a few output rows and walks along K, several chunks ahead; for long K.
- "dot": tensor cores, w the left operand, x padded to 8 or 16 rows the right one. `segments` cuts
  K into S parts that become S·R rows of the left and S·B columns of the right operand; only the
  products of equal parts are summed. So few output rows still fill a tile of 64.

The prologue that computes x from the residual stream is repeated by every block. The first weight
loads of "rows" do not depend on it and are issued before; "dot" needs x in memory: every block
writes the same values to one buffer and reads back what it wrote. Block 0 stores the new stream.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model.layers import gelu_tanh
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device, current_device
from gemma_jax.pallas.dispatch import needs_gpu_or_interpreter
from gemma_jax.pallas.kernel_math import inverse_root

MAX_BATCH = 16
"""Rows of x: more are a matter for a tiled matmul."""
RESIDENT_K = 2560
"""Widest x that "rows" keeps in registers."""

Activation = Literal["gelu_mul", "gelu_gate"]
Design = Literal["rows", "columns", "dot"]


@dataclass(frozen=True)
class Config:
    """Tile sizes of one product.

    Attributes:
      design: see the module.
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


@dataclass(frozen=True)
class Operands:
    """Arrays or refs of one call; None where the op has no such operand.

    Without `y`, `h` itself is normalised or multiplied. Shapes: h, y [B, K]; post, pre [K];
    factor [1]; w [P, N, K]; ple [B, N].
    """

    h: Any
    w: Any
    y: Any = None
    post: Any = None
    factor: Any = None
    pre: Any = None
    ple: Any = None

    def names(self) -> list[str]:
        """The operands that there are."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]


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


# --- choice of tiles -----------------------------------------------------------------------------


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


def unsupported(h: jax.Array, w: jax.Array, numerics: Numerics, device: Device) -> str | None:
    """Why the kernels cannot take these inputs."""
    if h.dtype != numerics.jnp_dtype or w.dtype != h.dtype:
        return f"dtypes {h.dtype} and {w.dtype}, compute dtype {numerics.dtype}"
    if h.shape[0] > MAX_BATCH:
        return f"{h.shape[0]} rows, more than {MAX_BATCH}"
    if h.shape[1] % 16:
        return f"rows of {h.shape[1]} elements, no multiple of 16"
    return needs_gpu_or_interpreter((8, 0))(device)


# --- loads ---------------------------------------------------------------------------------------


def _span(start: Any, width: int) -> jax.Array:
    return start + jnp.arange(width)


def _load(
    ref: Any, row: tuple[Any, ...], start: int, width: int, spec: Spec, inside: Any = None
) -> jax.Array:
    """A chunk [width] of a vector or a row, or [G, width] of rows; what lies outside reads 0."""
    index, mask = _chunk(start, width, spec, inside)
    value = triton.load(ref.at[(*row, index)], mask=mask, other=None if mask is None else 0)
    return value.astype(jnp.float32)


def _chunk(start: int, width: int, spec: Spec, inside: Any) -> tuple[jax.Array, jax.Array | None]:
    """Columns, as [1, width] if there are several rows, and the mask of what exists, if needed.

    `inside` says which rows exist, [G, 1], or is a scalar.
    """
    index, shape = _span(start, width), (width,)
    if inside is not None and inside.ndim:
        index, shape = index[None], (inside.shape[0], width)
    masks = [] if inside is None else [inside]
    if start + width > spec.k:
        masks.append(index < spec.k)
    masks = [jnp.broadcast_to(mask, shape) for mask in masks]
    return index, functools.reduce(operator.and_, masks) if masks else None


def _load_weights(w: Any, row: jax.Array, column: jax.Array, mask: jax.Array | None) -> jax.Array:
    at = w.at[row[:, None], column[None, :]]
    return triton.load(at, mask=mask, other=None if mask is None else 0)


def _tile(
    w: Any, row: jax.Array, start: int, width: int, masks_rows: bool, spec: Spec
) -> list[jax.Array]:
    """Rows `row` of each part, columns start … start + width: P arrays [R, width]."""
    column, shape = _span(start, width), (row.size, width)
    masks = []
    if masks_rows:
        masks.append(jnp.broadcast_to((row < spec.n)[:, None], shape))
    if start + width > spec.k:
        masks.append(jnp.broadcast_to((column < spec.k)[None, :], shape))
    mask = functools.reduce(operator.and_, masks) if masks else None
    return [_load_weights(w, p * spec.n + row, column, mask) for p in range(spec.parts)]


# --- prologue ------------------------------------------------------------------------------------

Chunks = list[jax.Array]


def _prologue(
    refs: Operands, h_out: Any, rows: tuple[Any, ...], inside: Any, width: int, spec: Spec
) -> Chunks:
    """x of `rows` in chunks of float32, [width] of one row or [G, width] of several.

    Args:
      rows: index of the leading axis: () of a vector is (b,) here or ([G, 1],).
      inside: None, or [G, 1]: which rows exist.
    """
    starts = range(0, spec.k, width)

    def load(ref: Any, *row: Any) -> Chunks:
        return [_load(ref, row, start, width, spec, inside) for start in starts]

    def weight(ref: Any) -> Chunks | None:
        if ref is None:
            return None
        chunks = [_load(ref, (), start, width, spec) for start in starts]
        return chunks if inside is None else [chunk[None] for chunk in chunks]

    post, pre = weight(refs.post), weight(refs.pre)
    h = load(refs.h, *rows)
    if refs.y is not None:
        y = _normed(load(refs.y, *rows), post, spec)
        h = [triton.rounded(a + c, spec.numerics) for a, c in zip(h, y, strict=True)]
    if refs.factor is not None:
        factor = refs.factor[0].astype(jnp.float32)
        h = [triton.rounded(chunk * factor, spec.numerics) for chunk in h]
    if h_out is not None:
        first = pl.program_id(0) == 0
        _store(h_out, rows, h, first if inside is None else first & inside, width, spec)
    return h if pre is None else _normed(h, pre, spec)


def _normed(chunks: Chunks, weight: Chunks | None, spec: Spec) -> Chunks:
    """RMS norm over the last axis, rounded once. Chunks are added first: one sum over threads."""
    squares = functools.reduce(operator.add, [c * c for c in chunks])
    root = inverse_root(jnp.sum(squares, axis=-1, keepdims=squares.ndim > 1), spec.k, spec.eps)
    scaled = [c * root for c in chunks]
    if weight is not None:
        scaled = [c * w for c, w in zip(scaled, weight, strict=True)]
    return [triton.rounded(c, spec.numerics) for c in scaled]


def _store(
    ref: Any, rows: tuple[Any, ...], chunks: Chunks, inside: Any, width: int, spec: Spec
) -> None:
    for start, chunk in zip(range(0, spec.k, width), chunks, strict=True):
        index, mask = _chunk(start, width, spec, inside)
        triton.store(ref.at[(*rows, index)], chunk.astype(ref.dtype), mask=mask)


def _write_x(refs: Operands, h_out: Any, x_out: Any, spec: Spec) -> None:
    """Fills x_out [B, K], as many rows at a time as fit in registers."""
    width = 512
    group = min(pl.next_power_of_2(spec.batch), 1 << max(0, (8192 // spec.k).bit_length() - 1))
    for first in range(0, spec.batch, group):
        row = (first + jnp.arange(group))[:, None]
        inside = row < spec.batch
        x = _prologue(refs, h_out, (row,), inside, width, spec)
        _store(x_out, (row,), x, inside, width, spec)
    if current_device().is_gpu:  # The interpreter runs a block in order and has no barrier.
        triton.debug_barrier()


# --- epilogue ------------------------------------------------------------------------------------


def _finish(
    refs: Operands, out: Any, index: tuple[Any, ...], mask: Any, products: Chunks, spec: Spec
) -> None:
    """Activates the products of a tile, each rounded first, and stores the result."""
    value = products[0]
    if spec.activation is not None:
        active = triton.rounded(gelu_tanh(triton.rounded(value, spec.numerics)), spec.numerics)
        if refs.ple is None:
            other = triton.rounded(products[1], spec.numerics)
        else:
            other = triton.load(refs.ple.at[index], mask=mask, other=0).astype(jnp.float32)
        value = active * other
    triton.store(out.at[index], value.astype(out.dtype), mask=mask)


# --- designs -------------------------------------------------------------------------------------


def _add_product(total: jax.Array | None, w: jax.Array, x: jax.Array) -> jax.Array:
    product = w.astype(jnp.float32) * x.astype(jnp.float32)[None, :]
    return product if total is None else total + product


def _rows_kernel(refs: Operands, h_out: Any, out: Any, config: Config, spec: Spec) -> None:
    block, rows, width = pl.program_id(0), config.rows, config.width
    steps = pl.cdiv(pl.cdiv(spec.n, rows) - block, config.blocks)

    def row_of(i: Any) -> jax.Array:
        return (block + i * config.blocks) * rows + jnp.arange(rows)

    def load(i: Any) -> tuple[Chunks, ...]:
        # Tiles past the last are masked: they are loaded in advance but never used.
        return tuple(
            _tile(refs.w, row_of(i), start, width, True, spec) for start in range(0, spec.k, width)
        )

    first = tuple(load(i) for i in range(config.ahead))
    x = [_prologue(refs, h_out, (b,), None, width, spec) for b in range(spec.batch)]

    def body(i: Any, tiles: tuple[Any, ...]) -> tuple[Any, ...]:
        following = load(i + config.ahead)
        row = row_of(i)
        for b in range(spec.batch):
            products: Chunks = []
            for p in range(spec.parts):
                total = None
                for chunk, x_chunk in zip(tiles[0], x[b], strict=True):
                    total = _add_product(total, chunk[p], x_chunk)
                assert total is not None
                products.append(jnp.sum(total, axis=1))
            _finish(refs, out, (b, row), row < spec.n, products, spec)
        return (*tiles[1:], following)

    lax.fori_loop(0, steps, body, first)


def _columns_kernel(refs: Operands, out: Any, config: Config, spec: Spec) -> None:
    rows, width = config.rows, config.width
    row = pl.program_id(0) * rows + jnp.arange(rows)
    starts = range(0, spec.k, width)

    def load(start: int) -> tuple[Chunks, Chunks]:
        weights = _tile(refs.w, row, start, width, spec.n % rows != 0, spec)
        return weights, [_load(refs.h, (b,), start, width, spec) for b in range(spec.batch)]

    waiting = [load(start) for start in starts[: config.ahead]]
    totals: dict[tuple[int, int], jax.Array] = {}
    for i in range(len(starts)):
        if i + config.ahead < len(starts):
            waiting.append(load(starts[i + config.ahead]))
        weights, x = waiting.pop(0)
        for b in range(spec.batch):
            for p in range(spec.parts):
                totals[b, p] = _add_product(totals.get((b, p)), weights[p], x[b])
    for b in range(spec.batch):
        products = [jnp.sum(totals[b, p], axis=1) for p in range(spec.parts)]
        _finish(refs, out, (b, row), row < spec.n, products, spec)


Sum = tuple[jax.Array, ...]
"""A running total; with a second array, by how much its roundings have raised it so far."""


def _added(total: Sum, product: jax.Array) -> Sum:
    """One product more; with two arrays by Kahan's compensated summation.

    In float32 it is needed: Triton turns `total + dot` into a dot that starts from `total`, and
    multiply-adds then round once for each element of K, many times what plain code is off by.
    """
    if len(total) == 1:
        return (total[0] + product,)
    before, excess = total
    term = product - excess
    after = before + term
    return after, (after - before) - term


def _dot_kernel(
    refs: Operands, h_out: Any, x_out: Any, out: Any, config: Config, spec: Spec
) -> None:
    s, rows, width = config.segments, config.rows, config.width
    left = pl.program_id(0) * rows * s + jnp.arange(rows * s)
    columns = max(pl.next_power_of_2(spec.batch), 16 // s)
    mask = None
    if spec.n % rows:
        mask = jnp.broadcast_to((left < spec.n * s)[:, None], (rows * s, width))
    if x_out is not None:
        _write_x(refs, h_out, x_out, spec)
    x_of = _right_operand(refs.h if x_out is None else x_out, columns, config, spec)

    def product(p: int, start: Any, x: jax.Array) -> jax.Array:
        weights = _load_weights(refs.w, p * spec.n * s + left, _span(start, width), mask)
        return triton.dot(weights, x, precision=spec.numerics.precision)

    def body(i: Any, sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
        x = x_of(i * width).T
        return tuple(_added(total, product(p, i * width, x)) for p, total in enumerate(sums))

    zero = jnp.zeros((rows * s, columns * s), jnp.float32)
    empty = (zero, zero) if spec.numerics.is_float32 else (zero,)
    sums = lax.fori_loop(0, spec.k // s // width, body, (empty,) * spec.parts)
    products = [_sum_of_equal_segments(total, rows, columns, s) for total, *_ in sums]
    row, batch = pl.program_id(0) * rows + jnp.arange(rows), jnp.arange(columns)
    inside = (row < spec.n)[:, None] & (batch < spec.batch)[None, :]
    _finish(refs, out, (batch[None, :], row[:, None]), inside, products, spec)


def _sum_of_equal_segments(total: jax.Array, rows: int, columns: int, s: int) -> jax.Array:
    """[rows·S, columns·S] → [rows, columns]."""
    if s == 1:
        return total
    left, right = jnp.arange(rows * s), jnp.arange(columns * s)
    same = (left % s)[:, None] == (right % s)[None, :]
    total = jnp.where(same, total, 0.0)
    total = jnp.sum(total.reshape(rows, s, columns * s), axis=1)
    return jnp.sum(total.reshape(rows, columns, s), axis=2)


def _right_operand(x: Any, columns: int, config: Config, spec: Spec) -> Callable[[Any], jax.Array]:
    """The function that loads x [columns·S, width] from a start on."""
    s, width = config.segments, config.width
    right = jnp.arange(columns * s)
    batch, offset = right // s, right % s * (spec.k // s)
    mask = jnp.broadcast_to((batch < spec.batch)[:, None], (right.size, width))

    def load(start: Any) -> jax.Array:
        at = x.at[batch[:, None], offset[:, None] + _span(start, width)[None, :]]
        return triton.load(at, mask=mask, other=0)

    return load


# --- call ----------------------------------------------------------------------------------------


def _kernel(*flat: Any, names: list[str], config: Config, spec: Spec) -> None:
    refs = Operands(**dict(zip(names, flat, strict=False)))
    outputs = list(flat[len(names) :])
    out = outputs.pop()
    h_out = outputs.pop(0) if spec.stores_h else None
    x_out = outputs.pop() if outputs else None
    if config.design == "rows":
        _rows_kernel(refs, h_out, out, config, spec)
    elif config.design == "columns":
        _columns_kernel(refs, out, config, spec)
    else:
        _dot_kernel(refs, h_out, x_out, out, config, spec)


def grid_of(config: Config, spec: Spec) -> tuple[int]:
    """Blocks of the grid."""
    tiles = pl.cdiv(spec.n, config.rows)
    return (min(config.blocks, tiles) if config.design == "rows" else tiles,)


def call(
    operands: Operands, config: Config, spec: Spec, name: str
) -> tuple[jax.Array | None, jax.Array]:
    """The new residual stream [B, K] if there is one, and the result [B, N].

    Raises:
      ValueError: a "dot" tile that does not divide K.
    """
    if config.design == "dot" and spec.k % (config.segments * config.width):
        raise ValueError(f"{config}: does not divide K = {spec.k}")
    names = operands.names()
    arrays = {n: getattr(operands, n) for n in names}
    s = config.segments
    arrays["w"] = operands.w.reshape(spec.parts * spec.n * s, spec.k // s)
    dtype = operands.h.dtype
    shapes = [jax.ShapeDtypeStruct((spec.batch, spec.n), dtype)]
    stream = jax.ShapeDtypeStruct((spec.batch, spec.k), dtype)
    has_prologue = any(x is not None for x in (operands.y, operands.factor, operands.pre))
    if has_prologue and config.design == "dot":
        shapes.insert(0, stream)
    if spec.stores_h:
        shapes.insert(0, stream)
    outputs = triton.pallas_call(
        functools.partial(_kernel, names=names, config=config, spec=spec),
        name=name,
        out_shape=shapes,
        grid=grid_of(config, spec),
        in_specs=[triton.whole() for _ in names],
        out_specs=[triton.whole() for _ in shapes],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        cost_estimate=pl.CostEstimate(
            flops=2 * spec.batch * operands.w.size,
            bytes_accessed=operands.w.size * operands.w.dtype.itemsize,
            transcendentals=0,
        ),
    )(*arrays.values())
    return (outputs[0] if spec.stores_h else None), outputs[-1]
