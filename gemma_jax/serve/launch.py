"""Starting and ending the server: socket, processes, signals, exit code.

SIGTERM or Ctrl-C stops accepting, lets running requests end for up to `drain_timeout` seconds, and
ends with code 0. The end of the engine's process ends the server with an error.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from prometheus_client import disable_created_metrics

from gemma_jax.errors import ConfigError, EngineError
from gemma_jax.serve.api_server import create_app
from gemma_jax.serve.client import EngineClient
from gemma_jax.serve.config import ServerConfig
from gemma_jax.serve.engine_process import EngineFactory
from gemma_jax.serve.load import load_engine
from gemma_jax.serve.metrics import ServerMetrics
from gemma_jax.text_side import TextSide

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel may allow fewer."""
_GRACE = 5.0
"""Seconds beyond `drain_timeout` in which errors can still be written."""


def serve_model(config: ServerConfig, settings: Mapping[str, Any], warm: bool = True) -> None:
    """Serve the `LLM` of these settings until a signal ends it; see `serve` and `load_engine`."""
    text_side = TextSide.load(
        settings["model"],
        settings.get("tokenizer"),
        settings.get("max_model_len"),
        settings.get("seed", 0),
    )
    serve(config, text_side, functools.partial(load_engine, dict(settings), warm))


def serve(config: ServerConfig, text_side: TextSide, factory: EngineFactory) -> None:
    """Serve until a signal ends it.

    Args:
      config: of the server.
      text_side: of the model that the engine has.
      factory: makes the engine in a process of its own; has to be picklable.
    Raises:
      ConfigError: the address cannot be listened on.
      GemmaError: the engine could not be made, or has ended unexpectedly.
    """
    disable_created_metrics()  # they would double the series
    _warn_if_open(config)
    _raise_file_limit()
    listener = _listen(config.host, config.port)
    metrics = ServerMetrics(config.model_names[0])
    server: _Server | None = None

    def on_end() -> None:
        if server is not None:
            server.should_exit = True

    def on_ready() -> None:
        took = time.monotonic() - begun
        print(f"gemma-jax: ready after {took:.0f} s", file=sys.stderr, flush=True)

    begun = time.monotonic()
    client = EngineClient(
        factory, metrics, config.max_queue, config.request_timeout, on_end, on_ready
    )
    app = create_app(config, text_side, client, metrics)
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=config.access_log,
        ws="none",
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(config.drain_timeout + _GRACE),
    )
    if config.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    server = _Server(settings, client, config.drain_timeout)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"gemma-jax: listening on {address}, loading {config.model}", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    if client.failure is not None:
        raise client.failure
    if not server.started:
        raise EngineError("the server could not start; its log says why")


class _Server(uvicorn.Server):
    """uvicorn's server with our way to end; its own would end with the signal's exit code."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_timeout: float):
        super().__init__(config)
        self._client, self._drain_timeout = client, drain_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.should_exit:  # the second signal does not wait
            self._client.fail_all("the server was told to stop at once")
            return
        name = signal.Signals(number).name
        print(f"gemma-jax: {name}, finishing what runs", file=sys.stderr, flush=True)
        self._client.drain()
        self.should_exit = True
        reason = f"the server is stopping, and waits no longer than {self._drain_timeout:g} s"
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout, self._client.fail_all, reason)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"host={host!r}, port={port}: cannot be listened on ({error.strerror or error});"
            " choose another with --host and --port"
        ) from error


def _warn_if_open(config: ServerConfig) -> None:
    try:
        is_local = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_local = config.host == "localhost"
    if not is_local and not config.api_keys:
        logger.warning("%s is open to others, and no --api-key is set", config.host)


def _raise_file_limit() -> None:
    """Allow as many open connections as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
