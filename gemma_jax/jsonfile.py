"""Reading the small JSON files of a checkpoint, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from gemma_jax.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or {} when there is no such file.

    Raises:
      ConfigError: the file is not UTF-8 JSON, or its top level is not an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value
