"""The router's metrics: plain counters in one object, turned into Prometheus families when scraped.

Every series exists at 0 from the start. TTFT, TBT, TPOT and second token are as the client saw them. Knows no HTTP.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from poolwright.core.admission import LATE_FIRST
from poolwright.router.refusal import REASONS
from poolwright_protocol import names
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS

# 499: the client left. 502: an engine broke after its first byte, whatever status the client had got by then.
_CODES = (200, 400, 404, 408, 413, 422, 429, 499, 500, 502, 503, 504)
_BOUND_TEXTS = (*(repr(bound) for bound in LATENCY_BUCKETS_SECONDS), "+Inf")


class Histogram:
    """Latencies in the fixed buckets. An observation costs one bisection."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUND_TEXTS)
        self.sum_seconds = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += times
        self.sum_seconds += seconds * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip(_BOUND_TEXTS, self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class PromptTokens:
    """A counter fed by estimates and corrected by usage. It never falls: the next pays for an overestimate."""

    __slots__ = ("_owed", "total")

    def __init__(self) -> None:
        self.total = 0
        self._owed = 0

    def estimated(self, tokens: int) -> None:
        paid = min(tokens, self._owed)
        self._owed -= paid
        self.total += tokens - paid

    def corrected(self, estimate: int, actual: int) -> None:
        if actual >= estimate:
            self.estimated(actual - estimate)
        else:
            self._owed += estimate - actual


class Waiting:
    """One request in flight."""

    __slots__ = ("answered", "arrived")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.answered = False  # its first token has been seen


class RouterMetrics(Collector):
    def __init__(self, pool: str, pool_namespace: str, router_uid: str, clock: Callable[[], float]) -> None:
        self._labels = {
            names.METRIC_POOL: pool,
            names.METRIC_POOL_NAMESPACE: pool_namespace,
            names.METRIC_ROUTER_UID: router_uid,
        }
        self._clock = clock
        self.ttft = Histogram()
        self.tbt = Histogram()
        self.second_token = Histogram()
        self.tpot = Histogram()
        self.arrivals = 0
        self.requests = dict.fromkeys(_CODES, 0)
        self.relegated = dict.fromkeys(sorted(LATE_FIRST), 0)
        self.refused = dict.fromkeys(sorted(REASONS), 0)
        self.relegation_threshold: Callable[[], float] = lambda: math.inf
        self.prompt_tokens = PromptTokens()
        self.output_tokens = 0
        self.in_flight: dict[Waiting, None] = {}  # in order of arrival
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def finished(self, code: int) -> None:
        self.requests[code] = self.requests.get(code, 0) + 1

    def oldest_waiting_seconds(self) -> float:
        for request in self.in_flight:
            if not request.answered:
                return self._clock() - request.arrived
        return 0.0

    def collect(self) -> Iterator[Metric]:
        yield self._gauge(names.ROUTER_INFO, "1 for each router.", 1)
        yield self._histogram(names.ROUTER_TTFT, "First token minus arrival at the router.", self.ttft)
        yield self._histogram(names.ROUTER_TBT, "Gaps between consecutive tokens of a stream.", self.tbt)
        yield self._histogram(names.ROUTER_SECOND_TOKEN, "Second token minus first: carries the KV.", self.second_token)
        yield self._histogram(names.ROUTER_TPOT, "(last - first) / (tokens - 1) of a stream.", self.tpot)
        yield self._counter(names.ROUTER_ARRIVALS, "Inference requests that arrived.", [({}, self.arrivals)])
        outcomes = [({"code": str(code)}, count) for code, count in self.requests.items()]
        yield self._counter(names.ROUTER_REQUESTS, "Inference requests that ended, by outcome.", outcomes)
        relegated = [({"reason": reason.value}, count) for reason, count in self.relegated.items()]
        yield self._counter(names.ROUTER_RELEGATED, "Inference requests served behind all others.", relegated)
        refused = [({"reason": reason.value}, count) for reason, count in self.refused.items()]
        yield self._counter(names.ROUTER_REFUSED, "Inference requests refused since they would be late.", refused)
        yield self._gauge(
            names.ROUTER_RELEGATION_THRESHOLD,
            "By what a predicted TTFT is divided before it counts as late; +Inf: none does.",
            self.relegation_threshold(),
        )
        yield self._counter(names.ROUTER_PROMPT_TOKENS, "Prompt tokens offered.", [({}, self.prompt_tokens.total)])
        yield self._counter(names.ROUTER_OUTPUT_TOKENS, "Tokens sent to clients.", [({}, self.output_tokens)])
        yield self._gauge(names.ROUTER_IN_FLIGHT, "Inference requests in flight.", len(self.in_flight))
        yield self._gauge(
            names.ROUTER_OLDEST_WAITING, "Age of the oldest request without a token.", self.oldest_waiting_seconds()
        )

    def describe(self) -> Iterable[Metric]:
        return []

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, rows: list[tuple[dict[str, str], int]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, *rows[0][0]])
        for extra, value in rows:
            family.add_metric([*self._labels.values(), *extra.values()], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum_seconds)
        return family
