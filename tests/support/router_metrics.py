"""A real prometheus-client endpoint that exports a router's metrics, with numbers a test sets."""

from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from poolwright_protocol import names
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS


class RouterMetrics:
    """Every series exists at 0 from the start, as on a router."""

    def __init__(self, router_uid: str, pool: str = "chat", namespace: str = "llm") -> None:
        self.router_uid = router_uid
        self._label_names = (names.METRIC_POOL, names.METRIC_POOL_NAMESPACE, names.METRIC_ROUTER_UID)
        self._labels = (pool, namespace, router_uid)
        self._port: int | None = None
        self.reset()
        self.listen()

    def reset(self) -> None:
        """As after a restart in place: all counters at 0 again."""
        registry = self._registry = CollectorRegistry()

        def histogram(name: str) -> Histogram:
            made = Histogram(name, name, self._label_names, registry=registry, buckets=LATENCY_BUCKETS_SECONDS)
            return made.labels(*self._labels)

        def counter(name: str) -> Counter:
            return Counter(name, name, self._label_names, registry=registry).labels(*self._labels)

        def gauge(name: str) -> Gauge:
            return Gauge(name, name, self._label_names, registry=registry).labels(*self._labels)

        self.info = gauge(names.ROUTER_INFO)
        self.info.set(1)
        self.ttft = histogram(names.ROUTER_TTFT)
        self.tbt = histogram(names.ROUTER_TBT)
        self.arrivals = counter(names.ROUTER_ARRIVALS)
        self.prompt_tokens = counter(names.ROUTER_PROMPT_TOKENS)
        self.output_tokens = counter(names.ROUTER_OUTPUT_TOKENS)
        self.in_flight = gauge(names.ROUTER_IN_FLIGHT)
        self.oldest_waiting = gauge(names.ROUTER_OLDEST_WAITING)

    def listen(self) -> None:
        """On a free port at first, later on the same again."""
        self._server, self._thread = start_http_server(self._port or 0, "127.0.0.1", registry=self._registry)
        self._port = self._server.server_port

    def restart(self) -> None:
        self.close()
        self.reset()
        self.listen()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.target}/metrics"

    def serve(self, requests: int, ttft_seconds: float, tbt_seconds: float, output_tokens: int = 10) -> None:
        """Count so many finished requests."""
        for _ in range(requests):
            self.arrivals.inc()
            self.prompt_tokens.inc(100)
            self.output_tokens.inc(output_tokens)
            self.ttft.observe(ttft_seconds)
            for _ in range(output_tokens - 1):
                self.tbt.observe(tbt_seconds)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
