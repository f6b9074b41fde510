"""Host memory while a checkpoint loads, measured in a process of its own."""

import json
import subprocess
import sys

import pytest

from gemma_jax.config import ModelConfig
from gemma_jax.testing.checkpoint import write_checkpoint

MIB = 1 << 20
ALLOWED_MIB = 64
CONFIG = ModelConfig(
    vocab_size=100_000,
    vocab_size_per_layer_input=100_000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=5,
    layer_types=("sliding_attention",) * 4 + ("full_attention",),
    num_attention_heads=4,
    num_key_value_heads=1,
    hidden_size_per_layer_input=256,
    head_dim=64,
    global_head_dim=128,
)

MEASURE = """
import json, sys, threading, time
import jax
from gemma_jax.checkpoint.load import load_checkpoint

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

jax.block_until_ready(jax.device_put(1.0))
peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
_, leaves = load_checkpoint(sys.argv[1], sys.argv[2])
done = True
thread.join()
arrays = sum(leaf.nbytes for leaf in leaves.values())
print(json.dumps({"above": peak - before - arrays, "arrays": arrays}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of about 400 MB whose largest tensor takes most of it."""
    path = tmp_path_factory.mktemp("large") / "hf"
    write_checkpoint(CONFIG, path, seed=0)
    return path


def measure(path, dtype):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), dtype],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_little_beyond_the_arrays(large, dtype):
    result = measure(large, dtype)
    assert result["arrays"] > 370 * MIB
    assert result["above"] < ALLOWED_MIB * MIB
