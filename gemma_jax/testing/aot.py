"""Compiles for an A100 or H200 on a machine without a GPU: registers, spills, shared memory, HLO.

Needs the CUDA plugin wheels of the installed jax and the nvcc wheel (the dependency group `aot`);
no driver. Speed and numerics stay unknown. The descriptions of both GPUs are in `gpu_targets/`.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = {"a100": "sm_80", "h200": "sm_90a"}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_gpu_ptx_compiler_extra_flags=-v",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "subprocess_compilation=5",
}
"""To be set before Python starts, so that ptxas reports what each kernel uses."""


def available() -> bool:
    """Whether the plugin and ptxas are installed."""
    return util.find_spec("jax_cuda13_plugin") is not None and _has_ptxas()


def _has_ptxas() -> bool:
    return any(util.find_spec(name) is not None for name in ("nvidia.cuda_nvcc", "nvidia.cu13"))


def target_mesh(name: str) -> Mesh:
    """A mesh of one GPU, "a100" or "h200", known by its description only."""
    text = (resources.files(__package__) / "gpu_targets" / f"{name}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    *arguments: Any,
    dump_to: Path | None = None,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
    **jit_options: Any,
):
    """The executable of `function` for `mesh`; arguments are arrays or shapes, in any tree.

    XLA's own files, the order of kernels among them, go to the folder `dump_to`.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function, **jit_options).trace(*shapes).lower()
    options = {} if dump_to is None else {"xla_dump_to": str(dump_to)}
    return lowered.compile(compiler_options={**compiler_options, **options})


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int


_ENTRY = re.compile(r"Function properties for (\S+)|Compiling entry function '(\S+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(log: str) -> list[Resources]:
    """Kernels of a ptxas -v report, in order. Dynamic shared memory is not in it."""
    found: list[Resources] = []
    name, spill = "", 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1] or entry[2]
        elif spills := _SPILL.search(line):
            spill = int(spills[1])
        elif used := _USED.search(line):
            shared = _SHARED.search(line)
            found.append(Resources(name, int(used[1]), spill, int(shared[1]) if shared else 0))
            spill = 0
    return found


def main() -> int:
    """Says whether this environment can compile for a GPU."""
    print("available" if available() else "not available: install jax-cuda13-plugin and nvcc")
    return 0


if __name__ == "__main__":
    sys.exit(main())
