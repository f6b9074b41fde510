"""Tiny configurations with the wiring of each published size, for tests on a CPU.

Each is its preset with small widths: the layer pattern, KV sharing, K-equals-V, per-layer inputs,
experts, RoPE and softcap stay, and windows are short enough for ordinary prompts to cross them.
Three variants switch off or on what no preset does alone; `e2b-tiny-wide-heads` keeps the published
head widths of 256 and 512.
"""

from typing import Any

from gemma_jax.config import FULL, PRESETS, SLIDING, LayerKind, ModelConfig
from gemma_jax.errors import ConfigError

VOCAB_SIZE = 1024


def _pattern(sliding: int, repeats: int) -> tuple[LayerKind, ...]:
    kinds: list[LayerKind] = [SLIDING for _ in range(sliding)]
    kinds.append(FULL)
    return tuple(kinds * repeats)


def _tiny(preset: str, layer_types: tuple[LayerKind, ...], **fields: Any) -> ModelConfig:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "head_dim": 32,
        "global_head_dim": 64,
        "dtype": "float32",
        "model_type": "gemma4_text",
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
    }
    return PRESETS[preset].replace(**(common | fields))


_E2B: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "sliding_window": 64,
    "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 16,
}  # fmt: skip

TINY_CONFIGS: dict[str, ModelConfig] = {
    "e2b-tiny": _tiny("e2b", _pattern(4, 2), **_E2B),
    "e4b-tiny": _tiny(
        "e4b", _pattern(5, 2), hidden_size=80, intermediate_size=160, num_attention_heads=4,
        sliding_window=72, num_kv_shared_layers=6, hidden_size_per_layer_input=16,
    ),
    "12b-tiny": _tiny(
        "12b", _pattern(5, 2), hidden_size=96, intermediate_size=160, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=1, sliding_window=100,
    ),
    "26b-a4b-tiny": _tiny(
        "26b-a4b", _pattern(5, 1), hidden_size=96, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=1, sliding_window=80,
        num_experts=16, top_k_experts=4, moe_intermediate_size=32,
    ),
    "31b-tiny": _tiny(
        "31b", _pattern(5, 2), hidden_size=128, intermediate_size=192, num_attention_heads=8,
        num_key_value_heads=4, num_global_key_value_heads=2, sliding_window=96,
    ),
    "e2b-tiny-no-ple": _tiny(
        "e2b", _pattern(4, 2), **(_E2B | {"hidden_size_per_layer_input": 0}),
    ),
    "e2b-tiny-single-wide": _tiny("e2b", _pattern(4, 2), **_E2B, use_double_wide_mlp=False),
    "e2b-tiny-wide-heads": _tiny(
        "e2b", _pattern(4, 2), **(_E2B | {"hidden_size": 128, "num_attention_heads": 2}),
        head_dim=256, global_head_dim=512,
    ),
}  # fmt: skip


def named_config(name: str) -> ModelConfig:
    """The configuration of a published size or of a tiny one.

    Raises:
      ConfigError: neither; the message lists both.
    """
    configs = PRESETS | TINY_CONFIGS
    if name not in configs:
        raise ConfigError(f"preset={name!r}: expected one of {', '.join(map(repr, configs))}")
    return configs[name]
