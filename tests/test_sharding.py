"""Meshes and PartitionSpecs: every weight has one, and only one device is used."""

import jax
import pytest
from jax.sharding import PartitionSpec

from gemma_jax.errors import UnsupportedError
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.sharding import TENSOR_AXIS, leaf_shardings, make_mesh, partition_spec
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.fast


def test_every_leaf_has_a_spec_that_splits_heads_and_mlp_width():
    model = abstract_model(TINY_CONFIGS["26b-a4b-tiny"], Numerics())
    shardings = leaf_shardings(model, make_mesh())
    specs = {path: sharding.spec for path, sharding in shardings.items()}
    assert specs["layers/0/attention/qkv"] == PartitionSpec(TENSOR_AXIS, None, None, None)
    assert specs["layers/0/attention/out"] == PartitionSpec(None, TENSOR_AXIS, None, None)
    assert specs["layers/0/mlp/gate_up"] == PartitionSpec(None, TENSOR_AXIS, None)
    assert specs["layers/0/mlp/down"] == PartitionSpec(None, TENSOR_AXIS)
    assert specs["layers/0/moe/down"] == PartitionSpec(None, None, TENSOR_AXIS)
    assert specs["norm"] == PartitionSpec(None)
    assert {s.mesh.devices.size for s in shardings.values()} == {1}


def test_an_axis_without_a_rule_is_replicated():
    assert partition_spec(("V", "D")) == PartitionSpec(None, None)


def test_the_mesh_is_one_device():
    assert make_mesh(1).devices.flatten().tolist() == jax.devices()[:1]


@pytest.mark.parametrize("size", [0, 2, 8])
def test_more_than_one_device_is_refused(size):
    with pytest.raises(UnsupportedError, match=rf"tensor_parallel_size={size}.*only 1"):
        make_mesh(size)
