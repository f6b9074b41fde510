"""From mapped tensors to device arrays, one leaf at a time, with bounded host memory."""

from collections.abc import Callable

import jax
import numpy as np

from gemma_jax.checkpoint.names import LeafSource

ShardingFor = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""Leaf path and shape → where the leaf lives."""

_MAX_PENDING_BYTES = 512 << 20
_ALIGNMENT = 64


class Placer:
    """Puts leaves on devices while at most 512 MiB of transfers are unfinished.

    A fused or cast leaf is assembled in one host buffer. The CPU backend adopts that buffer as the
    array, so nothing is held twice; other backends get plain leaves straight from the mapped file.
    """

    def __init__(self, sharding_for: ShardingFor | None = None):
        self._sharding_for = sharding_for or _default_sharding
        self._pending: list[jax.Array] = []

    def put(
        self,
        path: str,
        source: LeafSource,
        read: Callable[[str], np.ndarray],
        dtype: np.dtype,
    ) -> jax.Array:
        """The leaf as a `dtype` array; `read` gives each published tensor by name."""
        sharding = self._sharding_for(path, source.shape)
        host = _host_leaf(source, read, dtype, copy=_is_cpu(sharding))
        if len(sharding.device_set) == 1:
            array = jax.device_put(host, sharding)
        else:
            array = jax.make_array_from_callback(
                source.shape, sharding, lambda index: np.ascontiguousarray(host[index])
            )
        self._pending.append(array)
        if sum(a.nbytes for a in self._pending) > _MAX_PENDING_BYTES:
            self.wait()
        return array

    def wait(self) -> None:
        """Returns when every transfer has finished."""
        jax.block_until_ready(self._pending)
        self._pending.clear()


def _default_sharding(path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    del path, shape
    return default_sharding()


def default_sharding() -> jax.sharding.Sharding:
    """The default device, as a sharding."""
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
        device = jax.local_devices(backend=device)[0]
    return jax.sharding.SingleDeviceSharding(device)


def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    return any(device.platform == "cpu" for device in sharding.device_set)


def _host_leaf(
    source: LeafSource, read: Callable[[str], np.ndarray], dtype: np.dtype, *, copy: bool
) -> np.ndarray:
    """The leaf in host memory: a view of the file when nothing has to change and `copy` is off."""
    if not copy and len(source.parts) == 1:
        view = read(source.parts[0].name)
        if view.dtype == dtype:
            return view.reshape(source.shape)
    buffer = _aligned_empty(source.shape, dtype)
    source.fill(buffer, read)
    return buffer


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose address lets the CPU backend use it without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
