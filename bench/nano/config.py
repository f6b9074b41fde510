"""Nano's network: E2B's wiring at small width, and the files that describe it.

    python -m bench.nano.config            # writes config.json and generation_config.json

The whole model must stay under 12 MiB in bfloat16, which leaves 6.29 million elements.
"""

import argparse
import json
from pathlib import Path

from bench.nano.tokenizer import PACKAGE_FOLDER, VOCAB_SIZE
from gemma_jax.checkpoint.names import leaf_sources
from gemma_jax.config import FULL, SLIDING, ModelConfig

NANO = ModelConfig(
    vocab_size=VOCAB_SIZE,
    vocab_size_per_layer_input=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=10,
    layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 2,
    num_kv_shared_layers=5,
    use_double_wide_mlp=True,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
    global_head_dim=512,
    sliding_window=64,
    hidden_size_per_layer_input=32,
    final_logit_softcapping=30.0,
    max_position_embeddings=8192,
    eos_token_id=(1, 106),
)

GENERATION = {
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": [1, 106, 50],
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 64,
    "top_p": 0.95,
}


def parameter_count(config: ModelConfig) -> int:
    """Elements of all weights that a checkpoint of `config` holds."""
    return sum(source.size for source in leaf_sources(config).values())


def main() -> None:
    """Write both files and print the size of the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=PACKAGE_FOLDER)
    output = parser.parse_args().output
    for name, content in (("config", NANO.to_hf()), ("generation_config", GENERATION)):
        (output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    count = parameter_count(NANO)
    print(f"{count:,} elements, {count / 2**19:.2f} MiB in bfloat16")


if __name__ == "__main__":
    main()
