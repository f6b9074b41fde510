"""The models of the engine goldens: nano, and three small random ones of published wiring.

The random ones have the published head widths of 256 and 512 and the wiring of E2B (shared K and V,
per-layer inputs), 26B-A4B (experts) and 31B (K equals V). The window of the last is the published
1,024, which chooses another tile in vLLM's decode attention than a short one.
"""

from importlib import resources
from pathlib import Path

from gemma_jax.config import ModelConfig
from gemma_jax.parity.flips import NOISE_PERCENTILE
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS

SEED = 5
_WIDE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 256, "global_head_dim": 512}

RANDOM_CONFIGS: dict[str, ModelConfig] = {
    "e2b-like": TINY_CONFIGS["e2b-tiny"].replace(**_WIDE, intermediate_size=256),
    "26b-like": TINY_CONFIGS["26b-a4b-tiny"].replace(
        **_WIDE, intermediate_size=128, moe_intermediate_size=64, sliding_window=96
    ),
    "31b-like": TINY_CONFIGS["31b-tiny"].replace(
        **_WIDE, intermediate_size=256, num_key_value_heads=2, num_global_key_value_heads=1,
        num_hidden_layers=6, layer_types=TINY_CONFIGS["31b-tiny"].layer_types[:6],
        sliding_window=1024,
    ),
}  # fmt: skip

GOLDEN_MODELS = ("nano", *RANDOM_CONFIGS)

BEYOND_LIMIT = 2 * (1 - NOISE_PERCENTILE / 100)
"""Share of margins that two bfloat16 runs may move further than the noise limit of one of them. A
random model has so many near-ties that some of these are flips."""


def golden_checkpoint(name: str, folder: Path) -> Path:
    """The checkpoint of a golden model: nano's own, or one written to `folder` from its seed.

    The random ones are bfloat16 files with every published tensor, whatever dtype they run in, so
    that bfloat16 and float32 records are of the same weights.
    """
    if name == "nano":
        return Path(str(resources.files("gemma_jax") / "data" / "nano"))
    path = folder / name
    if not path.is_dir():
        write_checkpoint(RANDOM_CONFIGS[name], path, SEED, "bfloat16")
    return path
