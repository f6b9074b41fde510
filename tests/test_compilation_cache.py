"""Compiled programs are kept in the user's cache folder, and trouble with it stops nothing."""

import os
import subprocess
import sys

import jax
import pytest

from gemma_jax.compilation_cache import enable_compilation_cache

pytestmark = pytest.mark.fast

COMPILE = """
from gemma_jax.compilation_cache import enable_compilation_cache
folder = enable_compilation_cache()
assert enable_compilation_cache() == folder
import jax
jax.jit(lambda x: x + 1)(1.0)
print(folder)
"""


@pytest.fixture
def unconfigured_jax():
    """JAX as it is before anyone names a cache folder; the tests' own cache comes back after."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


def test_programs_are_written_to_the_configured_folder(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["GEMMA_JAX_CACHE_DIR"] = str(tmp_path)
    argv = [sys.executable, "-c", COMPILE]
    result = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == str(tmp_path / "xla")
    assert result.stderr == ""
    assert any(file.name.startswith("jit_") for file in (tmp_path / "xla").iterdir())


def test_folder_given_to_jax_itself_is_left_as_it_is(unconfigured_jax, monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMA_JAX_CACHE_DIR", str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert enable_compilation_cache() == tmp_path / "theirs"
    assert not (tmp_path / "ours").exists()


def test_off_keeps_nothing(unconfigured_jax, monkeypatch):
    monkeypatch.setenv("GEMMA_JAX_CACHE_DIR", "off")
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_unwritable_folder_warns_once_and_goes_on(unconfigured_jax, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEMMA_JAX_CACHE_DIR", str(tmp_path / "file"))
    assert enable_compilation_cache() is None
    assert enable_compilation_cache() is None
    assert caplog.text.count("no compilation cache") == 1
