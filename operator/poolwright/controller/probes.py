"""The operator's own HTTP: /healthz, /readyz and /metrics. It reports; it decides nothing.

Healthy says that the loop runs and that no pool has waited long for its turn. Ready says that this process leads, or
stands by for one that does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

# A pool that is due this long without a turn means that all workers hang: a restart is the cure.
UNHEALTHY_QUEUE_AGE_SECONDS = 180.0


class OperatorMetrics:
    """Every series exists from the start, at 0."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "poolwright_operator_reconciles", "Finished looks at a pool.", ["result"], registry=self.registry
        )
        for result in ("done", "conflict", "failed"):
            self.reconciles.labels(result)
        self.reconcile_seconds = Histogram(
            "poolwright_operator_reconcile_seconds", "Duration of one look at a pool.", registry=self.registry
        )
        self.leading = Gauge(
            "poolwright_operator_leading", "1 while this process holds the Lease.", registry=self.registry
        )
        self.queue_age = Gauge(
            "poolwright_operator_queue_age_seconds",
            "How long the pool that has waited longest for its turn has waited.",
            registry=self.registry,
        )


@dataclass(frozen=True, slots=True)
class Health:
    queue_age_seconds: float
    leading: bool
    standing_by: bool


async def serve(
    host: str, port: int, metrics: OperatorMetrics, health: Callable[[], Health]
) -> tuple[web.AppRunner, int]:
    """(runner to clean up, the port that was bound)."""

    async def healthz(_: web.Request) -> web.Response:
        age = health().queue_age_seconds
        ok = age < UNHEALTHY_QUEUE_AGE_SECONDS
        return web.Response(status=200 if ok else 503, text=f"queue age {age:.1f} s\n")

    async def readyz(_: web.Request) -> web.Response:
        now = health()
        state = "leading" if now.leading else "standing by" if now.standing_by else "no contact with the API server yet"
        return web.Response(status=200 if now.leading or now.standing_by else 503, text=state + "\n")

    async def exposition(_: web.Request) -> web.Response:
        now = health()
        metrics.queue_age.set(now.queue_age_seconds)
        metrics.leading.set(1 if now.leading else 0)
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, int(runner.addresses[0][1])
