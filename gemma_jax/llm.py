"""`LLM`: load a model, then generate, chat, stream or score, offline on one device."""

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
from tqdm import tqdm

from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.compilation_cache import enable_compilation_cache
from gemma_jax.config import ModelConfig
from gemma_jax.device_memory import cache_memory
from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import CapacityError, GemmaError, RequestError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.llm_arguments import (
    Params,
    check_params,
    engine_config,
    is_list_of_prompts,
    params_for,
)
from gemma_jax.model.transformer import abstract_model
from gemma_jax.model_source import resolve_model
from gemma_jax.outputs import PositionLogprobs, RequestOutput, StreamChunk
from gemma_jax.runner import Runner
from gemma_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from gemma_jax.score import score_tokens
from gemma_jax.sequence import position_logprobs
from gemma_jax.serve.collect import Collector
from gemma_jax.serve.engine import Engine
from gemma_jax.serve.request import CompletionDelta, EngineRequest
from gemma_jax.sharding import leaf_shardings, make_mesh
from gemma_jax.text_side import Message, Prompt, TextSide, prompt_text
from gemma_jax.tokenizer import Tokenizer, require_tokenizer

logger = logging.getLogger(__name__)


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
        engine = engine_config(settings)
        mesh = make_mesh(tensor_parallel_size)
        enable_compilation_cache()
        path = resolve_model(model)
        text_side = TextSide.load(path, tokenizer, engine.max_model_len, engine.seed)
        numerics = engine.numerics(text_side.config)
        self._set_up(text_side, engine)
        config = text_side.config
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
        engine = engine_config(settings)
        text_side = TextSide(config, max_model_len=engine.max_model_len, seed=engine.seed)
        self._set_up(text_side, engine)
        self._bind(leaves)
        return self

    def _set_up(self, text_side: TextSide, engine: EngineConfig) -> None:
        self.text_side, self.engine_config = text_side, engine
        self.max_num_seqs = engine.max_num_seqs
        self._ids = itertools.count()

    @property
    def model_config(self) -> ModelConfig:
        """What the network is."""
        return self.text_side.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; `None` when it brought none."""
        return self.text_side.tokenizer

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """The checkpoint's generation_config."""
        return self.text_side.defaults

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output."""
        return self.text_side.max_model_len

    def _bind(self, leaves: Mapping[str, jax.Array]) -> None:
        engine, config = self.engine_config, self.model_config
        numerics = engine.numerics(config)
        self._runner: Runner | None = Runner(
            config, numerics, leaves, engine.fast_prefill, engine.implementations()
        )
        self._engine: Engine | None = None
        self._sinks: dict[str, Collector | deque[CompletionDelta]] = {}

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights; the object cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._runner = self._engine = None

    @property
    def engine(self) -> Engine:
        """The engine that runs requests; its KV cache is made at the first use."""
        if self._engine is None:
            engine = self.engine_config
            self._engine = Engine(
                self.runner, engine, self.max_model_len,
                cache_memory(self.runner, engine),
                self.tokenizer, self.generation_defaults.suppress_tokens, self._grammars,
            )  # fmt: skip
        return self._engine

    def _grammars(self):
        from gemma_jax.serve.grammar import GrammarCompiler

        tokenizer = require_tokenizer(self.tokenizer, "response_format")
        eos = self.generation_defaults.eos_token_ids
        return GrammarCompiler(tokenizer, self.model_config.vocab_size, eos)

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
        listed = is_list_of_prompts(prompts)
        many: Sequence[Any] = prompts if listed else [prompts]  # type: ignore[assignment]
        params = params_for(many, sampling_params, self.generation_defaults)
        outcomes = [self._try_request(p, q) for p, q in zip(many, params, strict=True)]
        if not listed and isinstance(outcomes[0], GemmaError):
            raise outcomes[0]
        self._run([x for x in outcomes if isinstance(x, Collector)], use_tqdm)
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
                prompts.append(self.chat_prompt(conversation, tools, enable_thinking))
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
        check_params("sampling_params", params)
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one completion; use generate")
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs: a stream has none; use generate or score")
        return self._stream(self._request(prompt, params).request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> Iterator[StreamChunk]:
        """`stream` of the model's turn of a conversation."""
        return self.stream(self.chat_prompt(messages, tools, enable_thinking), sampling_params)

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
        ids = self.text_side.check_ids(token_ids)
        if len(ids) > self.max_model_len:
            raise RequestError(
                f"token_ids: {len(ids)} tokens, but the context holds {self.max_model_len}"
            )
        k = min(max(logprobs, 1), self.model_config.vocab_size)
        engine = self.engine_config
        scored = score_tokens(
            self.runner, ids, page_size=engine.page_size, k=k,
            max_chunk=engine.chunk_tokens(self.model_config, self.max_model_len, plain=True),
        )  # fmt: skip
        return [None] + [
            position_logprobs(token, values, logprobs, self.tokenizer)
            for token, values in zip(ids[1:], scored, strict=True)
        ]

    # --- requests --------------------------------------------------------------------------------

    def make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str, grammar: str | None = None
    ) -> EngineRequest:
        """A prompt as a checked request of the engine; see `TextSide.make_request`."""
        return self.text_side.make_request(prompt, params, request_id, grammar)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> str:
        """The text of a conversation up to the opening of the model's turn."""
        return self.text_side.chat_prompt(messages, tools, enable_thinking)

    def _try_request(self, prompt: Any, params: SamplingParams) -> "Collector | GemmaError":
        if isinstance(prompt, GemmaError):
            return prompt
        try:
            return self._request(prompt, params)
        except GemmaError as error:
            return error

    def _request(self, prompt: Prompt, params: SamplingParams) -> Collector:
        request = self.make_request(prompt, params, f"request-{next(self._ids)}")
        return Collector(request, prompt_text(prompt))

    # --- running ---------------------------------------------------------------------------------

    def _run(self, collectors: Sequence[Collector], use_tqdm: bool) -> None:
        """Runs the requests to their ends; interrupted, it gives up those that remain."""
        total = sum(c.request.params.n for c in collectors)
        waiting = {c.request.request_id: c for c in collectors}
        try:
            for request_id, collector in waiting.items():
                self._sinks[request_id] = collector
                self._add(collector.request)
            with tqdm(total=total, unit="seq", disable=not use_tqdm) as bar:
                while not all(c.finished for c in collectors):
                    bar.update(self._step())
        finally:
            for request_id in waiting:
                self._drop(request_id)

    def _add(self, request: EngineRequest) -> None:
        """Queues a request; one that can never run ends with an error."""
        try:
            self.engine.add(request)
        except CapacityError as error:
            for index in range(request.params.n):
                self._deliver(
                    CompletionDelta(
                        request.request_id, index, "", [], finish_reason="error", error=str(error)
                    )
                )

    def _step(self) -> int:
        """One step of the engine; the number of completions that ended."""
        try:
            deltas = self.engine.step()
        except BaseException as error:
            self._give_up_engine(error)
            raise
        for delta in deltas:
            self._deliver(delta)
        return sum(delta.finish_reason is not None for delta in deltas)

    def _give_up_engine(self, error: BaseException) -> None:
        """After an interruption: a call may have consumed the cache, so the next engine is new."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        reason = f"the engine was interrupted by {type(error).__name__}; ask again"
        for request_id in list(self._sinks):
            self._deliver(
                CompletionDelta(request_id, 0, "", [], finish_reason="error", error=reason)
            )

    def _deliver(self, delta: CompletionDelta) -> None:
        sink = self._sinks.get(delta.request_id)
        if isinstance(sink, Collector):
            sink.add(delta)
        elif sink is not None:
            sink.append(delta)

    def _drop(self, request_id: str) -> None:
        del self._sinks[request_id]
        if self._engine is not None:
            self._engine.abort(request_id)

    def _stream(self, request: EngineRequest) -> Iterator[StreamChunk]:
        inbox: deque[CompletionDelta] = deque()
        self._sinks[request.request_id] = inbox
        try:
            self._add(request)
            while True:
                while not inbox:
                    self._step()
                delta = inbox.popleft()
                if delta.error is not None:
                    raise RequestError(delta.error)
                yield StreamChunk(
                    delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason,
                    delta.logprobs,
                )  # fmt: skip
                if delta.finish_reason is not None:
                    return
        finally:
            self._drop(request.request_id)

    def _outcome(self, outcome: "Collector | GemmaError", prompt: Any) -> RequestOutput:
        if isinstance(outcome, GemmaError):
            return RequestOutput(
                f"request-{next(self._ids)}", prompt_text(prompt), [], finished=True,
                error=str(outcome),
            )  # fmt: skip
        return outcome.output()
