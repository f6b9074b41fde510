"""The left factor x of a skinny product: loaded, or made from the residual stream by every block.

    h' = (h + rms_norm(y) · post) · factor        x = rms_norm(h') · pre

Rows are held in chunks, because the widths of the models are no powers of two.
"""

import functools
import operator
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import current_device
from gemma_jax.pallas.kernel_math import inverse_root
from gemma_jax.pallas.skinny_config import Spec

Chunks = list[jax.Array]


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


# --- loads ---------------------------------------------------------------------------------------


def span(start: Any, width: int) -> jax.Array:
    return start + jnp.arange(width)


def load_chunk(
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
    index, shape = span(start, width), (width,)
    if inside is not None and inside.ndim:
        index, shape = index[None], (inside.shape[0], width)
    masks = [] if inside is None else [inside]
    if start + width > spec.k:
        masks.append(index < spec.k)
    masks = [jnp.broadcast_to(mask, shape) for mask in masks]
    return index, functools.reduce(operator.and_, masks) if masks else None


# --- prologue ------------------------------------------------------------------------------------


def prologue(
    refs: Operands, h_out: Any, rows: tuple[Any, ...], inside: Any, width: int, spec: Spec
) -> Chunks:
    """x of `rows` in chunks of float32, [width] of one row or [G, width] of several.

    Args:
      rows: index of the leading axis: () of a vector is (b,) here or ([G, 1],).
      inside: None, or [G, 1]: which rows exist.
    """
    starts = range(0, spec.k, width)

    def load(ref: Any, *row: Any) -> Chunks:
        return [load_chunk(ref, row, start, width, spec, inside) for start in starts]

    def weight(ref: Any) -> Chunks | None:
        if ref is None:
            return None
        chunks = [load_chunk(ref, (), start, width, spec) for start in starts]
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


def write_x(refs: Operands, h_out: Any, x_out: Any, spec: Spec) -> None:
    """Fills x_out [B, K], as many rows at a time as fit in registers."""
    width = 512
    group = min(pl.next_power_of_2(spec.batch), 1 << max(0, (8192 // spec.k).bit_length() - 1))
    for first in range(0, spec.batch, group):
        row = (first + jnp.arange(group))[:, None]
        inside = row < spec.batch
        x = prologue(refs, h_out, (row,), inside, width, spec)
        _store(x_out, (row,), x, inside, width, spec)
    if current_device().is_gpu:  # The interpreter runs a block in order and has no barrier.
        triton.debug_barrier()
