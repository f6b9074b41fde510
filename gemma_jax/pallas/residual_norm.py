"""Residual sum with the norms around it, in one pass over a row.

    h = x + rms_norm(y) · post_weight          the norm and the sum round once each
    h = h · scalar                             where a layer ends
    n = rms_norm(h) · pre_weight               where another norm follows

y may be unfinished: partial sums of a product, added in their order and rounded before the norm.

It covers attention → MLP, MLP → per-layer input, and a layer's end → the next layer's input norm.

The kernel reads x and y once and writes h and n once: a program holds whole rows in registers, cut
into chunks because a width such as 1536 is no power of two; a last, partial chunk is masked.

Limits: bfloat16 or float32, rows of at most `MAX_WIDTH`, compute capability 8.0 or a CPU
(interpreted). Source of the formulas: transformers 5.17 `Gemma4TextDecoderLayer`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from gemma_jax.model.layers import add, rms_norm, scale
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import triton_api as triton
from gemma_jax.pallas.device import Device
from gemma_jax.pallas.dispatch import (
    Choice,
    Implementation,
    dispatch,
    needs_gpu_or_interpreter,
)
from gemma_jax.pallas.kernel_math import inverse_root

MAX_WIDTH = 16_384
"""Widest row that fits the registers of a program of eight warps."""


class ResidualNorm(NamedTuple):
    """The residual stream h [N, D] and, if asked for, its norm n [N, D]."""

    h: jax.Array
    n: jax.Array | None


# --- reference -----------------------------------------------------------------------------------


def residual_norm_reference(
    x: jax.Array,
    y: jax.Array,
    post_weight: jax.Array,
    pre_weight: jax.Array | None = None,
    scalar: jax.Array | None = None,
    *,
    eps: float,
    numerics: Numerics,
) -> ResidualNorm:
    """The op in plain jnp; float64 arguments give the exact result."""
    y = whole(y, x.shape[0], numerics)
    h = add(x, rms_norm(y, post_weight, eps, numerics), numerics)
    if scalar is not None:
        h = scale(h, scalar, numerics)
    return ResidualNorm(h, None if pre_weight is None else rms_norm(h, pre_weight, eps, numerics))


def whole(y: jax.Array, rows: int, numerics: Numerics) -> jax.Array:
    """[N, D] of an output that may still be partial sums [S, R, D] of R >= N rows."""
    if y.ndim == 2:
        return y
    return numerics.cast(functools.reduce(jnp.add, list(y[:, :rows])))


# --- kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Tile of a program.

    Attributes:
      block_rows: rows, a power of two.
      chunk: columns a load takes, a power of two.
      num_warps: warps of a program.
    """

    block_rows: int
    chunk: int
    num_warps: int


def default_config(num_rows: int, width: int) -> Config:
    """Chunks of 16 bytes a thread. Many rows: a warp or two a row; few: all the warps there are."""
    num_warps = 1 if width <= 4096 else 8
    if num_rows < 512:
        num_warps = 8
    return Config(1, 256 * num_warps, num_warps)


def invariant_config(width: int) -> Config:
    """A tile that does not depend on the number of rows."""
    num_warps = 1 if width <= 512 else 4
    return Config(1, 256 * num_warps, num_warps)


@dataclass(frozen=True)
class _Plan:
    """Static facts of one call."""

    num_rows: int
    width: int
    config: Config
    eps: float
    numerics: Numerics
    splits: int = 0  # partial sums of y; 0 = it is whole


Refs = dict[str, Any]


class _Chunk(NamedTuple):
    """Where a chunk of a block of rows lies, and which of its elements exist, if some do not."""

    rows: jax.Array  # [R, 1]
    columns: jax.Array  # [chunk]
    inside: jax.Array | None  # [R, chunk]
    inside_row: jax.Array | None  # [chunk]


