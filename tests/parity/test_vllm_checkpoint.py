"""The folder that vLLM is given: a checkpoint with every tensor it asks for."""

import numpy as np
import pytest

from gemma_jax.checkpoint.hf import HfCheckpoint
from gemma_jax.checkpoint.load import load_config
from gemma_jax.checkpoint.names import unused_shapes
from gemma_jax.checkpoint.safetensors_io import map_file
from gemma_jax.model_source import resolve_model
from gemma_jax.parity.vllm_checkpoint import vllm_checkpoint
from gemma_jax.testing.golden_models import golden_checkpoint


def test_missing_keys_and_values_of_shared_layers_are_added_and_the_rest_is_the_same():
    nano = resolve_model("nano")
    config = load_config(nano)
    before = HfCheckpoint(nano, config)
    with vllm_checkpoint(nano) as folder:
        after = HfCheckpoint(folder, config)
        assert set(after.dropped) == {f"model.{name}" for name in unused_shapes(config)}
        norm = after.dropped["model.layers.9.self_attn.k_norm.weight"]
        assert (norm.view(map_file(norm.path)) == 1).all()
        assert list(after.used) == list(before.used)
        for name in after.used:
            np.testing.assert_array_equal(after.read(name), before.read(name))
        assert load_config(folder) == config
    assert not folder.exists()


@pytest.mark.parametrize("name", ["e2b-like", "31b-like"])
def test_complete_checkpoint_is_given_as_it_is(name, tmp_path):
    path = golden_checkpoint(name, tmp_path)
    with vllm_checkpoint(path) as folder:
        assert folder == path
