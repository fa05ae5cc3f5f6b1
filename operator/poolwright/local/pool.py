"""One InferencePool on this machine: the supervisor's processes under the controller's own reconcile.

Owns the start, the loop and the end of it all; contains no rule that the operator on a cluster does not follow.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from poolwright.controller.admin_client import HttpEngineAdmin
from poolwright.controller.live import RouterWork
from poolwright.controller.ports import Event, World
from poolwright.controller.prometheus import PrometheusAccess, PrometheusSource
from poolwright.controller.reconcile import Memory, reconcile
from poolwright.controller.scrape import ScrapeSource
from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines
from poolwright.local.prometheus_process import LocalPrometheus
from poolwright.local.store import LocalStore
from poolwright.local.supervisor import LocalSettings, Supervisor
from poolwright.machines import Conflict, Unavailable
from poolwright_protocol import keys

_RETRY_SECONDS = 1.0
_STATUS_SECONDS = 1.0  # the live view wants measured values sooner than an API server should be asked to store them
_PROMETHEUS_START_SECONDS = 30.0


class LocalPool:
    """`start`, then `edit` as often as wished, then `close`. The folder holds logs and records."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        folder: Path,
        on_event: Callable[[Event], None],
        *,
        router_port: int = 0,
        own_scrape: bool = False,
    ) -> None:
        self._folder = folder
        uid = secrets.token_hex(16)
        self.store = LocalStore(manifest, uid, on_event)
        key = keys.pool_key(secrets.token_bytes(32), uid)
        machines_file = folder / "machines.json"
        self.machines = LocalMachines(machines_file)
        self.supervisor = Supervisor(self.machines, machines_file, LocalSettings(folder, key, router_port))
        self._engines = HttpEngineAdmin(key)
        self._live = RouterWork()
        meta = self.store.pool.metadata
        self._prometheus = (
            None if own_scrape or not LocalPrometheus.available() else LocalPrometheus(folder / "prometheus")
        )
        self._scrape = ScrapeSource(
            lambda: {self.supervisor.router_uid: f"{self.supervisor.router_url}/metrics"},
            meta.namespace,
            meta.name,
            clock=time.time,
        )
        self._source: PrometheusSource | ScrapeSource = self._scrape
        self._loop: asyncio.Task[None] | None = None
        self._kick = asyncio.Event()
        self.trouble = ""  # why the last look failed

    @property
    def metrics_by(self) -> str:
        """Who measures, for a line to the user."""
        return f"Prometheus at {self._prometheus.url}" if self._prometheus else "own scrape (no prometheus on the PATH)"

    async def start(self) -> None:
        await self.supervisor.start()
        meta = self.store.pool.metadata
        if self._prometheus:
            await self._prometheus.start()
            await _until(self._prometheus.ready, _PROMETHEUS_START_SECONDS, "Prometheus")
            self._source = PrometheusSource(PrometheusAccess(self._prometheus.url), meta.namespace, meta.name)
        else:
            self._scrape.start()
        self._loop = asyncio.create_task(self._run(), name="reconcile")

    async def close(self) -> None:
        if self._loop:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        await self.supervisor.close()
        await self._scrape.close()
        if isinstance(self._source, PrometheusSource):
            await self._source.close()
        if self._prometheus:
            await self._prometheus.close()
        await self._engines.close()
        await self._live.close()

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """As `kubectl edit`: raises InvalidPool and changes nothing where the outcome does not validate."""
        self.store.edit(change)
        self._kick.set()

    async def ready_machines(self) -> list[Machine]:
        """Ready, with a role and settled."""
        return [m for m in await self.machines.list() if m.ready and m.role is not None and m.move is None]

    def explain(self) -> str:
        """The conditions that are not as they should be, for a line to the user."""
        conditions = self.store.status.get("conditions", ())
        return self.trouble or "; ".join(
            f"{c['type']}={c['status']}: {c['message']}" for c in conditions if c["message"]
        )

    async def _run(self) -> None:
        world = World(self.store, self.machines, self.supervisor, self._source, self._engines, self._live)
        memory = Memory(refresh_seconds=_STATUS_SECONDS)
        while True:
            try:
                delay = await reconcile(world, memory, time.time())
                self.trouble = ""
            except (Unavailable, Conflict, OSError, ValueError) as error:
                delay, self.trouble = _RETRY_SECONDS, str(error)
            if self._prometheus:
                self._prometheus.set_targets(self.supervisor.metrics_targets())
            self._kick.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._kick.wait(), min(_RETRY_SECONDS if delay is None else delay, 1.0))


async def _until(ready: Callable[[], Any], limit_seconds: float, what: str) -> None:
    deadline = time.monotonic() + limit_seconds
    while not await ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready within {limit_seconds:.0f} s")
        await asyncio.sleep(0.2)


def memory_mebibytes(pid: int) -> int | None:
    """Resident set of a process; None where the system does not say."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) // 1024
    except (OSError, ValueError):
        pass
    return None
