"""Every rounding point is still there in the code compiled for an A100 and an H200.

Plain bfloat16 code would lose some of them on the A100 only, where no test on a CPU could see it.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from gemma_jax.config import PRESETS
from gemma_jax.model.layers import gelu_mul, rms_norm, softcap
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import Numerics
from gemma_jax.testing import aot

pytestmark = pytest.mark.aot

HF, VLLM = Numerics(), Numerics(rounding="vllm")
D = PRESETS["e2b"].hidden_size


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rope(numerics):
    return lambda x, cos, sin: apply_rope(x, (cos, sin), numerics)


ROPE = (bf16(8, 64, 1, 8, 512), f32(8, 64, 256), f32(8, 64, 256))
# name: function, arguments, roundings of one output element; RoPE computes two halves.
CASES = {
    "softcap": (lambda z: softcap(z, 30.0, HF), [bf16(8, 4096)], 3),
    "norm, hf": (lambda x, w: rms_norm(x, w, 1e-6, HF), [bf16(8, D), bf16(D)], 1),
    "norm, vllm": (lambda x, w: rms_norm(x, w, 1e-6, VLLM), [bf16(8, D), bf16(D)], 1),
    "rope, hf": (rope(HF), ROPE, 6),
    "rope, vllm": (rope(VLLM), ROPE, 2),
    "gelu_mul": (lambda g, u: gelu_mul(g, u, HF), [bf16(8, 6144), bf16(8, 6144)], 2),
}


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_roundings_survive_compilation(name, target):
    function, shapes, expected = CASES[name]
    text = aot.compile_for(aot.target_mesh(target), function, *shapes).as_text()
    assert len(re.findall(r" reduce-precision\(", text)) == expected
