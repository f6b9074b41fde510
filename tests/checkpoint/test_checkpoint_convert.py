"""Conversion between the formats: bits survive, and a destination is whole or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint_helpers import BF16, SHAPES, same
from safetensors.numpy import load_file

from gemma_jax.checkpoint import atomic, hf
from gemma_jax.checkpoint.cli import main
from gemma_jax.checkpoint.convert import to_hf, to_orbax
from gemma_jax.checkpoint.hf import load_hf, write_hf
from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.checkpoint.orbax import iter_leaves, load_orbax, save_orbax
from gemma_jax.checkpoint.side_files import load_config
from gemma_jax.checkpoint.verify import verify
from gemma_jax.errors import CheckpointError, UnsupportedError


@pytest.fixture
def orbax_copy(make_source, tmp_path):
    """A source and its orbax conversion."""
    source = make_source()
    to_orbax(source.write(), tmp_path / "orbax")
    return source, tmp_path / "orbax"


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_to_orbax_and_back_keeps_every_bit(make_source, tmp_path, name, dtype):
    source = make_source(name, dtype)
    to_orbax(source.write(), tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    unused = set(source.tensors) - set(written)
    assert all("self_attn" in tensor for tensor in unused)
    assert written.keys() == source.tensors.keys() - unused
    for tensor, value in written.items():
        assert same(value, source.tensors[tensor]), tensor
    assert load_config(tmp_path / "hf") == load_config(tmp_path / "orbax") == source.config
    for other in ("orbax", "hf"):
        report = verify(source.path, tmp_path / other)
        assert report.ok
        assert report.compared == len(written)


def test_orbax_loads_as_the_same_leaves(orbax_copy):
    source, copy = orbax_copy
    config, leaves = load_checkpoint(copy)
    expected = load_hf(source.path, source.config)
    assert config == source.config
    assert list(leaves) == list(expected)
    assert all(same(leaves[path], expected[path]) for path in expected)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves.values())


@pytest.mark.parametrize("stored", [BF16, np.dtype(np.float32), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_orbax_casts_as_safetensors_does(make_source, tmp_path, stored, asked):
    source = make_source("12b-tiny", stored)
    to_orbax(source.write(), tmp_path / "orbax")
    leaves = load_orbax(tmp_path / "orbax", source.config, asked)
    expected = load_hf(source.path, source.config, asked)
    assert all(same(leaves[path], expected[path]) for path in expected)


def test_orbax_leaves_go_where_sharding_for_says(orbax_copy):
    source, copy = orbax_copy
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    leaves = load_orbax(copy, source.config, sharding_for=lambda path, shape: sharding)
    assert all(leaf.sharding == sharding for leaf in leaves.values())


def test_orbax_refuses_float16(orbax_copy):
    source, copy = orbax_copy
    with pytest.raises(UnsupportedError, match="overflow"):
        load_orbax(copy, source.config, "float16")


def test_iter_leaves_gives_every_leaf_once_in_any_batching(orbax_copy, monkeypatch):
    source, copy = orbax_copy
    monkeypatch.setattr("gemma_jax.checkpoint.orbax._BATCH_BYTES", 200_000)
    found = list(iter_leaves(copy, source.config))
    expected = load_hf(source.path, source.config, None)
    assert [path for path, _ in found] == list(expected)
    assert all(same(leaf, expected[path]) for path, leaf in found)


def test_shards_hold_at_most_the_asked_bytes_and_load_again(make_source, tmp_path):
    source = make_source()
    to_hf(source.write(), tmp_path / "hf", shard_bytes=300_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    total = 0
    for file in files:
        tensors = load_file(tmp_path / "hf" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        sizes = [tensor.nbytes for tensor in tensors.values()]
        assert sum(sizes) <= 300_000 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    assert verify(source.path, tmp_path / "hf").ok


def test_conversion_can_cast(make_source, tmp_path):
    source = make_source("12b-tiny", np.float32)
    to_orbax(source.write(), tmp_path / "orbax", dtype="bfloat16")
    config, leaves = load_checkpoint(tmp_path / "orbax")
    assert config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in leaves.values()} == {BF16}
    expected = source.tensors["model.embed_tokens.weight"].astype(BF16)
    assert same(leaves["embed/table"], expected)


def test_conversion_to_float16_is_refused(make_source, tmp_path):
    with pytest.raises(UnsupportedError, match="float16"):
        to_orbax(make_source().write(), tmp_path / "orbax", dtype="float16")
    assert not (tmp_path / "orbax").exists()


def test_tokenizer_template_and_generation_config_travel_along(make_source, tmp_path):
    source = make_source()
    source.write()
    names = ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
    for name in names:
        (source.path / name).write_text(f"content of {name}")
    to_orbax(source.path, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "hf")
    for name in names:
        assert (tmp_path / "hf" / name).read_text() == f"content of {name}"


def test_a_multimodal_config_becomes_a_text_only_one_beside_text_only_weights(
    make_source, tmp_path
):
    source = make_source()
    source.config_json = {"model_type": "gemma4", "text_config": source.config_json}
    to_orbax(source.write(), tmp_path / "orbax")
    assert json.loads((tmp_path / "orbax" / "config.json").read_text())["model_type"] == "gemma4"
    to_hf(tmp_path / "orbax", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["model_type"] == "gemma4_text"
    assert written["architectures"] == ["Gemma4ForCausalLM"]
    assert load_config(tmp_path / "hf") == source.config


# --- verify ---------------------------------------------------------------------------------------


def test_verify_lists_what_is_not_used(make_source, tmp_path):
    source = make_source()
    source.tensors["model.vision_tower.std_bias"] = np.zeros((3,), np.float32)
    to_orbax(source.write(), tmp_path / "orbax")
    report = verify(source.path, tmp_path / "orbax")
    dropped = report.dropped[str(source.path)]
    assert len(dropped) == 16
    assert "model.vision_tower.std_bias" in dropped
    assert report.dropped[str(tmp_path / "orbax")] == ()


@pytest.mark.parametrize("value", [np.float32(1e-30), np.float32(-0.0)])
def test_verify_finds_one_changed_bit(make_source, value):
    a, b = make_source(dtype=np.float32, folder="a"), make_source(dtype=np.float32, folder="b")
    name = "model.layers.3.mlp.down_proj.weight"
    a.tensors[name][5, 7] = 0.0
    b.tensors[name][5, 7] = value
    report = verify(a.write(), b.write())
    assert not report.ok
    assert len(report.different) == 1
    assert report.different[0].startswith("layers.3.mlp.down_proj.weight: ")


def test_verify_tells_dtypes_apart(make_source):
    a, b = make_source(folder="a"), make_source(folder="b")
    b.tensors["model.norm.weight"] = b.tensors["model.norm.weight"].astype(np.float32)
    report = verify(a.write(), b.write())
    assert report.different == ("norm.weight: bfloat16 against float32",)


def test_verify_compares_the_configs(make_source):
    a, b = make_source(folder="a"), make_source(folder="b")
    b.config_json["rms_norm_eps"] = 1e-5
    report = verify(a.write(), b.write())
    assert not report.ok
    assert report.config_differences == ("rms_norm_eps: 1e-06 against 1e-05",)


def test_verify_refuses_models_of_different_shapes(make_source):
    a, b = make_source(folder="a"), make_source("e4b-tiny", folder="b")
    with pytest.raises(CheckpointError, match=r"different models .*hidden_size: 64 against 80"):
        verify(a.write(), b.write())


# --- bad leaves and broken orbax directories ------------------------------------------------------


@pytest.mark.parametrize("write", [save_orbax, write_hf])
def test_leaves_that_do_not_fit_the_config_are_refused(make_source, tmp_path, write):
    source = make_source()
    leaves = load_hf(source.write(), source.config)
    bad = dict(leaves)
    bad["norm"] = np.zeros((3,), np.float32)
    bad["extra"] = bad["norm"]
    bad["layers/0/layer_scalar"] = np.zeros((1,), np.int32)
    del bad["ple/norm"]
    with pytest.raises(CheckpointError) as caught:
        write(bad, source.config, tmp_path / "out")
    message = str(caught.value)
    assert "leaf norm: shape [3] (float32), expected [64]" in message
    assert "leaf extra: unknown" in message
    assert "leaf layers/0/layer_scalar: dtype int32 (shape [1]), expected bfloat16" in message
    assert "leaf ple/norm: missing; expected shape [16]" in message
    assert not (tmp_path / "out").exists()


def test_orbax_of_another_model_names_leaf_and_shapes(orbax_copy):
    source, copy = orbax_copy
    wider = source.config.replace(intermediate_size=256)
    with pytest.raises(CheckpointError) as caught:
        load_orbax(copy, wider)
    line = "leaf layers/0/mlp/down: shape [64, 128] (bfloat16), expected [64, 256]"
    assert line in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"format": "gemma_jax orbax", "version": 99}'])
def test_an_unknown_marker_is_refused(orbax_copy, text):
    _, copy = orbax_copy
    (copy / "gemma_jax.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"gemma_jax\.json"):
        load_checkpoint(copy)


@pytest.mark.parametrize("damage", ["gone", "no metadata", "data cut", "end cut"])
def test_damaged_orbax_data_is_a_checkpoint_error(orbax_copy, damage):
    _, copy = orbax_copy
    params = copy / "params"
    if damage == "gone":
        params.rename(copy / "elsewhere")
    elif damage == "no metadata":
        (params / "_METADATA").unlink()
    else:
        cut_data(copy, kept=0.5 if damage == "data cut" else 0.8)
    with pytest.raises(
        CheckpointError, match=r"params/ holds no readable|orbax data cannot be read"
    ):
        load_checkpoint(copy)


def cut_data(checkpoint, kept):
    """Cuts the files of an orbax checkpoint: all by half (metadata too), or the largest only."""
    files = [*checkpoint.glob("params/d/*"), *checkpoint.glob("params/ocdbt.process_0/d/*")]
    for file in files if kept == 0.5 else [max(files, key=lambda file: file.stat().st_size)]:
        os.truncate(file, int(file.stat().st_size * kept))


@pytest.mark.parametrize("kept", [0.5, 0.8])
def test_reads_left_behind_by_a_damaged_leaf_print_nothing(orbax_copy, kept):
    """Each would end in a stack trace of its own, some after the error was raised."""
    _, copy = orbax_copy
    cut_data(copy, kept)
    code = (
        "import sys, time\n"
        "from gemma_jax.checkpoint.load import load_checkpoint\n"
        "from gemma_jax.errors import CheckpointError\n"
        "for _ in range(5):\n"
        "    try:\n"
        "        load_checkpoint(sys.argv[1])\n"
        "    except CheckpointError as error:\n"
        "        print(error)\n"
        "time.sleep(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 5


# --- whole or absent ------------------------------------------------------------------------------


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "source")


@pytest.mark.parametrize("convert", [to_orbax, to_hf])
def test_an_existing_destination_is_refused_and_untouched(make_source, tmp_path, convert):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("mine")
    with pytest.raises(CheckpointError, match=r"exists already.*--overwrite"):
        convert(make_source().write(), target)
    assert (target / "config.json").read_text() == "mine"
    assert leftovers(tmp_path) == ["target"]


@pytest.mark.parametrize("convert", [to_orbax, to_hf])
def test_overwrite_replaces_a_checkpoint_whole(make_source, tmp_path, convert):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("old")
    (target / "stale.safetensors").write_text("old")
    source = make_source()
    convert(source.write(), target, overwrite=True)
    assert verify(source.path, target).ok
    assert not (target / "stale.safetensors").exists()
    assert leftovers(tmp_path) == ["target"]


def test_overwrite_does_not_delete_what_is_not_a_checkpoint(make_source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        to_hf(make_source().write(), target, overwrite=True)
    assert (target / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("target", ["source", "."])
def test_a_destination_that_holds_the_source_is_refused(make_source, tmp_path, target):
    source = make_source()
    source.write()
    with pytest.raises(CheckpointError, match="is the source or holds it"):
        to_hf(source.path, tmp_path / target, overwrite=True)
    assert load_checkpoint(source.path)


def test_a_full_disk_is_refused_before_writing(make_source, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(CheckpointError, match=r"the disk has 0\.00 GB free"):
        to_hf(make_source().write(), tmp_path / "target")
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(make_source, tmp_path, monkeypatch):
    write_file = hf.safetensors_io.write_file
    written = []

    def fills_up(path, plan, tensors):
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        write_file(path, plan, tensors)

    monkeypatch.setattr(hf.safetensors_io, "write_file", fills_up)
    with pytest.raises(CheckpointError, match=r"target: cannot be written .*No space left"):
        to_hf(make_source().write(), tmp_path / "target", shard_bytes=300_000)
    assert leftovers(tmp_path) == []


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
from gemma_jax.checkpoint.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["to-orbax", "to-hf"])
def test_a_write_that_the_system_refuses_leaves_nothing(make_source, tmp_path, command):
    arguments = [command, str(make_source().write()), str(tmp_path / "target")]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path / 'target'}: " in done.stderr
    assert "File too large" in done.stderr
    assert leftovers(tmp_path) == []


def test_a_parent_that_cannot_be_written_is_named(make_source, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="target: cannot be written"):
        to_hf(make_source().write(), tmp_path / "file" / "target")


KILLED = """
import sys, time
from gemma_jax.checkpoint import {module} as module
def hang(*args, **kwargs):
    print("writing", flush=True)
    time.sleep(600)
module.{function} = hang
from gemma_jax.checkpoint.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "module", "function"),
    [("to-orbax", "orbax", "config_json"), ("to-hf", "hf", "text_config_json")],
)
def test_a_killed_conversion_leaves_no_destination_and_can_be_repeated(
    make_source, tmp_path, command, module, function
):
    source, target = make_source(), tmp_path / "target"
    arguments = [command, str(source.write()), str(target)]
    code = KILLED.format(module=module, function=function)
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    (left,) = leftovers(tmp_path)
    assert left.startswith(".target.")
    assert left.endswith(".tmp")
    assert main(arguments) == 0
    assert verify(source.path, target).ok


def test_an_interrupted_conversion_cleans_up(make_source, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "text_config_json", interrupt)
    assert main(["to-hf", str(make_source().write()), str(tmp_path / "target")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert leftovers(tmp_path) == []
