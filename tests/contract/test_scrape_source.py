"""Our own scraping of a real endpoint: the same states and numbers as Prometheus would give. Time is the test's."""

from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web

from poolwright.controller.scrape import ScrapeSource
from poolwright.core.reading import MetricsReading, MetricsState
from support.router_metrics import RouterMetrics

UIDS = ["router-a", "router-b"]


@pytest.fixture
def routers() -> Iterator[list[RouterMetrics]]:
    made = [RouterMetrics(uid) for uid in UIDS]
    yield made
    for router in made:
        router.close()


class Bench:
    def __init__(self, endpoints: dict[str, str]) -> None:
        self.now = 1000.0
        self.endpoints = endpoints
        self.source = ScrapeSource(
            lambda: self.endpoints, "llm", "chat", clock=lambda: self.now, interval_seconds=1.0, timeout_seconds=1.0
        )

    async def scrape(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            await self.source.scrape()

    async def read(self, window_seconds: float = 10.0, uids: list[str] = UIDS) -> MetricsReading:
        return await self.source.read(window_seconds, uids, self.now)


@pytest.fixture
async def bench(routers: list[RouterMetrics]) -> AsyncIterator[Bench]:
    made = Bench({r.router_uid: r.url for r in routers})
    yield made
    await made.source.close()


async def test_increases_of_all_routers_are_summed(bench: Bench, routers: list[RouterMetrics]) -> None:
    routers[0].serve(7, 0.1, 0.01)  # before the first sample: no increase
    await bench.scrape(2)
    routers[0].serve(30, 0.1, 0.01)
    routers[1].serve(10, 2.0, 0.01)
    routers[0].in_flight.set(3)
    routers[1].in_flight.set(4)
    routers[1].oldest_waiting.set(1.5)
    await bench.scrape(2)
    reading = await bench.read()
    assert (reading.state, reading.detail) == (MetricsState.COMPLETE, "")
    assert (reading.arrivals, reading.prompt_tokens, reading.output_tokens) == (40, 4000, 400)
    assert (reading.ttft.count, reading.tbt.count) == (40, 360)
    assert (reading.in_flight, reading.oldest_waiting_seconds) == (7, 1.5)
    under = [n for b, n in zip(reading.ttft.upper_bounds_seconds, reading.ttft.cumulative_counts, strict=True) if b < 1]
    assert under[-1] == 30


async def test_only_the_window_counts(bench: Bench, routers: list[RouterMetrics]) -> None:
    await bench.scrape(2)
    routers[0].serve(5, 0.1, 0.01)
    await bench.scrape(20)
    routers[0].serve(3, 0.1, 0.01)
    await bench.scrape(2)
    assert (await bench.read(window_seconds=10)).arrivals == 3
    assert (await bench.read(window_seconds=60)).arrivals == 8


async def test_a_restart_counts_from_zero_also_where_a_counter_has_overtaken_itself(
    bench: Bench, routers: list[RouterMetrics]
) -> None:
    routers[0].serve(5, 0.1, 0.01)
    await bench.scrape(2)
    routers[0].restart()
    routers[0].serve(4, 0.1, 0.01)
    routers[0].serve(4, 2.0, 0.01)
    await bench.scrape()
    reading = await bench.read()
    assert reading.state is MetricsState.COMPLETE
    assert (reading.arrivals, reading.ttft.count) == (8, 8)


async def test_one_sample_is_no_baseline(bench: Bench) -> None:
    await bench.scrape()
    assert (await bench.read()).state is MetricsState.STALE
    await bench.scrape()
    assert (await bench.read()).state is MetricsState.COMPLETE


async def test_a_router_that_vanished_is_partial_then_missing_with_its_address(
    bench: Bench, routers: list[RouterMetrics]
) -> None:
    await bench.scrape(2)
    routers[1].close()
    await bench.scrape(5)
    reading = await bench.read()
    assert reading.state is MetricsState.PARTIAL
    assert routers[1].url in reading.detail
    routers[0].close()
    await bench.scrape(5)
    reading = await bench.read()
    assert reading.state is MetricsState.MISSING
    assert routers[0].url in reading.detail
    for router in routers:
        router.listen()


async def test_nothing_scraped_for_long_is_stale(bench: Bench) -> None:
    await bench.scrape(2)
    bench.now += 60
    reading = await bench.read()
    assert reading.state is MetricsState.STALE
    assert "router-a" in reading.detail


async def test_the_window_is_at_least_four_scrapes(bench: Bench) -> None:
    await bench.scrape(6)
    assert (await bench.read(window_seconds=1)).window_seconds == 4


async def test_another_routers_address_is_not_read_as_this_ones(bench: Bench, routers: list[RouterMetrics]) -> None:
    bench.endpoints = {"router-a": routers[1].url}
    await bench.scrape(3)
    reading = await bench.read(uids=["router-a"])
    assert reading.state is MetricsState.MISSING
    assert "router-a" in reading.detail


async def test_a_page_that_is_no_exposition_is_missing_with_its_address() -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(text="<html>sign in</html>")

    app = web.Application()
    app.router.add_get("/metrics", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    bench = Bench({"router-a": url})
    await bench.scrape(3)
    reading = await bench.read(uids=["router-a"])
    await bench.source.close()
    await runner.cleanup()
    assert reading.state is MetricsState.MISSING
    assert url in reading.detail
