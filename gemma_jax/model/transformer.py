"""The Gemma 4 text decoder: modules that hold the weights, and the two forward passes.

NNX gives structure and names; the engine keeps a flat list of leaves and merges them into the
module inside `jax.jit`. Source: transformers 5.17 `Gemma4TextModel`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from gemma_jax.config import LayerConfig, ModelConfig
from gemma_jax.model.attention import Attention
from gemma_jax.model.context import DecodeContext, PrefillContext
from gemma_jax.model.layers import (
    Embedding,
    Mlp,
    add,
    gelu_mul,
    parameter,
    rms_norm,
    scale,
    softcap,
)
from gemma_jax.model.moe import MixtureOfExperts
from gemma_jax.numerics import Numerics

Context = PrefillContext | DecodeContext


class PerLayerEmbedding(nnx.Module):
    """Per-layer inputs (PLE): a second token table plus a projection of the token embedding."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        p, dtype = config.hidden_size_per_layer_input, numerics.dtype
        width = config.num_hidden_layers * p
        self.width, self.eps = p, config.rms_norm_eps
        self.table = parameter(config.vocab_size_per_layer_input, width, axes="V P", dtype=dtype)
        self.projection = parameter(width, config.hidden_size, axes="P D", dtype=dtype)
        self.norm = parameter(p, axes="P", dtype=dtype)

    def __call__(
        self, ids: jax.Array, h: jax.Array, first: int, last: int, numerics: Numerics
    ) -> jax.Array:
        """Inputs of layers first … last - 1 from ids [B, T] and embeddings [B, T, D]: [B, T, n, P].

        ((projection · D^(-1/2)) normed + token row · sqrt(P)) · 2^(-1/2).
        """
        columns = slice(first * self.width, last * self.width)
        shape = (*ids.shape, last - first, self.width)
        rows = self.table[...].at[ids, columns].get(mode="clip")
        token = scale(rows, numerics.constant(self.width**0.5), numerics).reshape(shape)
        context = numerics.einsum("btd,pd->btp", h, self.projection[...][columns])
        context = scale(context, numerics.scalar(h.shape[-1] ** -0.5), numerics).reshape(shape)
        context = rms_norm(context, self.norm[...], self.eps, numerics)
        return scale(add(context, token, numerics), numerics.scalar(2.0**-0.5), numerics)


