"""Prometheus metrics of the server, under the names that vLLM gives them."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gemma_jax.serve.request import EngineRequest, EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "gemma_jax:"
RATE_SECONDS = 5.0
"""The tokens a second are those of about this long."""

_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))

Completion = tuple[int, int]
"""Number of the prompt in its HTTP request, and of the completion in its prompt."""


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._engine = _EngineMetrics(model)
        self.registry.register(self._engine)
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(
                PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return family.labels(model)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to a completion's first token.",
            _LATENCY_BUCKETS,
        )  # fmt: skip
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Time between two arrivals of tokens, divided by the tokens that the later brought.",
            _LATENCY_BUCKETS,
        )
        self.latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a completion.",
            _LATENCY_BUCKETS,
        )  # fmt: skip
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.output_length = histogram(
            "request_generation_tokens", "Generated tokens of a completion.", _TOKEN_BUCKETS
        )
        self._finished = Counter(
            PREFIX + "request_success", "Completions that have ended, by reason.",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._responses = Counter(
            PREFIX + "http_requests", "HTTP responses begun.", ["path", "method", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._model = model

    def new_request(self, requests: Sequence[EngineRequest]) -> "RequestTimings":
        """Follow an HTTP request from now on."""
        for request in requests:
            self.prompt_length.observe(len(request.prompt_token_ids))
        return RequestTimings(self)

    def on_stats(self, stats: EngineStats) -> None:
        """Take the engine's state and counters."""
        self._engine.update(stats)

    def on_finish(self, reason: str) -> None:
        """Count a completion that has ended."""
        self._finished.labels(self._model, reason).inc()

    def on_response(self, path: str, method: str, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(path, method, str(status)).inc()

    def render(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class RequestTimings:
    """Observes the latencies of one HTTP request's completions."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last: dict[Completion, float] = {}
        self._tokens: dict[Completion, int] = {}

    def on_tokens(self, completion: Completion, count: int) -> None:
        """A completion has gained `count` tokens."""
        if not count:
            return
        now = time.monotonic()
        if completion in self._last:
            gap = now - self._last[completion]
            self._metrics.inter_token_latency.observe(gap / count)
        else:
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last[completion] = now
        self._tokens[completion] = self._tokens.get(completion, 0) + count

    def on_finish(self, completion: Completion, reason: str) -> None:
        """A completion has ended."""
        self._metrics.latency.observe(time.monotonic() - self._arrival)
        self._metrics.output_length.observe(self._tokens.get(completion, 0))
        self._metrics.on_finish(reason)

    def on_abort(self) -> None:
        """The request was given up before its end."""
        self._metrics.on_finish("abort")


class _EngineMetrics(Collector):
    """The engine's own state and counters, as it last reported them."""

    def __init__(self, model: str):
        self._model = model
        self._stats = EngineStats()
        self._samples: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def update(self, stats: EngineStats) -> None:
        self._stats = stats
        now = time.monotonic()
        self._samples.append((now, stats.generated_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
            del self._samples[0]

    def _tokens_per_second(self) -> float:
        now = time.monotonic()
        start, before = self._samples[0]
        if now - self._samples[-1][0] > RATE_SECONDS or now <= start:
            return 0.0
        return (self._stats.generated_tokens - before) / (now - start)

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        gauges = {
            "num_requests_running": ("Completions that are being computed.", stats.running),
            "num_requests_waiting": ("Completions that wait for a place.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the KV pages in use; 1 is all.", stats.kv_usage),
            "generation_tokens_per_second": (
                f"Tokens generated a second, over {RATE_SECONDS:g} s.",
                self._tokens_per_second(),
            ),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.prefix_query_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", stats.prefix_hit_tokens),
            "num_preemptions": ("Completions that lost their pages.", stats.preemptions),
            "device_calls": ("Programs run on the device.", stats.device_calls),
            "device_idle_seconds": ("Device idle while there was work.", stats.idle_seconds),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
