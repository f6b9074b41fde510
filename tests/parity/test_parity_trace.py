"""The trace: what it stores, what counts as a difference, and every wiring against transformers."""

import json

import ml_dtypes
import numpy as np
import pytest

from gemma_jax.cli import EXIT_BAD_INPUT, EXIT_OK, main
from gemma_jax.errors import RecordError
from gemma_jax.parity.trace import MAX_SHARE, compare_values
from gemma_jax.parity.trace_file import load_trace
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS

BF16 = np.dtype(ml_dtypes.bfloat16)


def judged(ours, theirs, dtype="bfloat16"):
    return compare_values(3, "attention", ours, theirs, dtype)


def normal(size):
    return np.random.default_rng(0).normal(size=size)


def test_one_step_in_a_per_cent_of_the_values_is_a_difference():
    theirs = normal(4000).astype(BF16)
    ours = theirs.copy()
    ours[:40] = np.nextafter(theirs[:40], BF16.type(9))
    block = judged(ours, theirs)
    assert (block.differing, block.failed, block.place) == (40, True, "layer 3, attention")
    ours[int(MAX_SHARE * 4000) :] = theirs[int(MAX_SHARE * 4000) :]
    assert not judged(ours, theirs).failed


def test_one_value_that_is_far_off_is_a_difference():
    theirs = normal(4000).astype(BF16)
    ours = theirs.copy()
    ours[7] = BF16.type(float(ours[7]) + 0.5)
    assert judged(ours, theirs).failed


def test_float32_values_are_judged_by_the_rms_of_the_tensor():
    theirs = normal(4000).astype(np.float32)
    assert not judged(theirs + np.float32(2e-5), theirs, "float32").failed
    assert judged(theirs + np.float32(1e-3), theirs, "float32").failed
    assert judged(theirs * np.float32(np.nan), theirs, "float32").failed


def test_shapes_that_differ_are_refused():
    with pytest.raises(RecordError, match="our shape"):
        judged(np.zeros(3, BF16), np.zeros(4, BF16))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"text"])
def test_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "f.npz"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="not a file of `parity record --hidden`"):
        load_trace(path)
    np.savez(path, header=np.array(json.dumps({"dtype": "int8"})))
    with pytest.raises(RecordError, match="header dtype='int8': expected bfloat16 or float32"):
        load_trace(path)


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
def test_every_sub_block_of_every_wiring_is_that_of_transformers(name, dtype, tmp_path, capsys):
    model = write_checkpoint(TINY_CONFIGS[name], tmp_path / "model", 20_261, dtype)
    ids = np.random.default_rng(1).integers(3, 1024, 130).tolist()
    given = tmp_path / "given.jsonl"
    row = {"id": 0, "prompt_token_ids": ids[:120], "token_ids": ids[120:]}
    given.write_text('{"header": {}}\n' + json.dumps(row) + "\n")
    record, hidden = tmp_path / "r.jsonl", tmp_path / "f.npz"
    flags = ["--engine", "transformers", "--teacher-force", str(given), "--model", str(model)]
    flags += ["--output", str(record), "--hidden", str(hidden), "--hidden-positions"]
    assert main(["parity", "record", *flags, "0,1,50,71,72,79,80,99,100,129"]) == EXIT_OK
    assert load_trace(hidden).dtype == dtype
    compare = ["parity", "compare", str(record), "--model", str(model), "--trace", str(hidden)]
    result = tmp_path / "result.json"
    main([*compare, "--output-json", str(result)])
    print(capsys.readouterr().out)
    assert json.loads(result.read_text())["trace"]["first"] is None
    other = write_checkpoint(TINY_CONFIGS[name], tmp_path / "other", 1, dtype)
    compare[4] = str(other)
    assert main(compare) == EXIT_BAD_INPUT
