"""Broken checkpoints: one error that names the tensor and what was expected."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from gemma_jax.checkpoint.hf import load_hf
from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.checkpoint.safetensors_io import read_header
from gemma_jax.errors import CheckpointError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
TABLE = "model.embed_tokens.weight"
UNUSED = "model.layers.9.self_attn.k_proj.weight"


def error(source) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_hf(source.path, source.config)
    return str(caught.value)


def test_a_wrong_shape_names_both_shapes_and_the_dtype(make_source):
    source = make_source()
    source.tensors[Q_PROJ] = source.tensors[Q_PROJ][:100]
    source.write()
    assert f"{Q_PROJ}: shape [100, 64] (BF16), expected [128, 64]" in error(source)


def test_a_wrong_shape_of_an_unused_tensor_is_an_error_too(make_source):
    source = make_source()
    source.tensors[UNUSED] = source.tensors[UNUSED][:1]
    source.write()
    assert f"{UNUSED}: shape [1, 64] (BF16), expected [64, 64]" in error(source)


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.int8, "I8"), (np.int64, "I64"), (np.float64, "F64")]
)
def test_integers_and_doubles_are_refused(make_source, dtype, name):
    source = make_source()
    source.tensors[Q_PROJ] = source.tensors[Q_PROJ].astype(dtype)
    source.write()
    message = error(source)
    assert f"{Q_PROJ}: dtype {name} (shape [128, 64]), expected one of BF16, F16, F32" in message


def test_a_missing_tensor_is_named_with_its_shape(make_source):
    source = make_source()
    del source.tensors[Q_PROJ]
    source.write()
    assert "layers.0.self_attn.q_proj.weight: missing; expected shape [128, 64]" in error(source)


def test_an_unknown_tensor_is_named(make_source):
    source = make_source()
    source.tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros((3,), np.float32)
    source.write()
    assert "model.layers.0.self_attn.q_proj.bias (F32 [3]): unknown tensor" in error(source)


def test_k_eq_v_layers_have_no_v_proj(make_source):
    source = make_source("12b-tiny")
    name = "model.layers.5.self_attn.v_proj.weight"
    source.tensors[name] = source.tensors["model.layers.5.self_attn.k_proj.weight"].copy()
    source.write()
    assert f"{name} (BF16 [64, 96]): unknown tensor" in error(source)


@pytest.mark.parametrize("change", ["value", "dtype"])
def test_an_untied_lm_head_is_refused(make_source, change):
    source = make_source()
    head = source.tensors[TABLE].copy()
    if change == "value":
        head[-1, -1] += 1
    else:
        head = head.astype(np.float32)
    source.tensors["lm_head.weight"] = head
    source.write()
    kind = "BF16" if change == "value" else "F32"
    assert f"lm_head.weight ({kind} [1024, 64]) differs from {TABLE} (BF16 [1024, 64])" in error(
        source
    )


def test_the_same_tensor_under_two_prefixes_is_a_duplicate(make_source):
    source = make_source()
    other = Q_PROJ.replace("model.", "model.language_model.")
    source.tensors[other] = source.tensors[Q_PROJ].copy()
    source.write()
    message = error(source)
    assert "duplicate" in message
    assert Q_PROJ in message
    assert other in message


def test_the_same_tensor_in_two_shards_is_a_duplicate(make_source):
    source = make_source()
    source.write(shards=2, index=False)
    save_file({Q_PROJ: np.zeros((2,), np.float32)}, source.path / "more.safetensors")
    message = error(source)
    assert f"{Q_PROJ}: duplicate, BF16 [128, 64] in model-0" in message
    assert "F32 [2] in more.safetensors" in message


def test_all_problems_come_in_one_error_and_the_first_ten_are_shown(make_source):
    source = make_source()
    for name in [name for name in source.tensors if "mlp" in name]:
        del source.tensors[name]
    source.write()
    message = error(source)
    assert "30 problems" in message
    assert message.count("missing") == 10
    assert message.endswith("... and 20 more")


# --- index ----------------------------------------------------------------------------------------


def edit_index(source, change):
    path = source.path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_missing_shard_is_an_error(make_source):
    source = make_source()
    source.write(shards=3)
    (source.path / "model-00002-of-00003.safetensors").unlink()
    message = error(source)
    assert "shard model-00002-of-00003.safetensors is missing (it holds model." in message


def test_an_index_that_names_a_missing_tensor_is_an_error(make_source):
    source = make_source()
    source.write(shards=2)
    file = "model-00001-of-00002.safetensors"
    edit_index(source, lambda index: index["weight_map"].update({"model.ghost": file}))
    assert f"model.ghost: missing from {file}, where the index puts it" in error(source)


def test_a_tensor_that_the_index_does_not_name_is_an_error(make_source):
    source = make_source()
    source.write(shards=2)
    edit_index(source, lambda index: index["weight_map"].pop(Q_PROJ))
    assert f"{Q_PROJ} (BF16 [128, 64]): in model-" in error(source)


def test_an_index_that_leaves_the_directory_is_refused(make_source):
    source = make_source()
    source.write(shards=2)
    edit_index(source, lambda index: index["weight_map"].update(x="../other.safetensors"))
    assert "shard '../other.safetensors' is not the name of a" in error(source)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_named(make_source, text):
    source = make_source()
    source.write(shards=2)
    (source.path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in error(source)


# --- container ------------------------------------------------------------------------------------


def container(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_a_well_formed_container_is_read(tmp_path):
    file = container(tmp_path / "x", {"b": entry(8, 16), "a": entry(0, 8)}, bytes(16))
    assert [info.name for info in read_header(file)] == ["a", "b"]


BAD = {
    "empty file": (b"", b"", "header length 0 does not fit a file of 8 bytes"),
    "not JSON": (b"{nonsense", b"", "not valid JSON"),
    "deeply nested": (b"[" * 200_000, b"", "not valid JSON"),
    "not an object": ([1], b"", "not a JSON object"),
    "entry is no object": ({"a": 3}, b"", "a: dtype None"),
    "unknown dtype": ({"a": entry(0, 8, dtype="Q9")}, bytes(8), "a: dtype 'Q9'"),
    "negative size": ({"a": entry(0, 8, [-2])}, bytes(8), r"a: shape \[-2\]"),
    "negative offset": ({"a": entry(-8, 0)}, bytes(8), r"a: data_offsets \[-8, 0\]"),
    "size and shape differ": ({"a": entry(0, 12)}, bytes(12), "span 12 bytes.*takes 8"),
    "truncated": ({"a": entry(0, 8)}, bytes(7), r"truncated: a \(F32 \[2\]\) ends at byte"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "b .* overlaps"),
    "gap": ({"a": entry(0, 8), "b": entry(9, 17)}, bytes(17), "b .* follows a gap"),
    "trailing bytes": ({"a": entry(0, 8)}, bytes(9), "1 bytes after the last tensor"),
    "name twice": (
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
        b"",
        "header names a twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_container_is_refused(tmp_path, case):
    header, data, message = BAD[case]
    file = container(tmp_path / "weights.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_before_reading(tmp_path, length):
    file = container(tmp_path / "x", {}, length=length)
    with pytest.raises(CheckpointError, match=f"header length {length} does not fit a file"):
        read_header(file)


@pytest.mark.parametrize("size", [0, 3, 7])
def test_a_file_too_short_for_a_header_is_refused(tmp_path, size):
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"a file of {size} bytes"):
        read_header(tmp_path / "x")


def test_a_download_cut_short_names_the_tensor_that_is_cut(make_source):
    source = make_source()
    file = source.write() / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 10)
    message = error(source)
    assert "truncated: model." in message


def test_every_broken_shard_is_listed(make_source):
    source = make_source()
    source.write(shards=3)
    for i in (1, 3):
        (source.path / f"model-0000{i}-of-00003.safetensors").write_bytes(b"not weights at all")
    message = error(source)
    assert "2 problems" in message
    assert "model-00001-of" in message
    assert "model-00003-of" in message


def test_git_lfs_pointer_files_are_refused(make_source):
    source = make_source()
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10246621918\n"
    (source.write() / "model.safetensors").write_text(text)
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        load_checkpoint(source.path)
