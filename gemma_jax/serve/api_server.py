"""The routes of the server: HTTP requests to engine requests, deltas to responses."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from gemma_jax.errors import GemmaError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.outputs import Logprob
from gemma_jax.serve.bodies import (
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
)
from gemma_jax.serve.client import EngineClient, Generation, State
from gemma_jax.serve.config import ServerConfig
from gemma_jax.serve.exchange import Exchange
from gemma_jax.serve.http_parts import (
    EventStream,
    Gate,
    error_response,
    json_response,
    on_disconnect,
    read_body,
)
from gemma_jax.serve.metrics import CONTENT_TYPE, ServerMetrics
from gemma_jax.serve.openapi import describe
from gemma_jax.serve.protocol import (
    DONE,
    ApiError,
    TokenizeRequest,
    api_error,
    detokenize_request,
    event,
    tokenize_request,
)
from gemma_jax.serve.responses import token_text
from gemma_jax.text_side import TextSide
from gemma_jax.tokenizer import require_tokenizer
from gemma_jax.version import __version__

logger = logging.getLogger(__name__)

LONG_TEXT = 20_000
"""Texts from this many characters, or bytes of a body, are worked on beside the event loop."""


class Api:
    """What the routes do, on one model and one engine."""

    def __init__(
        self, config: ServerConfig, text_side: TextSide, client: EngineClient,
        metrics: ServerMetrics,
    ):  # fmt: skip
        self.config, self.client, self.metrics = config, client, metrics
        self._text_side = text_side
        self._started = int(time.time())

    # --- state -----------------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The chat page."""
        text = (resources.files("gemma_jax.serve") / "static" / "chat.html").read_text("utf-8")
        policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return Response(text, headers=headers, media_type="text/html")

    async def health(self, request: Request) -> Response:
        """200 when requests are taken, 503 with the reason otherwise."""
        state = self.client.state
        ready = state is State.READY
        return json_response({"status": state.value}, 200 if ready else 503)

    async def version(self, request: Request) -> Response:
        """The version of this package."""
        return json_response({"version": __version__})

    async def render_metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """The names that this model answers to."""
        models = [self._model(name) for name in self.config.model_names]
        return json_response({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self._check_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "gemma-jax",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self._text_side.max_model_len,
        }

    # --- tokens ----------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text or of a chat's prompt."""
        body = tokenize_request(await read_body(request, self.config.max_body_bytes))
        self._check_model(body.model)
        tokenizer = require_tokenizer(self._text_side.tokenizer, "prompt")
        try:
            text, with_bos = body.prompt, body.add_special_tokens
            if text is None:
                text, with_bos = self._conversation(body), True
            ids = await self._beside(len(text), tokenizer.encode, text, with_bos)
        except GemmaError as error:
            raise api_error(error, "messages" if body.prompt is None else "prompt") from error
        answer = {
            "count": len(ids),
            "max_model_len": self._text_side.max_model_len,
            "tokens": ids,
        }
        if body.with_texts:
            answer["token_strs"] = [
                token_text(Logprob(0.0, decoded_token=tokenizer.id_to_token(i))) for i in ids
            ]
        return json_response(answer)

    def _conversation(self, body: TokenizeRequest) -> str:
        return self._text_side.chat_prompt(
            body.messages, body.tools, body.thinking, body.add_generation_prompt
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of ids, special tokens included."""
        name, tokens = detokenize_request(await read_body(request, self.config.max_body_bytes))
        self._check_model(name)
        tokenizer = require_tokenizer(self._text_side.tokenizer, "tokens")
        try:
            ids = self._text_side.check_ids(tokens) if tokens else []
        except GemmaError as error:
            message = str(error).replace("prompt_token_ids", "tokens")
            raise api_error(type(error)(message), "tokens") from error
        return json_response({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

    # --- generating ------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        """The model's turn of a conversation."""
        return await self._generate(request, chat_request, "messages")

    async def completions(self, request: Request) -> Response:
        """The continuation of one prompt or of several."""
        return await self._generate(request, completion_request, "prompt")

    async def _generate(
        self,
        request: Request,
        read: Callable[[Any, GenerationDefaults], ChatRequest | CompletionRequest],
        text_field: str,
    ) -> Response:
        self.client.check_ready()
        body = await read_body(request, self.config.max_body_bytes)
        size = int(request.headers.get("content-length", LONG_TEXT))
        try:
            exchange = await self._beside(size, self._exchange, read, body)
        except GemmaError as error:
            raise api_error(error, text_field) from error
        headers = {"X-Request-Id": exchange.head.id}
        generation = self.client.submit(exchange.requests)
        with ExitStack() as on_exit:
            on_exit.callback(generation.abort)
            async with on_disconnect(request.receive, generation.abort):
                await generation.accepted()
                if not exchange.request.stream:
                    async for deltas in generation:
                        for delta in deltas:
                            exchange.push(delta)
                    return json_response(exchange.response(), headers=headers)
            on_exit.pop_all()  # the stream aborts it from now on
        return EventStream(_events(exchange, generation), generation.abort, headers)

    def _exchange(
        self, read: Callable[[Any, GenerationDefaults], ChatRequest | CompletionRequest], body: Any
    ) -> Exchange:
        asked = read(body, self._text_side.defaults)
        self._check_model(asked.model)
        return Exchange(asked, self._text_side, asked.model or self.config.model_names[0])

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.config.model_names:
            raise ApiError(
                404,
                f"model {name!r} does not exist; this server has"
                f" {', '.join(self.config.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def _beside[T](self, size: int, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)`, in a thread when its input is long: other requests go on meanwhile."""
        if size < LONG_TEXT:
            return work(*args)
        return await asyncio.to_thread(work, *args)


async def _events(exchange: Exchange, generation: Generation) -> AsyncIterator[bytes]:
    """The events of a stream; those of one device call go out together."""
    extra = {"usage": None} if exchange.request.include_usage else {}
    try:
        async for deltas in generation:
            chunks = [chunk for delta in deltas if (chunk := exchange.push(delta))]
            if chunks:
                yield b"".join(event(chunk | extra) for chunk in chunks)
    except Exception as error:
        if not isinstance(error, GemmaError | TimeoutError):
            logger.exception("a stream failed")
        yield event(api_error(error).body())
        return
    if exchange.request.include_usage:
        yield event(exchange.usage_chunk())
    yield DONE


def create_app(
    config: ServerConfig, text_side: TextSide, client: EngineClient, metrics: ServerMetrics
) -> FastAPI:
    """The ASGI application; its lifespan is that of the engine's process."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        client.start()
        yield
        await client.stop()

    # The interactive documentation would load scripts from elsewhere.
    app = FastAPI(
        title="gemma-jax", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    api = Api(config, text_side, client, metrics)
    routes = [
        ("GET", "/", api.page),
        ("GET", "/health", api.health),
        ("GET", "/version", api.version),
        ("GET", "/metrics", api.render_metrics),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("POST", "/v1/chat/completions", api.chat_completions),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
    ]
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], **describe(path, config.model_names))
    app.add_exception_handler(Exception, _on_error)
    for kind in (GemmaError, ApiError, TimeoutError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(
        Gate, api_keys=config.api_keys, metrics=metrics, paths=[path for _, path, _ in routes]
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


async def _on_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        kind = "not_found" if error.status_code == 404 else None
        return error_response(
            ApiError(error.status_code, error.detail, code=kind, headers=error.headers)
        )
    return error_response(api_error(error))
