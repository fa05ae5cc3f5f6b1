"""What went wrong for users of other autoscalers, as they reported it in public, re-created here.

Each test names the id under which the report is listed among us; what is right is said by the test.
"""

import json
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from poolwright.api.models import InferencePool, InferencePoolStatus, RouterSpec
from poolwright.controller import observe, scrape
from poolwright.controller import status as statuses
from poolwright.controller.ports import ChildrenState
from poolwright.controller.probes import OperatorMetrics
from poolwright.controller.prometheus import PrometheusAccess, PrometheusSource
from poolwright.controller.scrape import ScrapeSource, _Ring, _Sample, _total_increase
from poolwright.controller.trouble import troubles
from poolwright.core import fast_loop, routing
from poolwright.core.board import Board
from poolwright.core.decision import Decision, ObjectiveState, Reason, Snapshot
from poolwright.core.ledger import Ledger
from poolwright.core.memory import rebuild_memory
from poolwright.core.percentile import MalformedHistogram, percentile, share_under
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import HistogramIncrease, LiveReading, MachineWork, MetricsReading, MetricsState
from poolwright.core.relegation import Judged
from poolwright.core.routing import Choice, NoMachine, Route, RoutingRequest
from poolwright.core.spec import Metric, PoolBounds
from poolwright.router.meter import Meter
from poolwright.router.metrics import RouterMetrics, Waiting
from poolwright_protocol import names
from support.pool_world import PRICES, START, M, P, T, World, pool, reading, spec, split
from support.router_metrics import RouterMetrics as ScrapedRouter
from support.standing_pool import manifest

NOTHING = reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0)
OUTAGE = MetricsReading(MetricsState.MISSING, 20.0, detail="503")


def busy(per_second: float, prompt: float, output: float, ttft: float = 0.3, tbt: float = 0.02) -> MetricsReading:
    arrivals = per_second * 20
    return reading(
        ttft,
        tbt,
        ttft_count=arrivals,
        tbt_count=arrivals * (output - 1),
        arrivals=arrivals,
        prompt_tokens=arrivals * prompt,
    )


def test_as_01_traffic_that_stops_is_idle_and_holds_nobody() -> None:
    """Sum and count of TTFT both stand still: 0/0. Idle is read from the counters, and the pool of seven is free."""
    world = World(spec(8, max_moves_per_window=4), pool(*[P] * 7, T), prices={"c": PRICES})
    for _ in range(10):
        world.step(busy(1.5, 8000, 20), seconds=30)
    decision = world.step(NOTHING, seconds=30)
    assert (decision.reason, {o.state for o in decision.objectives}) == (Reason.IDLE, {ObjectiveState.IDLE})
    assert all("nan" not in value.lower() for _, value in decision.evidence)
    for _ in range(8):
        world.step(busy(60, 50, 500), seconds=80)
    assert split(world.machines)[0] < 7


def test_as_03_a_pool_below_its_minimum_is_lifted_during_an_outage_of_metrics() -> None:
    world = World(spec(4, pools={P: PoolBounds(2), T: PoolBounds(1)}), pool(P, T, T, T))
    decision = world.decide(OUTAGE)
    assert decision.reason is Reason.MINIMUM_REPAIRED
    assert "minimum of 2" in decision.message
    assert split(world.machines)[0] == 2


VECTOR = '{"status": "success", "data": {"resultType": "%s", "result": [%s]}}'
ONE = '{"metric": {"router_uid": "a"}, "value": [1, "%s"]}'


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e400", "", "matrix"])
async def test_as_04_a_value_that_is_no_number_is_missing_and_reaches_no_decision(value: str) -> None:
    body = VECTOR % ("matrix", "") if value == "matrix" else VECTOR % ("vector", ONE % value)
    async with _answering(body) as url:
        source = PrometheusSource(PrometheusAccess(url), "llm", "chat")
        seen = await source.read(60, ["a"], 0.0)
        await source.close()
    assert seen.state is MetricsState.MISSING
    decision = World(spec(), pool(P, T, M)).decide(seen)
    assert decision.reason is Reason.METRICS_MISSING
    numbers = [o.observed_seconds for o in decision.objectives]
    assert numbers == [None, None]
    _is_plain_json(_status(decision, seen))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -5.0])
