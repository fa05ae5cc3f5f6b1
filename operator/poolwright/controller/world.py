"""The world of each pool, built from Kubernetes, Prometheus and the engines' admin ports; kept while the pool lives.

A pool's key is derived from its uid, so a successor of the same name gets a world of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from poolwright.controller import observe
from poolwright.controller.admin_client import HttpEngineAdmin
from poolwright.controller.children import KubeChildren
from poolwright.controller.events import EventRecorder
from poolwright.controller.live import RouterWork
from poolwright.controller.ports import World
from poolwright.controller.prometheus import PrometheusAccess, PrometheusSource
from poolwright.controller.render import Images
from poolwright.controller.store import KubePoolStore
from poolwright.core.reading import MetricsReading
from poolwright.kube import ApiError, KubeClient, KubeMachines, Nodes
from poolwright.kube.client import unavailable
from poolwright.kube.resources import POOLS
from poolwright_protocol import keys

Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True, slots=True)
class Settings:
    """What all pools of one operator share."""

    images: Images
    root_secret: bytes
    prometheus: PrometheusAccess | None
    event_instance: str


class NoMetrics:
    """`MetricsSource` of an operator that was given no Prometheus."""

    async def read(self, window_seconds: float, router_uids: Sequence[str], now: float) -> MetricsReading:
        return observe.missing(window_seconds, "no Prometheus is configured: start the operator with --prometheus-url")

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Kept:
    uid: str
    world: World
    metrics: PrometheusSource | NoMetrics
    engines: HttpEngineAdmin
    live: RouterWork

    async def close(self) -> None:
        await self.metrics.close()
        await self.engines.close()
        await self.live.close()


class Worlds:
    def __init__(self, client: KubeClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._events = EventRecorder(client, settings.event_instance)
        self._nodes = Nodes(client)
        self._kept: dict[Key, _Kept] = {}

    async def of(self, key: Key) -> tuple[str, World] | None:
        """(uid, world) of the pool that bears this name now; None when there is none. Raises Unavailable."""
        namespace, name = key
        try:
            raw = await self._client.get(POOLS, namespace, name)
        except ApiError as error:
            raise unavailable(error) from error
        kept = self._kept.get(key)
        if raw is None or (kept is not None and kept.uid != raw["metadata"]["uid"]):
            await self.forget(key)
            kept = None
        if raw is None:
            return None
        if kept is None:
            kept = self._kept[key] = self._build(namespace, name, str(raw["metadata"]["uid"]))
        return kept.uid, kept.world

    async def forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            await kept.close()

    async def close(self) -> None:
        for key in list(self._kept):
            await self.forget(key)

    def _build(self, namespace: str, name: str, uid: str) -> _Kept:
        settings = self._settings
        metrics = PrometheusSource(settings.prometheus, namespace, name) if settings.prometheus else NoMetrics()
        engines = HttpEngineAdmin(keys.pool_key(settings.root_secret, uid))
        live = RouterWork()
        world = World(
            store=KubePoolStore(self._client, namespace, name, uid, self._events),
            machines=KubeMachines(self._client, namespace, name, self._nodes),
            children=KubeChildren(self._client, settings.images, settings.root_secret),
            metrics=metrics,
            engines=engines,
            live=live,
        )
        return _Kept(uid, world, metrics, engines, live)
