"""What a workload must compute and read at least: multiply-accumulates and bytes, from the config.

A prompt token is charged the layers that own K and V (with fast prefill) or all of them; the last
row of a prompt and every generated token are charged all layers and the head. Norms and other
element-wise work count nothing, and one multiply-accumulate is two FLOPs.
"""

from gemma_jax.benchmarks.workload import Workload
from gemma_jax.config import LayerConfig, ModelConfig


def layer_macs(config: ModelConfig, layer: LayerConfig) -> int:
    """Multiply-accumulates of one layer's matrices for one token, attention scores left out."""
    macs = _dense_layer_weights(config, layer)
    if config.enable_moe_block:
        macs += _router_weights(config) + (config.top_k_experts or 0) * _expert_weights(config)
    return macs


def attention_macs(config: ModelConfig, layer: LayerConfig, first: int, last: int) -> int:
    """Multiply-accumulates of q kᵀ and of the weighted sum of v, positions first … last - 1."""
    return 2 * config.num_attention_heads * layer.head_dim * _keys_seen(layer, first, last)


def prompt_flops(config: ModelConfig, input_len: int, fast_prefill: bool = True) -> int:
    """FLOPs of one prompt of `input_len` tokens up to the logits of its last row."""
    owners = config.owner_layers if fast_prefill else config.layers
    shared = config.layers[len(owners) :]
    macs = input_len * (_per_layer_projection(config) + sum(layer_macs(config, x) for x in owners))
    macs += sum(attention_macs(config, x, 0, input_len) for x in owners)
    macs += _token_macs(config, shared, input_len - 1) + _head_weights(config)
    return 2 * macs


def token_flops(config: ModelConfig, position: int) -> int:
    """FLOPs of one generated token at `position`, which attends to itself and all before it."""
    macs = _per_layer_projection(config) + _token_macs(config, config.layers, position)
    return 2 * (macs + _head_weights(config))


def workload_flops(config: ModelConfig, workload: Workload, fast_prefill: bool = True) -> int:
    """FLOPs of a whole workload; the first generated token comes with the prompt."""
    positions = range(workload.input_len, workload.input_len + workload.output_len - 1)
    one = prompt_flops(config, workload.input_len, fast_prefill)
    return workload.num_requests * (one + sum(token_flops(config, p) for p in positions))


def step_weights(config: ModelConfig, batch: int = 1) -> int:
    """Weights that one decode step of `batch` tokens reads; embedding rows count nothing.

    Of the experts, those that `batch` independent uniform draws of top_k are expected to reach.
    """
    weights = sum(_dense_layer_weights(config, layer) for layer in config.layers)
    weights += _per_layer_projection(config) + _head_weights(config)
    if config.enable_moe_block:
        experts, used = config.num_experts or 1, config.top_k_experts or 0
        reached = experts * (1 - (1 - used / experts) ** batch)
        weights += config.num_hidden_layers * (
            _router_weights(config) + round(reached * _expert_weights(config))
        )
    return weights


def cached_values(config: ModelConfig, length: int) -> int:
    """Numbers of K and V that a step must read for one sequence of `length` tokens."""
    return sum(
        2 * layer.num_kv_heads * layer.head_dim * min(length, layer.window or length)
        for layer in config.owner_layers
    )


def decode_bytes(config: ModelConfig, workload: Workload, itemsize: int) -> int:
    """Bytes that the decode steps of a workload read: all weights once a step, and the cache."""
    batch = workload.num_requests
    lengths = range(workload.input_len + 1, workload.input_len + workload.output_len)
    cached = batch * sum(cached_values(config, length) for length in lengths)
    return itemsize * (len(lengths) * step_weights(config, batch) + cached)


def _token_macs(config: ModelConfig, layers: tuple[LayerConfig, ...], position: int) -> int:
    return sum(
        layer_macs(config, x) + attention_macs(config, x, position, position + 1) for x in layers
    )


def _keys_seen(layer: LayerConfig, first: int, last: int) -> int:
    """Sum over the positions first … last - 1 of the keys that each attends to."""
    window = layer.window or last
    growing = range(min(first, window), min(last, window))  # position p sees p + 1 keys
    return sum(growing) + len(growing) + window * (last - first - len(growing))


def _dense_layer_weights(config: ModelConfig, layer: LayerConfig) -> int:
    d, h = config.hidden_size, layer.head_dim
    kv_heads = layer.num_kv_heads * (1 if layer.k_eq_v else 2) if layer.owns_kv else 0
    attention = d * h * (2 * config.num_attention_heads + kv_heads)
    per_layer_gate = 2 * d * config.hidden_size_per_layer_input
    return attention + 3 * d * layer.intermediate_size + per_layer_gate


def _router_weights(config: ModelConfig) -> int:
    return config.hidden_size * (config.num_experts or 0)


def _expert_weights(config: ModelConfig) -> int:
    return 3 * config.hidden_size * (config.moe_intermediate_size or 0)


def _per_layer_projection(config: ModelConfig) -> int:
    return config.hidden_size * config.num_hidden_layers * config.hidden_size_per_layer_input


def _head_weights(config: ModelConfig) -> int:
    return config.hidden_size * config.vocab_size
