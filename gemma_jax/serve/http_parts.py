"""Pieces of HTTP that the routes share: reading a body, streaming events, noticing who left."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemma_jax.serve.metrics import ServerMetrics
from gemma_jax.serve.protocol import ApiError, read_json, write_json

BODY_SECONDS = 60.0
"""How long a client may take to send a body."""
OPEN_PATHS = ("/", "/health", "/version", "/metrics")
"""What is answered without an API key: nothing that reads or makes text."""


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`value` as a JSON response."""
    return Response(write_json(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """A refusal in the API's form."""
    return json_response(error.body(), error.status, error.headers)


async def read_body(request: Request, max_bytes: int) -> Any:
    """The JSON value of a request's body.

    Raises:
      RequestError: it is not JSON.
      ApiError: it is too large, too slow, or not declared as JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page can send other types to this machine without being asked first (CORS).
        raise ApiError(
            415,
            f"Content-Type is {kind!r}; expected application/json",
            param="Content-Type",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return read_json(await _read(request, max_bytes))
    except TimeoutError as error:
        raise ApiError(408, f"body did not arrive within {BODY_SECONDS:g} s") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise ApiError(
                413,
                f"body has more than the {max_bytes} bytes allowed (--max-body-bytes)",
                param="body",
                code="request_too_large",
                headers={"Connection": "close"},  # the rest is not read
            )
        parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def on_disconnect(receive: Receive, action: Callable[[], None]) -> AsyncIterator[None]:
    """Call `action` if the client hangs up within the block; the body has to be read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        action()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class EventStream(Response):
    """Server-sent events, made while they are sent.

    Args:
      events: encoded events; it is closed when the response ends, however it ends.
      abort: called when the client hangs up; `events` then ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        abort: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ):
        self.status_code, self.background = 200, None
        self._events, self._abort = events, abort
        self.init_headers(
            {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with on_disconnect(receive, self._abort):
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._abort()


class Gate:
    """Outermost middleware: checks the API key, and counts responses.

    Args:
      app: what is behind it.
      api_keys: any of them opens; none of them leaves the gate open.
      metrics: where responses are counted.
      paths: the paths to count by name; others count as "other".
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], metrics: ServerMetrics, paths: Sequence[str]
    ):
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.on_response(path, scope["method"], message["status"])
            await send(message)

        if self._may_pass(scope):
            with contextlib.suppress(ClientDisconnect):  # nobody is left to be answered
                await self._app(scope, receive, counted)
        else:
            await error_response(_wrong_key())(scope, receive, counted)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), expected) for expected in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
        param="Authorization",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
