"""The end of a `decode_attention` kernel: the output, or the merge of the splits of the key axis.

    out = Σ_s out_s 2^(top_s - top) / Σ_s total_s 2^(top_s - top),   top = max_s top_s

Every split leaves its part in memory; the last one of a row to finish merges them, or, where they
are many, a second kernel does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gemma_jax.numerics import MASK_VALUE
from gemma_jax.pallas import triton_api as tt
from gemma_jax.pallas.decode_attention_plan import (
    Plan,
    Program,
    block_index,
    program_of,
    query_rows,
    widened,
)
from gemma_jax.pallas.device import current_device

State = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [rows] (base 2), sum [rows] and output [rows, H], float32."""


def finish(plan: Plan, p: Program, refs: dict[str, Any], split, state: State) -> None:
    """Stores the output, or this split's part of it."""
    top, total, out = state
    every = pl.ds(0, plan.head_dim)
    if plan.config.splits == 1:
        rows, valid, _ = query_rows(plan, p)
        _store_output(refs, out, total, rows, valid, every)
        return
    kept = jnp.arange(plan.config.rows, dtype=jnp.int32)
    mask = kept < plan.kept_rows
    tt.store(refs["top"].at[p.index, split, kept], top, mask=mask)
    tt.store(refs["total"].at[p.index, split, kept], total, mask=mask)
    where = (p.index, split, *block_index(kept, every))
    tt.store(refs["partial"].at[where], out, mask=widened(mask, plan.head_dim))
    if plan.config.combine == "kernel":
        return
    if current_device().is_gpu:
        tt.debug_barrier()  # every thread's part is stored before one thread counts it
    arrived = tt.atomic_add(refs["counters"], p.index, jnp.int32(1))

    @pl.when(arrived == p.live - 1)
    def _merge() -> None:
        count = plan.merged_rows
        firsts = range(0, plan.kept_rows, count)
        merged = [_merged_rows(plan, p, refs, first, count, every) for first in firsts]
        for first, (out, total) in zip(firsts, merged, strict=True):  # after all loads
            rows, valid, _ = query_rows(plan, p, first, count)
            _store_output(refs, out, total, rows, valid, every)
        refs["counters"][p.index] = 0  # as the next call expects it


def _merged_rows(
    plan: Plan, p: Program, refs: dict[str, Any], first: Any, count: int, columns: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [count, columns] and sum [count] over the live splits, of rows of a block."""
    splits, some = plan.kept_splits, pl.ds(first, count)
    live = jnp.broadcast_to(jnp.arange(splits)[:, None] < p.live, (splits, count))
    each = pl.ds(0, splits)
    top = tt.load(refs["top"].at[p.index, each, some], mask=live, other=MASK_VALUE)
    total = tt.load(refs["total"].at[p.index, each, some], mask=live, other=0.0)
    scale = jnp.exp2(top - jnp.max(top, axis=0)[None])
    wide = (splits, count, columns.size)
    mask = jnp.broadcast_to(live[:, :, None], wide)
    part = tt.load(refs["partial"].at[p.index, each, some, columns], mask=mask, other=0.0)
    return jnp.sum(part * scale[:, :, None], axis=0), jnp.sum(total * scale, axis=0)


def _store_output(refs: dict[str, Any], out, total, rows, valid, columns) -> None:
    out = out / jnp.where(total == 0.0, 1.0, total)[:, None]
    ref = refs["out"]
    tt.store(
        ref.at[block_index(rows, columns)], out.astype(ref.dtype), mask=widened(valid, columns.size)
    )


def _combine_kernel(*args: Any, plan: Plan, width: int) -> None:
    """Merges the splits of one query row, `width` of its columns."""
    names = ("lengths", "top", "total", "partial", "out")
    refs: dict[str, Any] = dict(zip(names, args, strict=True))
    p = program_of(plan, pl.program_id(0), refs["lengths"])
    first, columns = pl.program_id(1), pl.ds(pl.program_id(2) * width, width)
    out, total = _merged_rows(plan, p, refs, first, 1, columns)
    rows, valid, _ = query_rows(plan, p, first, 1)
    _store_output(refs, out, total, rows, valid, columns)


def combine(plan: Plan, lengths: jax.Array, found: dict[str, jax.Array], out: Any) -> jax.Array:
    width = min(128, plan.head_dim)
    return tt.pallas_call(
        functools.partial(_combine_kernel, plan=plan, width=width),
        name=f"decode_attention_combine_{plan.head_dim}",
        out_shape=out,
        grid=(plan.programs, plan.kept_rows, plan.head_dim // width),
        in_specs=[tt.whole() for _ in range(4)],
        out_specs=tt.whole(),
        num_warps=4,
        num_stages=1,
    )(lengths, found["top"], found["total"], found["partial"])
