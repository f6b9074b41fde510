"""Where the sequences of a batch lie in flat arrays of query and key rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


class Segments(NamedTuple):
    """Sequence b: `q_lengths[b]` query rows from `q_offsets[b]`, and the same of key rows.

    All are int32 [B], on the device. Queries are the last of their keys: query i stands at position
    k_lengths - q_lengths + i among them. Rows of two sequences never overlap and follow the order
    of b; rows between them are padding.
    """

    q_offsets: jax.Array
    q_lengths: jax.Array
    k_offsets: jax.Array
    k_lengths: jax.Array

    @classmethod
    def padded(
        cls,
        lengths: ArrayLike,
        q_stride: int,
        k_stride: int | None = None,
        k_lengths: ArrayLike | None = None,
    ) -> "Segments":
        """Sequences that start every `q_stride` query rows and every `k_stride` key rows.

        Without `k_stride` and `k_lengths` keys lie as the queries do.
        """
        lengths = jnp.asarray(lengths, jnp.int32)
        index = jnp.arange(lengths.shape[0], dtype=jnp.int32)
        return cls(
            index * q_stride,
            lengths,
            index * (q_stride if k_stride is None else k_stride),
            lengths if k_lengths is None else jnp.asarray(k_lengths, jnp.int32),
        )

    @classmethod
    def packed(cls, lengths: ArrayLike, k_lengths: ArrayLike | None = None) -> "Segments":
        """Sequences that follow each other without a gap."""
        lengths = jnp.asarray(lengths, jnp.int32)
        k_lengths = lengths if k_lengths is None else jnp.asarray(k_lengths, jnp.int32)
        return cls(_starts(lengths), lengths, _starts(k_lengths), k_lengths)


def _starts(lengths: jax.Array) -> jax.Array:
    return jnp.cumsum(lengths, dtype=jnp.int32) - lengths
