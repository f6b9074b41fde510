"""The device that kernels are compiled for."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from gemma_jax.pallas.device import current_device

pytestmark = pytest.mark.fast


def test_a_cpu_has_no_capability():
    device = current_device()
    assert not device.is_gpu
    assert device.shared_memory == 0
    assert not device.at_least(8)


@pytest.mark.parametrize(
    ("kind", "capability", "shared"),
    [("NVIDIA A100-SXM4-80GB", (8, 0), 166_912), ("NVIDIA H200", (9, 0), 232_448)],
)
def test_an_abstract_mesh_names_the_gpu_that_code_is_compiled_for(kind, capability, shared):
    gpu = AbstractDevice(device_kind=kind, num_cores=108, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        device = current_device()
    assert device.capability == capability
    assert device.shared_memory == shared
    assert device.num_cores == 108
    assert not current_device().is_gpu