def _kernel(*refs: Any, names: tuple[str, ...], plan: _Plan) -> None:
    """Whole rows: two reductions over registers, one read and one write of memory."""
    ref = dict(zip(names, refs, strict=True))
    chunks = _chunks(plan)
    # All loads first: the stores below may alias them for all that the compiler knows, and no load
    # is issued before a barrier that stands in front of it.
    y = [_load_branch(ref["y"], c, plan) for c in chunks]
    x = [_load(ref["x"], c) for c in chunks]
    post, pre = (_weight_of(ref.get(name), chunks, plan) for name in ("post_weight", "pre_weight"))
    scalar = None
    if "scalar" in ref:
        scalar = triton.load(ref["scalar"].at[pl.ds(0, 1)]).astype(jnp.float32)[None]
    h = [triton.rounded(a + b, plan.numerics) for a, b in zip(x, _norm(y, post, plan), strict=True)]
    if scalar is not None:
        h = [triton.rounded(part * scalar, plan.numerics) for part in h]
    _store(ref["h"], h, chunks)
    if "n" in ref:
        _store(ref["n"], _norm(h, pre, plan), chunks)


Weight = Callable[[int], jax.Array]
"""The weight of a chunk, float32 [1, chunk]."""


def _weight_of(ref: Any, chunks: list[_Chunk], plan: _Plan) -> Weight:
    """Loaded now if registers allow, else when it is asked for."""
    if ref is None or plan.width > 32 * 32 * plan.config.num_warps:
        return lambda i: _load_weight(ref, chunks[i])
    return [_load_weight(ref, c) for c in chunks].__getitem__


def _norm(parts: list[jax.Array], weight: Weight, plan: _Plan) -> list[jax.Array]:
    # Chunks are added before the sum over columns: one exchange between warps instead of many.
    squares = functools.reduce(jnp.add, [part * part for part in parts])
    total = jnp.sum(squares, axis=1, keepdims=True)
    root = inverse_root(total, plan.width, plan.eps)
    return [triton.rounded(part * root * weight(i), plan.numerics) for i, part in enumerate(parts)]


def _chunks(plan: _Plan) -> list[_Chunk]:
    block, size = plan.config.block_rows, plan.config.chunk
    rows = (pl.program_id(0) * block + lax.iota(jnp.int32, block))[:, None]
    exist = rows < plan.num_rows if plan.num_rows % block else None
    chunks: list[_Chunk] = []
    for first in range(0, plan.width, size):
        columns = first + lax.iota(jnp.int32, size)
        inside_row = columns < plan.width if first + size > plan.width else None
        inside = _both(exist, None if inside_row is None else inside_row[None], (block, size))
        chunks.append(_Chunk(rows, columns, inside, inside_row))
    return chunks


def _both(a: jax.Array | None, b: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """a & b broadcast to `shape`; None is all true."""
    given = [mask for mask in (a, b) if mask is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, given), shape) if given else None


def _load(ref: Any, chunk: _Chunk, *first: int) -> jax.Array:
    """float32 [R, chunk]; zero outside, which adds nothing to a sum of squares."""
    other = None if chunk.inside is None else 0.0
    values = triton.load(_at(ref, chunk, *first), mask=chunk.inside, other=other)
    return values.astype(jnp.float32)


def _load_branch(ref: Any, chunk: _Chunk, plan: _Plan) -> jax.Array:
    """The same of an array that may be partial sums [S, R, D]."""
    if not plan.splits:
        return _load(ref, chunk)
    parts = [_load(ref, chunk, split) for split in range(plan.splits)]
    return triton.rounded(functools.reduce(jnp.add, parts), plan.numerics)


def _load_weight(ref: Any, chunk: _Chunk) -> jax.Array:
    other = None if chunk.inside_row is None else 0.0
    weight = triton.load(ref.at[chunk.columns], mask=chunk.inside_row, other=other)
    return weight.astype(jnp.float32)[None]


