"""What the routers measured and when the control plane can know of it: histograms, counters, scrapes.

The buckets are the routers' own (`poolwright_protocol.buckets`); percentiles are `core`'s business.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS

_BOUNDS = (*LATENCY_BUCKETS_SECONDS, math.inf)
_KEPT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class _Scrape:
    at: float
    ttft: tuple[int, ...]
    tbt: tuple[int, ...]
    arrivals: int
    prompt_tokens: int
    output_tokens: int
    in_flight: int
    oldest_waiting_seconds: float


class Meter:
    """`delay_seconds`: from a scrape to when it can be read."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay = delay_seconds
        self._ttft = [0] * len(_BOUNDS)
        self._tbt = [0] * len(_BOUNDS)
        self._arrivals = self._prompt_tokens = self._output_tokens = 0
        self._in_flight = 0
        self._waiting: dict[int, float] = {}  # number and arrival of those without a token, first come first
        self._scrapes: deque[_Scrape] = deque()

    def arrived(self, number: int, now: float, prompt_tokens: int) -> None:
        self._arrivals += 1
        self._prompt_tokens += prompt_tokens
        self._in_flight += 1
        self._waiting[number] = now

    def first_token(self, number: int, now: float) -> None:
        arrived = self._waiting.pop(number)
        self._ttft[bisect.bisect_left(LATENCY_BUCKETS_SECONDS, now - arrived)] += 1
        self._output_tokens += 1

    def tokens(self, seconds: float, count: int) -> None:
        """So many gaps of so many seconds."""
        self._tbt[bisect.bisect_left(LATENCY_BUCKETS_SECONDS, seconds)] += count
        self._output_tokens += count

    def ended(self, number: int) -> None:
        self._in_flight -= 1
        self._waiting.pop(number, None)

    def scrape(self, now: float) -> None:
        oldest = next(iter(self._waiting.values()), now)
        self._scrapes.append(
            _Scrape(
                now,
                tuple(self._ttft),
                tuple(self._tbt),
                self._arrivals,
                self._prompt_tokens,
                self._output_tokens,
                self._in_flight,
                now - oldest,
            )
        )
        while self._scrapes[0].at < now - _KEPT_SECONDS:
            self._scrapes.popleft()

    def reading(self, now: float, window_seconds: float) -> MetricsReading:
        """Between the newest scrape that can be read and the one a window before it."""
        known = [scrape for scrape in self._scrapes if scrape.at <= now - self._delay]
        if len(known) < 2:
            return MetricsReading(MetricsState.MISSING, window_seconds, detail="not scraped yet")
        last = known[-1]
        index = bisect.bisect_right(known, last.at - window_seconds + 1e-9, key=lambda scrape: scrape.at)
        first = known[max(0, min(index - 1, len(known) - 2))]
        return MetricsReading(
            MetricsState.COMPLETE,
            last.at - first.at,
            _increase(first.ttft, last.ttft),
            _increase(first.tbt, last.tbt),
            last.arrivals - first.arrivals,
            last.prompt_tokens - first.prompt_tokens,
            last.output_tokens - first.output_tokens,
            last.in_flight,
            last.oldest_waiting_seconds,
        )


def _increase(first: tuple[int, ...], last: tuple[int, ...]) -> HistogramIncrease:
    counts = (float(b - a) for a, b in zip(first, last, strict=True))
    return HistogramIncrease(_BOUNDS, tuple(accumulate(counts)))
