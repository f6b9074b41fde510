"""Published tensor names and shapes of the text decoder.

`hf_shapes` is the one list of what a checkpoint holds; names are the `<rest>` part that follows
`model.` (text-only files) or `model.language_model.` (multimodal files).
Source: the published safetensors headers and transformers 5.17 `Gemma4ForCausalLM`.
"""

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