def _store(ref: Any, parts: list[jax.Array], chunks: list[_Chunk]) -> None:
    for part, chunk in zip(parts, chunks, strict=True):
        triton.store(_at(ref, chunk), part.astype(ref.dtype), mask=chunk.inside)


def _at(ref: Any, chunk: _Chunk, *first: int) -> Any:
    return ref.at[(*map(jnp.int32, first), chunk.rows, chunk.columns[None])]


# --- wrapper -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("eps", "numerics", "config"))
def _residual_norm_pallas(
    x: jax.Array,
    y: jax.Array,
    post_weight: jax.Array,
    pre_weight: jax.Array | None = None,
    scalar: jax.Array | None = None,
    *,
    eps: float,
    numerics: Numerics,
    config: Config | None = None,
) -> ResidualNorm:
    n, d = x.shape
    if config is None:
        config = invariant_config(d) if numerics.batch_invariant else default_config(n, d)
    inputs = {"x": x, "y": y, "post_weight": post_weight}
    names = ["h"]
    if scalar is not None:
        inputs["scalar"] = scalar
    if pre_weight is not None:
        inputs["pre_weight"] = pre_weight
        names.append("n")
    plan = _Plan(n, d, config, eps, numerics, y.shape[0] if y.ndim == 3 else 0)
    out = triton.pallas_call(
        functools.partial(_kernel, names=(*inputs, *names), plan=plan),
        name="residual_norm",
        out_shape=[jax.ShapeDtypeStruct((n, d), x.dtype) for _ in names],
        grid=(pl.cdiv(n, config.block_rows),),
        in_specs=[triton.whole() for _ in inputs],
        out_specs=[triton.whole() for _ in names],
        num_warps=config.num_warps,
        num_stages=1,
    )(*inputs.values())
    return ResidualNorm(out[0], None if pre_weight is None else out[1])


# --- public op -----------------------------------------------------------------------------------


def residual_norm(
    x: jax.Array,
    y: jax.Array,
    post_weight: jax.Array,
    pre_weight: jax.Array | None = None,
    scalar: jax.Array | None = None,
    *,
    eps: float,
    numerics: Numerics,
    implementation: Implementation | None = None,
) -> ResidualNorm:
    """h = (x + rms_norm(y, post_weight)) · scalar, and n = rms_norm(h, pre_weight).

    Args:
      x: residual stream [N, D].
      y: output of the branch [N, D], or partial sums of it [S, R, D] float32 of R >= N rows.
      post_weight, pre_weight: [D]; without `pre_weight` there is no n.
      scalar: [1], the layer scalar; None multiplies by nothing.
      eps: of the norms.
      implementation: None picks the fastest that supports the inputs; a name runs or raises.
    Raises:
      UnsupportedError: the named implementation cannot take these inputs.
      ValueError: shapes that do not fit each other.
    """
    unfinished = y.ndim == 3 and y.shape[1] >= x.shape[0] and y.shape[2:] == x.shape[1:]
    if x.ndim != 2 or (x.shape != y.shape and not unfinished):
        raise ValueError(
            f"x{list(x.shape)}, y{list(y.shape)}: expected the same [N, D], or of y partial sums "
            "[S, R, D] of at least N rows"
        )
    choices = {
        "triton": Choice(_residual_norm_pallas, functools.partial(_unsupported, x, numerics)),
        "reference": Choice(residual_norm_reference),
    }
    run = dispatch("residual_norm", implementation, choices, f"{x.dtype}{list(x.shape)}")
    return run(x, y, post_weight, pre_weight, scalar, eps=eps, numerics=numerics)


def _unsupported(x: jax.Array, numerics: Numerics, device: Device) -> str | None:
    if x.dtype != numerics.jnp_dtype:
        return f"dtype {x.dtype}, compute dtype {numerics.dtype}"
    if x.shape[1] > MAX_WIDTH:
        return f"rows of {x.shape[1]} elements, more than {MAX_WIDTH}"
    return needs_gpu_or_interpreter((8, 0))(device)
