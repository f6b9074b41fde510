"""Counts of multiply-accumulates and bytes, against the published sizes and against the model."""

import pytest

from gemma_jax.benchmarks import costs
from gemma_jax.benchmarks.workload import Workload
from gemma_jax.checkpoint.names import hf_shapes
from gemma_jax.config import PRESETS
from gemma_jax.testing.configs import TINY_CONFIGS

E2B = PRESETS["e2b"]


def test_an_e2b_prompt_token_costs_1_255_gflop():
    assert costs.prompt_flops(E2B, 2048) / 2048 == pytest.approx(1.255e9, rel=0.005)


def test_an_e2b_decode_step_reads_2_28_billion_weights():
    assert costs.step_weights(E2B) == pytest.approx(2.28e9, rel=0.001)


@pytest.mark.parametrize("name", [*PRESETS, *TINY_CONFIGS])
def test_step_weights_are_the_matrices_of_the_checkpoint(name):
    config = (PRESETS | TINY_CONFIGS)[name]
    # With a batch without end every expert is reached.
    matrices = {n: s for n, s in hf_shapes(config).items() if len(s) > 1}
    matrices.pop("embed_tokens_per_layer.weight", None)
    count = 0
    for shape in matrices.values():
        size = 1
        for n in shape:
            size *= n
        count += size
    assert costs.step_weights(config, batch=10**6) == count


def test_a_step_of_one_token_reaches_only_its_experts():
    config = TINY_CONFIGS["26b-a4b-tiny"]
    one, all_of_them = (costs.step_weights(config, batch) for batch in (1, 10**6))
    unused = (config.num_experts - config.top_k_experts) * 3 * config.hidden_size
    assert all_of_them - one == config.num_hidden_layers * unused * config.moe_intermediate_size


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 64), (0, 200), (63, 66), (150, 151)])
@pytest.mark.parametrize("kind", ["sliding", "full"])
def test_attention_counts_the_keys_that_the_mask_lets_through(kind, first, last):
    config = TINY_CONFIGS["e2b-tiny"]
    layer = next(x for x in config.layers if x.is_sliding == (kind == "sliding"))
    window = layer.window or 10**9
    keys = sum(min(position + 1, window) for position in range(first, last))
    per_key = 2 * config.num_attention_heads * layer.head_dim
    assert costs.attention_macs(config, layer, first, last) == per_key * keys


def test_fast_prefill_saves_the_shared_layers_on_all_rows_but_the_last():
    config = TINY_CONFIGS["e2b-tiny"]
    shared = config.layers[config.first_shared_layer :]
    saved = sum(
        7 * costs.layer_macs(config, x) + costs.attention_macs(config, x, 0, 7) for x in shared
    )
    slow, fast = (costs.prompt_flops(config, 8, fast_prefill=f) for f in (False, True))
    assert slow - fast == 2 * saved


def test_models_without_shared_layers_gain_nothing_from_fast_prefill():
    config = PRESETS["12b"]
    assert costs.prompt_flops(config, 100, True) == costs.prompt_flops(config, 100, False)


def test_the_first_generated_token_is_part_of_the_prompt():
    config = TINY_CONFIGS["e2b-tiny"]
    prompt = costs.prompt_flops(config, 16)
    assert costs.workload_flops(config, Workload(3, 16, 1)) == 3 * prompt
    assert costs.workload_flops(config, Workload(1, 16, 3)) == (
        prompt + costs.token_flops(config, 16) + costs.token_flops(config, 17)
    )


def test_decode_reads_weights_once_a_step_and_a_cache_bounded_by_the_window():
    config = TINY_CONFIGS["31b-tiny"]
    assert costs.decode_bytes(config, Workload(4, 100, 1), 2) == 0
    long, longer = (costs.cached_values(config, n) for n in (1000, 1001))
    full = [x for x in config.owner_layers if not x.is_sliding]
    assert longer - long == sum(2 * x.num_kv_heads * x.head_dim for x in full)
    assert costs.decode_bytes(config, Workload(4, 999, 2), 2) == 2 * (
        costs.step_weights(config, 4) + 4 * long
    )
