"""The Prometheus reader against a real Prometheus that scrapes real endpoints with a router's metric names."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp import web

from poolwright.controller.prometheus import PrometheusAccess, PrometheusSource
from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from support import prometheus_server
from support.router_metrics import RouterMetrics

pytestmark = pytest.mark.prometheus

ROUTERS = ["router-a", "router-b"]
WINDOW_SECONDS = 6.0


@pytest.fixture
def routers() -> Iterator[list[RouterMetrics]]:
    made = [RouterMetrics(uid) for uid in ROUTERS]
    yield made
    for router in made:
        router.close()


@pytest.fixture
def server(tmp_path: Path, routers: list[RouterMetrics]) -> Iterator[str]:
    with prometheus_server.running(tmp_path, {"pods": [r.target for r in routers]}) as url:
        yield url


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of routers that serve nothing, for tests that only read: before the first answer the window has to fill."""
    with ExitStack() as routers:
        targets = [routers.enter_context(RouterMetrics(uid)).target for uid in ROUTERS]
        with prometheus_server.running(tmp_path_factory.mktemp("prometheus"), {"pods": targets}) as url:
            yield url


async def read_until(
    url: str, wanted: Callable[[MetricsReading], bool], uids: list[str] = ROUTERS, seconds: float = 20.0
) -> MetricsReading:
    """The first reading that is as wanted, else the last one."""
    source = PrometheusSource(PrometheusAccess(url), "llm", "chat")
    try:
        async with asyncio.timeout(seconds + 10):
            end = asyncio.get_running_loop().time() + seconds
            while True:
                reading = await source.read(WINDOW_SECONDS, uids, now=0.0)
                if wanted(reading) or asyncio.get_running_loop().time() > end:
                    return reading
                await asyncio.sleep(0.25)
    finally:
        await source.close()


def complete(reading: MetricsReading) -> bool:
    return reading.state is MetricsState.COMPLETE


def about(count: float) -> float:
    """An increase is extrapolated to the window's ends: near the true count once there are several scrapes."""
    return pytest.approx(count, rel=0.15)  # type: ignore[no-any-return]


def share_under(histogram: HistogramIncrease, seconds: float) -> float:
    under = max(
        n
        for bound, n in zip(histogram.upper_bounds_seconds, histogram.cumulative_counts, strict=True)
        if bound <= seconds
    )
    return under / histogram.count


async def test_increases_of_all_routers_are_summed(server: str, routers: list[RouterMetrics]) -> None:
    await read_until(server, complete)
    routers[0].serve(30, ttft_seconds=0.1, tbt_seconds=0.01)
    routers[1].serve(10, ttft_seconds=2.0, tbt_seconds=0.01)
    routers[0].in_flight.set(3)
    routers[1].in_flight.set(4)
    routers[1].oldest_waiting.set(1.5)
    reading = await read_until(server, lambda r: complete(r) and r.arrivals == about(40) and r.in_flight == 7)
    assert reading.state is MetricsState.COMPLETE, reading.detail
    assert reading.detail == ""
    assert reading.arrivals == about(40)
    assert reading.ttft.count == about(40)
    assert reading.tbt.count == about(360)
    assert reading.prompt_tokens == about(4000)
    assert reading.output_tokens == about(400)
    assert share_under(reading.ttft, 1.0) == pytest.approx(0.75, abs=0.1)
    assert reading.ttft.upper_bounds_seconds[-1] == math.inf
    assert reading.in_flight == 7
    assert reading.oldest_waiting_seconds == 1.5


async def test_a_router_that_restarts_does_not_look_like_traffic(server: str, routers: list[RouterMetrics]) -> None:
    await read_until(server, complete)
    routers[0].serve(20, ttft_seconds=0.1, tbt_seconds=0.01)
    await read_until(server, lambda r: r.arrivals == about(20))
    await asyncio.to_thread(routers[0].restart)
    routers[0].serve(5, ttft_seconds=0.1, tbt_seconds=0.01)
    reading = await read_until(server, lambda r: complete(r) and r.arrivals == about(25))
    assert reading.arrivals == about(25)


async def test_idle_is_zero_and_complete_from_the_start(idle_server: str) -> None:
    reading = await read_until(idle_server, complete)
    assert (reading.state, reading.arrivals, reading.in_flight, reading.ttft.count) == (MetricsState.COMPLETE, 0, 0, 0)


async def test_a_router_that_vanished_makes_it_partial_then_stale(server: str, routers: list[RouterMetrics]) -> None:
    await read_until(server, complete)
    routers[0].in_flight.set(5)
    await asyncio.to_thread(routers[1].close)
    reading = await read_until(server, lambda r: r.state is MetricsState.PARTIAL and r.in_flight == 5)
    assert reading.state is MetricsState.PARTIAL
    assert "router-b" in reading.detail
    assert "router-a" not in reading.detail
    assert reading.in_flight == 5  # the living router still counts
    await asyncio.to_thread(routers[0].close)
    reading = await read_until(server, lambda r: r.state is MetricsState.STALE)
    assert reading.state is MetricsState.STALE
    assert "router-a" in reading.detail
    for router in routers:
        router.listen()  # the fixture closes them


