"""Where each weight lives: one table from logical axis to mesh axis, applied to every leaf.

One device today; the mesh and the specs are carried from the start so that tensor parallelism is a
change of the table's mesh and not of the loader.
"""

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gemma_jax.errors import UnsupportedError

TENSOR_AXIS = "tensor"

MESH_AXIS = {"K": TENSOR_AXIS, "F": TENSOR_AXIS}
"""Logical axes that are split over the tensor axis; every other axis is replicated."""


def make_mesh(tensor_parallel_size: int = 1) -> Mesh:
    """A mesh of the first device.

    Raises:
      UnsupportedError: more than one device is asked for.
    """
    if tensor_parallel_size != 1:
        raise UnsupportedError(
            f"tensor_parallel_size={tensor_parallel_size!r}: only 1 is supported; run one replica"
            " a device instead"
        )
    return jax.make_mesh(
        (1,), (TENSOR_AXIS,), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)
    )


def partition_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The PartitionSpec of a weight with these logical axes."""
    return PartitionSpec(*(MESH_AXIS.get(axis) for axis in axes))


def leaf_shardings(model: nnx.Module, mesh: Mesh) -> dict[str, NamedSharding]:
    """Path → sharding of every weight of an abstract model; paths are joined by '/'."""
    return {
        path: NamedSharding(mesh, partition_spec(param.axes))
        for path, param in named_parameters(model).items()
    }


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Path → parameter, in the order of the flat leaf list."""
    state = nnx.state(model, nnx.Param)
    return {"/".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}
