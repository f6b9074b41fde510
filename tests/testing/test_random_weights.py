"""The random-weight recipe: reproducible piece by piece, with the moments that its table states."""

import numpy as np
import pytest

from gemma_jax.checkpoint.names import hf_shapes, unused_shapes
from gemma_jax.config import PRESETS
from gemma_jax.errors import CheckpointError, ConfigError
from gemma_jax.testing.configs import TINY_CONFIGS, named_config
from gemma_jax.testing.weights import (
    random_block,
    random_tensor,
    random_tensor_blocks,
    random_weights,
    tensor_moments,
    weights_checksum,
)

NAME, SHAPE = "layers.3.mlp.up_proj.weight", (130, 65)


def test_a_tensor_is_the_same_in_blocks_and_alone():
    whole = random_tensor(NAME, SHAPE, 3)
    blocks = list(random_tensor_blocks(NAME, SHAPE, 3, block_elements=1000))
    assert [len(block) for block in blocks] == [1000] * 8 + [450]
    np.testing.assert_array_equal(np.concatenate(blocks), whole.reshape(-1))
    np.testing.assert_array_equal(random_block(NAME, SHAPE, 3, 40, 7), whole.reshape(-1)[40:47])


def test_the_stream_never_changes():
    values = random_tensor("embed_tokens.weight", (2, 4), 0).reshape(-1)
    expected = [
        -1.6930415630340576,
        1.2670061588287354,
        1.6913501024246216,
        -2.8792808055877686,
        -3.1101644039154053,
        -1.1204837560653687,
        -3.4021520614624023,
        0.12960779666900635,
    ]
    np.testing.assert_array_equal(values, np.array(expected, np.float32))


def test_prefixes_do_not_change_a_tensor_but_name_and_seed_do():
    tensor = random_tensor(NAME, SHAPE, 0)
    np.testing.assert_array_equal(random_tensor(f"model.{NAME}", SHAPE, 0), tensor)
    prefixed = random_tensor(f"model.language_model.{NAME}", SHAPE, 0)
    np.testing.assert_array_equal(prefixed, tensor)
    other_layer = random_tensor("layers.4.mlp.up_proj.weight", SHAPE, 0)
    for other in (other_layer, random_tensor(NAME, SHAPE, 1)):
        assert abs(np.corrcoef(other.reshape(-1), tensor.reshape(-1))[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_tokens.weight", (512, 64)),
        ("layers.0.self_attn.q_norm.weight", (40_000,)),
        ("layers.0.post_attention_layernorm.weight", (40_000,)),
        ("layers.0.layer_scalar", (40_000,)),
        ("layers.0.router.proj.weight", (200, 200)),
        ("norm.weight", (40_000,)),
    ],
)
def test_values_have_the_stated_moments(name, shape):
    mean, std = tensor_moments(name, shape)
    values = random_tensor(name, shape, 0)
    assert values.mean() == pytest.approx(mean, abs=0.02 * std)
    assert values.std() == pytest.approx(std, rel=0.02)


def test_layer_scalars_stay_between_three_quarters_and_one():
    values = random_tensor("layers.0.layer_scalar", (10_000,), 0)
    assert values.min() >= 0.75
    assert values.max() <= 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_recipe_has_a_row_for_every_published_tensor(name):
    config = PRESETS[name]
    for tensor, shape in (hf_shapes(config) | unused_shapes(config)).items():
        assert tensor_moments(tensor, shape)[1] > 0


def test_the_checksum_sees_one_changed_value():
    weights = random_weights(TINY_CONFIGS["e2b-tiny"], 0)
    before = weights_checksum(weights)
    weights["norm.weight"][5] = np.nextafter(weights["norm.weight"][5], 2)
    assert weights_checksum(weights) != before


def test_unknown_names_and_seeds_are_refused():
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: no row"):
        random_tensor("lm_head.weight", (4, 4), 0)
    with pytest.raises(ConfigError, match="seed=-1"):
        random_tensor(NAME, SHAPE, -1)
    with pytest.raises(ValueError, match="multiple of 4"):
        random_block(NAME, SHAPE, 0, 2, 4)
    with pytest.raises(ConfigError, match="preset='e3b': expected one of 'e2b'"):
        named_config("e3b")
