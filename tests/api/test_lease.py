"""The Lease on a real API server: one holder, a quick hand-over, and a loss that is noticed."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from poolwright.controller.lease import Lease, LeaseLost
from poolwright.kube import KubeClient
from poolwright.kube.resources import LEASES, PODS
from support.faulty_proxy import FaultyProxy, faulty_proxy
from support.kube_fixtures import client as client
from support.kube_fixtures import eventually
from support.kube_fixtures import namespace as namespace
from support.pods import engine_pod
from testbed.bed import Bed

pytestmark = pytest.mark.cluster
NAME = "operator"


def lease(client: KubeClient, namespace: str, identity: str) -> Lease:
    return Lease(client, namespace, NAME, identity, duration_seconds=5, renew_deadline_seconds=3.5, retry_seconds=0.2)


async def holder(client: KubeClient, namespace: str) -> str:
    found = await client.get(LEASES, namespace, NAME)
    return str(found["spec"].get("holderIdentity") or "") if found else ""


async def cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_of_many_that_start_at_once_one_leads(client: KubeClient, namespace: str) -> None:
    candidates = [lease(client, namespace, f"c{n}") for n in range(5)]
    tasks = [asyncio.create_task(candidate.acquire()) for candidate in candidates]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    await asyncio.sleep(1)
    leaders = [candidate.identity for candidate, task in zip(candidates, tasks, strict=True) if task.done()]
    assert leaders == [await holder(client, namespace)]
    for task in tasks:
        await cancel(task)


async def test_a_released_lease_is_taken_without_waiting_for_its_end(client: KubeClient, namespace: str) -> None:
    first, second = lease(client, namespace, "first"), lease(client, namespace, "second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await first.release()
    released_at = time.monotonic()
    await waiting
    assert time.monotonic() - released_at < 1.5
    assert await holder(client, namespace) == "second"


async def test_a_lease_goes_with_the_pod_of_its_last_holder(client: KubeClient, namespace: str) -> None:
    pods = [await client.create(PODS, namespace, engine_pod(name)) for name in ("first", "second")]
    first, second = (
        Lease(client, namespace, NAME, pod["metadata"]["name"], pod=(pod["metadata"]["name"], pod["metadata"]["uid"]))
        for pod in pods
    )
    await first.acquire()
    await first.release()
    await second.acquire()
    await client.delete(PODS, namespace, "first")
    await asyncio.sleep(2)
    assert await holder(client, namespace) == "second"
    await client.delete(PODS, namespace, "second")

    async def gone() -> bool:
        return await client.get(LEASES, namespace, NAME) is None

    await eventually(gone)


async def test_a_lease_whose_holder_died_is_taken_after_its_duration_and_not_before(
    client: KubeClient, namespace: str
) -> None:
    await lease(client, namespace, "dead").acquire()
    started_at = time.monotonic()
    await lease(client, namespace, "heir").acquire()
    assert 5 <= time.monotonic() - started_at < 15
    found = await client.get(LEASES, namespace, NAME)
    assert found is not None
    assert found["spec"]["leaseTransitions"] == 1


async def test_a_holder_that_renews_keeps_it(client: KubeClient, namespace: str) -> None:
    first = lease(client, namespace, "first")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(lease(client, namespace, "second").acquire())
    await asyncio.sleep(7)
    assert not holding.done()
    assert not waiting.done()
    await cancel(waiting)
    await cancel(holding)


async def test_a_lease_taken_by_another_is_lost(client: KubeClient, namespace: str) -> None:
    first = lease(client, namespace, "first")
    await first.acquire()
    taken = await client.get(LEASES, namespace, NAME)
    assert taken is not None
    taken["spec"]["holderIdentity"] = "thief"
    await client.replace(LEASES, namespace, NAME, taken)
    with pytest.raises(LeaseLost, match="thief"):
        async with asyncio.timeout(5):
            await first.hold()
    await first.release()
    assert await holder(client, namespace) == "thief", "what is not held is not released"


async def test_an_edit_by_hand_in_between_is_no_loss(client: KubeClient, namespace: str, api_server: Bed) -> None:
    first = lease(client, namespace, "first")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    for n in range(3):
        await asyncio.to_thread(api_server.kubectl, "annotate", "lease", NAME, f"n{n}=x", "-n", namespace)
    await asyncio.sleep(1)
    assert not holding.done()
    await cancel(holding)


@pytest.fixture
async def proxy(api_server: Bed) -> AsyncIterator[FaultyProxy]:
    admin = api_server.admin
    async with faulty_proxy(api_server.url, admin.certificate, admin.key, admin.authority) as proxy:
        yield proxy


async def test_a_lease_that_cannot_be_renewed_is_given_up_before_another_may_take_it(
    client: KubeClient, namespace: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    async with await KubeClient.connect(proxy.kubeconfig(tmp_path)) as through:
        first = lease(through, namespace, "first")
        await first.acquire()
        proxy.requests_to_throttle = 10_000
        cut_off_at = time.monotonic()
        with pytest.raises(LeaseLost, match="not renewed"):
            await first.hold()
        assert time.monotonic() - cut_off_at < 5, "longer than the Lease lasts"
