"""The random checkpoint writer: published names, any dtype and sharding, whole or absent."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from gemma_jax.checkpoint.names import hf_shapes, unused_shapes
from gemma_jax.config import ModelConfig
from gemma_jax.testing import checkpoint
from gemma_jax.testing.checkpoint import main, override, write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.weights import random_tensor

CONFIG = TINY_CONFIGS["e2b-tiny"]


def _tensors(folder):
    out = {}
    for path in folder.glob("*.safetensors"):
        out |= load_file(path)
    return out


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_files_hold_every_published_tensor_rounded_once(tmp_path, dtype, shards):
    folder = write_checkpoint(CONFIG, tmp_path / "model", 7, dtype, shards=shards)
    tensors = _tensors(folder)
    shapes = hf_shapes(CONFIG) | unused_shapes(CONFIG)
    assert {name: x.shape for name, x in tensors.items()} == {
        f"model.{name}": shape for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        expected = random_tensor(name, values.shape, 7).astype(ml_dtypes.finfo(dtype).dtype)
        np.testing.assert_array_equal(values, expected)


def test_blocks_meet_at_any_size(tmp_path, monkeypatch):
    whole = write_checkpoint(CONFIG, tmp_path / "whole", 0).joinpath("model.safetensors")
    monkeypatch.setattr(checkpoint, "BLOCK_ELEMENTS", 516)
    parts = write_checkpoint(CONFIG, tmp_path / "parts", 0).joinpath("model.safetensors")
    assert parts.read_bytes() == whole.read_bytes()


def test_the_index_names_the_file_of_every_tensor(tmp_path):
    folder = write_checkpoint(CONFIG, tmp_path / "model", shards=4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == found
    assert len(set(found.values())) == 4
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in _tensors(folder).values())


@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
def test_the_config_file_reads_back_as_written(tmp_path, name):
    folder = write_checkpoint(TINY_CONFIGS[name], tmp_path / "model", dtype="float32")
    assert ModelConfig.from_file(folder) == TINY_CONFIGS[name]
    data = json.loads((folder / "config.json").read_text())
    assert (data["architectures"], data["model_type"]) == (["Gemma4ForCausalLM"], "gemma4_text")


def test_settings_change_fields_and_keep_the_layer_pattern():
    config = override(CONFIG, ["num_hidden_layers=7", "num_kv_shared_layers=0", "vocab_size=600"])
    assert config.layer_types[:5] == CONFIG.layer_types[:5]
    assert len(config.layer_types) == 7
    assert config.vocab_size_per_layer_input == 600
    config = override(CONFIG, ["final_logit_softcapping=null", "eos_token_id=[1, 106]"])
    assert config.final_logit_softcapping is None
    assert config.eos_token_id == (1, 106)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "hiden_size=64"], "hiden_size: unknown field; expected one of vocab_size"),
        (["--set", "hidden_size=wide"], "hidden_size='wide': expected an integer"),
        (["--set", "hidden_size"], "expected field=value"),
        (["--set", "num_attention_heads=3", "--set", "num_key_value_heads=2"], "must divide"),
        (["--set", "sliding_rope=3"], "expected a JSON object of rope_type"),
        (["--shards", "0"], "shards=0: expected an integer from 1"),
        (["--seed", "-2"], "seed=-2: expected an integer of at least 0"),
        (["--preset", "e3b"], "preset='e3b': expected one of"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(tmp_path, capsys, arguments, message):
    base = ["--preset", "e2b-tiny", "--out", str(tmp_path / "model")]
    assert main([*base, *arguments]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_replaced_only_when_asked(tmp_path, capsys):
    base = ["--preset", "e2b-tiny", "--out", str(tmp_path / "model")]
    assert main(base) == 0
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert main([*base, "--seed", "1"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert main([*base, "--seed", "1", "--overwrite"]) == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != before


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "random_block", fail)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(CONFIG, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
