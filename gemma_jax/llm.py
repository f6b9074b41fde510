"""`LLM`: load a model, then generate, chat, stream or score, offline on one device."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from tqdm import tqdm

from gemma_jax.batch_arrays import check_id_lists
from gemma_jax.chat_template import load_chat_template, render_chat
from gemma_jax.checkpoint.load import load_checkpoint, load_config
from gemma_jax.compilation_cache import enable_compilation_cache
from gemma_jax.config import ModelConfig
from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import ConfigError, GemmaError, RequestError, UnsupportedError
from gemma_jax.generate import Limits, run_batch, score_tokens, split_batches
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.kernels import Kernels
from gemma_jax.model.transformer import abstract_model
from gemma_jax.model_source import resolve_model
from gemma_jax.outputs import FinishReason, PositionLogprobs, RequestOutput
from gemma_jax.runner import Runner
from gemma_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from gemma_jax.sequence import Sequence as Completion
from gemma_jax.sequence import position_logprobs
from gemma_jax.sharding import leaf_shardings, make_mesh
from gemma_jax.tokenizer import Tokenizer, require_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

HOST_CACHE_BYTES = 4 * 2**30
"""Cache memory of a batch on a device that does not report its memory, such as a CPU."""

_MEDIA_KEYS = ("multi_modal_data", "image", "images", "audio", "video")
_LORA_KEYS = ("lora_path", "lora_request", "enable_lora", "lora_modules")


@dataclass(frozen=True)
class StreamChunk:
    """What one device call added to a streamed completion.

    Attributes:
      text: new text, never half a character and never the beginning of a stop string.
      token_ids: the new ids.
      logprobs: one mapping a new id, as in `CompletionOutput`; `None` when not asked for.
      finish_reason: set on the last chunk only.
      stop_reason: as in `CompletionOutput`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass
