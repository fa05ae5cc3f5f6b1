"""`MetricsSource` without Prometheus: scrapes the routers' `/metrics` itself and keeps a ring of samples per router.

Owns scraping and counting; same numbers, same states and same rules as the Prometheus reader.
"""

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from poolwright.controller import observe
from poolwright.core.reading import MetricsReading, MetricsState
from poolwright_protocol import names

_RETENTION_SECONDS = 900.0

_HISTOGRAMS = tuple(f"{name}_bucket" for name in (names.ROUTER_TTFT, names.ROUTER_TBT))
_COUNTERS = tuple(
    f"{name}_total" for name in (names.ROUTER_ARRIVALS, names.ROUTER_PROMPT_TOKENS, names.ROUTER_OUTPUT_TOKENS)
)
_CUMULATIVE = frozenset((*_HISTOGRAMS, *_COUNTERS))
_GAUGES = (names.ROUTER_IN_FLIGHT, names.ROUTER_OLDEST_WAITING)
_WANTED = frozenset((names.ROUTER_INFO, *_HISTOGRAMS, *_COUNTERS, *_GAUGES))

_Series = tuple[str, float]  # sample name, `le`; 0.0 where it has none


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    values: Mapping[_Series, float]


@dataclass(slots=True)
class _Ring:
    samples: deque[_Sample] = field(default_factory=deque)
    problem: str = ""


class ScrapeSource:
    """The metrics of one pool. `endpoints` gives, at any time, the live routers: uid → URL of `/metrics`."""

    def __init__(
        self,
        endpoints: Callable[[], Mapping[str, str]],
        namespace: str,
        pool: str,
        *,
        clock: Callable[[], float],
        interval_seconds: float = 2.0,
        timeout_seconds: float = 2.0,
    ) -> None:
        self._endpoints = endpoints
        self._labels = observe.pool_labels(namespace, pool)
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._rings: dict[str, _Ring] = {}
        self._client = httpx.AsyncClient(timeout=timeout_seconds, trust_env=False)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Scrape every interval until closed."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="scrape")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._client.aclose()

    async def _run(self) -> None:
        while True:
            await self.scrape()
            await asyncio.sleep(self._interval_seconds)

    async def scrape(self) -> None:
        """One sample of every live router. A failure is kept as that router's problem."""
        endpoints = dict(self._endpoints())
        await asyncio.gather(*(self._scrape_one(uid, url) for uid, url in endpoints.items()))
        oldest = self._clock() - _RETENTION_SECONDS
        for uid, ring in list(self._rings.items()):
            while ring.samples and ring.samples[0].at < oldest:
                ring.samples.popleft()
            if not ring.samples and uid not in endpoints:
                del self._rings[uid]

    async def _scrape_one(self, uid: str, url: str) -> None:
        ring = self._rings.setdefault(uid, _Ring())
        try:
            answer = await self._client.get(url)
            answer.raise_for_status()
            values = self._parse(uid, answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, observe.Malformed) as error:
            ring.problem = f"scrape of {url} failed: {error or type(error).__name__}"
            return
        ring.problem = ""
        ring.samples.append(_Sample(self._clock(), values))

    def _parse(self, uid: str, text: str) -> dict[_Series, float]:
        expected = {**self._labels, names.METRIC_ROUTER_UID: uid}
        values: dict[_Series, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _WANTED and all(sample.labels.get(k) == v for k, v in expected.items()):
                    values[sample.name, float(sample.labels.get("le", 0.0))] = float(sample.value)
        present = {name for name, _ in values}
        absent = sorted(_WANTED - present)
        if absent:
            raise observe.Malformed(f"it has no {', '.join(absent)} of router {uid}")
        return values

    async def read(self, window_seconds: float, router_uids: Sequence[str], now: float) -> MetricsReading:
        try:
            return self._read(window_seconds, router_uids, now)
        except observe.Malformed as error:
            return observe.missing(window_seconds, str(error))

    def _read(self, window_seconds: float, router_uids: Sequence[str], now: float) -> MetricsReading:
        rings = {uid: ring for uid in router_uids if (ring := self._rings.get(uid)) and ring.samples}
        gaps = [gap for r in rings.values() if (gap := observe.typical_gap(s.at for s in r.samples)) is not None]
        interval = max(gaps, default=None)
        limit = observe.FRESH_INTERVALS * max(interval or 0.0, self._interval_seconds)
        fresh = [u for u, r in rings.items() if len(r.samples) >= 2 and now - r.samples[-1].at <= limit]
        state, detail = observe.judge(router_uids, fresh)
        problems = [ring.problem for uid in router_uids if (ring := self._rings.get(uid)) and ring.problem]
        if problems:
            detail = "; ".join(problems)
            if not fresh and len(problems) == len(set(router_uids)):
                return observe.missing(window_seconds, detail)
        if interval:
            window_seconds = max(window_seconds, math.ceil(observe.SCRAPES_PER_WINDOW * interval))
        if state is MetricsState.STALE:
            return MetricsReading(state, window_seconds, detail=detail)
        # Of the time before the first sample nothing is known, and no rate may say that nothing came in it.
        seen_since = min(ring.samples[0].at for ring in self._rings.values() if ring.samples)
        window_seconds = min(window_seconds, now - seen_since)
        # Routers that have gone still count for what they served in the window; gauges are of the living only.
        increase = _total_increase(self._rings.values(), now - window_seconds, now, limit)
        latest = [rings[uid].samples[-1].values for uid in fresh]
        ttft, tbt = (observe.histogram({le: v for (n, le), v in increase.items() if n == name}) for name in _HISTOGRAMS)
        arrivals, prompt_tokens, output_tokens = (observe.finite(increase[name, 0.0], name) for name in _COUNTERS)
        in_flight, oldest = ([observe.finite(v[name, 0.0], name) for v in latest] for name in _GAUGES)
        return MetricsReading(
            state=state,
            window_seconds=window_seconds,
            ttft=ttft,
            tbt=tbt,
            arrivals=arrivals,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            in_flight=sum(in_flight),
            oldest_waiting_seconds=max(oldest, default=0.0),
            detail=detail,
        )


def _total_increase(rings: Iterable[_Ring], start: float, end: float, limit_seconds: float) -> dict[_Series, float]:
    """Summed over routers. The last sample before the window is the baseline, if near: nothing is extrapolated."""
    total: dict[_Series, float] = {}
    for ring in rings:
        inside = [s for s in ring.samples if start < s.at <= end]
        before = [s for s in ring.samples if start - limit_seconds <= s.at <= start]
        window = before[-1:] + inside
        for earlier, later in itertools.pairwise(window):
            previous = {} if _restarted(earlier, later) else earlier.values
            for series, value in later.values.items():
                if series[0] in _CUMULATIVE:
                    total[series] = total.get(series, 0.0) + value - previous.get(series, 0.0)
    return total


def _restarted(earlier: _Sample, later: _Sample) -> bool:
    """One counter that fell tells it for the whole router: the others may already have passed their old values."""
    return any(
        later.values.get(series, math.inf) < value
        for series, value in earlier.values.items()
        if series[0] in _CUMULATIVE
    )
