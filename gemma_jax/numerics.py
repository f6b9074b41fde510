"""The precision rules as code: where values are rounded, and where the two engines differ.

A bf16 model keeps activations in bf16 and computes every element-wise step in float32; *where* the
float32 result is rounded back decides the tokens. Each such point is an explicit
`lax.reduce_precision`, because XLA may delete a plain float32 → bf16 → float32 round trip. In a
float32 model no rounding applies anywhere, nor to float64 arrays: with those every formula gives
the exact result that errors are measured against. docs/numerics.md lists each rule with its source.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Rounding = Literal["hf", "vllm"]
ROUNDINGS: tuple[Rounding, ...] = ("hf", "vllm")

MASK_VALUE = float(jnp.finfo(jnp.float32).min)
"""Score of a key that may not be attended to; finite, so that an empty row stays free of NaN."""


def widen(x: jax.Array) -> jax.Array:
    """`x` in float32, in which element-wise steps are computed; float64 stays."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclass(frozen=True)
class Numerics:
    """The compute dtype and the engine whose rounding points are reproduced.

    Attributes:
      dtype: "bfloat16" or "float32".
      rounding: "hf" = transformers 5.17 with eager attention; "vllm" = vLLM 0.25.1, eager mode with
        Triton attention.
      batch_invariant: the order of every sum is fixed, whatever else a call computes.
    """

    dtype: str = "bfloat16"
    rounding: Rounding = "hf"
    batch_invariant: bool = False

    @property
    def jnp_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def is_float32(self) -> bool:
        return self.dtype == "float32"

    @property
    def matches_vllm(self) -> bool:
        return self.rounding == "vllm"

    @property
    def precision(self) -> lax.Precision:
        """Matmul precision: a float32 run must not use TF32 on a GPU."""
        return lax.Precision.HIGHEST if self.is_float32 else lax.Precision.DEFAULT

    # --- rounding --------------------------------------------------------------------------------

    def round(self, x: jax.Array) -> jax.Array:
        """float32 `x` rounded to the nearest compute-dtype value, still stored as float32."""
        if self.is_float32 or x.dtype == jnp.float64:
            return x
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    def cast(self, x: jax.Array) -> jax.Array:
        """float32 `x` rounded and stored in the compute dtype."""
        return x if x.dtype == jnp.float64 else self.round(x).astype(self.jnp_dtype)

    def einsum(self, equation: str, *operands: jax.Array) -> jax.Array:
        """Matrix product with float32 accumulation and one rounding on the output."""
        y = jnp.einsum(equation, *operands, precision=self.precision)
        # Skinny products are expanded to float32 loops whose bf16 output XLA would not round.
        return self.round(y)

    def constant(self, value: float) -> jax.Array:
        """A model constant such as sqrt(D), rounded to the compute dtype, as float32."""
        return self.round(jnp.float32(value))

    # --- points where the engines differ ---------------------------------------------------------

    def scalar(self, value: float) -> jax.Array:
        """A per-layer-input or router scale: transformers keeps it in float32, vLLM rounds it."""
        return self.constant(value) if self.matches_vllm else jnp.float32(value)

    def inverse_root(self, x: jax.Array) -> jax.Array:
        """x^(-1/2) of the norms: transformers takes a power, vLLM an rsqrt."""
        return lax.rsqrt(x) if self.matches_vllm else jnp.power(x, -0.5)

    def rotate(self, x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x·cos + y·sin: transformers rounds both products and the sum, vLLM only the sum."""
        if self.matches_vllm:
            return self.cast(x * cos + y * sin)
        return self.cast(self.round(x * cos) + self.round(y * sin))
