"""Tensor names and shapes: the published ones, ours, and the table that links the two.

`hf_shapes` is the one list of what a checkpoint holds; names are the `<rest>` part that follows
`model.` (text-only files) or `model.language_model.` (multimodal files). `leaf_sources` is the one
list of the model's parameter leaves and of the published tensors inside each; loading and writing
both derive from it.
Source: the published safetensors headers and transformers 5.17 `Gemma4ForCausalLM`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gemma_jax.config import LayerConfig, ModelConfig

Shape = tuple[int, ...]


def hf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name → shape (`[out, in]` for matrices) of every tensor that the text decoder uses."""
    d, v = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (v, d)}
    if config.has_per_layer_inputs:
        p, width = config.hidden_size_per_layer_input, config.num_hidden_layers
        width *= p
        shapes["embed_tokens_per_layer.weight"] = (config.vocab_size_per_layer_input, width)
        shapes["per_layer_model_projection.weight"] = (width, d)
        shapes["per_layer_projection_norm.weight"] = (p,)
    for layer in config.layers:
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"layers.{layer.index}.{name}"] = shape
    shapes["norm.weight"] = (d,)
    return shapes


def unused_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name → shape of the K and V tensors that released files carry for KV-shared layers."""
    shapes: dict[str, Shape] = {}
    for layer in config.layers:
        if not layer.owns_kv:
            for name, shape in _kv_shapes(config, layer).items():
                shapes[f"layers.{layer.index}.self_attn.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig, layer: LayerConfig) -> dict[str, Shape]:
    d, f, h = config.hidden_size, layer.intermediate_size, layer.head_dim
    n = config.num_attention_heads
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    shapes: dict[str, Shape] = {f"{norm}_layernorm.weight": (d,) for norm in norms}
    shapes["layer_scalar"] = (1,)
    shapes["self_attn.q_proj.weight"] = (n * h, d)
    shapes["self_attn.q_norm.weight"] = (h,)
    if layer.owns_kv:
        shapes |= {f"self_attn.{name}": s for name, s in _kv_shapes(config, layer).items()}
    shapes["self_attn.o_proj.weight"] = (d, n * h)
    shapes |= {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)}
    shapes["mlp.down_proj.weight"] = (d, f)
    if config.has_per_layer_inputs:
        p = config.hidden_size_per_layer_input
        shapes["per_layer_input_gate.weight"] = (p, d)
        shapes["per_layer_projection.weight"] = (d, p)
        shapes["post_per_layer_input_norm.weight"] = (d,)
    if config.enable_moe_block:
        shapes |= _expert_shapes(config)
    return shapes


def _kv_shapes(config: ModelConfig, layer: LayerConfig) -> dict[str, Shape]:
    matrix = (layer.num_kv_heads * layer.head_dim, config.hidden_size)
    shapes: dict[str, Shape] = {"k_proj.weight": matrix, "k_norm.weight": (layer.head_dim,)}
    if not layer.k_eq_v:
        shapes["v_proj.weight"] = matrix
    return shapes


def _expert_shapes(config: ModelConfig) -> dict[str, Shape]:
    d = config.hidden_size
    e, f = config.num_experts or 0, config.moe_intermediate_size or 0
    return {
        "experts.gate_up_proj": (e, 2 * f, d),
        "experts.down_proj": (e, d, f),
        "router.proj.weight": (e, d),
        "router.scale": (d,),
        "router.per_expert_scale": (e,),
        "post_feedforward_layernorm_1.weight": (d,),
        "post_feedforward_layernorm_2.weight": (d,),
        "pre_feedforward_layernorm_2.weight": (d,),
    }


# --- leaves ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One published tensor inside a leaf: `leaf[index]` holds its numbers in the same order.

    `name` is the `<rest>` name and `shape` the published shape.
    """

    name: str
    shape: Shape
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class LeafSource:
    """One parameter leaf of the model: its shape and the published tensors that fill it."""

    shape: Shape
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def fill(self, out: np.ndarray, read: Callable[[str], np.ndarray]) -> None:
        """Writes every part into `out` (`self.shape`), cast to the dtype of `out`."""
        for part in self.parts:
            slot = out[part.index]
            np.copyto(slot, read(part.name).reshape(slot.shape), casting="unsafe")

    def split(self, leaf: np.ndarray) -> dict[str, np.ndarray]:
        """Name → published tensor, cut out of a leaf: the inverse of `fill`."""
        return {part.name: leaf[part.index].reshape(part.shape) for part in self.parts}


