"""`MetricsSource` over a Prometheus server. Asks only for bucket increases, counter increases and instant gauges.

Owns the queries and their reading; percentiles and shares are computed in `core`, from these numbers. Every router is
deduplicated by its own `router_uid` before sums, so that a router scraped twice counts once.
"""

import asyncio
import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from poolwright.controller import observe
from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright_protocol import names

# How far back scrape times are read to learn the scrape interval.
_INTERVAL_LOOKBACK_SECONDS = 600
_UNKNOWN_INTERVAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Row:
    labels: Mapping[str, str]
    at: float
    value: float


class QueryFailed(Exception):
    """The query and what went wrong with it."""

    def __init__(self, query: str, cause: str) -> None:
        super().__init__(f"query {query} failed: {cause}")


@dataclass(frozen=True, slots=True)
class PrometheusAccess:
    """Where the server is and how it knows us. The token file is read for each request: tokens rotate."""

    url: str
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    insecure_skip_verify: bool = False
    timeout_seconds: float = 10.0


class PrometheusSource:
    """The metrics of one pool."""

    def __init__(self, access: PrometheusAccess, namespace: str, pool: str) -> None:
        self._access = access
        self._selector = (
            "{" + ",".join(f"{k}={_quoted(v)}" for k, v in observe.pool_labels(namespace, pool).items()) + "}"
        )
        verify: ssl.SSLContext | bool = not access.insecure_skip_verify
        if verify and access.ca_file:
            verify = ssl.create_default_context(cafile=str(access.ca_file))
        self._client = httpx.AsyncClient(
            base_url=access.url.rstrip("/") + "/", timeout=access.timeout_seconds, verify=verify, trust_env=False
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self, window_seconds: float, router_uids: Sequence[str], now: float) -> MetricsReading:
        """The server's own clock dates the answers, so `now` is not sent: a skewed operator would read the past."""
        try:
            return await self._read(window_seconds, router_uids)
        except QueryFailed as error:
            return observe.missing(window_seconds, str(error))

    async def _read(self, window_seconds: float, router_uids: Sequence[str]) -> MetricsReading:
        (at, ages), interval = await asyncio.gather(self._ages(), self._interval())
        fresh_limit = observe.FRESH_INTERVALS * (interval or _UNKNOWN_INTERVAL_SECONDS)
        # A router with no measured interval has one sample at most, and one sample has no increase.
        fresh = [uid for uid in router_uids if uid in ages and ages[uid] <= fresh_limit] if interval else []
        state, detail = observe.judge(router_uids, fresh)
        if interval:
            window_seconds = max(window_seconds, math.ceil(observe.SCRAPES_PER_WINDOW * interval))
        if state is MetricsState.STALE:
            return MetricsReading(state, window_seconds, detail=detail)
        window = f"[{math.ceil(window_seconds)}s]"
        ttft, tbt, in_flight, oldest = await asyncio.gather(
            self._buckets(names.ROUTER_TTFT, window, at),
            self._buckets(names.ROUTER_TBT, window, at),
            self._gauge(names.ROUTER_IN_FLIGHT, fresh, at),
            self._gauge(names.ROUTER_OLDEST_WAITING, fresh, at),
        )
        arrivals, prompt_tokens, output_tokens = await asyncio.gather(
            self._increase(names.ROUTER_ARRIVALS, window, at),
            self._increase(names.ROUTER_PROMPT_TOKENS, window, at),
            self._increase(names.ROUTER_OUTPUT_TOKENS, window, at),
        )
        return MetricsReading(
            state=state,
            window_seconds=window_seconds,
            ttft=ttft,
            tbt=tbt,
            arrivals=arrivals,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            in_flight=sum(in_flight.values()),
            oldest_waiting_seconds=max(oldest.values(), default=0.0),
            detail=detail,
        )

    async def _ages(self) -> tuple[float, dict[str, float]]:
        """The server's time, at which all else is asked, and the age of each router's last sample, in seconds. A router
        that has vanished is not there."""
        query = f"min by ({names.METRIC_ROUTER_UID}) (time() - timestamp({names.ROUTER_INFO}{self._selector}))"
        rows = await self._vector(query)
        at = max((row.at for row in rows), default=0.0)
        return at, {row.labels.get(names.METRIC_ROUTER_UID, ""): row.value for row in rows}

    async def _interval(self) -> float | None:
        """The scrape interval, from the sample times of the routers; None while no router has two."""
        query = f"{names.ROUTER_INFO}{self._selector}[{_INTERVAL_LOOKBACK_SECONDS}s]"
        series = await self._query(query, "matrix")
        try:
            gaps = [observe.typical_gap(float(at) for at, _ in row["values"]) for row in series]
        except (KeyError, TypeError, ValueError) as error:
            raise QueryFailed(query, f"malformed answer: {error!r}") from error
        return max((gap for gap in gaps if gap is not None), default=None)

    async def _buckets(self, metric: str, window: str, at: float) -> HistogramIncrease:
        """Increase of each bucket, resets handled per series, summed over routers."""
        series = f"increase({metric}_bucket{self._selector}{window})"
        query = f"sum by (le) (max by ({names.METRIC_ROUTER_UID}, le) ({series}))"
        rows = await self._vector(query, at, required=True)
        try:
            return observe.histogram({float(row.labels["le"]): row.value for row in rows})
        except (KeyError, ValueError, observe.Malformed) as error:
            raise QueryFailed(query, str(error)) from error

    async def _increase(self, counter: str, window: str, at: float) -> float:
        series = f"increase({counter}_total{self._selector}{window})"
        query = f"sum(max by ({names.METRIC_ROUTER_UID}) ({series}))"
        return (await self._vector(query, at, required=True))[0].value

    async def _gauge(self, gauge: str, uids: Sequence[str], at: float) -> dict[str, float]:
        """By router, of those given; each of them must be there."""
        query = f"max by ({names.METRIC_ROUTER_UID}) ({gauge}{self._selector})"
        values = {row.labels.get(names.METRIC_ROUTER_UID, ""): row.value for row in await self._vector(query, at)}
        absent = [uid for uid in uids if uid not in values]
        if absent:
            raise QueryFailed(query, f"no value for router {', '.join(absent)}")
        return {uid: values[uid] for uid in uids}

    async def _vector(self, query: str, at: float | None = None, required: bool = False) -> list[_Row]:
        raw = await self._query(query, "vector", at)
        if required and not raw:
            raise QueryFailed(query, "it matches no series")
        try:
            rows = [_Row(row["metric"], float(row["value"][0]), float(row["value"][1])) for row in raw]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise QueryFailed(query, f"malformed answer: {error!r}") from error
        for row in rows:
            if not math.isfinite(row.value):
                raise QueryFailed(query, f"the answer holds {row.value}")
        return rows

    async def _query(self, query: str, expected: str, at: float | None = None) -> list[dict[str, Any]]:
        try:
            headers = {}
            if self._access.bearer_token_file:
                token = await asyncio.to_thread(self._access.bearer_token_file.read_text)
                headers["authorization"] = f"Bearer {token.strip()}"
            form = {"query": query} if at is None else {"query": query, "time": f"{at:.3f}"}
            answer = await self._client.post("api/v1/query", data=form, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise QueryFailed(query, f"{self._access.url}: {error or type(error).__name__}") from error
        try:
            body = answer.json()
            if answer.status_code != httpx.codes.OK or body["status"] != "success":
                raise QueryFailed(query, f"{answer.status_code} {body.get('error', answer.text[:200])}")
            data = body["data"]
            if data["resultType"] != expected:
                raise QueryFailed(query, f"expected a {expected}, got a {data['resultType']}")
            return list(data["result"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise QueryFailed(
                query, f"{answer.status_code}, not an answer of Prometheus: {answer.text[:200]!r}"
            ) from error


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