@pytest.mark.parametrize(
    "field", ["arrivals", "in_flight", "oldest_waiting_seconds", "prompt_tokens", "window_seconds"]
)
def test_as_04_what_gets_past_the_reader_all_the_same_reaches_no_status(field: str, value: float) -> None:
    seen = replace(busy(20, 500, 50), **{field: value})  # type: ignore[arg-type]
    world = World(spec(), pool(P, T, M), prices={"c": PRICES})
    for _ in range(3):
        decision = world.step(seen)
        text = _is_plain_json(_status(decision, seen))
        assert not re.search(r"\bnan\b", text.lower())
        assert all(0 <= count.desired <= 3 for count in decision.pools.values())


def _status(decision: Decision, seen: MetricsReading, *problems: str) -> InferencePoolStatus:
    children = ChildrenState(routers_ready=1, routers_desired=1, problems=problems)
    return statuses.build(
        statuses.Facts(InferencePool.parse(manifest()), pool(P, T, M), children, seen, decision, (), None), START
    )


def _is_plain_json(status: InferencePoolStatus) -> str:
    """Raises for a number that JSON has no word for."""
    return json.dumps(status.to_json(), allow_nan=False)


def test_as_06_ttft_counts_from_arrival_at_the_router_and_the_prompt_pool_grows_in_the_first_interval() -> None:
    metrics = RouterMetrics("chat", "llm", "a", clock=lambda: 0.0)
    meter(metrics, arrived=0.0).tokens(0, {"completion_tokens": 1}, now=110.0)  # it waited for nearly all of this
    assert metrics.ttft.sum_seconds == 110.0
    counts = tuple(n * 40 for _, n in metrics.ttft.cumulative())
    seen = replace(busy(2, 8000, 1000), ttft=HistogramIncrease(reading().ttft.upper_bounds_seconds, counts))
    world = World(spec(8), pool(P, P, *[T] * 6))
    assert world.decide(seen).reason is Reason.TTFT_MISSED
    assert split(world.machines)[0] == 3


@pytest.mark.parametrize("prices", [{}, {"c": PRICES}], ids=["by latency", "by work"])
def test_as_06_arrivals_that_swing_grow_the_prompt_pool_in_the_first_interval_that_misses(
    prices: dict[str, MachinePrices],
) -> None:
    """1 to 24 requests a second in 900 s, of 8,000 tokens in and 1,000 out. Prompt machines are servers of one line:
    what an engine would say of its own work is the same 0.84 s all along, and only the wait grows."""
    service = PRICES.prefill_seconds(8000)
    made = spec(
        32, pools={M: PoolBounds(0, 0)}, max_moves_per_window=8, dwell_seconds=10.0, metrics_window_seconds=20.0
    )
    made = replace(made, objectives=(replace(made.objectives[0], target_seconds=2.0), made.objectives[1]))
    assert service < 2.0
    world = World(made, pool(*[P] * 4, *[T] * 28), prices=prices)
    free_at: list[float] = [START] * 4
    arrived: list[float] = []
    first_tokens: list[tuple[float, float]] = []  # when, TTFT from the arrival at the router
    due, first_miss = START, None
    for tick in range(1, 180):
        until = START + 5.0 * tick
        while due < until:
            begun = max(due, min(free_at))
            free_at[free_at.index(min(free_at))] = begun + service
            arrived.append(due)
            first_tokens.append((begun + service, begun + service - due))
            due += 1 / (12.5 - 11.5 * math.cos(2 * math.pi * (due - START) / 900))
        seen = _swing(until, arrived, first_tokens)
        world.now = until
        before = split(world.machines)[0]
        decision = world.decide(seen)
        ttft = decision.objectives[0]
        grown = split(world.machines)[0] - before
        world.finish_moves()
        free_at += [until] * grown
        if ttft.state is ObjectiveState.MISSED:
            first_miss = until
            assert grown > 0 or before > 4, decision
            break
    if prices:  # the forecast was there first, or came with the first miss
        assert split(world.machines)[0] > 4
    else:
        assert first_miss is not None
        assert decision.reason is Reason.TTFT_MISSED


