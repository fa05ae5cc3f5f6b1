"""One pool under `reconcile` without Kubernetes: the real local store and machines, engines' real admin ports, a real
endpoint with a router's metrics, scraped; only engine processes are left out. Time is the test's."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from poolwright.api.models import API_VERSION, InferencePool
from poolwright.controller.admin_client import HttpEngineAdmin
from poolwright.controller.ports import ChildrenState, Event, World
from poolwright.controller.reconcile import Memory, reconcile
from poolwright.controller.scrape import ScrapeSource
from poolwright.local.store import LocalStore
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.machines_bed import LocalBed
from support.router_metrics import RouterMetrics

START = 1_800_000_000.0
STRIDE_SECONDS = 2
ROUTER = "router-a"


def manifest(machines: int = 3, **rebalance: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "chat", "namespace": "llm"},
        "spec": {
            "model": {"name": "tiny", "source": {"path": "/models/tiny"}},
            "slo": {
                "objectives": [
                    {"name": "ttft", "metric": "TTFT", "percentile": 90, "targetMilliseconds": 1000},
                    {"name": "tbt", "metric": "TBT", "percentile": 90, "targetMilliseconds": 100},
                ]
            },
            "machines": [{"name": "small", "replicas": machines}],
            "pools": {"prompt": {"min": 1}, "token": {"min": 1}, "mixed": {"min": 0}},
            "rebalance": {
                "intervalSeconds": 5,
                "metricsWindowSeconds": 20,
                "dwellSeconds": 10,
                "windowSeconds": 60,
                "maxMovesPerWindow": 2,
                **rebalance,
            },
        },
    }


@dataclass
class StandingChildren:
    """Children that are as they should be, or as a test says."""

    state: ChildrenState = field(
        default_factory=lambda: ChildrenState(routers_ready=1, routers_desired=1, router_uids=(ROUTER,))
    )

    async def ensure(self, pool: InferencePool) -> ChildrenState:
        return self.state


class StandingPool:
    def __init__(self, raw: dict[str, Any], bed: LocalBed, router: RouterMetrics, engines: HttpEngineAdmin) -> None:
        self.now = START
        self.bed = bed
        self.router = router
        self.events: list[Event] = []
        self.store = LocalStore(raw, "uid-of-chat", self.events.append)
        self.children = StandingChildren()
        self.metrics = ScrapeSource(
            lambda: {ROUTER: self.router.url}, "llm", "chat", clock=lambda: self.now, interval_seconds=STRIDE_SECONDS
        )
        self.world = World(self.store, bed.machines, self.children, self.metrics, engines)
        self.memory = Memory()

    async def look(self) -> float | None:
        return await reconcile(self.world, self.memory, self.now)

    async def live(self, seconds: float, load: "Load | None" = None) -> None:
        """Time passes in strides: traffic, a scrape, and a look where one is due."""
        due = self.now
        for _ in range(math.ceil(seconds / STRIDE_SECONDS)):
            self.now += STRIDE_SECONDS
            if load is not None:
                self.router.serve(load.requests * STRIDE_SECONDS, load.ttft_seconds, load.tbt_seconds)
            await self.metrics.scrape()
            while due <= self.now:
                wait = await self.look()
                assert wait is not None
                if wait > 0:
                    due = self.now + wait
                    break

    def restart_operator(self) -> None:
        self.memory = Memory()

    @property
    def split(self) -> dict[Role, int]:
        roles = [m.role for m in self._machines]
        return {role: roles.count(role) for role in Role}

    @property
    def _machines(self) -> list[Any]:
        return list(self.bed.machines._machines.values())

    @property
    def status(self) -> dict[str, Any]:
        return self.store.status

    def condition(self, kind: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == kind)

    @property
    def writes(self) -> int:
        return self.bed.machines.writes + self.store.status_writes


@dataclass(frozen=True)
class Load:
    """Finished requests per second, as the client saw them."""

    requests: int
    ttft_seconds: float
    tbt_seconds: float


@asynccontextmanager
async def standing_pool(machines: int = 3, **rebalance: Any) -> AsyncIterator[StandingPool]:
    """With so many newborn machines and no traffic."""
    bed = LocalBed()
    router = RouterMetrics(ROUTER)
    engines = HttpEngineAdmin(bed.pool_key)
    pool = StandingPool(manifest(machines, **rebalance), bed, router, engines)
    try:
        for index in range(machines):
            await bed.add(f"m{index}", None, 0)
        yield pool
    finally:
        await pool.metrics.close()
        await engines.close()
        await bed.close()
        router.close()
