"""The arguments of `LLM`: checked, and brought into one form."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import RequestError, UnsupportedError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None

_LORA_KEYS = ("lora_path", "lora_request", "enable_lora", "lora_modules")


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The settings that `LLM` was given by name.

    Raises:
      UnsupportedError: LoRA.
      TypeError: a name that `EngineConfig` does not have.
    """
    known = EngineConfig.__dataclass_fields__
    lora = [name for name in _LORA_KEYS if name in settings]
    if lora:
        raise UnsupportedError(
            f"{lora[0]}={settings[lora[0]]!r}: LoRA is not supported; merge the adapter first"
        )
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TypeError(
            f"LLM() got unknown argument(s) {', '.join(unknown)}; allowed: {', '.join(known)}"
        )
    return EngineConfig(**settings)


def params_for(
    prompts: Sequence[Any], given: Params, defaults: GenerationDefaults
) -> list[SamplingParams]:
    """Parameters for each prompt; `given` as of `LLM.generate`.

    Raises:
      RequestError: what is not `SamplingParams`, or a list of another length than `prompts`.
    """
    if given is None:
        given = defaults.sampling_params()
    if isinstance(given, SamplingParams):
        return [given] * len(prompts)
    if not isinstance(given, list | tuple):
        raise RequestError(
            f"sampling_params={given!r}: expected SamplingParams, a list of them, or None"
        )
    for i, params in enumerate(given):
        check_params(f"sampling_params[{i}]", params)
    if len(given) != len(prompts):
        raise RequestError(
            f"sampling_params: {len(given)} entries for {len(prompts)} prompts; give one for"
            " all, or one a prompt"
        )
    return list(given)


def check_params(name: str, params: Any) -> None:
    """Raises a `RequestError` for what is not `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{name}={params!r}: expected SamplingParams")


def is_list_of_prompts(prompts: Any) -> bool:
    """A list of ids is one prompt; any other list holds prompts."""
    if isinstance(prompts, str | Mapping | np.ndarray) or not isinstance(prompts, Sequence):
        return False
    return not (prompts and all(isinstance(x, int | np.integer) for x in prompts))
