"""Reading safetensors in every layout that occurs."""

import json
import logging

import jax
import numpy as np
import pytest
from checkpoint_helpers import BF16, SHAPES, same

from gemma_jax.checkpoint.hf import HfCheckpoint, load_hf
from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.checkpoint.names import leaf_sources
from gemma_jax.errors import CheckpointError, ConfigError, UnsupportedError


def check_loaded(leaves, source, dtype=None):
    for path, leaf in leaf_sources(source.config).items():
        array = np.asarray(leaves[path])
        assert array.shape == leaf.shape
        for name, tensor in leaf.split(array).items():
            expected = source.tensors[f"model.{name}"]
            assert same(tensor, expected if dtype is None else expected.astype(dtype)), name


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_loads_bit_for_bit(make_source, name):
    source = make_source(name)
    config, leaves = load_checkpoint(source.write())
    assert config == source.config
    assert set(leaves) == set(leaf_sources(config))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())
    check_loaded(leaves, source)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.", ""])
def test_prefixes_do_not_matter(make_source, prefix):
    source = make_source()
    renamed = make_source()
    renamed.rename(prefix)
    check_loaded(load_hf(renamed.write(), source.config), source)


@pytest.mark.parametrize("index", [True, False])
def test_shards_load_with_and_without_an_index(make_source, index):
    source = make_source()
    check_loaded(load_hf(source.write(shards=3, index=index), source.config), source)


def test_one_file_can_be_named(make_source):
    source = make_source()
    config, leaves = load_checkpoint(source.write() / "model.safetensors")
    assert config == source.config
    check_loaded(leaves, source)


@pytest.mark.parametrize("unused", [True, False])
def test_unused_keys_and_values_may_be_there_or_not(make_source, unused):
    source = make_source(unused=unused)
    checkpoint = HfCheckpoint(source.write(), source.config)
    assert len(checkpoint.dropped) == (15 if unused else 0)
    check_loaded(load_hf(source.path, source.config), source)


def test_towers_are_ignored_whatever_their_dtype(make_source):
    source = make_source()
    source.rename("model.language_model.")
    towers = [
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.audio_tower.output_proj.bias",
        "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.embedding.weight",
        "model.vision_embedder.patch_ln1.weight",
        "vision_tower.std_bias",
    ]
    source.tensors |= {name: np.zeros((3,), np.int64) for name in towers}
    source.config_json = {
        "model_type": "gemma4",
        "text_config": source.config_json,
        "vision_config": {},
    }
    config, leaves = load_checkpoint(source.write())
    dropped = HfCheckpoint(source.path, config).dropped
    assert set(towers) <= set(dropped)
    assert set(leaves) == set(leaf_sources(config))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight"])
def test_a_tied_lm_head_is_accepted(make_source, name):
    source = make_source()
    source.tensors[name] = source.tensors["model.embed_tokens.weight"].copy()
    assert name in HfCheckpoint(source.write(), source.config).dropped


@pytest.mark.parametrize("stored", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_floats_are_cast_to_the_asked_dtype(make_source, stored, asked):
    source = make_source("12b-tiny", stored)
    leaves = load_hf(source.write(), source.config, asked)
    check_loaded(leaves, source, BF16 if asked == "bfloat16" else np.float32)


def test_auto_takes_the_dtype_of_the_config(make_source):
    source = make_source(dtype=np.float32)
    source.config_json["dtype"] = "bfloat16"
    _, leaves = load_checkpoint(source.write(), "auto")
    assert {leaf.dtype for leaf in leaves.values()} == {BF16}


def test_casts_are_logged_once_with_counts(make_source, caplog):
    source = make_source("12b-tiny")
    source.tensors["model.norm.weight"] = source.tensors["model.norm.weight"].astype(np.float32)
    with caplog.at_level(logging.INFO):
        load_hf(source.write(), source.config, "float32")
    lines = [r.getMessage() for r in caplog.records if "casting" in r.getMessage()]
    assert len(lines) == 1
    parts = sum(len(leaf.parts) for leaf in leaf_sources(source.config).values())
    assert f"{parts - 1} BF16 tensors to float32" in lines[0]


def test_a_leaf_of_mixed_dtypes_is_kept_exactly_in_float32(make_source):
    source = make_source()
    name = "model.layers.0.mlp.up_proj.weight"
    source.tensors[name] = source.tensors[name].astype(np.float16)
    leaf = load_hf(source.write(), source.config, None)["layers/0/mlp/gate_up"]
    assert same(leaf[1], source.tensors[name].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", np.float16])
def test_float16_is_refused_with_the_reason(make_source, dtype):
    with pytest.raises(UnsupportedError, match=r"float16.*overflow"):
        load_checkpoint(make_source().write(), dtype)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "float64"])
def test_other_dtypes_are_refused(make_source, dtype):
    with pytest.raises(UnsupportedError, match=dtype):
        load_checkpoint(make_source().write(), dtype)


def test_leaves_go_where_sharding_for_says(make_source):
    source = make_source()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    asked = {}

    def sharding_for(path, shape):
        asked[path] = shape
        return sharding

    _, leaves = load_checkpoint(source.write(), sharding_for=sharding_for)
    assert asked == {path: leaf.shape for path, leaf in leaf_sources(source.config).items()}
    assert all(leaf.sharding == sharding for leaf in leaves.values())


def test_quantized_checkpoints_are_refused(make_source):
    source = make_source()
    source.config_json["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="quantization_config"):
        load_checkpoint(source.write())


def test_a_missing_path_and_an_empty_directory_are_named(make_source, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: no such file"):
        load_checkpoint(tmp_path / "nowhere")
    source = make_source()
    source.path.mkdir()
    (source.path / "config.json").write_text(json.dumps(source.config_json))
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        load_checkpoint(source.path)
