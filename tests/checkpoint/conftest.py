"""Fixtures of the checkpoint tests."""

import numpy as np
import pytest
from checkpoint_helpers import BF16, Source

from gemma_jax.checkpoint.names import hf_shapes, unused_shapes
from gemma_jax.testing.configs import TINY_CONFIGS


@pytest.fixture
def make_source(tmp_path):
    """Builds a `Source` of a tiny config; its tensors are random numbers of one dtype."""

    def make(name: str = "e2b-tiny", dtype=BF16, *, unused: bool = True, folder: str = "source"):
        config = TINY_CONFIGS[name]
        config = config.replace(dtype="float32" if dtype == np.float32 else "bfloat16")
        shapes = hf_shapes(config) | (unused_shapes(config) if unused else {})
        rng = np.random.default_rng(0)
        tensors = {
            f"model.{n}": rng.standard_normal(s, dtype=np.float32).astype(dtype)
            for n, s in shapes.items()
        }
        return Source(tmp_path / folder, config, tensors, config.to_hf())

    return make