class _Request:
    """A checked prompt and the completions that it asked for."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]


class LLM:
    """A Gemma 4 model on one device.

    Args:
      model: a path, a bundled name ("nano") or a Hugging Face Hub id.
      tokenizer: folder of another tokenizer; by default the model's own.
      tensor_parallel_size: only 1.
      **settings: the fields of `EngineConfig`: dtype, rounding, fast_prefill, kernels,
        max_model_len, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization, seed, …

    Raises:
      CheckpointError, ConfigError, UnsupportedError: what cannot be loaded, and why.
      TypeError: an unknown argument.
    """

    def __init__(
        self,
        model: str | Path = "nano",
        tokenizer: str | Path | None = None,
        *,
        tensor_parallel_size: int = 1,
        **settings: Any,
    ):
        engine = _engine_config(settings)
        mesh = make_mesh(tensor_parallel_size)
        enable_compilation_cache()
        path = resolve_model(model)
        folder = path if path.is_dir() else path.parent
        config = load_config(path)
        numerics = engine.numerics(config)
        text_side = Tokenizer.from_dir(tokenizer or folder)
        if tokenizer is not None:
            require_tokenizer(text_side, f"tokenizer={str(tokenizer)!r}")
        self._set_up(
            config, engine, text_side, GenerationDefaults.from_dir(folder),
            load_chat_template(folder),
        )  # fmt: skip
        shardings = leaf_shardings(abstract_model(config, numerics), mesh)
        _, leaves = load_checkpoint(path, numerics.dtype, lambda name, shape: shardings[name])
        self._bind(leaves)
        logger.info("loaded %s: %s, %s", model, numerics, engine)

    @classmethod
    def from_leaves(
        cls, config: ModelConfig, leaves: Mapping[str, jax.Array], **settings: Any
    ) -> Self:
        """A model with weights that are in memory already, and no tokenizer.

        Args:
          config: the network.
          leaves: path → array of every weight, in the compute dtype (see docs/checkpoints.md).
          **settings: the fields of `EngineConfig`.
        """
        self = cls.__new__(cls)
        enable_compilation_cache()
        self._set_up(config, _engine_config(settings), None, GenerationDefaults(), None)
        self._bind(leaves)
        return self

    def _set_up(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        chat_template: str | None,
    ) -> None:
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(
                f"tokenizer: {tokenizer.vocab_size} tokens, but the model's vocab_size is"
                f" {config.vocab_size}; it belongs to another model"
            )
        _check_ids("eos_token_id", defaults.eos_token_ids, config)
        _check_ids("suppress_tokens", defaults.suppress_tokens, config)
        self.model_config, self.engine_config = config, engine
        self.tokenizer, self.generation_defaults = tokenizer, defaults
        self.max_model_len = engine.context_length(config)
        self.max_num_seqs = engine.max_num_seqs
        self._chat_template = chat_template
        self._seeds = np.random.default_rng(engine.seed)
        self._ids = itertools.count()

    def _bind(self, leaves: Mapping[str, jax.Array]) -> None:
        engine, config = self.engine_config, self.model_config
        numerics = engine.numerics(config)
        self._runner: Runner | None = Runner(
            config, numerics, leaves, engine.fast_prefill, Kernels.parse(engine.kernels)
        )
        cache_bytes = _cache_budget(leaves, engine.gpu_memory_utilization)
        self._limits = Limits.of(engine, self.max_model_len, cache_bytes)

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights; the object cannot be used afterwards."""
        self._runner = None

    @property
    def runner(self) -> Runner:
        """The jitted programs bound to this model's weights."""
        if self._runner is None:
            raise RuntimeError("this LLM has been closed; build a new one")
        return self._runner

    # --- generating ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts; one `RequestOutput` a prompt, in input order.

        Args:
          prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
          sampling_params: one for all or one a prompt; `None` takes the checkpoint's
            generation_config.
          use_tqdm: show a progress bar on stderr.
        Returns:
          In a list, a prompt that cannot run has its `error` set and the others run.
        Raises:
          RequestError: a single prompt that cannot run, or lists of different lengths.
        """
        listed = _is_list_of_prompts(prompts)
        many: Sequence[Any] = prompts if listed else [prompts]  # type: ignore[assignment]
        params = self._params_for(many, sampling_params)
        outcomes = [self._try_request(p, q) for p, q in zip(many, params, strict=True)]
        if not listed and isinstance(outcomes[0], GemmaError):
            raise outcomes[0]
        requests = [r for r in outcomes if isinstance(r, _Request)]
        self._run(requests, use_tqdm)
        return [self._outcome(x, prompt) for x, prompt in zip(outcomes, many, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes the model's turn of one conversation or of several.

        Messages are {"role", "content"} mappings, rendered by the checkpoint's chat template.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(f"messages={messages!r}: expected a list of messages")
        listed = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if listed else [messages]
        prompts: list[Any] = []
        for conversation in conversations:  # one list of messages each
            try:
                prompts.append(self._chat_prompt(conversation, tools, enable_thinking))
            except GemmaError as error:
                if not listed:
                    raise
                prompts.append(error)
        return self.generate(prompts if listed else prompts[0], sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Completes one prompt, yielding text and ids as they come; n must be 1."""
        params = sampling_params or self.generation_defaults.sampling_params()
        _check_params("sampling_params", params)
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one completion; use generate")
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs: a stream has none; use generate or score")
        request = self._request(prompt, params)
        return self._stream(request.completions[0])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> Iterator[StreamChunk]:
        """`stream` of the model's turn of a conversation."""
        return self.stream(self._chat_prompt(messages, tools, enable_thinking), sampling_params)

    def score(self, token_ids: Sequence[int], logprobs: int = 0) -> list[PositionLogprobs | None]:
        """Teacher-forced log-probabilities of a sequence: what the model gives each of its tokens.

        Args:
          token_ids: the whole sequence; nothing is added to it.
          logprobs: also report this many best ids a position.
        Returns:
          One mapping id → Logprob a token, as `prompt_logprobs`; the first is `None`.
        """
        if not isinstance(logprobs, int) or not 0 <= logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"logprobs={logprobs!r}: expected an integer from 0 to {MAX_LOGPROBS}"
            )
        ids = self._checked_ids(token_ids)
        if len(ids) > self.max_model_len:
            raise RequestError(
                f"token_ids: {len(ids)} tokens, but the context holds {self.max_model_len}"
            )
        k = min(max(logprobs, 1), self.model_config.vocab_size)
        scored = score_tokens(self.runner, ids, self._limits, k)
        return [None] + [
            position_logprobs(token, values, logprobs, self.tokenizer)
            for token, values in zip(ids[1:], scored, strict=True)
        ]

    # --- requests --------------------------------------------------------------------------------

    def _params_for(self, prompts: Sequence[Any], given: Params) -> list[SamplingParams]:
        if given is None:
            given = self.generation_defaults.sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if not isinstance(given, list | tuple):
            raise RequestError(
                f"sampling_params={given!r}: expected SamplingParams, a list of them, or None"
            )
        for i, params in enumerate(given):
            _check_params(f"sampling_params[{i}]", params)
        if len(given) != len(prompts):
            raise RequestError(
                f"sampling_params: {len(given)} entries for {len(prompts)} prompts; give one for"
                " all, or one a prompt"
            )
        return list(given)

    def _try_request(self, prompt: Any, params: SamplingParams) -> "_Request | GemmaError":
        if isinstance(prompt, GemmaError):
            return prompt
        try:
            return self._request(prompt, params)
        except GemmaError as error:
            return error

    def _request(self, prompt: Prompt, params: SamplingParams) -> _Request:
        text, ids = self._tokenize(prompt)
        vocab_size = self.model_config.vocab_size
        params.check_vocab(vocab_size)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"prompt: {len(ids)} tokens leave no room in a context of {self.max_model_len};"
                " shorten it or raise max_model_len"
            )
        if params.stop:
            require_tokenizer(self.tokenizer, "stop strings")
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        eos = () if params.ignore_eos else self.generation_defaults.eos_token_ids
        completions = [
            Completion(ids, params, i, _key(seed, i), wanted, tuple(eos), self.tokenizer)
            for i in range(params.n)
        ]
        check_id_lists(completions[0], self.generation_defaults.suppress_tokens)
        return _Request(f"request-{next(self._ids)}", text, ids, params, completions)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (or None) and checked ids of a prompt."""
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt='': is empty; give at least one character")
            tokenizer = require_tokenizer(self.tokenizer, "a text prompt")
            return prompt, self._checked_ids(tokenizer.encode(prompt))
        return None, self._checked_ids(prompt)

    def _from_mapping(self, prompt: Mapping[str, Any]) -> str | Sequence[int]:
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

    def _checked_ids(self, ids: Any) -> list[int]:
        name, vocab_size = "prompt_token_ids", self.model_config.vocab_size
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

    def _chat_prompt(self, messages: Sequence[Message], tools: Any, enable_thinking: bool) -> str:
        require_tokenizer(self.tokenizer, "a chat")
        return render_chat(
            messages,
            tools=tools,
            enable_thinking=enable_thinking,
            template=self._chat_template,
            empty_thought=not self.model_config.has_per_layer_inputs,
        )

    # --- running ---------------------------------------------------------------------------------

    def _run(self, requests: Sequence[_Request], use_tqdm: bool) -> None:
        completions = [c for request in requests for c in request.completions]
        batches = split_batches(self.runner, completions, self._limits)
        suppressed = self.generation_defaults.suppress_tokens
        with tqdm(total=len(completions), unit="seq", disable=not use_tqdm) as bar:
            for batch in batches:
                for events in run_batch(self.runner, batch, self._limits, suppressed):
                    bar.update(sum(sequence.finished for sequence, _, _ in events))

    def _stream(self, completion: Completion) -> Iterator[StreamChunk]:
        suppressed = self.generation_defaults.suppress_tokens
        calls = run_batch(self.runner, [completion], self._limits, suppressed, interactive=True)
        for events in calls:
            for sequence, ids, text in events:
                logprobs = sequence.output_logprobs()
                yield StreamChunk(
                    text, ids, sequence.finish_reason, sequence.stop_reason,
                    None if logprobs is None else logprobs[-len(ids) :],
                )  # fmt: skip

    def _outcome(self, outcome: "_Request | GemmaError", prompt: Any) -> RequestOutput:
        if isinstance(outcome, GemmaError):
            text = prompt if isinstance(prompt, str) else None
            return RequestOutput(
                f"request-{next(self._ids)}", text, [], finished=True, error=str(outcome)
            )
        k = outcome.params.prompt_logprobs
        return RequestOutput(
            request_id=outcome.request_id,
            prompt=outcome.prompt,
            prompt_token_ids=outcome.prompt_token_ids,
            prompt_logprobs=None if k is None else self.score(outcome.prompt_token_ids, k),
            outputs=[c.output() for c in outcome.completions],
            finished=True,
        )


def _engine_config(settings: dict[str, Any]) -> EngineConfig:
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


def _check_ids(name: str, ids: Sequence[int], config: ModelConfig) -> None:
    for token in ids:
        if token >= config.vocab_size:
            raise ConfigError(
                f"generation_config.json: {name} has {token}, outside the model's vocabulary of"
                f" {config.vocab_size}"
            )


def _check_params(name: str, params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{name}={params!r}: expected SamplingParams")


def _is_list_of_prompts(prompts: Any) -> bool:
    """A list of ids is one prompt; any other list holds prompts."""
    if isinstance(prompts, str | Mapping | np.ndarray) or not isinstance(prompts, Sequence):
        return False
    return not (prompts and all(isinstance(x, int | np.integer) for x in prompts))


def _key(seed: int, index: int) -> np.ndarray:
    """The random key of completion `index` of a request with `seed`: uint32 [2]."""
    return np.random.SeedSequence([seed % 2**64, index]).generate_state(2, np.uint32)


def _cache_budget(leaves: Mapping[str, jax.Array], share: float) -> int:
    """Bytes that the caches of a batch may take beside the weights."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return HOST_CACHE_BYTES
    weights = sum(x.nbytes for x in leaves.values())
    return max(int(limit * share) - weights, 0) // 2  # the rest is for activations
