"""What ptxas makes of every kernel at the shapes of published models, for an A100 and an H200."""

import jax
import pytest

from gemma_jax.errors import UnsupportedError
from gemma_jax.pallas.cases import all_cases
from gemma_jax.testing import aot

pytestmark = pytest.mark.aot

SHARED_MEMORY = {"a100": 166_912, "h200": 232_448}
SPILLS_ALLOWED = {
    ("prefill_attention_mosaic_mosaic_gpu_kernel", "h200"): 32,
    ("decode_attention_512", "a100"): 4,
}
"""Bytes a kernel may spill on a target.

At head width 512 the output warpgroups of the Mosaic kernel need all the registers there are; a few
go to local memory once a tile. No tile without spills came near its speed (docs/experiments.md).
One register of several queries a sequence at head width 512 on an A100 is not worth a smaller tile.
"""

BETWEEN = ("e4b", "12b", "26b")
"""Models whose shapes lie between those of E2B and 31B; left out for time."""
REPEATED = (
    "ragged", "chunk", "sliding, 1 x 32768", "sliding, 64 x 32768",
    "q|k|v, sliding, 16384", "down, shared, 16384", "o, full, 16384", "ple gate, 64", "head, 64",
)  # fmt: skip
"""Cases whose program is another one's, or differs from it in a bound of the grid or a loop."""
LEFT_OUT = (*BETWEEN, *REPEATED)
BENCHED = [c for c in all_cases() if c.bench and not any(x in c.name.lower() for x in LEFT_OUT)]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("case", BENCHED, ids=lambda case: f"{case.op}-{case.name}")
def test_a_kernel_does_not_spill_and_fits_shared_memory(case, target, capfd):
    mesh = aot.target_mesh(target)
    shapes = jax.eval_shape(lambda: case.inputs(0))
    try:
        aot.compile_for(mesh, lambda x: case.call(**x, implementation="pallas"), shapes)
    except UnsupportedError as error:
        pytest.skip(str(error))
    kernels = aot.parse_ptxas(capfd.readouterr().err)
    assert kernels, "ptxas reported nothing"
    for kernel in kernels:
        assert kernel.spill_bytes <= SPILLS_ALLOWED.get((kernel.name, target), 0), kernel
        assert kernel.shared_bytes <= SHARED_MEMORY[target], kernel