def _swing(now: float, arrived: list[float], first_tokens: list[tuple[float, float]]) -> MetricsReading:
    """What the routers' histograms increased by in 20 s."""
    bounds = reading().ttft.upper_bounds_seconds
    inside = [ttft for at, ttft in first_tokens if now - 20 < at <= now]
    came = [at for at in arrived if now - 20 < at <= now]
    out = [(at, ttft) for at, ttft in first_tokens if at > now]
    return replace(
        busy(len(came) / 20, 8000, 1000, tbt=0.012),
        ttft=HistogramIncrease(bounds, tuple(float(sum(t <= b for t in inside)) for b in bounds)),
        in_flight=float(len(out) + 1),
        oldest_waiting_seconds=max((now - (at - ttft) for at, ttft in out if at - ttft <= now), default=0.0),
    )


def test_as_07_machines_that_can_never_start_freeze_nothing() -> None:
    """Two are Pending for good. What there is keeps being decided on, and the load's end is seen."""
    pending = tuple(replace(m, uid=f"x{m.uid}", ready=False, host=None) for m in pool(None, None))
    world = World(spec(6, pools={T: PoolBounds(1)}), (*pool(P, T, T, T), *pending))
    world.now += 700
    assert world.step(reading(ttft=5.0)).reason is Reason.TTFT_MISSED
    world.now += 400
    assert world.step(NOTHING).reason is Reason.IDLE


def test_as_07_a_pool_that_is_short_for_good_says_so_and_holds_up_no_other() -> None:
    """Four token machines are wanted at least, and two have no role, being Pending: no wait has an end here."""
    pending = tuple(replace(m, uid=f"x{m.uid}", ready=False, host=None) for m in pool(None, None))
    made = spec(7, pools={T: PoolBounds(4), M: PoolBounds(0)}, max_moves_per_window=4)
    world = World(made, (*pool(P, T, T, M, M), *pending), prices={"c": PRICES})
    short = world.step(NOTHING)
    assert short.reason is Reason.MINIMUM_REPAIRED, "what can be lifted is, at once"
    world.machines = (*pool(P, P, T, T), *pending)
    for _ in range(3):
        world.step(NOTHING, seconds=700)
    assert split(world.machines) == (1, 3, 0)
    assert "token has 3 of at least 4" in world.step(NOTHING).minimum_unmet


