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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model.layers import gelu_tanh
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import needs_gpu_or_interpreter
from gemma_jax.pallas.skinny_config import Config, Spec
from gemma_jax.pallas.skinny_prologue import Chunks, Operands, load_chunk, prologue, span, write_x

MAX_BATCH = 16
"""Rows of x: more are a matter for a tiled matmul."""


def unsupported(h: jax.Array, w: jax.Array, numerics: Numerics, device: Device) -> str | None:
    """Why the kernels cannot take these inputs."""
    if h.dtype != numerics.jnp_dtype or w.dtype != h.dtype:
        return f"dtypes {h.dtype} and {w.dtype}, compute dtype {numerics.dtype}"
    if h.shape[0] > MAX_BATCH:
        return f"{h.shape[0]} rows, more than {MAX_BATCH}"
    if h.shape[1] % 16:
        return f"rows of {h.shape[1]} elements, no multiple of 16"
    return needs_gpu_or_interpreter((8, 0))(device)


# --- weights -------------------------------------------------------------------------------------


def _load_weights(w: Any, row: jax.Array, column: jax.Array, mask: jax.Array | None) -> jax.Array:
    at = w.at[row[:, None], column[None, :]]
    return triton.load(at, mask=mask, other=None if mask is None else 0)


def _tile(
    w: Any, row: jax.Array, start: int, width: int, masks_rows: bool, spec: Spec
) -> list[jax.Array]:
    """Rows `row` of each part, columns start … start + width: P arrays [R, width]."""
    column, shape = span(start, width), (row.size, width)
    masks = []
    if masks_rows:
        masks.append(jnp.broadcast_to((row < spec.n)[:, None], shape))
    if start + width > spec.k:
        masks.append(jnp.broadcast_to((column < spec.k)[None, :], shape))
    mask = functools.reduce(operator.and_, masks) if masks else None
    return [_load_weights(w, p * spec.n + row, column, mask) for p in range(spec.parts)]


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
    x = [prologue(refs, h_out, (b,), None, width, spec) for b in range(spec.batch)]

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
        return weights, [load_chunk(refs.h, (b,), start, width, spec) for b in range(spec.batch)]

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
        write_x(refs, h_out, x_out, spec)
    x_of = _right_operand(refs.h if x_out is None else x_out, columns, config, spec)

    def product(p: int, start: Any, x: jax.Array) -> jax.Array:
        weights = _load_weights(refs.w, p * spec.n * s + left, span(start, width), mask)
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
        at = x.at[batch[:, None], offset[:, None] + span(start, width)[None, :]]
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
