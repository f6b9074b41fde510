"""Standard streams that are closed or full, in a process of their own."""

import os
import subprocess
import sys

import pytest


def run(command, redirection):
    line = f'"{sys.executable}" -m gemma_jax.cli {command} {redirection}'
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("command", ["generate --prompts -", "generate --prompts - --output -"])
def test_a_closed_stdin_reads_as_an_empty_one(command):
    done = run(command, "<&-")
    assert (done.returncode, done.stderr) == (2, "gemma-jax: error: stdin has no rows\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_stdout_is_an_error_without_a_traceback():
    done = run("collect-env", ">/dev/full")
    message = "gemma-jax: error: output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)