def test_as_07_a_shortage_of_places_is_a_condition_while_it_lasts() -> None:
    decision = World(spec(3), pool(P, T, M)).decide(reading())
    pods = [_engine_pod(f"p{i}", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.") for i in range(2)]
    short = _status(decision, reading(), *troubles(pods, ()).problems)
    found = next(c for c in short.conditions if c.type == "CapacityShortage")
    assert (found.status.value, found.reason) == ("True", "MachinesUnschedulable")
    assert "2 engine pods" in found.message
    assert "Insufficient nvidia.com/gpu" in found.message
    events = {event.reason for event in statuses.events(_status(decision, reading()), short)}
    assert "CapacityShortage" in events
    over = next(c for c in _status(decision, reading()).conditions if c.type == "CapacityShortage")
    assert (over.status.value, over.reason) == ("False", "EveryMachineHasAPlace")


def _engine_pod(name: str, why_not: str) -> dict[str, Any]:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why_not}
    labels = {names.LABEL_COMPONENT: names.COMPONENT_ENGINE}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Pending", "conditions": [unscheduled]}}


@pytest.fixture
def scraped() -> Iterator[list[ScrapedRouter]]:
    made = [ScrapedRouter(uid) for uid in ("a", "b")]
    yield made
    for router in made:
        router.close()


class Scraping:
    def __init__(self, routers: list[ScrapedRouter]) -> None:
        self.now = 1000.0
        self.urls = {r.router_uid: r.url for r in routers}
        self.source = ScrapeSource(
            lambda: self.urls, "llm", "chat", clock=lambda: self.now, interval_seconds=1.0, timeout_seconds=1.0
        )

    async def read(self, uids: list[str], scrapes: int = 2) -> MetricsReading:
        for _ in range(scrapes):
            self.now += 1.0
            await self.source.scrape()
        return await self.source.read(10.0, uids, self.now)


@pytest.fixture
async def scraping(scraped: list[ScrapedRouter]) -> AsyncIterator[Scraping]:
    made = Scraping(scraped)
    yield made
    await made.source.close()


async def test_as_09_a_deleted_routers_queue_is_nobodys(scraping: Scraping, scraped: list[ScrapedRouter]) -> None:
    scraped[1].in_flight.set(50)
    scraped[1].oldest_waiting.set(60)
    assert (await scraping.read(["a", "b"])).in_flight == 50
    del scraping.urls["b"]
    seen = await scraping.read(["a"])
    assert (seen.state, seen.in_flight, seen.oldest_waiting_seconds) == (MetricsState.COMPLETE, 0, 0)


async def test_as_09_series_that_linger_for_a_minute_are_nobodys_queue() -> None:
    """A server that still answers for router b, whose pod was deleted: 50 in flight, for 60 s."""
    rows = [{"metric": {"router_uid": uid}, "value": [1000.0, value]} for uid, value in (("a", "0"), ("b", "50"))]
    buckets = [{"metric": {"le": le}, "value": [1000.0, "0"]} for le in ("1", "+Inf")]

    def answer(query: str) -> dict[str, Any]:
        if query.startswith(names.ROUTER_INFO):
            samples = [{"metric": {"router_uid": "a"}, "values": [[940 + 15 * i, "1"] for i in range(5)]}]
            return {"resultType": "matrix", "result": samples}
        if "timestamp(" in query:
            return {"resultType": "vector", "result": [{**row, "value": [1000.0, "5"]} for row in rows]}
        if "by (le)" in query:
            return {"resultType": "vector", "result": buckets}
        if query.startswith("sum("):
            return {"resultType": "vector", "result": [{"metric": {}, "value": [1000.0, "0"]}]}
        return {"resultType": "vector", "result": rows}

    async with _answering(answer) as url:
        source = PrometheusSource(PrometheusAccess(url), "llm", "chat")
        both = await source.read(60, ["a", "b"], 0.0)
        seen = await source.read(60, ["a"], 0.0)
        await source.close()
    assert (both.in_flight, both.oldest_waiting_seconds) == (50, 50)
    assert (seen.state, seen.in_flight, seen.oldest_waiting_seconds) == (MetricsState.COMPLETE, 0, 0)
    world = World(spec(2), pool(P, T))
    for _ in range(12):
        assert world.step(seen).reason is Reason.IDLE
    assert world.begun == []


def test_as_09_a_deleted_machine_is_in_no_count_and_its_work_moves_nothing() -> None:
    world = World(spec(3), pool(P, T, T), prices={"c": PRICES})
    gone = LiveReading(START, {"deleted": MachineWork(prompt_tokens=1e6, streams=500, context_tokens=1e6)})
    for _ in range(6):
        world.step(NOTHING, live=replace(gone, read_at=world.now))
    assert world.begun == []


def test_as_11_one_unready_machine_or_none_at_all_is_a_case_and_not_an_error() -> None:
    unready = tuple(replace(m, uid="x", ready=False, host=None) for m in pool(P))
    world = World(spec(6, pools={P: PoolBounds(1)}), (*pool(P, T, T, T, T), *unready))
    decision = world.decide(reading(ttft=5.0))
    assert decision.reason is Reason.TTFT_MISSED
    assert decision.pools[P].ready == 1
    empty = World(spec(3), ()).decide(reading())
    assert empty.reason is Reason.NO_MACHINES
    assert "at least 1" in empty.minimum_unmet


def test_as_12_a_machine_of_several_pods_is_one_whoever_of_them_reports() -> None:
    leaders = {f"u{i}": MachineWork(streams=10, context_tokens=1e4) for i in range(3)}
    workers = {f"u{i}-worker": MachineWork(streams=10, context_tokens=1e4) for i in range(3)}
    decisions = []
    for work in (leaders, {**leaders, **workers}):
        world = World(spec(3), pool(P, T, M), prices={"c": PRICES})
        decisions.append(world.decide(busy(10, 500, 50), LiveReading(START, work)))
    assert decisions[0] == decisions[1]


def test_as_13_prompt_heavy_load_grows_the_prompt_pool_though_a_token_machine_is_pending() -> None:
    pending = tuple(replace(m, uid="x", ready=False, host=None) for m in pool(None))
    world = World(spec(8, max_moves_per_window=4, pools={T: PoolBounds(2)}), (*pool(P, P, *[T] * 5), *pending))
    world.prices = {"c": PRICES}
    before = split(world.machines)
    for _ in range(3):
        world.step(busy(20, 4096, 16), seconds=30)
    after = split(world.machines)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_as_14_after_a_restart_without_traffic_idleness_can_be_proved() -> None:
    metrics = RouterMetrics("chat", "llm", "a", clock=lambda: 0.0)
    exported = {sample.name for family in metrics.collect() for sample in family.samples}
    wanted = {names.ROUTER_IN_FLIGHT, f"{names.ROUTER_ARRIVALS}_total", f"{names.ROUTER_TTFT}_bucket"}
    assert wanted <= exported
    world = World(spec(5), pool(P, P, P, T, T))
    world.memory = rebuild_memory(START, world.machines, (), None, world.spec)
    assert world.decide(NOTHING).reason is Reason.IDLE


async def test_as_15_a_first_burst_is_seen_and_without_a_baseline_nothing_is_said(
    scraping: Scraping, scraped: list[ScrapedRouter]
) -> None:
    """A router's series are there at 0 before its first request. Born at 20 they have no increase, and one look has no
    rate: that is unknown, not 0."""
    assert (await scraping.read(["a"], scrapes=1)).state is MetricsState.STALE
    scraped[0].serve(20, 0.1, 0.01)
    assert (await scraping.read(["a"], scrapes=1)).arrivals == 20
    assert RouterMetrics("chat", "llm", "a", clock=lambda: 0.0).ttft.count == 0


async def test_as_15_born_at_twenty_has_no_increase_and_a_collector_that_restarts_has_no_rate_of_before(
    scraped: list[ScrapedRouter],
) -> None:
    """Scrapes of 20, 20, 20. Then two requests in each 3 s, seen by a collector that has just begun: asked after 15, 30
    and 60 s for the last minute, it answers for what it has seen, and never that nothing came in the time before."""
    scraped[0].serve(20, 0.1, 0.01)
    scraping = Scraping(scraped)
    del scraping.urls["b"]
    seen = await scraping.read(["a"], scrapes=3)
    await scraping.source.close()
    assert (seen.state, seen.arrivals) == (MetricsState.COMPLETE, 0)
    again = Scraping(scraped)
    del again.urls["b"]
    await again.source.scrape()
    assert (await again.source.read(60.0, ["a"], again.now)).state is MetricsState.STALE, "unknown, and not 0"
    rates = {}
    for second in range(1, 61):
        again.now += 1.0
        if second % 3 == 0:
            scraped[0].serve(2, 0.1, 0.01)
        await again.source.scrape()
        if second in (15, 30, 60):
            read = await again.source.read(60.0, ["a"], again.now)
            rates[second] = read.arrivals / read.window_seconds
    await again.source.close()
    assert rates == pytest.approx({15: 2 / 3, 30: 2 / 3, 60: 2 / 3})


def test_as_16_a_restart_is_handled_for_each_series_before_they_are_summed() -> None:
    series = (f"{names.ROUTER_ARRIVALS}_total", 0.0)

    def ring(*values: float) -> _Ring:
        made = _Ring()
        made.samples.extend(_Sample(15.0 * i, {series: value}) for i, value in enumerate(values))
        return made

    total = _total_increase([ring(100, 110, 120), ring(1000, 0, 10)], 0.0, 30.0, 20.0)
    assert total[series] / 30 == 1.0


def test_as_17_beyond_the_last_bound_is_at_least_it_and_a_breach() -> None:
    slow = HistogramIncrease((1.0, 60.0, math.inf), (0.0, 0.0, 1000.0))
    p99 = percentile(slow, 99)
    assert p99 is not None
    assert (p99.seconds, p99.at_least, share_under(slow, 90.0)) == (60.0, True, 0.0)
    made = spec(3)
    made = replace(
        made, objectives=(replace(made.objectives[0], percentile=99, target_seconds=90.0), made.objectives[1])
    )
    seen = replace(reading(), ttft=slow)
    (ttft, _) = World(made, pool(P, T, M)).decide(seen).objectives
    assert (ttft.state, ttft.at_least) == (ObjectiveState.MISSED, True)
    assert max(b for b in reading().ttft.upper_bounds_seconds if b < math.inf) >= 120


def test_as_19_the_last_bits_of_floats_are_repaired_and_counts_that_fall_refused() -> None:
    bounds = (0.0168, 0.0224, 60.0, math.inf)
    rounded = HistogramIncrease(bounds, (99.9, 100 - 1e-12, 100 - 1e-12, 100.0))
    highest = percentile(rounded, 100)
    assert highest is not None
    assert 0.0168 < highest.seconds <= 0.0224
    fallen = (0.0, 0.0, 45.0, 9.0, 17.0, 0.0)
    with pytest.raises(observe.Malformed):
        observe.histogram(dict(zip((0.1, 0.2, 0.4, 0.8, 1.6, math.inf), fallen, strict=True)))
    broken = replace(reading(), ttft=HistogramIncrease((0.1, 0.2, 0.4, 0.8, 1.6, math.inf), fallen))
    with pytest.raises(MalformedHistogram):
        percentile(broken.ttft, 90)
    assert World(spec(), pool(P, T, M)).decide(broken).reason is Reason.METRICS_MISSING


def meter(metrics: RouterMetrics, arrived: float) -> Meter:
    machine = pool(M)[0]
    entry = Ledger().begin(Choice(machine, None, Route.MIXED), 10, arrived)
    waiting = Waiting(arrived)
    metrics.in_flight[waiting] = None
    return Meter(metrics, waiting, entry, Judged(), estimate=10, choices=1)


def test_as_20_requests_given_up_while_they_wait_leave_no_latency() -> None:
    """On the router; the engine's own histograms are tested where its metrics are."""
    metrics = RouterMetrics("chat", "llm", "a", clock=lambda: 4.0)
    for _ in range(5):
        meter(metrics, arrived=1.0)
    assert metrics.oldest_waiting_seconds() == 3.0
    for waiting in list(metrics.in_flight):
        metrics.in_flight.pop(waiting)
        metrics.finished(499)
    assert (metrics.ttft.count, metrics.ttft.sum_seconds, metrics.tbt.count) == (0, 0.0, 0)
    assert metrics.oldest_waiting_seconds() == 0.0


def test_as_21_a_stream_that_stalls_has_one_first_token_and_its_stall_is_one_gap() -> None:
    """Twenty tokens; after the fifth the engine has no memory for a second, and goes on."""
    metrics = RouterMetrics("chat", "llm", "a", clock=lambda: 0.0)
    stream = meter(metrics, arrived=0.0)
    now = 0.5
    for token in range(1, 21):
        stream.tokens(0, {"completion_tokens": token}, now)
        now += 1.0 if token == 5 else 0.02
    stream.finish()
    assert (metrics.ttft.count, metrics.tbt.count) == (1, 19)
    over = metrics.tbt.count - dict(metrics.tbt.cumulative())[max(b for b, _ in _bounds(metrics) if float(b) < 0.9)]
    assert over == 1
    assert metrics.ttft.sum_seconds + metrics.tbt.sum_seconds == pytest.approx(0.5 + 1.0 + 18 * 0.02)


def _bounds(metrics: RouterMetrics) -> list[tuple[str, float]]:
    return [(b, n) for b, n in metrics.tbt.cumulative() if b != "+Inf"]


async def test_as_22_a_router_whose_gauge_was_renamed_is_left_out_and_named(scraped: list[ScrapedRouter]) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(scraped[1].url)).text.replace(names.ROUTER_IN_FLIGHT, "poolwright_router_running")
    async with _answering(page) as url:
        scraping = Scraping(scraped)
        scraping.urls["b"] = url
        seen = await scraping.read(["a", "b"])
        await scraping.source.close()
    assert seen.state is MetricsState.PARTIAL
    assert names.ROUTER_IN_FLIGHT in seen.detail


