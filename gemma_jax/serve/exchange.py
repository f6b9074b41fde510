"""One API request on its way: a checked body in, requests for the engine, a response object out."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from gemma_jax.serve.bodies import BODY_READERS, ChatRequest, CompletionRequest
from gemma_jax.serve.chat_output import SPECIAL_TOKENS
from gemma_jax.serve.echo import Echo, echo
from gemma_jax.serve.request import CompletionDelta, EngineRequest
from gemma_jax.serve.responses import (
    ChatChoice,
    Choice,
    CompletionChoice,
    ResponseHead,
    Usage,
    chat_chunk,
    chat_response,
    completion_chunk,
    completion_response,
)
from gemma_jax.text_side import TextSide
from gemma_jax.tokenizer import Tokenizer


class Exchange:
    """A chat or completion request that the engine works on, streamed or not.

    Args:
      request: from `chat_request` or `completion_request`.
      text: of the model.
      model: the name that the response gives the model.

    Attributes:
      head: id, time and model of the response.
      requests: what to add to the engine: one for a chat, one a prompt for completions.
      error: why the engine failed one of them, or None.

    Raises:
      RequestError: a prompt, message or parameter cannot run on this model.
      UnsupportedError: a message holds something else than text.
    """

    def __init__(self, request: ChatRequest | CompletionRequest, text: TextSide, model: str):
        self._is_chat = isinstance(request, ChatRequest)
        response_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = ResponseHead(response_id, int(time.time()), model)
        self.request = request
        self.error: str | None = None
        self.requests: list[EngineRequest]
        self._choices: Sequence[Choice]
        if isinstance(request, ChatRequest):
            prompt = text.chat_prompt(request.messages, request.tools, request.thinking)
            self.requests = [
                text.make_request(prompt, request.params, response_id, request.grammar)
            ]
            special = special_tokens(text.tokenizer)
            self._choices = [ChatChoice(request, i, special) for i in range(request.params.n)]
        else:
            self.requests = [
                text.make_request(
                    prompt, request.params, f"{response_id}-{i}", request.grammar,
                    request.prompt_only,
                )
                for i, prompt in enumerate(request.prompts)
            ]  # fmt: skip
            self._choices = _completion_choices(request, self.requests, text.tokenizer)
        self._position = {r.request_id: i for i, r in enumerate(self.requests)}
        self._cached = [0] * len(self.requests)
        self._unfinished = len(self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, or the engine failed."""
        return self._unfinished == 0 or self.error is not None

    @property
    def num_choices(self) -> int:
        """Choices of the response: n a prompt."""
        return len(self._choices)

    def push(self, delta: CompletionDelta) -> dict[str, Any] | None:
        """Take one delta of the engine; return the chunk to stream, or None while there is none."""
        if delta.finish_reason == "error":
            self.error = delta.error or "the engine failed"
            return None
        position = self._position[delta.request_id]
        self._cached[position] = max(self._cached[position], delta.num_cached_tokens)
        self._unfinished -= delta.finish_reason is not None
        choice = self._choices[position * self.request.params.n + delta.index]
        changes = choice.push(delta)
        return self._chunk(changes) if changes else None

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that asked for its usage."""
        return self._chunk([], self.usage)

    @property
    def usage(self) -> Usage:
        """The tokens so far; every prompt counts once, however many choices it has."""
        return Usage(
            prompt_tokens=sum(len(r.prompt_token_ids) for r in self.requests),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(self._cached),
        )

    def response(self) -> dict[str, Any]:
        """Return the whole response object."""
        build = chat_response if self._is_chat else completion_response
        return build(self.head, self._choices, self.usage)

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        build = chat_chunk if self._is_chat else completion_chunk
        return build(self.head, choices, usage)


def open_exchange(url: str, body: Any, text: TextSide, model: str) -> Exchange:
    """Return the exchange of a body that was sent to `url`, a key of `BODY_READERS`.

    Raises:
      RequestError, UnsupportedError: as the body's reader and `Exchange`.
    """
    return Exchange(BODY_READERS[url](body, text.defaults), text, model)


def special_tokens(tokenizer: Tokenizer | None) -> frozenset[str]:
    """Return the texts of a tokenizer's special tokens."""
    if tokenizer is None:
        return frozenset(SPECIAL_TOKENS)
    texts = (tokenizer.id_to_token(token_id) for token_id in tokenizer.special_ids)
    return frozenset(text for text in texts if text)


def _completion_choices(
    request: CompletionRequest, requests: Sequence[EngineRequest], tokenizer: Tokenizer | None
) -> list[CompletionChoice]:
    choices: list[CompletionChoice] = []
    with_tokens = request.params.logprobs is not None
    for prompt, engine_request in zip(request.prompts, requests, strict=True):
        ids = engine_request.prompt_token_ids
        echoed = echo(prompt, ids, tokenizer, with_tokens) if request.echo else Echo()
        for _ in range(request.params.n):
            choices.append(CompletionChoice(request, len(choices), echoed))
    return choices
