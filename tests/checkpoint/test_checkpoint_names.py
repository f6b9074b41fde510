"""The table that links our leaves to the published tensors."""

import numpy as np
import pytest

from gemma_jax.checkpoint.names import hf_shapes, leaf_shapes, leaf_sources
from gemma_jax.config import PRESETS
from gemma_jax.testing.configs import TINY_CONFIGS

ALL = {**PRESETS, **TINY_CONFIGS}


@pytest.mark.parametrize("name", ALL)
def test_every_published_tensor_lies_in_exactly_one_leaf(name):
    config = ALL[name]
    parts = [part for source in leaf_sources(config).values() for part in source.parts]
    assert len({part.name for part in parts}) == len(parts)
    assert {part.name: part.shape for part in parts} == hf_shapes(config)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_the_parts_of_a_leaf_cover_it_without_overlap(name):
    for path, source in leaf_sources(TINY_CONFIGS[name]).items():
        hits = np.zeros(source.shape, np.int32)
        for part in source.parts:
            hits[part.index] += 1
            assert hits[part.index].size == np.prod(part.shape), path
        assert (hits == 1).all(), path


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_leaf_shapes_are_those_of_the_model(name):
    from flax import nnx

    from gemma_jax.model.transformer import abstract_model
    from gemma_jax.numerics import Numerics

    config = TINY_CONFIGS[name]
    state = nnx.to_flat_state(nnx.state(abstract_model(config, Numerics())))
    model = {"/".join(map(str, path)): tuple(leaf.shape) for path, leaf in state}
    assert model == leaf_shapes(config)


def test_heads_of_qkv_are_grouped_by_key_value_head():
    config = TINY_CONFIGS["e4b-tiny"]
    layer = config.layers[0]
    k, g, h, d = layer.num_kv_heads, layer.num_groups, layer.head_dim, config.hidden_size
    assert (k, g) == (2, 2)
    rng = np.random.default_rng(0)
    prefix = "layers.0.self_attn."
    hf = {
        f"{prefix}{name}.weight": rng.standard_normal((heads * h, d)).astype(np.float32)
        for name, heads in (("q_proj", k * g), ("k_proj", k), ("v_proj", k))
    }
    source = leaf_sources(config)["layers/0/attention/qkv"]
    leaf = np.zeros(source.shape, np.float32)
    source.fill(leaf, hf.__getitem__)
    for n in range(k * g):
        rows = hf[f"{prefix}q_proj.weight"][n * h : (n + 1) * h]
        np.testing.assert_array_equal(leaf[n // g, n % g], rows)
    for head in range(k):
        rows = slice(head * h, (head + 1) * h)
        np.testing.assert_array_equal(leaf[head, g], hf[f"{prefix}k_proj.weight"][rows])
        np.testing.assert_array_equal(leaf[head, g + 1], hf[f"{prefix}v_proj.weight"][rows])


def test_attention_out_reads_query_heads_in_published_order():
    config = TINY_CONFIGS["e4b-tiny"]
    layer = config.layers[0]
    k, g, h = layer.num_kv_heads, layer.num_groups, layer.head_dim
    source = leaf_sources(config)["layers/0/attention/out"]
    hf = np.arange(np.prod(source.parts[0].shape), dtype=np.float32).reshape(source.parts[0].shape)
    leaf = np.zeros(source.shape, np.float32)
    source.fill(leaf, lambda _: hf)
    for n in range(k * g):
        np.testing.assert_array_equal(leaf[:, n // g, n % g], hf[:, n * h : (n + 1) * h])


def test_expert_rows_are_gate_then_up():
    config = TINY_CONFIGS["26b-a4b-tiny"]
    source = leaf_sources(config)["layers/0/moe/gate_up"]
    e, _, f, d = source.shape
    hf = np.random.default_rng(0).standard_normal((e, 2 * f, d)).astype(np.float32)
    leaf = np.zeros(source.shape, np.float32)
    source.fill(leaf, lambda _: hf)
    np.testing.assert_array_equal(leaf[3, 0], hf[3, :f])
    np.testing.assert_array_equal(leaf[3, 1], hf[3, f:])