_METRIC = re.compile(r"\bpoolwright_(?:router|operator)_[a-z_]*[a-z]")


async def test_as_22_whatever_is_read_or_documented_is_on_the_list_of_what_is_exported() -> None:
    """One list: names as the processes export them. Both readers ask for the same ones of it, documents name no other,
    and no other module spells a router's metric."""
    exported: set[str] = set()
    router = RouterMetrics("chat", "llm", "a", clock=lambda: 0.0)
    for family in (*router.collect(), *OperatorMetrics().registry.collect()):
        exported |= {family.name, f"{family.name}_total", *(sample.name for sample in family.samples)}
    asked: set[str] = set()

    def answer(query: str) -> dict[str, Any]:
        asked.update(_METRIC.findall(query))
        if "[" in query and "increase" not in query:
            samples = [{"metric": {"router_uid": "a"}, "values": [[940 + 15 * i, "1"] for i in range(5)]}]
            return {"resultType": "matrix", "result": samples}
        row = {"metric": {"router_uid": "a", "le": "+Inf"}, "value": [1000.0, "5"]}
        return {"resultType": "vector", "result": [row]}

    async with _answering(answer) as url:
        source = PrometheusSource(PrometheusAccess(url), "llm", "chat")
        assert (await source.read(60, ["a"], 0.0)).state is MetricsState.COMPLETE
        await source.close()
    assert asked == set(scrape._WANTED)
    assert asked <= exported
    root = Path(__file__).parents[2]
    documents = [p for folder in ("docs", "helm", "examples") for p in (root / folder).rglob("*") if p.is_file()]
    said = {name for p in documents if p.suffix in (".md", ".yaml", ".tpl") for name in _METRIC.findall(p.read_text())}
    assert said
    assert said <= exported, said - exported
    spelled = re.compile("[\"']poolwright_router_")
    assert [p.name for p in (root / "operator").rglob("*.py") if spelled.search(p.read_text())] == []


