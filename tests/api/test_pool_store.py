"""The pool object and its Events on a real API server: status by apply, successors apart, one Event for repeats."""

import asyncio
from typing import Any

import pytest

from poolwright.controller.events import EventRecorder, event_name
from poolwright.controller.ports import Event
from poolwright.controller.store import KubePoolStore
from poolwright.kube import KubeClient
from poolwright.kube.resources import EVENTS, POOLS
from poolwright.machines import Conflict
from support.kube_fixtures import client as client
from support.kube_fixtures import make_pool
from support.kube_fixtures import namespace as namespace
from support.kube_fixtures import pool_kind as pool_kind

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("pool_kind")]
MOVED = Event("Normal", "MoveCompleted", "machine a moved from Mixed to Prompt")


async def store_of(client: KubeClient, namespace: str, instance: str = "operator-a") -> KubePoolStore:
    pool = await make_pool(client, namespace)
    return KubePoolStore(client, namespace, "chat", pool.metadata.uid, EventRecorder(client, instance))


async def events(client: KubeClient, namespace: str) -> list[dict[str, Any]]:
    return await client.list(EVENTS, namespace, fields="reportingController=poolwright")


async def test_repeats_are_one_event_with_a_count_also_after_a_restart(client: KubeClient, namespace: str) -> None:
    first = await store_of(client, namespace)
    for _ in range(3):
        await first.emit(MOVED)
    pool = await first.get()
    assert pool is not None
    again = KubePoolStore(client, namespace, "chat", pool.metadata.uid, EventRecorder(client, "operator-b"))
    await again.emit(MOVED)
    (event,) = await events(client, namespace)
    assert event["series"]["count"] == 4
    assert (event["type"], event["reason"], event["note"]) == ("Normal", "MoveCompleted", MOVED.message)
    assert event["regarding"]["uid"] == pool.metadata.uid
    assert event["reportingInstance"] == "operator-a"


async def test_repeats_at_the_same_time_are_all_counted(client: KubeClient, namespace: str) -> None:
    store = await store_of(client, namespace)
    await store.emit(MOVED)
    await asyncio.gather(store.emit(MOVED), store.emit(MOVED))
    (event,) = await events(client, namespace)
    assert event["series"]["count"] == 3


async def test_what_differs_is_another_event(client: KubeClient, namespace: str) -> None:
    store = await store_of(client, namespace)
    for event in (
        MOVED,
        Event("Warning", "MoveCompleted", MOVED.message),
        Event("Normal", "MoveCompleted", "machine b"),
    ):
        await store.emit(event)
    assert len(await events(client, namespace)) == 3


async def test_a_long_message_is_shortened_and_not_lost(client: KubeClient, namespace: str) -> None:
    store = await store_of(client, namespace)
    await store.emit(Event("Warning", "Blocked", "é" * 2000))
    (event,) = await events(client, namespace)
    assert event["note"].endswith("…")
    assert len(event["note"].encode()) <= 1024


async def test_an_event_that_cannot_be_written_stops_nobody(
    client: KubeClient, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    await EventRecorder(client, "x").record("no-such-namespace", "chat", "uid", MOVED)
    assert any("An Event was not written" in record.message for record in caplog.records)


def test_names_of_events_are_derived_from_what_they_say() -> None:
    assert event_name("chat", "uid", MOVED) == event_name("chat", "uid", MOVED)
    assert event_name("chat", "uid", MOVED) != event_name("chat", "other", MOVED)


async def test_status_is_written_whole_and_what_is_no_longer_said_goes(client: KubeClient, namespace: str) -> None:
    store = await store_of(client, namespace)
    await store.write_status({"observedGeneration": 1, "metrics": "Complete"})
    await store.write_status({"observedGeneration": 2})
    pool = await store.get()
    assert pool is not None
    assert pool.status == {"observedGeneration": 2}
    assert pool.metadata.generation == 1


async def test_a_status_is_written_past_edits_of_others(client: KubeClient, namespace: str) -> None:
    store = await store_of(client, namespace)

    async def edit() -> None:
        for number in range(20):
            operation = {"op": "add", "path": "/metadata/annotations", "value": {"n": str(number)}}
            await client.json_patch(POOLS, namespace, "chat", [operation])
            await asyncio.sleep(0.05)

    async def write() -> None:
        for generation in range(1, 6):
            await store.write_status({"observedGeneration": generation})

    await asyncio.gather(edit(), write())
    pool = await store.get()
    assert pool is not None
    assert pool.status == {"observedGeneration": 5}
    assert pool.metadata.annotations == {"n": "19"}


async def test_a_successor_of_the_same_name_reads_as_gone_and_is_never_written(
    client: KubeClient, namespace: str
) -> None:
    store = await store_of(client, namespace)
    await client.delete(POOLS, namespace, "chat")
    assert await store.get() is None
    with pytest.raises(Conflict):
        await store.write_status({"observedGeneration": 1})
    assert await client.get(POOLS, namespace, "chat") is None, "a status write made a pool"
    await make_pool(client, namespace)
    assert await store.get() is None
    with pytest.raises(Conflict):
        await store.write_status({"observedGeneration": 1})
