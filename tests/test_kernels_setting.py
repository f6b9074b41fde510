"""The `kernels` setting: one default, overrides by op."""

import pytest

from gemma_jax.errors import ConfigError
from gemma_jax.kernels import Kernels

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("given", "default", "overrides"),
    [
        ("auto", "auto", {}),
        ("pallas", "pallas", {}),
        ("pallas, decode_attention = reference", "pallas", {"decode_attention": "reference"}),
        ("gelu_mul=xla", "auto", {"gelu_mul": "xla"}),
        ({"prefill_attention": "cudnn"}, "auto", {"prefill_attention": "cudnn"}),
    ],
)
def test_text_and_mappings_are_read(given, default, overrides):
    kernels = Kernels.parse(given)
    assert kernels.default == default
    assert dict(kernels.overrides) == overrides
    assert Kernels.parse(str(kernels)) == kernels


def test_an_override_beats_the_default():
    kernels = Kernels.parse("reference,gelu_mul=auto,norm_matmul=triton")
    assert kernels.of("gelu_mul") is None
    assert kernels.of("norm_matmul") == "triton"
    assert kernels.of("residual_norm") == "reference"


@pytest.mark.parametrize("given", ["", "fast", "auto,,", "auto,gelu_mul=", "auto,x=xla", 1, None])
def test_anything_else_is_refused(given):
    with pytest.raises(ConfigError, match="kernels"):
        Kernels.parse(given)
