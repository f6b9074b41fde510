"""The decode loop compiled for a GPU: a CUDA graph a call, few kernels a step, no cache copied."""

import re

import jax
import jax.numpy as jnp
import pytest

from gemma_jax import runner
from gemma_jax.call_arrays import DecodeRows, PageTables
from gemma_jax.checkpoint.names import leaf_shapes
from gemma_jax.config import FULL, SLIDING
from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model import row_blocks
from gemma_jax.model.cache import CacheLayout, init_cache
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.sampling import RowState, SamplingStatics, SamplingTable
from gemma_jax.sharding import named_parameters
from gemma_jax.testing import aot
from gemma_jax.testing.configs import named_config

pytestmark = pytest.mark.aot

PLAIN = Numerics()
LAYERS = 4
SLOTS = 64
KERNELS_OF_A_LAYER = 7
OTHER_KERNELS = 30
"""Embedding, per-layer inputs, RoPE tables, head, sampling, loop."""


def shapes(rows, numerics=PLAIN, kernels=AUTO):
    """Arguments of `runner.decode` for E2B cut to four layers, as shapes."""
    config = named_config("e2b").replace(
        num_hidden_layers=LAYERS, layer_types=(SLIDING, FULL) * 2, num_kv_shared_layers=2,
        vocab_size=4096, vocab_size_per_layer_input=4096,
    )  # fmt: skip
    layout = CacheLayout.plan(config, rows, 1024, 256, 128)
    program = runner.make_program(config, numerics, layout, kernels)
    sizes = leaf_shapes(config)
    names = named_parameters(abstract_model(config, numerics))
    leaves = [jax.ShapeDtypeStruct(sizes[name], jnp.bfloat16) for name in names]
    cache = jax.eval_shape(lambda: init_cache(config, layout, jnp.bfloat16))

    def column(dtype, *rest):
        return jax.ShapeDtypeStruct((rows, *rest), dtype)

    i, f = jnp.int32, jnp.float32
    table = SamplingTable(
        column(f), column(i), column(f), column(f), column(f), column(f), column(f), column(i),
        column(i), column(jnp.uint32, 2), column(i, 0), column(i, 0), column(f, 0),
    )  # fmt: skip
    state = RowState(*(jax.ShapeDtypeStruct((SLOTS,), d) for d in (i, i, i, jnp.bool_)))
    size = layout.page_size
    tables = PageTables(
        column(i, layout.full_slots // size), column(i, layout.window_slots // size)
    )
    return program, (leaves, cache, state, DecodeRows(column(i), column(i)), tables, table)


def thunks_of(folder):
    """What XLA runs of the decode program, one line each, indented by the loops around it."""
    (path,) = folder.glob("*decode*thunk_sequence_after_thunk_passes.txt")
    return path.read_text()


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_call_is_one_graph_of_few_kernels_a_step_and_copies_no_cache(rows, target, tmp_path):
    if (rows, target) == (64, "a100"):
        pytest.skip("XLA multiplies that many rows there, with kernels of its own between ours")
    program, arguments = shapes(rows)

    def decode(*arrays):
        return runner.decode(program, 8, SamplingStatics(), *arrays)

    compiled = aot.compile_for(
        aot.target_mesh(target), decode, *arguments, dump_to=tmp_path, donate_argnums=(1, 2),
        compiler_options=runner.ONE_GRAPH,
    )  # fmt: skip
    cache = {",".join(map(str, x.shape)) for x in jax.tree.leaves(arguments[1])}
    copied = re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", compiled.as_text())
    assert not cache & set(copied)

    whole = thunks_of(tmp_path)
    assert [line[:19] for line in whole.splitlines() if "kCommandBuffer" in line] == [
        "000: kCommandBuffer"
    ]
    step = whole.rsplit("body:", 1)[1].splitlines()
    # A Mosaic kernel is a custom call.
    kernels = [line for line in step if re.match(r" {12,}\d+: kCustom(Kernel|Call)", line)]
    assert len(kernels) > KERNELS_OF_A_LAYER * LAYERS
    norms = 3 * LAYERS if rows > 2 else 0  # apart from three rows on
    assert len(kernels) <= KERNELS_OF_A_LAYER * LAYERS + norms + OTHER_KERNELS


@pytest.mark.parametrize("target", aot.TARGETS)
def test_the_host_turns_the_loops_of_a_batch_invariant_call_and_knows_how_often(target, tmp_path):
    """XLA fails at run time if one loop of a graph is in another that it unrolls."""
    program, arguments = shapes(64, Numerics(batch_invariant=True), Kernels("pallas"))

    def decode(*arrays):
        return runner.decode(program, 8, SamplingStatics(), *arrays)

    compiled = aot.compile_for(
        aot.target_mesh(target), decode, *arguments, dump_to=tmp_path, donate_argnums=(1, 2)
    )
    trips = re.findall(r'known_trip_count":\{"n":"(\d+)"\}', compiled.as_text())
    blocks = 64 // row_blocks.CPU_ROWS
    assert sorted(map(int, trips)) == sorted([runner.STEP_BLOCK, blocks])

    outer = []  # what surrounds a line, by indentation
    loops = 0
    for line in thunks_of(tmp_path).splitlines():
        depth = len(line) - len(line.lstrip())
        outer = [(d, name) for d, name in outer if d < depth]
        if "kWhile" in line:
            loops += 1
            assert not any("kCommandBuffer" in name for _, name in outer)
        outer.append((depth, line))
    assert loops == 3  # until no row goes on, the steps of a block, blocks of rows