async def test_a_live_router_that_is_not_scraped_makes_it_partial(idle_server: str) -> None:
    reading = await read_until(idle_server, lambda r: r.state is MetricsState.PARTIAL, uids=[*ROUTERS, "router-new"])
    assert reading.state is MetricsState.PARTIAL
    assert "router-new" in reading.detail


async def test_without_any_router_it_is_stale(idle_server: str) -> None:
    reading = await read_until(idle_server, lambda r: True, uids=[])
    assert reading.state is MetricsState.STALE
    assert reading.detail == "no router is running"


async def test_a_router_scraped_by_two_jobs_counts_once(tmp_path: Path, routers: list[RouterMetrics]) -> None:
    targets = [r.target for r in routers]
    with prometheus_server.running(tmp_path, {"pods": targets, "service": targets}) as url:
        await read_until(url, complete)
        routers[0].serve(20, ttft_seconds=0.1, tbt_seconds=0.01)
        routers[0].in_flight.set(2)
        reading = await read_until(url, lambda r: r.arrivals == about(20) and r.in_flight == 2)
    assert reading.arrivals == about(20)
    assert reading.in_flight == 2


async def test_another_pool_of_the_same_name_is_not_read(idle_server: str) -> None:
    source = PrometheusSource(PrometheusAccess(idle_server), "other-namespace", "chat")
    await read_until(idle_server, complete)
    reading = await source.read(WINDOW_SECONDS, ROUTERS, 0.0)
    await source.close()
    assert reading.state is MetricsState.STALE


async def test_the_window_is_at_least_four_scrape_intervals(tmp_path: Path, routers: list[RouterMetrics]) -> None:
    with prometheus_server.running(tmp_path, {"pods": [r.target for r in routers]}, scrape_interval="2s") as url:
        reading = await read_until(url, complete)
    assert reading.window_seconds >= 8


async def test_unreachable_is_missing_and_names_the_query() -> None:
    source = PrometheusSource(PrometheusAccess("http://127.0.0.1:1", timeout_seconds=1), "llm", "chat")
    reading = await source.read(60, ROUTERS, 0.0)
    await source.close()
    assert reading.state is MetricsState.MISSING
    assert "poolwright_router_info{" in reading.detail
    assert "http://127.0.0.1:1" in reading.detail


VECTOR = '{"status": "success", "data": {"resultType": "vector", "result": [%s]}}'
ODD_ANSWERS = {
    "an error": (503, "Service Unavailable"),
    "a page of a proxy": (200, "<html>sign in</html>"),
    "an error of Prometheus": (422, '{"status": "error", "errorType": "execution", "error": "query timed out"}'),
    "a matrix for a vector": (200, '{"status": "success", "data": {"resultType": "matrix", "result": []}}'),
    "NaN": (200, VECTOR % '{"metric": {"router_uid": "router-a"}, "value": [1, "NaN"]}'),
    "infinity": (200, VECTOR % '{"metric": {"router_uid": "router-a"}, "value": [1, "+Inf"]}'),
    "an empty value": (200, VECTOR % '{"metric": {"router_uid": "router-a"}, "value": [1, ""]}'),
    "a number": (200, "1"),
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS.keys())
async def test_a_broken_answer_is_missing_and_never_a_number(answer: tuple[int, str]) -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(status=answer[0], text=answer[1])

    async with _serving(respond) as url:
        source = PrometheusSource(PrometheusAccess(url), "llm", "chat")
        reading = await source.read(60, ROUTERS, 0.0)
        await source.close()
    assert reading.state is MetricsState.MISSING
    assert "query" in reading.detail
    assert reading.arrivals == 0
    assert reading.ttft == HistogramIncrease()


async def test_the_bearer_token_is_read_for_each_request_and_the_path_prefix_kept(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    seen: list[tuple[str, str | None]] = []

    async def respond(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("authorization")))
        return web.Response(status=403, text="no")

    async with _serving(respond) as url:
        access = PrometheusAccess(f"{url}/prefix/", bearer_token_file=token_file)
        source = PrometheusSource(access, "llm", "chat")
        assert "No such file" in (await source.read(60, ROUTERS, 0.0)).detail
        for token in ("first", "second"):
            token_file.write_text(f"{token}\n")
            assert (await source.read(60, ROUTERS, 0.0)).state is MetricsState.MISSING
        await source.close()
    assert {path for path, _ in seen} == {"/prefix/api/v1/query"}
    assert {token for _, token in seen} == {"Bearer first", "Bearer second"}


class _serving:
    """A small HTTP server that answers everything with one handler."""

    def __init__(self, respond: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", respond)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