def leaf_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Leaf path (`/`-joined) → shape of every parameter of the model."""
    return {path: source.shape for path, source in leaf_sources(config).items()}


def leaf_sources(config: ModelConfig) -> dict[str, LeafSource]:
    """Leaf path (`/`-joined) → shape and published tensors, for every parameter of the model.

    Query head n is `[n // G, n % G]` in the `[K, G + 2, H, D]` array `attention/qkv`, where the key
    head of a group follows its G query heads and the value head comes last.
    """
    shapes = hf_shapes(config)
    whole = {"embed/table": "embed_tokens.weight"}
    if config.has_per_layer_inputs:
        whole |= {
            "ple/table": "embed_tokens_per_layer.weight",
            "ple/projection": "per_layer_model_projection.weight",
            "ple/norm": "per_layer_projection_norm.weight",
        }
    whole["norm"] = "norm.weight"
    sources = {path: _whole(name, shapes[name]) for path, name in whole.items()}
    for layer in config.layers:
        prefix = f"layers.{layer.index}."
        local = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        for path, source in _layer_sources(config, layer, local).items():
            parts = tuple(Part(prefix + p.name, p.shape, p.index) for p in source.parts)
            sources[f"layers/{layer.index}/{path}"] = LeafSource(source.shape, parts)
    return sources


_LAYER_WHOLE = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm": "post_feedforward_layernorm.weight",
    "layer_scalar": "layer_scalar",
    "attention/q_norm": "self_attn.q_norm.weight",
    "mlp/down": "mlp.down_proj.weight",
}
_PLE_WHOLE = {
    "ple/gate": "per_layer_input_gate.weight",
    "ple/projection": "per_layer_projection.weight",
    "ple/norm": "post_per_layer_input_norm.weight",
}
_MOE_WHOLE = {
    "moe/router": "router.proj.weight",
    "moe/router_scale": "router.scale",
    "moe/per_expert_scale": "router.per_expert_scale",
    "moe/down": "experts.down_proj",
    "moe/pre_norm": "pre_feedforward_layernorm_2.weight",
    "moe/post_norm": "post_feedforward_layernorm_2.weight",
    "moe/dense_post_norm": "post_feedforward_layernorm_1.weight",
}


def _whole(name: str, published: Shape, shape: Shape | None = None) -> LeafSource:
    """A leaf that is one published tensor, reshaped when `shape` is given."""
    return LeafSource(published if shape is None else shape, (Part(name, published),))


def _layer_sources(
    config: ModelConfig, layer: LayerConfig, shapes: dict[str, Shape]
) -> dict[str, LeafSource]:
    whole = dict(_LAYER_WHOLE)
    if layer.owns_kv:
        whole["attention/k_norm"] = "self_attn.k_norm.weight"
    if config.has_per_layer_inputs:
        whole |= _PLE_WHOLE
    if config.enable_moe_block:
        whole |= _MOE_WHOLE
    sources = {path: _whole(name, shapes[name]) for path, name in whole.items()}
    sources |= _attention_sources(config, layer, shapes)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    gate_up = tuple(Part(name, shapes[name], (i,)) for i, name in enumerate(names))
    sources["mlp/gate_up"] = LeafSource((2, *shapes[names[0]]), gate_up)
    if config.enable_moe_block:
        name = "experts.gate_up_proj"
        e, f2, d = shapes[name]
        sources["moe/gate_up"] = _whole(name, shapes[name], (e, 2, f2 // 2, d))
    return sources


def _attention_sources(
    config: ModelConfig, layer: LayerConfig, shapes: dict[str, Shape]
) -> dict[str, LeafSource]:
    d, h = config.hidden_size, layer.head_dim
    k, g = layer.num_kv_heads, layer.num_groups
    slots: list[tuple[str, int | slice]] = [("q_proj", slice(0, g))]
    if layer.owns_kv:
        slots.append(("k_proj", g))
        if not layer.k_eq_v:
            slots.append(("v_proj", g + 1))
    parts = []
    for projection, slot in slots:
        name = f"self_attn.{projection}.weight"
        parts.append(Part(name, shapes[name], (slice(None), slot)))
    heads = g + len(slots) - 1
    out = "self_attn.o_proj.weight"
    return {
        "attention/qkv": LeafSource((k, heads, h, d), tuple(parts)),
        "attention/out": _whole(out, shapes[out], (d, k, g, h)),
    }
