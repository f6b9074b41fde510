"""The residual stream between blocks, with its newest branch not yet added.

Attention, MLP and per-layer input each end in a norm and an addition, and the next block begins
with a norm. Whoever reads the stream next does all of that at once: in one kernel with its own
product when there are few rows (decode), in one kernel before it when there are many (prefill).
The branch may be partial sums, so that the product that makes it needs no pass to add them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gemma_jax.kernels import Kernels
from gemma_jax.model.layers import rms_norm
from gemma_jax.numerics import Numerics
from gemma_jax.pallas.gelu_mul import gelu_gate, gelu_mul
from gemma_jax.pallas.invariant_matmul import invariant_matmul
from gemma_jax.pallas.norm_matmul import Update, norm_matmul
from gemma_jax.pallas.residual_norm import residual_norm
from gemma_jax.pallas.skinny_matmul import is_worth_it, skinny_matmul

MAX_FUSED_ROWS = 16
"""Most rows whose norms and product are one op, `norm_matmul`."""


class Ops(NamedTuple):
    """What every op of the network is told: precision, implementations, the norms' epsilon."""

    numerics: Numerics
    kernels: Kernels
    eps: float

    @property
    def fixes_sums(self) -> bool:
        """Whether the kernels add in one order, whatever the number of rows."""
        return self.numerics.batch_invariant and self.kernels.default == "pallas"


class Residual(NamedTuple):
    """The stream (h + norm(branch) · weight) · scalar, each step rounded; without a branch, h."""

    h: jax.Array  # [N, D]
    branch: jax.Array | None = None  # [N, D] or partial sums, as `multiply_branch` leaves it
    weight: jax.Array | None = None  # [D], of the norm after the block
    scalar: jax.Array | None = None  # [1], of the layer

    @property
    def update(self) -> Update | None:
        """The branch with its norm's weight."""
        if self.branch is None or self.weight is None:
            return None
        return Update(self.branch, self.weight)

    def settle(self, ops: Ops) -> jax.Array:
        """The stream itself, [N, D]."""
        return self._added(None, ops)[0]

    def norm(self, weight: jax.Array, ops: Ops) -> tuple[jax.Array, jax.Array]:
        """The stream and its norm: two [N, D]."""
        h, x = self._added(weight, ops)
        return h, norm(h, weight, ops) if x is None else x

    def _added(self, weight: jax.Array | None, ops: Ops) -> tuple[jax.Array, jax.Array | None]:
        if self.branch is None or self.weight is None:
            return self.h, None
        return residual_norm(
            self.h, self.branch, self.weight, weight, self.scalar,
            eps=ops.eps, numerics=ops.numerics, implementation=ops.kernels.of("residual_norm"),
        )  # fmt: skip


def norm(h: jax.Array, weight: jax.Array, ops: Ops) -> jax.Array:
    """`rms_norm` of rows h [N, D]."""
    if not ops.fixes_sums:
        return rms_norm(h, weight, ops.eps, ops.numerics)
    nothing = jnp.zeros_like(h)  # a branch of zeros leaves the stream as it is
    _, normed = Residual(h, nothing, jnp.zeros_like(weight)).norm(weight, ops)
    return normed


def project(
    stream: Residual, weight: jax.Array, matrix: jax.Array, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """The stream, and the product of its norm with `matrix` [F, D]: [N, D] and [N, F]."""
    if _is_fused(stream.h, ops):
        return _norm_matmul(stream, matrix, ops, pre_weight=weight)
    h, x = stream.norm(weight, ops)
    return h, matmul(x, matrix, ops)


def project_gelu_mul(
    stream: Residual, weight: jax.Array, matrix: jax.Array, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """The stream, and gelu(gate) · up of its norm, `matrix` [2, F, D]: [N, D] and [N, F]."""
    if _is_fused(stream.h, ops):
        return _norm_matmul(stream, matrix, ops, pre_weight=weight)
    h, x = stream.norm(weight, ops)
    if ops.fixes_sums:
        y = product(x, matrix.reshape(-1, x.shape[1]), ops).reshape(-1, *matrix.shape[:2])
    elif is_worth_it(x, matrix, ops.numerics):
        return h, _skinny_matmul(x, matrix, ops)
    else:
        y = ops.numerics.einsum("nd,cfd->ncf", x, matrix)
    kernel = ops.kernels.of("gelu_mul")
    return h, gelu_mul(y, numerics=ops.numerics, implementation=kernel)


def project_gate(
    stream: Residual, matrix: jax.Array, inputs: jax.Array, index: int, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """The stream, and gelu(stream · matrix) · inputs[:, index]: [N, D] and [N, P].

    `matrix` is [P, D], `inputs` [N, L, P] are the per-layer inputs of L layers.
    """
    if _is_fused(stream.h, ops):
        return _norm_matmul(stream, matrix, ops, gate_input=inputs[:, index])
    h = stream.settle(ops)
    if not ops.fixes_sums and is_worth_it(h, matrix, ops.numerics, gated=True):
        return h, _skinny_matmul(h, matrix, ops, gate=inputs, gate_index=index)
    gate, kernel = matmul(h, matrix, ops), ops.kernels.of("gelu_mul")
    return h, gelu_gate(gate, inputs, index, numerics=ops.numerics, implementation=kernel)


def product(x: jax.Array, matrix: jax.Array, ops: Ops) -> jax.Array:
    """`matmul` where our kernels for few rows do not pay."""
    if ops.fixes_sums:
        return _invariant_matmul(x, matrix, ops)
    return ops.numerics.einsum("nk,fk->nf", x, matrix)


def matmul(x: jax.Array, matrix: jax.Array, ops: Ops) -> jax.Array:
    """x [N, K] times `matrix` [F, K] transposed, rounded once: [N, F]."""
    if not ops.fixes_sums and is_worth_it(x, matrix, ops.numerics):
        return _skinny_matmul(x, matrix, ops)
    return product(x, matrix, ops)


def multiply_branch(x: jax.Array, matrix: jax.Array, ops: Ops) -> jax.Array:
    """`matmul` for `Residual.branch`: [N, F], or partial sums of it [S, R, F], R >= N."""
    if ops.fixes_sums:
        return _invariant_matmul(x, matrix, ops, unfinished=True)
    if is_worth_it(x, matrix, ops.numerics):
        return _skinny_matmul(x, matrix, ops, unfinished=True)
    return matmul(x, matrix, ops)


def _is_fused(x: jax.Array, ops: Ops) -> bool:
    return x.shape[0] <= MAX_FUSED_ROWS and not ops.fixes_sums


def _invariant_matmul(x: jax.Array, matrix: jax.Array, ops: Ops, **rest) -> jax.Array:
    return invariant_matmul(x, matrix, numerics=ops.numerics, implementation="pallas", **rest)


def _skinny_matmul(x: jax.Array, matrix: jax.Array, ops: Ops, **rest) -> jax.Array:
    kernel = ops.kernels.of("skinny_matmul")
    return skinny_matmul(x, matrix, numerics=ops.numerics, implementation=kernel, **rest)


def _norm_matmul(stream: Residual, matrix: jax.Array, ops: Ops, **rest) -> tuple:
    return norm_matmul(
        stream.h, matrix, update=stream.update, factor=stream.scalar, eps=ops.eps,
        numerics=ops.numerics, implementation=ops.kernels.of("norm_matmul"), **rest,
    )  # fmt: skip
