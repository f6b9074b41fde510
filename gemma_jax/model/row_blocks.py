"""A function of rows, applied to blocks of a fixed number of them.

XLA compiles a product or a sum anew for every number of rows, and may add in another order. A loop
over blocks has one body, whatever the number of rows, so a row's result has the same bits in any
company.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CPU_ROWS = 16
"""Rows a block on a CPU. Its products treat every row of such a block alike (tests show it)."""


def fold_blocks[Carry](
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    carry: Carry,
    rows: Any,
    valid: jax.Array | None,
    size: int = CPU_ROWS,
) -> tuple[Carry, Any]:
    """`carry, out = f(carry, block)` over the blocks of `rows` in order.

    Args:
      f: takes `size` rows of every leaf and gives as many of each output.
      carry: handed from block to block.
      rows: arrays [N, …]; the last block is filled up with copies of the last row.
      valid: [N] bool; blocks after the last valid row are not computed, their outputs are zero.
        None computes all: on a GPU the host then need not ask, turn by turn, whether to go on.
      size: rows a block.
    Returns:
      The last carry and the outputs [N, …].
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    # XLA takes the only block of an array for the array itself, and dissolves a loop of one turn.
    blocks = max(2, -(-n // size))
    rows = jax.tree.map(lambda x: _padded(x, blocks * size - n), rows)
    shapes = jax.eval_shape(f, carry, jax.tree.map(lambda x: x[:size], rows))[1]
    out = jax.tree.map(lambda s: jnp.zeros((blocks * size, *s.shape[1:]), s.dtype), shapes)
    turns = blocks
    if valid is not None:
        turns = (jnp.max(jnp.where(valid, jnp.arange(1, n + 1), 0)) + size - 1) // size

    def body(i: jax.Array, state: tuple[Carry, Any]) -> tuple[Carry, Any]:
        carry, out = state
        at = i * size
        block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, size), rows)
        carry, new = f(carry, lax.optimization_barrier(block))
        new = lax.optimization_barrier(new)

        def put(x: jax.Array, y: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(x, y, at, axis=0)

        return carry, jax.tree.map(put, out, new)

    carry, out = lax.fori_loop(0, turns, body, (carry, out))
    return carry, jax.tree.map(lambda x: x[:n], out)


def map_blocks(
    f: Callable[[Any], Any], rows: Any, valid: jax.Array | None, size: int = CPU_ROWS
) -> Any:
    """`fold_blocks` of a function without a carry."""
    return fold_blocks(lambda carry, block: (carry, f(block)), (), rows, valid, size)[1]


def _padded(x: jax.Array, count: int) -> jax.Array:
    if count == 0:
        return x
    return jnp.concatenate([x, jnp.broadcast_to(x[-1:], (count, *x.shape[1:]))])
