"""A pool without Kubernetes: real engine processes and a router under the controller's own reconcile."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from poolwright.api.models import InvalidPool
from poolwright.controller.ports import Event
from poolwright.local.pool import LocalPool
from poolwright.local.traffic import Client, Shape
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(180)
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"


def manifest(model: Path, **engine: int) -> dict[str, Any]:
    pool: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    pool["spec"]["model"]["source"] = {"path": str(model)}
    pool["spec"]["engine"] = {"maxNumBatchedTokens": 64, "maxNumSeqs": 8, "kvCacheMebibytes": 8, "maxModelLen": 64}
    pool["spec"]["engine"].update(engine)
    return pool


@asynccontextmanager
async def running(pool_manifest: dict[str, Any], folder: Path) -> AsyncIterator[tuple[LocalPool, list[Event]]]:
    events: list[Event] = []
    pool = LocalPool(pool_manifest, folder, events.append, own_scrape=True)
    await pool.start()
    try:
        yield pool, events
    finally:
        await pool.close()


async def until(claim: str, holds: Callable[[], Awaitable[Any]], limit_seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + limit_seconds
    while not (found := await holds()):
        assert time.monotonic() < deadline, f"not within {limit_seconds:g} s: {claim}"
        await asyncio.sleep(0.1)
    return found


async def served(pool: LocalPool) -> Any:
    async def ready() -> Any:
        machines = await pool.ready_machines()
        return machines if len(machines) == 3 and pool.supervisor.router_ready else None

    return await until("three machines are Ready with a role, and the router", ready)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


async def test_pool_serves_survives_a_crash_and_rolls_an_edit_one_machine_at_a_time(
    model: Path, tmp_path: Path
) -> None:
    async with running(manifest(model), tmp_path) as (pool, _):
        before = {m.name: m for m in await served(pool)}
        assert sorted(m.role.value for m in before.values()) == ["mixed", "prompt", "token"]
        client = Client(pool.supervisor.router_url, "smollm2")
        try:
            assert (await client.one(Shape(8, 5))).error is None

            crashed = next(m for m in before.values() if m.role.value == "token")
            os.kill(pool.supervisor.pids[crashed.name], signal.SIGKILL)

            async def back() -> Any:
                machine = pool.machines.get(crashed.name)
                return machine if machine and machine.restarts == 1 and machine.ready else None

            restarted = await until("the crashed engine is back", back)
            assert (restarted.uid, restarted.role, restarted.role_epoch) == (
                crashed.uid,
                crashed.role,
                crashed.role_epoch,
            )

            fewest = 3

            def smaller(spec: dict[str, Any]) -> None:
                spec["engine"]["maxNumSeqs"] = 4

            pool.edit(smaller)

            async def rolled() -> bool:
                nonlocal fewest
                machines = await pool.ready_machines()
                # Ready alone: a new machine takes its role, and a short pool is repaired, while the next one rolls.
                serving = sum(m.ready and not m.deleting for m in await pool.machines.list())
                fewest = min(fewest, serving)
                return len(machines) == 3 and not {m.uid for m in machines} & {m.uid for m in before.values()}

            await until("every machine was replaced", rolled, 120)
            assert fewest >= 2
            assert (await client.one(Shape(8, 5))).error is None

            assert all(m.note is None for m in await pool.machines.list())
            pool.edit(lambda spec: spec["rebalance"].update(basis="Work"))

            async def priced() -> bool:
                return all(m.note is not None for m in await pool.machines.list())

            await until("routers are told what work costs, by engines that measured it", priced)
            assert (await client.one(Shape(8, 5))).error is None
            assert "Prices of work are known" in (tmp_path / "router.log").read_text()
        finally:
            await client.close()


async def test_an_edit_that_does_not_validate_changes_nothing(model: Path, tmp_path: Path) -> None:
    pool = LocalPool(manifest(model), tmp_path, lambda _: None, own_scrape=True)
    try:
        before = pool.store.pool
        with pytest.raises(InvalidPool, match="max must be at least min"):
            pool.edit(lambda spec: spec["pools"]["prompt"].update(min=2, max=1))
        assert pool.store.pool == before
    finally:
        await pool.close()


async def test_a_model_that_is_not_there_is_a_condition_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model.gguf"
    async with running(manifest(missing), tmp_path) as (pool, events):

        async def said() -> Any:
            conditions = {c["type"]: c for c in pool.store.status.get("conditions", ())}
            condition = conditions.get("ModelAvailable", {})
            return condition if condition.get("status") == "False" else None

        condition = await until("ModelAvailable is False", said)
        assert str(missing) in condition["message"]
        assert [event.reason for event in events].count("ModelMissing") == 1
