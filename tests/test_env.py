"""Environment variables are parsed loudly."""

import logging
from pathlib import Path

import pytest

from gemma_jax import env
from gemma_jax.errors import ConfigError

pytestmark = pytest.mark.fast


def test_cache_dir_defaults_to_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.CACHE_DIR.read() == tmp_path / "gemma_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.CACHE_DIR.read() == Path.home() / ".cache" / "gemma_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.CACHE_DIR.read() == Path.home() / ".cache" / "gemma_jax"


def test_cache_dir_is_configurable(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMA_JAX_CACHE_DIR", str(tmp_path / "here"))
    assert env.CACHE_DIR.read() == tmp_path / "here"


@pytest.mark.parametrize("value", ["", "off", "OFF"])
def test_cache_dir_can_be_switched_off(value, monkeypatch):
    monkeypatch.setenv("GEMMA_JAX_CACHE_DIR", value)
    assert env.CACHE_DIR.read() is None


def test_log_level_is_a_known_name_or_an_error(monkeypatch):
    assert env.LOG_LEVEL.read() == logging.WARNING
    monkeypatch.setenv("GEMMA_JAX_LOG_LEVEL", "Debug")
    assert env.LOG_LEVEL.read() == logging.DEBUG
    monkeypatch.setenv("GEMMA_JAX_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"GEMMA_JAX_LOG_LEVEL='loud': expected one of debug"):
        env.LOG_LEVEL.read()


def test_misspelt_variable_is_reported_with_the_right_name(monkeypatch):
    assert env.unknown_variables() == []
    monkeypatch.setenv("GEMMA_JAX_CAHCE_DIR", "x")
    (sentence,) = env.unknown_variables()
    assert "did you mean GEMMA_JAX_CACHE_DIR?" in sentence
