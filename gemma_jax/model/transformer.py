"""The Gemma 4 text decoder: modules that hold the weights, and the two forward passes.

NNX gives structure and names; the engine keeps a flat list of leaves and merges them into the
module inside `jax.jit`. Source: transformers 5.17 `Gemma4TextModel`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gemma_jax.config import LayerConfig, ModelConfig
from gemma_jax.model.attention import Attention
from gemma_jax.model.context import DecodeContext, PrefillContext
from gemma_jax.model.layers import Embedding, Mlp, add, parameter, scale, softcap
from gemma_jax.model.moe import MixtureOfExperts
from gemma_jax.model.residual import (
    Ops,
    Residual,
    matmul,
    multiply_branch,
    norm,
    product,
    project,
    project_gate,
    project_gelu_mul,
)
from gemma_jax.numerics import Numerics

Context = PrefillContext | DecodeContext


class PerLayerEmbedding(nnx.Module):
    """Per-layer inputs (PLE): a second token table plus a projection of the token embedding."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        p, dtype = config.hidden_size_per_layer_input, numerics.dtype
        width = config.num_hidden_layers * p
        self.width = p
        self.table = parameter(config.vocab_size_per_layer_input, width, axes="V P", dtype=dtype)
        self.projection = parameter(width, config.hidden_size, axes="P D", dtype=dtype)
        self.norm = parameter(p, axes="P", dtype=dtype)

    def __call__(self, ids: jax.Array, h: jax.Array, first: int, last: int, ops: Ops) -> jax.Array:
        """Inputs of layers first … last - 1 from ids [N] and embeddings [N, D]: [N, n, P].

        ((projection · D^(-1/2)) normed + token row · sqrt(P)) · 2^(-1/2).
        """
        numerics = ops.numerics
        columns = slice(first * self.width, last * self.width)
        shape = (*ids.shape, last - first, self.width)
        rows = self.table[...].at[ids, columns].get(mode="clip")
        token = scale(rows, numerics.constant(self.width**0.5), numerics).reshape(shape)
        context = product(h, self.projection[...][columns], ops)
        context = scale(context, numerics.scalar(h.shape[-1] ** -0.5), numerics)
        context = norm(context.reshape(-1, self.width), self.norm[...], ops).reshape(shape)
        return scale(add(context, token, numerics), numerics.scalar(2.0**-0.5), numerics)


class LayerInput(NamedTuple):
    """One layer's slice of the per-layer inputs [N, L, P] of L layers."""

    inputs: jax.Array
    layer: int


class PerLayerGate(nnx.Module):
    """Weights of the per-layer-input block: norm( projection( gelu(gate(h)) · input ) )."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        d, p, dtype = config.hidden_size, config.hidden_size_per_layer_input, numerics.dtype
        self.gate = parameter(p, d, axes="P D", dtype=dtype)
        self.projection = parameter(d, p, axes="D P", dtype=dtype)
        self.norm = parameter(d, axes="D", dtype=dtype)


class DecoderLayer(nnx.Module):
    """Attention, MLP (with experts), per-layer input and layer scalar, each around the residual."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, numerics: Numerics):
        d, dtype = config.hidden_size, numerics.dtype
        self.layer = layer
        self.input_layernorm = parameter(d, axes="D", dtype=dtype)
        self.post_attention_layernorm = parameter(d, axes="D", dtype=dtype)
        self.pre_feedforward_layernorm = parameter(d, axes="D", dtype=dtype)
        self.post_feedforward_layernorm = parameter(d, axes="D", dtype=dtype)
        self.attention = Attention(config, layer, numerics)
        self.mlp = Mlp(d, layer.intermediate_size, numerics)
        self.moe = MixtureOfExperts(config, numerics) if config.enable_moe_block else None
        self.ple = PerLayerGate(config, numerics) if config.has_per_layer_inputs else None
        self.layer_scalar = parameter(1, axes="one", dtype=dtype)

    def __call__(
        self, stream: Residual, ple: LayerInput | None, context: Context, narrow: bool = False
    ) -> Residual:
        """The stream after this layer; `ple` are the per-layer inputs of a pass.

        `narrow` goes on with the context's selected rows only (and `ple` has those): keys and
        values are made of all rows, everything else of the selected ones.
        """
        attend = self._attention_narrowing if narrow else self._attention
        h, o = attend(stream, context)
        ops = context.ops
        stream = Residual(h, self.attention.output(o, ops), self.post_attention_layernorm[...])
        return self._per_layer_input(self._feed_forward(stream, ops), ple, ops)

    def _attention(self, stream: Residual, context: Context) -> tuple[jax.Array, jax.Array]:
        qkv = self.attention.qkv[...]
        matrix = qkv.reshape(-1, qkv.shape[-1])
        h, y = project(stream, self.input_layernorm[...], matrix, context.ops)
        return h, context.attend(self.attention, y.reshape(-1, *qkv.shape[:-1]))

    def _attention_narrowing(self, stream: Residual, context) -> tuple[jax.Array, jax.Array]:
        h, x = stream.norm(self.input_layernorm[...], context.ops)
        groups, qkv = self.layer.num_groups, self.attention.qkv[...]
        kv = _project_heads(x, qkv[:, groups:], context.ops)
        h, x = context.take(h), context.take(x)
        q = _project_heads(x, qkv[:, :groups], context.ops)
        return h, context.attend_narrowed(self.attention, q, kv)

    def _feed_forward(self, stream: Residual, ops: Ops) -> Residual:
        mlp = self.mlp
        weight = self.pre_feedforward_layernorm[...]
        h, active = project_gelu_mul(stream, weight, mlp.gate_up[...], ops)
        if self.moe is None:
            y = multiply_branch(active, mlp.down[...], ops)
        else:
            y = self.moe(h, matmul(active, mlp.down[...], ops), ops.numerics)
        return Residual(h, y, self.post_feedforward_layernorm[...])

    def _per_layer_input(self, stream: Residual, ple: LayerInput | None, ops: Ops) -> Residual:
        if self.ple is None or ple is None:
            return stream._replace(scalar=self.layer_scalar[...])
        h, gated = project_gate(stream, self.ple.gate[...], *ple, ops)
        y = multiply_branch(gated, self.ple.projection[...], ops)
        return Residual(h, y, self.ple.norm[...], self.layer_scalar[...])


