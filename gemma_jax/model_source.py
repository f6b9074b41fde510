"""Where a model name leads: an existing path, else a bundled model, else a Hugging Face Hub id."""

import re
from importlib import resources
from pathlib import Path

from gemma_jax.errors import CheckpointError, UnsupportedError

BUNDLED = ("nano",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors")


def resolve_model(model: str | Path) -> Path:
    """The folder or file of a model.

    Args:
      model: an existing path, else a bundled name ("nano"), else a Hub id such as
        "google/gemma-4-E2B-it", downloaded once into the Hub's cache (offline: only read from it).
    Raises:
      CheckpointError: none of the three; the message says what was tried.
      UnsupportedError: the folder holds a LoRA adapter and no model.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise CheckpointError(f"model={model!r}: expected a path, a bundled name or a Hub id")
    path = Path(model).expanduser()
    if _exists(path):
        _refuse_adapter(path)
        return path
    if str(model) in BUNDLED:
        return bundled_model(str(model))
    if _HUB_ID.fullmatch(str(model)) and not str(model).startswith(("./", "../", "~")):
        return _from_hub(str(model))
    raise CheckpointError(
        f"model={str(model)!r}: no such file or directory; bundled models: {', '.join(BUNDLED)};"
        " a Hub id looks like 'google/gemma-4-E2B-it'"
    )


def bundled_model(name: str) -> Path:
    """The folder of a model that is installed with this package."""
    folder = Path(str(resources.files("gemma_jax") / "data" / name))
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"model={name!r}: the bundled model is not installed in {folder}")
    return folder


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long for a file
        return False


def _refuse_adapter(path: Path) -> None:
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise UnsupportedError(
            f"model={str(path)!r}: holds a LoRA adapter, not a model; LoRA is not supported,"
            " merge it into its base model first"
        )


def _from_hub(repo: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(
            f"model={repo!r}: no such path, and the Hugging Face Hub gave no model of that name"
            f" ({reason})"
        ) from error