class PerLayerGate(nnx.Module):
    """The per-layer-input block of one layer: norm( projection( gelu(gate(h)) · ple ) )."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        d, p, dtype = config.hidden_size, config.hidden_size_per_layer_input, numerics.dtype
        self.eps = config.rms_norm_eps
        self.gate = parameter(p, d, axes="P D", dtype=dtype)
        self.projection = parameter(d, p, axes="D P", dtype=dtype)
        self.norm = parameter(d, axes="D", dtype=dtype)

    def __call__(self, h: jax.Array, ple: jax.Array, numerics: Numerics) -> jax.Array:
        gate = numerics.einsum("btd,pd->btp", h, self.gate[...])
        y = numerics.einsum("btp,dp->btd", gelu_mul(gate, ple, numerics), self.projection[...])
        return rms_norm(y, self.norm[...], self.eps, numerics)


class DecoderLayer(nnx.Module):
    """Attention, MLP (with experts), per-layer input and layer scalar, each around the residual."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, numerics: Numerics):
        d, dtype = config.hidden_size, numerics.dtype
        self.layer, self.eps = layer, config.rms_norm_eps
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
        self,
        h: jax.Array,
        ple: jax.Array | None,
        context: Context,
        numerics: Numerics,
        kv_hidden: jax.Array | None = None,
    ) -> jax.Array:
        """The residual stream after this layer, [B, T, D].

        `kv_hidden` [B, T', D] is given when K and V are needed for more rows than the queries `h`.
        """
        h = add(h, self._attention(h, context, numerics, kv_hidden), numerics)
        h = add(h, self._feed_forward(h, numerics), numerics)
        if self.ple is not None and ple is not None:
            h = add(h, self.ple(h, ple, numerics), numerics)
        return scale(h, self.layer_scalar[...], numerics)

    def _attention(self, h, context: Context, numerics: Numerics, kv_hidden) -> jax.Array:
        x = self._norm(h, self.input_layernorm, numerics)
        tables = context.tables(self.layer)
        if kv_hidden is None:
            q, k, v = self.attention.project(x, tables, numerics)
        else:
            kv_x = self._norm(kv_hidden, self.input_layernorm, numerics)
            kv_tables = context.kv_tables(self.layer)
            q, k, v = self.attention.project_split(x, tables, kv_x, kv_tables, numerics)
        o = self.attention.output(context.attend(self.layer, q, k, v), numerics)
        return self._norm(o, self.post_attention_layernorm, numerics)

    def _feed_forward(self, h: jax.Array, numerics: Numerics) -> jax.Array:
        y = self.mlp(self._norm(h, self.pre_feedforward_layernorm, numerics), numerics)
        if self.moe is not None:
            y = self.moe(h, y, numerics)
        return self._norm(y, self.post_feedforward_layernorm, numerics)

    def _norm(self, x: jax.Array, weight: nnx.Param, numerics: Numerics) -> jax.Array:
        return rms_norm(x, weight[...], self.eps, numerics)


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
        numerics: Numerics,
        fast: bool = True,
    ) -> jax.Array | None:
        """Final-normed hidden states of the rows `rows` [B, R] of a chunk `ids` [B, T]: [B, R, D].

        K and V of all rows go to the context. `fast` runs the last owner layer's queries and
        everything after it on `rows` only; otherwise every layer runs on every row. `rows=None`
        wants no hidden state: only K and V are computed.
        """
        embedded = self.embed(ids, numerics)
        last_owner = self.config.first_shared_layer - 1
        on_all_rows = last_owner if fast else self.config.num_hidden_layers
        h = self._layers(ids, embedded, embedded, 0, on_all_rows, context, numerics)
        if fast:
            selected = jnp.zeros((ids.shape[0], 1), jnp.int32) if rows is None else rows
            context.select_rows(selected)
            ids = jnp.take_along_axis(ids, selected, axis=1)
            embedded, queries = _take(embedded, selected), _take(h, selected)
            end = self.config.num_hidden_layers
            h = self._layers(ids, embedded, queries, last_owner, end, context, numerics, h)
        elif rows is not None:
            h = _take(h, rows)
        return None if rows is None else self._final_norm(h, numerics)

    def decode(self, ids: jax.Array, context: DecodeContext, numerics: Numerics) -> jax.Array:
        """Final-normed hidden state of one new token a row, ids [B]: [B, D]."""
        ids = ids[:, None]
        h = self.embed(ids, numerics)
        h = self._layers(ids, h, h, 0, self.config.num_hidden_layers, context, numerics)
        return self._final_norm(h, numerics)[:, 0]

    def logits(self, h: jax.Array, numerics: Numerics) -> jax.Array:
        """Soft-capped logits of hidden states [..., D]: float32 [..., V]."""
        return softcap(
            self.embed.logits(h, numerics), self.config.final_logit_softcapping, numerics
        )

    def _layers(
        self, ids, embedded, h, first: int, last: int, context: Context, numerics, kv_hidden=None
    ) -> jax.Array:
        """Layers first … last - 1; the first of them takes K and V from the rows `kv_hidden`."""
        if first == last:
            return h
        ple = None if self.ple is None else self.ple(ids, embedded, first, last, numerics)
        for i in range(first, last):
            layer_input = None if ple is None else ple[:, :, i - first]
            h = self.layers[i](h, layer_input, context, numerics, kv_hidden)
            kv_hidden = None
        return h

    def _final_norm(self, h: jax.Array, numerics: Numerics) -> jax.Array:
        return rms_norm(h, self.norm[...], self.config.rms_norm_eps, numerics)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [B, R] of x [B, T, D]."""
    return jnp.take_along_axis(x, rows[..., None], axis=1)


def abstract_model(config: ModelConfig, numerics: Numerics) -> Gemma4:
    """The model with shapes only: no memory is allocated."""
    return nnx.eval_shape(lambda: Gemma4(config, numerics))
