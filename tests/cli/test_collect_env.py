"""`gemma-jax collect-env` prints what a bug report needs and nothing secret."""

import json

import pytest

from gemma_jax import cli, system_info

pytestmark = pytest.mark.fast


def test_report_has_versions_devices_cache_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("GEMMA_JAX_LOG_LEVEL", "error")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("GEMMA_JAX_API_KEY", "secret")
    assert cli.main(["collect-env", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["versions"]["jax"]
    assert report["devices"]["platform"] == "cpu"
    assert report["compilation cache"]["folder"]
    assert report["environment"]["GEMMA_JAX_LOG_LEVEL"] == "error"
    assert "secret" not in out


def test_text_report_has_a_line_for_each_value(capsys):
    assert cli.main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert "versions:\n  python: " in out
    assert "devices:\n  platform: cpu\n" in out


def test_absent_package_has_no_version():
    versions = system_info.package_versions(("numpy", "surely-not-installed"))
    assert versions["numpy"]
    assert versions["surely-not-installed"] is None
