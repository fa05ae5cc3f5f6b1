"""What came in and how it went, over the last interval: the averages that published planners read from Prometheus."""

from collections.abc import Sequence
from dataclasses import dataclass

from poolwright.core.reading import HistogramIncrease
from poolwright.sim.baselines.routers import MakeRouter, Routed
from poolwright.sim.policy import ClusterView, Placement, Router, Setting
from poolwright.sim.request import Arrival


@dataclass(frozen=True, slots=True)
class Traffic:
    """Means over one interval; None where nothing was counted."""

    requests: int
    prompt_tokens: float | None
    output_tokens: float | None
    ttft_seconds: float | None
    tbt_seconds: float | None
    request_seconds: float | None


class Meter:
    """Passes everything on to a router and remembers when requests came, had their first token, and ended."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._began: dict[int, float] = {}
        self._arrived: list[tuple[float, int]] = []
        self._ttft: list[tuple[float, float]] = []
        self._ended: list[tuple[float, float]] = []

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        self._began[arrival.number] = now
        self._arrived.append((now, arrival.prompt_tokens))
        return self._router.route(now, arrival, view)

    def first_token(self, now: float, number: int) -> None:
        if number in self._began:
            self._ttft.append((now, now - self._began[number]))
        self._router.first_token(now, number)

    def finished(self, now: float, number: int) -> None:
        began = self._began.pop(number, None)
        if began is not None:
            self._ended.append((now, now - began))
        self._router.finished(now, number)

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        return self._router.rebind(now, arrival, placement, view)

    def traffic(self, now: float, view: ClusterView, seconds: float) -> Traffic:
        """Of the last `seconds`; what is older is forgotten."""
        since = now - seconds
        self._arrived = [(at, tokens) for at, tokens in self._arrived if at > since]
        self._ttft = [(at, value) for at, value in self._ttft if at > since]
        self._ended = [(at, value) for at, value in self._ended if at > since]
        reading = view.reading(seconds)
        return Traffic(
            len(self._arrived),
            _mean([float(tokens) for _, tokens in self._arrived]),
            reading.output_tokens / len(self._ended) if self._ended else None,
            _mean([value for _, value in self._ttft]),
            mean_seconds(reading.tbt),
            _mean([value for _, value in self._ended]),
        )


def metered(router: MakeRouter, setting: Setting) -> Meter:
    return Meter(router(setting))


def mean_seconds(histogram: HistogramIncrease) -> float | None:
    """Samples as in the middle of their bucket; those beyond the last bound as at it."""
    total = below = low = 0.0
    for bound, count in zip(histogram.upper_bounds_seconds, histogram.cumulative_counts, strict=True):
        middle = low if bound == float("inf") else (low + bound) / 2
        total += (count - below) * middle
        below, low = count, bound
    return total / below if below > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
