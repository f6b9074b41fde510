"""The device a kernel is about to be compiled for: what dispatch and tile tables ask about.

Tracing under an abstract mesh (compiling for a GPU that is not there) names that GPU; otherwise it
is the process's own device.
"""

import functools
from dataclasses import dataclass

import jax

SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
}
"""Bytes of shared memory that one block may take. Source: CUDA C++ Programming Guide."""

_KINDS = {"A100": (8, 0), "H100": (9, 0), "H200": (9, 0), "GH200": (9, 0)}


@dataclass(frozen=True)
class Device:
    """A CPU, or a GPU with its compute capability.

    Attributes:
      kind: the name the vendor gives it.
      capability: (major, minor) of an NVIDIA GPU; None on a CPU.
      num_cores: streaming multiprocessors; 1 on a CPU.
    """

    kind: str
    capability: tuple[int, int] | None
    num_cores: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a block may take; 0 where unknown."""
        return SHARED_MEMORY.get(self.capability, 0) if self.capability else 0

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is a GPU of that compute capability or newer."""
        return self.capability is not None and self.capability >= (major, minor)


def current_device() -> Device:
    """The device that the code being traced will run on."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform == "gpu":
        return Device(abstract.device_kind, _capability(abstract.device_kind), abstract.num_cores)
    return _own_device()


@functools.lru_cache
def _own_device() -> Device:
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return Device(device.device_kind, None)
    major, minor = str(device.compute_capability).split(".")
    return Device(device.device_kind, (int(major), int(minor)), device.core_count)


def _capability(kind: str) -> tuple[int, int] | None:
    return next((value for name, value in _KINDS.items() if name in kind), None)
