"""Model names: a path, else a bundled name, else a Hub id; each failure says what was tried."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from gemma_jax import model_source
from gemma_jax.errors import CheckpointError, UnsupportedError
from gemma_jax.model_source import bundled_model, resolve_model

pytestmark = pytest.mark.fast


@pytest.fixture
def hub(monkeypatch):
    """Replaces the download; the list holds the repositories that were asked for."""
    asked = []

    def download(repo, **options):
        asked.append((repo, options))
        return "/hub/cache"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_an_existing_path_wins_over_a_bundled_name_and_a_hub_id(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "google/gemma-4-E2B-it"):
        (tmp_path / name).mkdir(parents=True)
        assert str(resolve_model(name)) == name
    assert hub == []


def test_a_hub_id_is_downloaded_without_foreign_weight_formats(hub):
    assert str(resolve_model("google/gemma-4-E2B-it")) == "/hub/cache"
    ((repo, options),) = hub
    assert repo == "google/gemma-4-E2B-it"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_a_hub_failure_names_the_model_and_the_reason(monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("offline and not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"'google/none'.*offline and not in the cache"):
        resolve_model("google/none")


@pytest.mark.parametrize(
    "name", ["missing", "./a/b", "../a/b", "/no/such/folder", "a/b/c", "~/x", "x" * 5000]
)
def test_a_missing_path_raises_and_lists_the_other_kinds(name, hub):
    with pytest.raises(CheckpointError, match=r"no such file or directory; bundled models: nano"):
        resolve_model(name)
    assert hub == []


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_model_that_is_no_name_raises(name):
    with pytest.raises(CheckpointError, match=r"expected a path, a bundled name or a Hub id"):
        resolve_model(name)


def test_a_lora_adapter_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"LoRA adapter.*merge"):
        resolve_model(tmp_path)


def test_a_bundled_model_that_is_not_installed_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(model_source.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match=r"model='nano'.*not installed"):
        bundled_model("nano")
