"""Mixture of experts of the 26B-A4B: router and expert MLPs, run beside the dense MLP.

Source: transformers 5.17 `Gemma4TextRouter` and `Gemma4TextExperts` (grouped kernels), and the
Triton experts of vLLM 0.25.1.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from gemma_jax.config import ModelConfig
from gemma_jax.model.layers import gelu_mul, parameter, rms_norm, scale
from gemma_jax.numerics import Numerics


class MixtureOfExperts(nnx.Module):
    """Σ over the top-k experts of gate · expert( RMSNorm(r) ), with its own pre- and post-norm."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        d, dtype = config.hidden_size, numerics.dtype
        experts, width = config.num_experts or 0, config.moe_intermediate_size or 0
        self.top_k = config.top_k_experts or 0
        self.eps = config.rms_norm_eps
        self.router = parameter(experts, d, axes="E D", dtype=dtype)
        self.router_scale = parameter(d, axes="D", dtype=dtype)
        self.per_expert_scale = parameter(experts, axes="E", dtype=dtype)
        self.gate_up = parameter(experts, 2, width, d, axes="E gate F D", dtype=dtype)
        self.down = parameter(experts, d, width, axes="E D F", dtype=dtype)
        self.pre_norm = parameter(d, axes="D", dtype=dtype)
        self.post_norm = parameter(d, axes="D", dtype=dtype)
        self.dense_post_norm = parameter(d, axes="D", dtype=dtype)

    def __call__(self, residual: jax.Array, dense: jax.Array, numerics: Numerics) -> jax.Array:
        """norm(dense) + norm(experts), [B, T, D], from the un-normed residual stream."""
        shape = residual.shape
        rows = residual.reshape(-1, shape[-1])  # [R, D]
        gates, chosen = self._route(rows, numerics)
        x = rms_norm(rows, self.pre_norm[...], self.eps, numerics)
        few = chosen.size <= self.gate_up.shape[0]
        run = self._gathered if few else self._scanned
        experts = run(x, gates, chosen, numerics).reshape(shape)
        a = rms_norm(dense, self.dense_post_norm[...], self.eps, numerics)
        b = rms_norm(experts, self.post_norm[...], self.eps, numerics)
        return numerics.cast(a.astype(jnp.float32) + b.astype(jnp.float32))

    def _route(self, rows: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
        """Gates (float32) and expert ids of the top-k experts of each row: two [R, X]."""
        x = rms_norm(rows, None, self.eps, numerics)
        root = numerics.scalar(rows.shape[-1] ** -0.5)
        expert_scale = self.per_expert_scale[...].astype(jnp.float32)
        if numerics.matches_vllm:
            x = scale(scale(x, root, numerics), self.router_scale[...], numerics)
            logits = jnp.einsum(
                "rd,ed->re", x, self.router[...], precision=numerics.precision,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            top, chosen = lax.top_k(logits, self.top_k)
            gates = jax.nn.softmax(top, axis=-1)
        else:
            x = scale(scale(x, self.router_scale[...], numerics), root, numerics)
            logits = numerics.einsum("rd,ed->re", x, self.router[...])
            top, chosen = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.top_k)
            gates = top / jnp.sum(top, axis=-1, keepdims=True)
        return gates * expert_scale[chosen], chosen

    def _gathered(self, x, gates, chosen, numerics: Numerics) -> jax.Array:
        """For few rows: gathers the weights of the chosen experts."""
        gate_up, down = self.gate_up[...][chosen], self.down[...][chosen]  # [R, X, ...]
        y = numerics.einsum("rd,rxcfd->rxcf", x, gate_up)
        active = gelu_mul(y[..., 0, :], y[..., 1, :], numerics)
        out = self._expert_output("rxf,rxdf->rxd", active, down, gates, numerics)
        return numerics.cast(jnp.sum(out, axis=1))

    def _scanned(self, x, gates, chosen, numerics: Numerics) -> jax.Array:
        """For many rows: every expert in turn runs on all rows, weighted by its gate or by 0."""
        experts = self.gate_up.shape[0]
        one_hot = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)  # [R, X, E]
        weights = jnp.einsum("rx,rxe->er", gates, one_hot, precision=lax.Precision.HIGHEST)

        def step(total, expert):
            gate_up, down, weight = expert
            y = numerics.einsum("rd,cfd->rcf", x, gate_up)
            active = gelu_mul(y[..., 0, :], y[..., 1, :], numerics)
            return total + self._expert_output("rf,df->rd", active, down, weight, numerics), None

        total = jnp.zeros(x.shape, jnp.float32)
        total, _ = lax.scan(step, total, (self.gate_up[...], self.down[...], weights))
        return numerics.cast(total)

    def _expert_output(self, equation, active, down, gates, numerics: Numerics) -> jax.Array:
        """gate · down(active) in float32: transformers rounds the product with `down`, vLLM the
        gated one."""
        out = jnp.einsum(
            equation, active, down, precision=numerics.precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        gates = gates[..., None]
        return numerics.round(out * gates) if numerics.matches_vllm else numerics.round(out) * gates
