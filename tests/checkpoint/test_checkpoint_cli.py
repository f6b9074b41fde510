"""`gemma-jax convert` and `python -m convert`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gemma_jax.checkpoint.cli import main

ROOT = Path(__file__).parents[2]


def test_the_three_commands_work_together(make_source, tmp_path, capsys):
    source = str(make_source().write())
    orbax, hf = str(tmp_path / "orbax"), str(tmp_path / "hf")
    assert main(["to-orbax", source, orbax]) == 0
    assert main(["to-hf", orbax, hf, "--shard-gib", "0.0005"]) == 0
    assert main(["verify", source, hf]) == 0
    out = capsys.readouterr().out
    assert "160 of 160 tensors are bit-identical" in out
    assert "15 tensors that the text decoder does not use" in out
    assert "  model.layers.*.self_attn.k_proj.weight (5)" in out
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1


def test_verify_exits_with_1_and_names_the_tensor(make_source, capsys):
    a, b = make_source(folder="a"), make_source(folder="b")
    b.tensors["model.norm.weight"] += np.ones((), b.tensors["model.norm.weight"].dtype)
    assert main(["verify", str(a.write()), str(b.write())]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT norm.weight: 64 of 64 elements differ" in out
    assert "159 of 160 tensors are bit-identical" in out


def test_an_error_is_one_message_on_stderr_and_exit_code_2(tmp_path, capsys):
    assert main(["to-orbax", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gemma-jax convert: error: ")
    assert "nowhere: no such file or directory" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["to-gguf", "a", "b"],
        ["to-orbax", "a"],
        ["to-orbax", "a", "b", "--dtype", "float16"],
        ["to-hf", "a", "b", "--shard-gib", "0"],
        ["to-hf", "a", "b", "--shard-gib", "nan"],
        ["to-hf", "a", "b", "--shard-gib", "many"],
        ["verify", "a", "b", "--overwrite"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: gemma-jax convert" in capsys.readouterr().err


def test_help_does_not_import_jax():
    code = (
        "import sys\n"
        "from gemma_jax.checkpoint.cli import main\n"
        "try: main(['to-hf', '--help'])\n"
        "finally: assert not {'jax', 'orbax', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--shard-gib" in done.stdout


def test_python_m_convert_is_the_same_command_and_says_only_what_matters(make_source, tmp_path):
    source = make_source().write()
    command = [sys.executable, "-m", "convert", "to-orbax", str(source), str(tmp_path / "orbax")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout == f"wrote {tmp_path / 'orbax'} (orbax)\n"
    assert done.stderr == ""
