"""The real router on a free port, over machines that a test holds in its hand."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines
from poolwright.machines import Machines
from poolwright.router.config import RouterConfig
from poolwright.router.main import listen, serve
from poolwright_protocol import names

POOL_KEY = bytes(range(32))
LABELS = {
    names.METRIC_POOL: "chat",
    names.METRIC_POOL_NAMESPACE: "llm",
    names.METRIC_ROUTER_UID: "router-1",
}


class RouterServer:
    def __init__(self, port: int, machines: LocalMachines, stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.port = port
        self.machines = machines
        self.stop = stop
        self.task = task
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=30)

    def openai(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30, **options)

    def sync_openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    async def metrics(self) -> "Metrics":
        return Metrics((await self.http.get("/metrics")).text)

    async def until_ready(self) -> None:
        for _ in range(1000):
            if (await self.http.get("/ready")).status_code == 200:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError("the router did not become Ready in 10 s")


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                rest = frozenset(sample.labels.items() - LABELS.items())
                assert LABELS.items() <= sample.labels.items(), sample
                self._values[sample.name, rest] = sample.value

    def __getitem__(self, name: str) -> float:
        return self._values[name, frozenset()]

    def of(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]


@asynccontextmanager
async def running_router(
    machines: Iterable[Machine] = (), source: Machines | None = None, **config: Any
) -> AsyncIterator[RouterServer]:
    """Serving, and Ready where it was given machines."""
    local = LocalMachines()
    given = list(machines)
    for machine in given:
        local.put(machine)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    stop = asyncio.Event()
    settings = RouterConfig(
        pool="chat", pool_namespace="llm", pool_key=POOL_KEY, router_uid="router-1", **{"drain_seconds": 2.0, **config}
    )
    task = asyncio.create_task(serve(settings, source or local, listener, stop))
    server = RouterServer(port, local, stop, task)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    await server.http.get("/health")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
        if given:
            await server.until_ready()
        yield server
    finally:
        await server.http.aclose()
        stop.set()
        await task
        listener.close()