def _project_heads(x: jax.Array, heads: jax.Array, ops: Ops) -> jax.Array:
    """x [N, D] times heads [K, c, H, D] transposed: [N, K, c, H]."""
    if ops.fixes_sums:
        return product(x, heads.reshape(-1, x.shape[1]), ops).reshape(-1, *heads.shape[:3])
    return ops.numerics.einsum("nd,kchd->nkch", x, heads)


class Gemma4(nnx.Module):
    """Weights of the text decoder. Build it under `nnx.eval_shape` and load the leaves."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, numerics)
        self.ple = PerLayerEmbedding(config, numerics) if config.has_per_layer_inputs else None
        self.layers = nnx.List(DecoderLayer(config, layer, numerics) for layer in config.layers)
        self.norm = parameter(config.hidden_size, axes="D", dtype=numerics.dtype)

    def prefill(
        self,
        ids: jax.Array,
        context: PrefillContext,
        rows: jax.Array | None,
        fast: bool = True,
    ) -> jax.Array | None:
        """Final-normed hidden states of the rows `rows` [B, R] of a chunk `ids` [B, T]: [B, R, D].

        K and V of all rows go to the context. `fast` runs the last owner layer's queries and
        everything after it on `rows` only; otherwise every layer runs on every row. `rows=None`
        wants no hidden state: only K and V are computed.
        """
        selected = jnp.zeros((ids.shape[0], 1), jnp.int32) if rows is None else rows
        last_owner, count = self.config.first_shared_layer - 1, self.config.num_hidden_layers
        stream = self._embed(ids, context)
        stream = self._layers(ids, stream, 0, last_owner if fast else count, context)
        context.select_rows(selected)
        if fast:
            ids = jnp.take_along_axis(ids, selected, axis=1)
            stream = self._layers(ids, stream, last_owner, count, context, narrow=True)
        if rows is None:
            return None
        _, x = stream.norm(self.norm[...], context.ops)
        x = x if fast else context.take(x)
        return x.reshape(*rows.shape, -1)

    def decode(self, ids: jax.Array, context: DecodeContext) -> jax.Array:
        """Final-normed hidden state of one new token a row, ids [B]: [B, D]."""
        stream = self._embed(ids, context)
        stream = self._layers(ids, stream, 0, self.config.num_hidden_layers, context)
        return stream.norm(self.norm[...], context.ops)[1]

    def logits(self, h: jax.Array, ops: Ops) -> jax.Array:
        """Soft-capped logits of hidden states [..., D]: float32 [..., V]."""
        z = product(h.reshape(-1, h.shape[-1]), self.embed.table[...], ops)
        z = z.reshape(*h.shape[:-1], -1)
        return softcap(z, self.config.final_logit_softcapping, ops.numerics)

    def _embed(self, ids: jax.Array, context: Context) -> Residual:
        return Residual(self.embed(ids.reshape(-1), context.ops.numerics))

    def _layers(
        self, ids, stream: Residual, first: int, last: int, context: Context, narrow: bool = False
    ) -> Residual:
        """Layers first … last - 1; `narrow` makes the first of them go on with selected rows."""
        if first == last:
            return stream
        ids = ids.reshape(-1)
        ple = None
        if self.ple is not None:
            h = self.embed(ids, context.ops.numerics)
            ple = self.ple(ids, h, first, last, context.ops)
        for i in range(first, last):
            layer_input = None if ple is None else LayerInput(ple, i - first)
            stream = self.layers[i](stream, layer_input, context, narrow and i == first)
        return stream


def abstract_model(config: ModelConfig, numerics: Numerics) -> Gemma4:
    """The model with shapes only: no memory is allocated."""
    return nnx.eval_shape(lambda: Gemma4(config, numerics))
