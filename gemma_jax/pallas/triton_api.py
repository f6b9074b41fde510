"""The one door to Pallas' Triton lowering, which JAX has deprecated but not replaced for sm_80.

Kernels import only from here, so that a port to another lowering starts and ends in this file.
What lowers in jax 0.11.2: `pl.ds` and index vectors on refs, masks, `lax.fori_loop` with traced
bounds, `dot`, tanh, exp2, atomics; every array value is a power of two in each dimension. What does
not: value slices and concatenation, scratch memory, dynamic grids, `lax.reduce_precision`. Blocks
are *not* bounds-checked on the GPU: a ragged tail needs an explicit mask.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _triton

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.device import current_device

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

load = _triton.load
"""load(ref.at[indices], mask=None, other=None): out-of-mask elements read `other`."""
store = _triton.store
"""store(ref.at[indices], value, mask=None)."""
dot = _triton.dot
atomic_add = _triton.atomic_add
debug_barrier = _triton.debug_barrier


def pallas_call(
    kernel: Callable[..., None],
    *,
    name: str,
    out_shape: Any,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    num_warps: int,
    num_stages: int,
    input_output_aliases: Mapping[int, int] | None = None,
    cost_estimate: pl.CostEstimate | None = None,
) -> Callable[..., Any]:
    """A kernel compiled through Triton on a GPU, interpreted on a CPU."""
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=out_shape,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        input_output_aliases=dict(input_output_aliases or {}),
        cost_estimate=cost_estimate,
        interpret=not current_device().is_gpu,
        compiler_params=_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def whole(_: Any = None) -> pl.BlockSpec:
    """A ref to the whole array in device memory; the kernel indexes it itself."""
    return pl.BlockSpec(memory_space=pl.ANY)


def rounded(x: jax.Array, numerics: Numerics) -> jax.Array:
    """float32 `x` rounded to the compute dtype and widened again, inside a kernel."""
    return x if numerics.is_float32 else x.astype(jnp.bfloat16).astype(jnp.float32)
