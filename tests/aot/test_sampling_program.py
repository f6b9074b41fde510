"""Greedy sampling compiled for a GPU: from bf16 logits to ids without float32 logits in memory."""

import jax
import jax.numpy as jnp
import pytest

from gemma_jax.model.layers import softcap
from gemma_jax.numerics import Numerics
from gemma_jax.sampling import FUSED_STOP_IDS, RowState, SamplingStatics, SamplingTable, sample
from gemma_jax.testing import aot

pytestmark = pytest.mark.aot

ROWS, VOCABULARY, WIDTH = 64, 262_144, 1536


def column(dtype, *rest):
    return jax.ShapeDtypeStruct((ROWS, *rest), dtype)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_greedy_rows_write_no_float32_logits(target):
    numerics, i, f = Numerics(), jnp.int32, jnp.float32
    table = SamplingTable(
        column(f), column(i), column(f), column(f), column(f), column(f), column(f), column(i),
        column(i), column(jnp.uint32, 2), column(i, FUSED_STOP_IDS), column(i, 0), column(f, 0),
    )  # fmt: skip
    state = RowState(column(i), column(i), column(i), column(jnp.bool_))

    def step(h, w, table, state):
        logits = softcap(numerics.einsum("bd,vd->bv", h, w), 30.0, numerics)
        return sample(logits, table, state, SamplingStatics())

    weights = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16)
    compiled = aot.compile_for(
        aot.target_mesh(target), step, column(jnp.bfloat16, WIDTH), weights, table, state
    )
    text = compiled.as_text()
    entry = text[text.index("ENTRY") :]
    assert f"bf16[{ROWS},{VOCABULARY}]" in entry
    assert f"f32[{ROWS},{VOCABULARY}]" not in entry
