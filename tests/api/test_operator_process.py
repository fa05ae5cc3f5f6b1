"""The operator, started for real, on a real API server: births, moves by count, hand-over, silence once settled."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from poolwright.controller import names as child_names
from poolwright.core.machine import Machine
from poolwright.kube import KubeClient, KubeMachines
from poolwright.kube.machines import router_selector
from poolwright.kube.resources import DEPLOYMENTS, EVENTS, LEASES, PODS, POOLS
from poolwright_protocol.roles import Role
from support.kube_fixtures import MUTATING, edit_pool, eventually, make_pool
from support.kube_fixtures import client as client
from support.kube_fixtures import namespace as namespace
from support.kube_fixtures import pool_kind as pool_kind
from support.operator_process import (
    LEASE_SECONDS,
    StandInKubelet,
    operator_kubeconfig,
    operator_process,
    stand_in_kubelet,
)
from support.prometheus_server import running as prometheus
from support.router_metrics import RouterMetrics
from testbed.bed import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("pool_kind")]
THREE = {
    "machines": [{"name": "cpu", "replicas": 3}],
    "pools": {"prompt": {"min": 1}, "token": {"min": 1}, "mixed": {"min": 0}},
    "rebalance": {"intervalSeconds": 2, "dwellSeconds": 0},
}


def counts(prompt: int, token: int, mixed: int) -> dict[str, Any]:
    """An edit: mode Manual with these counts."""
    pools = {
        "prompt": {"min": 1, "replicas": prompt},
        "token": {"min": 1, "replicas": token},
        "mixed": {"min": 0, "replicas": mixed},
    }
    return {"pools": pools, "rebalance": {"mode": "Manual", "intervalSeconds": 2, "dwellSeconds": 0}}


@pytest.fixture
def kubeconfig(api_server: Bed, namespace: str, tmp_path: Path) -> Path:
    return operator_kubeconfig(api_server, namespace, tmp_path)


@pytest.fixture
async def kubelet(api_server: Bed, client: KubeClient, namespace: str) -> AsyncIterator[StandInKubelet]:
    async with stand_in_kubelet(api_server, client, namespace) as kubelet:
        yield kubelet


async def split(client: KubeClient, namespace: str) -> tuple[int, int, int]:
    """(prompt, token, mixed) of machines at rest."""
    machines = await KubeMachines(client, namespace, "chat").list()
    resting = [machine.role for machine in machines if machine.move is None]
    return resting.count(Role.PROMPT), resting.count(Role.TOKEN), resting.count(Role.MIXED)


async def until_split(
    client: KubeClient, namespace: str, wanted: tuple[int, int, int], limit_seconds: float = 60
) -> None:
    async def is_so() -> bool:
        return await split(client, namespace) == wanted

    try:
        await eventually(is_so, limit_seconds)
    except TimeoutError:
        machines = await KubeMachines(client, namespace, "chat").list()
        raise AssertionError(f"{wanted} was not reached; there are {machines}") from None


async def agreed(client: KubeClient, namespace: str, kubelet: StandInKubelet) -> list[Machine]:
    """Machines whose engine says what their record says."""
    machines = await KubeMachines(client, namespace, "chat").list()

    def same(machine: Machine) -> bool:
        engine = kubelet.engines[machine.uid].keeper.role_state()
        return (engine.role, engine.epoch) == (machine.role, machine.role_epoch)

    return [machine for machine in machines if same(machine)]


async def status(client: KubeClient, namespace: str) -> dict[str, Any]:
    pool = await client.get(POOLS, namespace, "chat")
    assert pool is not None
    found: dict[str, Any] = pool.get("status") or {}
    return found


def by_operator(api_server: Bed, mark: int, namespace: str) -> list[dict[str, Any]]:
    """Finished requests of the operator's account since the mark."""
    user = f"system:serviceaccount:{namespace}:operator"
    return [event for event in api_server.audit_events(since=mark) if event["user"]["username"] == user]


def forbidden(api_server: Bed, mark: int, namespace: str) -> list[str]:
    """Requests of the operator's account that its rights did not cover."""
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in by_operator(api_server, mark, namespace)
        if event["responseStatus"]["code"] in (401, 403)
    ]


