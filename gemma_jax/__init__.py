"""Gemma 4 inference in JAX.

The public names are imported on use, so that `import gemma_jax` (and `gemma-jax --help`) does not
import JAX.
"""

from typing import TYPE_CHECKING, Any

from gemma_jax.version import __version__

if TYPE_CHECKING:
    from gemma_jax.chat import ChatSession
    from gemma_jax.llm import LLM
    from gemma_jax.outputs import RequestOutput, StreamChunk
    from gemma_jax.sampling_params import SamplingParams

__all__ = ["LLM", "ChatSession", "RequestOutput", "SamplingParams", "StreamChunk", "__version__"]

_HOMES = {
    "LLM": "llm",
    "ChatSession": "chat",
    "RequestOutput": "outputs",
    "StreamChunk": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gemma_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gemma_jax.{_HOMES[name]}"), name)