def _token_load(works: Mapping[str, MachineWork], **changes: Any) -> float:
    machines = tuple(replace(m, **changes) if m.uid == "u1" else m for m in pool(T, T))
    made = spec(2, pools={P: PoolBounds()})
    loads = fast_loop.measure(
        Board(START, made, machines, {}), Snapshot(machines, NOTHING, {"c": PRICES}, LiveReading(START, works))
    )
    assert loads is not None
    return loads.token


def _filled(share: float) -> MachineWork:
    """Streams that take this share of what the target of a step leaves them."""
    tbt = spec(2).objective(Metric.TBT)
    assert tbt is not None
    floor = PRICES.decode_seconds(1, 0)
    each = PRICES.decode_seconds(2, 0) - floor
    return MachineWork(streams=1 + share * (tbt.target_seconds - floor) / each)


def test_as_23_shares_are_averaged_over_machines_that_stay_and_never_added() -> None:
    assert _token_load({"u0": _filled(0.4), "u1": _filled(0.4)}) == pytest.approx(0.4)
    assert _token_load({"u0": _filled(0.9), "u1": MachineWork()}, deleting=True) == pytest.approx(0.9)
    assert _token_load({"u0": _filled(0.9), "u1": MachineWork()}) == pytest.approx(0.45)


def test_as_24_a_machine_too_many_during_a_roll_out_is_no_load() -> None:
    """At nine tenths of the target, flat; a third machine is there for a while, and says of itself that it is full."""
    flat = reading(ttft=0.9, tbt=0.05)
    world = World(spec(2, pools={P: PoolBounds(), T: PoolBounds()}), pool(P, T), prices={"c": PRICES})
    full = MachineWork(prompt_tokens=1e6, prompt_pairs=1e9, streams=600, context_tokens=6e5)
    nine_tenths = {"u0": MachineWork(prompt_tokens=4500, prompt_pairs=1e6), "u1": MachineWork(streams=400)}
    world.step(flat)
    surge = tuple(replace(m, uid="surge", ready=ready) for ready in (False, True) for m in pool(None))
    for extra in surge:
        world.machines = (*world.machines[:2], extra)
        for _ in range(4):
            decision = world.step(flat, seconds=30, live=LiveReading(world.now, {**nine_tenths, "surge": full}))
            loads = fast_loop.measure(
                Board(world.now, world.spec, world.machines, {}),
                Snapshot(world.machines, flat, world.prices, LiveReading(world.now, {**nine_tenths, "surge": full})),
            )
            assert loads is not None
            assert 0.4 < loads.prompt < 1
    assert world.begun == []
    assert split(world.machines) == (1, 1, 0), "it waits for its role until another has gone"
    assert "1 machine(s) wait for a role" in dict(decision.evidence)["beyond-budget"]
    world.remove("u1")
    world.step(flat)
    assert split(world.machines)[1] == 1


def test_as_25_empty_pools_take_no_router_down_and_a_request_is_told_when_to_return() -> None:
    assert RouterSpec().replicas >= 1
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RouterSpec(replicas=0)
    nobody = routing.choose(RoutingRequest(10), [], {}, 0.0)
    assert isinstance(nobody, NoMachine)  # the router answers 503 with Retry-After
    world = World(spec(2, pools={P: PoolBounds(), T: PoolBounds()}), pool(None, None))
    for _ in range(3):
        world.step(NOTHING)
    prompt, token, mixed = split(world.machines)
    assert prompt + mixed > 0
    assert token + mixed > 0
    assert {o.metric for o in world.spec.objectives} == {Metric.TTFT, Metric.TBT}


class _answering:
    """A small HTTP server that answers everything with one text, or as Prometheus does, by the query."""

    def __init__(self, answer: str | Callable[[str], dict[str, Any]]) -> None:
        async def respond(request: web.Request) -> web.Response:
            if isinstance(answer, str):
                return web.Response(text=answer)
            query = str((await request.post())["query"])
            return web.json_response({"status": "success", "data": answer(query)})

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