async def test_new_machines_get_roles_and_an_edit_of_counts_moves_one_without_a_restart(
    api_server: Bed, client: KubeClient, namespace: str, kubelet: StandInKubelet, kubeconfig: Path, tmp_path: Path
) -> None:
    mark = api_server.audit_mark()
    with operator_process(kubeconfig, namespace, tmp_path) as operator:
        await make_pool(client, namespace, **THREE)
        await until_split(client, namespace, (1, 1, 1))
        assert len(await agreed(client, namespace, kubelet)) == 3
        assert (await status(client, namespace)).get("recentMoves", []) == [], "a birth is no move"
        await edit_pool(client, namespace, "chat", **counts(2, 1, 0))
        await until_split(client, namespace, (2, 1, 0))
        assert len(await agreed(client, namespace, kubelet)) == 3

        async def recorded() -> list[dict[str, Any]]:
            return [
                m for m in (await status(client, namespace)).get("recentMoves", []) if m.get("outcome") == "Completed"
            ]

        (move,) = await eventually(recorded)
        assert (move["from"], move["to"]) == ("Mixed", "Prompt")
        assert len(kubelet.started) == 3, "an engine was started again"
        events = await client.list(EVENTS, namespace, fields="reportingController=poolwright")
        assert any(move["machine"] in event["note"] for event in events)
        for path in ("/healthz", "/readyz", "/metrics"):
            code, text = await operator.probe(path)
            assert code == 200, text
        assert "poolwright_operator_leading 1.0" in text
        assert await operator.stop() == 0
        assert "Traceback" not in operator.log
    lease = await client.get(LEASES, namespace, "poolwright-operator")
    assert lease is not None
    assert not lease["spec"].get("holderIdentity"), "a stopped operator still holds the Lease"
    assert forbidden(api_server, mark, namespace) == []


async def test_a_settled_world_under_constant_traffic_is_not_written(
    api_server: Bed, client: KubeClient, namespace: str, kubelet: StandInKubelet, kubeconfig: Path, tmp_path: Path
) -> None:
    spec = {**THREE, "rebalance": {"intervalSeconds": 2, "dwellSeconds": 0, "metricsWindowSeconds": 10}}
    with operator_process(kubeconfig, namespace, tmp_path, "before"):
        await make_pool(client, namespace, **spec)
        await until_split(client, namespace, (1, 1, 1))
    (router,) = await client.list(PODS, namespace, labels=router_selector("chat"))
    with RouterMetrics(router["metadata"]["uid"], "chat", namespace) as metrics:
        traffic = asyncio.create_task(constant_traffic(metrics))
        with prometheus(tmp_path / "prometheus", {"routers": [metrics.target]}) as url:
            with operator_process(kubeconfig, namespace, tmp_path, arguments=["--prometheus-url", url]):

                async def measured() -> bool:
                    found = await status(client, namespace)
                    return found.get("metrics") == "Complete" and found["objectives"][0]["state"] == "Met"

                await eventually(measured, 90)
                await asyncio.sleep(3)
                mark = api_server.audit_mark()
                await asyncio.sleep(30)
                requests = by_operator(api_server, mark, namespace)
            traffic.cancel()
    assert len(requests) > 10, "the operator did not look at all"
    written = [r for r in requests if r["verb"] in MUTATING and r["objectRef"]["resource"] != "leases"]
    statuses = [r for r in written if r["objectRef"].get("subresource") == "status"]
    assert [r["requestURI"] for r in written if r not in statuses] == []
    assert len(statuses) <= 1
    assert await split(client, namespace) == (1, 1, 1)


async def constant_traffic(metrics: RouterMetrics) -> None:
    """Ten requests a second, at half of the target."""
    while True:
        metrics.serve(2, ttft_seconds=0.5, tbt_seconds=0.02)
        await asyncio.sleep(0.2)


async def test_an_edit_of_a_child_is_put_back_within_a_moment(
    client: KubeClient, namespace: str, kubelet: StandInKubelet, kubeconfig: Path, tmp_path: Path, api_server: Bed
) -> None:
    with operator_process(kubeconfig, namespace, tmp_path):
        await make_pool(client, namespace, **THREE)
        await until_split(client, namespace, (1, 1, 1))
        engines = child_names.engines("chat", "cpu")
        await asyncio.to_thread(api_server.kubectl, "scale", "deployment", engines, "--replicas=1", "-n", namespace)

        async def whole() -> bool:
            found = await client.get(DEPLOYMENTS, namespace, engines)
            return found is not None and found["spec"]["replicas"] == 3

        await eventually(whole, 10)
        await until_split(client, namespace, (1, 1, 1))


