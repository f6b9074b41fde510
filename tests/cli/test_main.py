"""`gemma-jax` itself: finding the sub-command, help without JAX, exit codes."""

import subprocess
import sys

import pytest

from gemma_jax import cli
from gemma_jax.cli import options
from gemma_jax.errors import CapacityError, CheckpointError
from gemma_jax.version import __version__

pytestmark = pytest.mark.fast

REPORT_IMPORTS = """
import sys
from gemma_jax.cli import main
try:
    main(sys.argv[1:])
finally:
    print("jax imported:", "jax" in sys.modules)
"""


@pytest.mark.parametrize("command", [(), *((name,) for name in cli.COMMANDS)])
def test_help_does_not_import_jax(command):
    argv = [sys.executable, "-c", REPORT_IMPORTS, *command, "--help"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage: gemma-jax" in result.stdout
    assert "jax imported: False" in result.stdout


def test_help_of_parity_compare_names_the_defaults_of_the_reference(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["parity", "compare", "--help"])
    text = capsys.readouterr().out
    assert "whose bfloat16 roundings to reproduce (default: the reference's)" in text
    assert "dtype of weights and activations (default: the reference's)" in text
    assert "(default: None)" not in text


def test_version_is_the_package_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"gemma-jax {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["genrate"],
        ["generate"],
        ["generate", "--prompt", "a", "--bogus"],
        ["generate", "--prompt", "a", "--max-tok", "3"],
        ["generate", "--prompt", "a", "--max-tokens", "three"],
        ["generate", "--prompt", "a", "--prompts", "b.jsonl"],
        ["generate", "--prompt", "a", "--rounding", "up"],
        ["generate", "--prompt", "a", "--dtype", "float16"],
        ["generate", "--prompt", "a", "--logprobs", "3"],
        ["chat", "--bogus"],
        ["collect-env", "--bogus"],
    ],
)
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "0"], "top_p is 0.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-tokens", "-1"], "max_tokens is -1"),
        (["--logprobs", "21", "--output", "-"], "logprobs is 21"),
        (["--stop", ""], "stop[0] is empty"),
    ],
)
def test_bad_sampling_value_is_refused_before_the_model_loads(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda args: pytest.fail("the model was loaded"))
    assert cli.main(["generate", "--prompt", "a", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gemma-jax: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("error", "code"), [(CheckpointError("no such model"), 2), (CapacityError("no room"), 1)]
)
def test_own_errors_print_one_line_and_no_traceback(error, code, capsys, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr(options, "load_model", fail)
    assert cli.main(["generate", "--prompt", "a"]) == code
    assert capsys.readouterr().err == f"gemma-jax: error: {error}\n"


def test_ctrl_c_exits_with_130(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "load_model", interrupt)
    assert cli.main(["generate", "--prompt", "a"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_reader_that_goes_away_ends_the_command_quietly():
    argv = [sys.executable, "-m", "gemma_jax.cli", "collect-env"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait(timeout=60) == cli.EXIT_BROKEN_PIPE
    assert error == ""
