"""The text side of a model: prompts and sampling parameters to checked requests, without JAX.

`LLM` and the HTTP process of the server both make their requests here, so both accept and refuse
the same input in the same words.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from gemma_jax.buckets import ID_LIST_BUCKETS
from gemma_jax.chat_template import load_chat_template, render_chat
from gemma_jax.checkpoint.side_files import checkpoint_folder, load_config
from gemma_jax.config import ModelConfig
from gemma_jax.errors import ConfigError, ContextLengthError, RequestError, UnsupportedError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.model_source import resolve_model
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.serve.request import EngineRequest
from gemma_jax.tokenizer import Tokenizer, require_tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]

_MEDIA_KEYS = ("multi_modal_data", "image", "images", "audio", "video")


class TextSide:
    """Tokenizer, chat template, generation defaults and limits of one model.

    Args:
      config: the network.
      tokenizer: `None` takes prompts as token ids only.
      defaults: of `generation_config.json`.
      chat_template: jinja2 source; `None` is the built-in format.
      max_model_len: most tokens of a sequence; `None` is the model's own limit.
      seed: of the requests that bring none.

    Raises:
      ConfigError: the parts do not belong to one model, or `max_model_len` exceeds its limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        defaults: GenerationDefaults | None = None,
        chat_template: str | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.defaults = defaults or GenerationDefaults()
        self.max_model_len = config.context_length(max_model_len)
        self._chat_template = chat_template
        self._seeds = np.random.default_rng(seed)
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"tokenizer: {tokenizer.vocab_size} tokens, but the model's vocab_size is"
                f" {config.vocab_size}; it belongs to another model"
            )
        _check_ids("eos_token_id", self.defaults.eos_token_ids, config)
        _check_ids("suppress_tokens", self.defaults.suppress_tokens, config)

    @classmethod
    def load(
        cls,
        model: str | Path,
        tokenizer: str | Path | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
    ) -> Self:
        """Reads the text side of a checkpoint; its weights stay where they are.

        Args:
          model: as for `LLM`: a path, a bundled name or a Hugging Face Hub id.
          tokenizer: folder of another tokenizer; by default the model's own.
          max_model_len, seed: as for the class.
        Raises:
          CheckpointError, ConfigError: what cannot be read, and why.
          RequestError: `tokenizer` names a folder that has none.
        """
        path = resolve_model(model)
        config, folder = load_config(path), checkpoint_folder(path)
        found = Tokenizer.from_dir(tokenizer or folder)
        if tokenizer is not None:
            require_tokenizer(found, f"tokenizer={str(tokenizer)!r}")
        defaults, template = GenerationDefaults.from_dir(folder), load_chat_template(folder)
        return cls(config, found, defaults, template, max_model_len, seed)

    # --- prompts ---------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The checked ids of a prompt: text, {"prompt": …}, {"prompt_token_ids": …} or ids.

        Raises:
          RequestError: the prompt is empty, malformed or outside the vocabulary.
          UnsupportedError: it brings something else than text.
        """
        if isinstance(prompt, Mapping):
            prompt = _from_mapping(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt='': is empty; give at least one character")
            tokenizer = require_tokenizer(self.tokenizer, "a text prompt")
            return self.check_ids(tokenizer.encode(prompt))
        return self.check_ids(prompt)

    def check_ids(self, ids: Any) -> list[int]:
        """`ids` as a list of integers, every one an id of the vocabulary.

        Raises:
          RequestError: they are not; the message names the first that is wrong.
        """
        name, vocab_size = "prompt_token_ids", self.config.vocab_size
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise RequestError(f"prompt: expected text or token ids, got {type(ids).__name__}")
        if not ids:
            raise RequestError(f"{name}=[]: is empty; give at least one token id")
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
            return list(ids)
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(f"{name}[{i}]={token!r}: expected an integer")
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name}[{i}]={token}: expected an id in [0, {vocab_size})")
        return [int(token) for token in ids]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation up to the opening of the model's turn; see `render_chat`."""
        require_tokenizer(self.tokenizer, "a chat")
        return render_chat(
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
            template=self._chat_template,
            empty_thought=not self.config.has_per_layer_inputs,
            template_variables=template_variables,
        )

    # --- requests --------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        grammar: str | None = None,
        prompt_only: bool = False,
    ) -> EngineRequest:
        """The request of one prompt, checked, with `max_tokens` cut to the context.

        With `prompt_only` nothing is generated, whatever `params.max_tokens` says.

        Raises:
          RequestError: the prompt, or its parameters with this model, cannot run.
          ContextLengthError: the prompt fills the context, or with `prompt_only` exceeds it.
          UnsupportedError: as for `tokenize`.
        """
        ids = self.tokenize(prompt)
        params.check_vocab(self.config.vocab_size)
        room = self.max_model_len - len(ids)
        if room < (0 if prompt_only else 1):
            raise ContextLengthError(
                f"prompt: {len(ids)} tokens leave no room in a context of {self.max_model_len};"
                " shorten it or raise max_model_len"
            )
        limit = 0 if prompt_only else params.max_tokens
        if params.stop:
            require_tokenizer(self.tokenizer, "stop strings")
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            max_tokens=room if limit is None else min(limit, room),
            eos_ids=() if params.ignore_eos else tuple(self.defaults.eos_token_ids),
            seed=params.seed if params.seed is not None else int(self._seeds.integers(2**63)),
            grammar=grammar,
        )
        self._check_id_lists(request)
        return request

    def _check_id_lists(self, request: EngineRequest) -> None:
        bias = {*(request.params.logit_bias or {}), *self.defaults.suppress_tokens}
        lists = {
            "stop_token_ids (with EOS ids)": request.stop_ids,
            "logit_bias (with suppressed ids)": bias,
        }
        most = ID_LIST_BUCKETS[-1]
        for name, ids in lists.items():
            if len(ids) > most:
                raise RequestError(f"{name}: {len(ids)} ids; at most {most} are allowed")


def prompt_text(prompt: Any) -> str | None:
    """The text of a prompt that `TextSide.tokenize` takes; `None` of one given as ids."""
    value = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return value if isinstance(value, str) else None


def _from_mapping(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    for key in _MEDIA_KEYS:
        if key in prompt:
            raise UnsupportedError(f"prompt[{key!r}]: only text is supported")
    known = {"prompt", "prompt_token_ids"}
    if len(prompt.keys() & known) != 1 or prompt.keys() - known:
        raise RequestError(
            f"prompt: expected exactly one of 'prompt' and 'prompt_token_ids',"
            f" got the keys {sorted(map(str, prompt))}"
        )
    (value,) = prompt.values()
    if "prompt" in prompt and not isinstance(value, str):
        raise RequestError(f"prompt['prompt']={value!r}: expected text")
    if "prompt_token_ids" in prompt and isinstance(value, str):
        raise RequestError(f"prompt['prompt_token_ids']={value!r}: expected token ids")
    return value


def _check_ids(name: str, ids: Sequence[int], config: ModelConfig) -> None:
    for token in ids:
        if token >= config.vocab_size:
            raise ConfigError(
                f"generation_config.json: {name} has {token}, outside the model's vocabulary of"
                f" {config.vocab_size}"
            )