async def test_of_two_operators_one_acts_and_the_other_takes_over_when_it_is_killed(
    client: KubeClient, namespace: str, kubelet: StandInKubelet, kubeconfig: Path, tmp_path: Path
) -> None:
    with (
        operator_process(kubeconfig, namespace, tmp_path, "one") as one,
        operator_process(kubeconfig, namespace, tmp_path, "two") as two,
    ):
        await make_pool(client, namespace, **THREE)
        await until_split(client, namespace, (1, 1, 1))
        leader, standby = (one, two) if one.leads else (two, one)
        await standby.until("Waiting for the Lease")
        assert not standby.leads
        assert "Applied a child" not in standby.log
        code, text = await standby.probe("/readyz")
        assert (code, text) == (200, "standing by\n")
        leader.kill()
        killed_at = time.monotonic()
        await edit_pool(client, namespace, "chat", **counts(1, 2, 0))
        await until_split(client, namespace, (1, 2, 0))
        assert standby.leads
        assert time.monotonic() - killed_at < LEASE_SECONDS + 30
        assert len(await agreed(client, namespace, kubelet)) == 3
        assert "Applied a child" not in standby.log, "it wrote children that were right"


async def test_an_operator_that_loses_its_lease_exits(
    client: KubeClient, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    with operator_process(kubeconfig, namespace, tmp_path) as operator:
        await operator.until("Acquired the Lease")
        for _ in range(20):
            lease = await client.get(LEASES, namespace, "poolwright-operator")
            assert lease is not None
            lease["spec"]["holderIdentity"] = "thief"
            try:
                await client.replace(LEASES, namespace, "poolwright-operator", lease)
                break
            except Exception:
                await asyncio.sleep(0.05)
        assert await operator.ended() == 1
        assert "held by thief" in operator.log


async def test_an_operator_told_to_stop_while_it_waits_for_the_lease_stops(
    client: KubeClient, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    with operator_process(kubeconfig, namespace, tmp_path, "one") as one:
        await one.until("Acquired the Lease")
        with operator_process(kubeconfig, namespace, tmp_path, "two") as two:
            await two.until("Waiting for the Lease")
            assert await two.stop() == 0


async def test_a_deleted_pool_leaves_nothing_and_a_new_one_of_its_name_is_served(
    client: KubeClient, namespace: str, kubelet: StandInKubelet, kubeconfig: Path, tmp_path: Path
) -> None:
    with operator_process(kubeconfig, namespace, tmp_path) as operator:
        await make_pool(client, namespace, **THREE)
        await until_split(client, namespace, (1, 1, 1))
        await client.delete(POOLS, namespace, "chat")

        async def gone() -> bool:
            return (
                not await client.list(DEPLOYMENTS, namespace)
                and not await KubeMachines(client, namespace, "chat").list()
            )

        await eventually(gone, 60)

        async def stopped() -> bool:
            return not kubelet.engines

        await eventually(stopped)
        await make_pool(client, namespace, **THREE)
        await until_split(client, namespace, (1, 1, 1))
        assert "Traceback" not in operator.log


@pytest.mark.parametrize(
    ("arguments", "secret", "named"),
    [
        (["--all-namespaces", "--engine-image=e", "--router-image=r"], "short", "POOLWRIGHT_ROOT_SECRET"),
        (["--all-namespaces", "--engine-image=e"], "x" * 16, "--router-image"),
        (["--engine-image=e", "--router-image=r"], "x" * 16, "--namespace"),
        (["--namespace=a", "--all-namespaces", "--engine-image=e", "--router-image=r"], "x" * 16, "--all-namespaces"),
    ],
    ids=["secret", "image", "no scope", "two scopes"],
)
async def test_bad_start_is_refused_with_the_name_of_what_is_wrong(
    arguments: list[str], secret: str, named: str
) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "poolwright.controller", *arguments],
        env={**os.environ, "POOLWRIGHT_ROOT_SECRET": secret},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
