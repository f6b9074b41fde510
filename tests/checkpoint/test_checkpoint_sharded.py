"""Leaves spread over several devices: four virtual CPU devices in a process of their own."""

import subprocess
import sys

from gemma_jax.checkpoint.convert import to_orbax

CODE = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from gemma_jax.checkpoint.load import load_checkpoint

mesh = jax.make_mesh((4,), ("tensor",))
def sharding_for(path, shape):
    split = path.endswith(("mlp/down", "embed/table"))
    axis = len(shape) - 1 if split else None
    spec = [None] * len(shape)
    if split:
        spec[axis] = "tensor"
    return NamedSharding(mesh, PartitionSpec(*spec))

for path in sys.argv[1:]:
    for dtype in ("bfloat16", "float32"):
        _, plain = load_checkpoint(path, dtype)
        _, spread = load_checkpoint(path, dtype, sharding_for)
        for name, leaf in spread.items():
            assert leaf.sharding == sharding_for(name, leaf.shape), name
            assert np.array_equal(np.asarray(leaf), np.asarray(plain[name])), name
        shard = spread["embed/table"].addressable_shards[0].data
        assert shard.shape[1] * 4 == spread["embed/table"].shape[1]
print("same")
"""


def test_sharded_leaves_equal_unsharded_ones(make_source, tmp_path, monkeypatch):
    source = make_source()
    to_orbax(source.write(), tmp_path / "orbax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    paths = [str(source.path), str(tmp_path / "orbax")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *paths], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "same\n", done.stderr
