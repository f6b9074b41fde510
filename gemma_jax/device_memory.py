"""How much of the device's memory is left for the KV cache."""

import jax

from gemma_jax.config import ModelConfig
from gemma_jax.engine_config import EngineConfig
from gemma_jax.runner import Runner

HOST_CACHE_BYTES = 512 * 2**20
"""Memory of the KV cache on a device that does not report its memory, such as a CPU."""


def cache_memory(runner: Runner, engine: EngineConfig) -> int:
    """Bytes that the KV cache may take beside weights, what else is in use, and activations."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return HOST_CACHE_BYTES
    weights = sum(x.nbytes for x in runner.leaves)
    used = max(stats.get("bytes_in_use", 0), weights)
    free = int(limit * engine.gpu_memory_utilization) - used
    return free - activation_bytes(runner.config, engine.prefill_tokens(), engine.max_num_seqs)


def activation_bytes(config: ModelConfig, prefill_tokens: int, rows: int) -> int:
    """Bytes that the intermediates of a call may take: a bound on both kinds of call.

    A prompt token holds a gate|up row and its product, and a few rows of the residual stream and
    of queries; a row whose logits are wanted holds several float32 rows of the vocabulary.
    """
    widest = max(layer.intermediate_size for layer in config.layers)
    heads = max(layer.num_kv_heads * layer.num_groups * layer.head_dim for layer in config.layers)
    ple = config.num_hidden_layers * config.hidden_size_per_layer_input
    a_token = 4 * (3 * widest + 8 * config.hidden_size + 4 * heads + 2 * ple)
    return prefill_tokens * a_token + rows * config.vocab_size * 4 * 6
