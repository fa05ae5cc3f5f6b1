"""`KubeMachines` on a real API server: what is a machine, test-and-set, and watches that heal."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from poolwright.core.links import Place
from poolwright.core.machine import Machine, begin, finish
from poolwright.core.router_note import RouterNote
from poolwright.kube import ApiError, KubeClient, KubeMachines, Nodes
from poolwright.kube.resources import NODES, PODS
from poolwright.machines import Conflict, Unavailable
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.names import ANNOTATION_ROUTING as ROUTING
from poolwright_protocol.names import LABEL_KV_ISLAND, LABEL_KV_OUTSIDE_GBPS
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.faulty_proxy import FaultyProxy, faulty_proxy
from support.pods import engine_pod, make_pod, pod_metadata, run_pod, write_status
from testbed.bed import Bed

pytestmark = pytest.mark.cluster


@pytest.fixture
async def client(api_server: Bed) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(str(api_server.kubeconfig)) as client:
        yield client


@pytest.fixture
def namespace(api_server: Bed) -> str:
    return api_server.new_namespace()


@pytest.fixture
async def proxy(api_server: Bed) -> AsyncIterator[FaultyProxy]:
    if not isinstance(api_server, Bed):
        pytest.skip("a lent cluster gives no client certificate for the proxy")
    admin = api_server.admin
    async with faulty_proxy(api_server.url, admin.certificate, admin.key, admin.authority) as proxy:
        yield proxy


async def only(machines: KubeMachines) -> Machine:
    (machine,) = await machines.list()
    return machine


async def next_set(watch: AsyncIterator[tuple[Machine, ...]], limit_seconds: float = 20) -> tuple[Machine, ...]:
    async with asyncio.timeout(limit_seconds):
        return await anext(watch)


async def until(watch: AsyncIterator[tuple[Machine, ...]], names: set[str], limit_seconds: float = 30) -> None:
    async with asyncio.timeout(limit_seconds):
        while {machine.name for machine in await anext(watch)} != names:
            pass


async def test_a_machine_is_an_engine_pod_of_this_pool_and_nothing_else(
    client: KubeClient, namespace: str, api_server: Bed
) -> None:
    await make_pod(client, namespace, engine_pod("mine"))
    await make_pod(client, namespace, engine_pod("other", pool="other"))
    router = engine_pod("router")
    router["metadata"]["labels"]["poolwright.dev/component"] = "router"
    await make_pod(client, namespace, router)
    run_pod(api_server, namespace, "mine", "127.0.0.9")
    machine = await only(KubeMachines(client, namespace, "chat"))
    assert (machine.name, machine.host, machine.ready, machine.machine_class) == ("mine", "127.0.0.9", True, "cpu")
    assert (machine.role, machine.role_epoch, machine.move, machine.role_since) == (None, 0, None, None)
    assert (machine.api_port, machine.admin_port, machine.kv_port) == (8000, 8001, 9000)
    assert abs(machine.created_at - time.time()) < 60


async def test_a_pod_that_ended_for_good_is_no_machine(client: KubeClient, namespace: str, api_server: Bed) -> None:
    await make_pod(client, namespace, engine_pod("evicted"))
    write_status(api_server, namespace, "evicted", {"phase": "Failed", "reason": "Evicted"})
    assert await KubeMachines(client, namespace, "chat").list() == ()


async def test_a_move_lives_on_the_pod_and_is_read_back_whole(client: KubeClient, namespace: str) -> None:
    await make_pod(
        client,
        namespace,
        engine_pod("m", labels={**engine_pod("m")["metadata"]["labels"], "poolwright.dev/role": "mixed"}),
    )
    machines = KubeMachines(client, namespace, "chat")
    moving = await machines.patch(
        begin(await only(machines), Role.PROMPT, now=1000.5, deadline_seconds=30, reason="TTFT")
    )
    assert moving == await only(machines)
    assert moving.role is None
    assert moving.role_epoch == 1
    assert moving.move is not None
    assert (moving.move.from_role, moving.move.to_role, moving.move.deadline) == (Role.MIXED, Role.PROMPT, 1030.5)
    done = await machines.patch(finish(moving, now=1003.25))
    assert done == await only(machines)
    assert (done.role, done.role_epoch, done.role_since, done.move) == (Role.PROMPT, 1, 1003.25, None)
    meta = await pod_metadata(client, namespace, "m")
    assert meta["labels"]["poolwright.dev/role"] == "prompt"
    assert meta["annotations"]["poolwright.dev/role-epoch"] == "1"


async def test_a_note_for_routers_lives_on_the_pod_beside_its_role(client: KubeClient, namespace: str) -> None:
    await make_pod(client, namespace, engine_pod("m"))
    machines = KubeMachines(client, namespace, "chat")
    before = await only(machines)
    profile = MachineProfile(StepCost(0.02, 1e-4, 1e-8), StepCost(0.03, 2e-4, 2e-8), 2048, 256, 64, 90_000)
    note = RouterNote(profile, 1.0, 0.06, 90.0, 512)
    async with aclosing(KubeMachines(client, namespace, "chat").watch()) as watch:
        assert (await next_set(watch))[0].note is None
        await machines.annotate(before, note)
        assert (await next_set(watch))[0].note == note  # as a router sees it
    moving = await machines.patch(begin(await only(machines), Role.PROMPT, 1, 30, ""))
    assert moving.note == note
    meta = await pod_metadata(client, namespace, "m")
    await client.delete(PODS, namespace, "m")
    with pytest.raises(Conflict):
        await machines.annotate(moving, note)
    await make_pod(client, namespace, engine_pod("m", annotations={**meta["annotations"], ROUTING: "{}"}))
    with pytest.raises(Conflict):
        await machines.annotate(moving, note)  # another pod of that name
    assert (await only(machines)).note is None


async def test_of_two_writers_who_read_the_same_epoch_one_wins(client: KubeClient, namespace: str) -> None:
    await make_pod(client, namespace, engine_pod("m"))
    one, other = KubeMachines(client, namespace, "chat"), KubeMachines(client, namespace, "chat")
    patches = [begin(await only(one), Role.PROMPT, 1, 30, "one"), begin(await only(other), Role.TOKEN, 1, 30, "other")]
    results = await asyncio.gather(one.patch(patches[0]), other.patch(patches[1]), return_exceptions=True)
    assert sorted(type(result) for result in results if isinstance(result, Exception)) == [Conflict]
    assert (await only(one)).role_epoch == 1


async def test_a_stale_patch_stays_refused_after_a_newer_read_by_the_same_process(
    client: KubeClient, namespace: str
) -> None:
    await make_pod(client, namespace, engine_pod("m"))
    machines = KubeMachines(client, namespace, "chat")
    stale = begin(await only(machines), Role.PROMPT, 1, 30, "")
    await machines.patch(stale)
    await machines.list()
    with pytest.raises(Conflict):
        await machines.patch(stale)


async def test_a_pod_of_the_same_name_with_another_uid_is_not_touched(client: KubeClient, namespace: str) -> None:
    machines = KubeMachines(client, namespace, "chat")
    await make_pod(client, namespace, engine_pod("m"))
    of_the_first = begin(await only(machines), Role.PROMPT, 1, 30, "")
    await client.delete(PODS, namespace, "m")
    with pytest.raises(Conflict, match="gone"):
        await machines.patch(of_the_first)
    await make_pod(client, namespace, engine_pod("m"))
    with pytest.raises(Conflict):
        await machines.patch(of_the_first)
    assert (await only(machines)).role_epoch == 0


@pytest.mark.parametrize(
    "annotations",
    [
        {"poolwright.dev/role-epoch": "many", "poolwright.dev/move": "{", "poolwright.dev/role-since": "yesterday"},
        {"unrelated": "x"},
        {},
    ],
    ids=["broken", "absent", "no annotations"],
)
async def test_broken_or_absent_annotations_count_as_absent_and_a_patch_mends_them(
    client: KubeClient, namespace: str, annotations: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    await make_pod(client, namespace, engine_pod("m", annotations=annotations))
    machines = KubeMachines(client, namespace, "chat")
    machine = await only(machines)
    await machines.list()
    assert (machine.role_epoch, machine.move, machine.role_since) == (0, None, None)
    complaints = [record for record in caplog.records if "Annotations of a pod were ignored" in record.message]
    assert len(complaints) == (1 if "poolwright.dev/move" in annotations else 0), "each is named in the log once"
    mended = await machines.patch(begin(machine, Role.TOKEN, 1, 30, ""))
    assert mended.role_epoch == 1
    assert mended == await only(machines)


async def test_a_machine_on_a_cordoned_node_says_so_and_where_the_node_stands(
    client: KubeClient, namespace: str
) -> None:
    node = f"node-{namespace}"
    await client.create(
        NODES,
        None,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node, "labels": {LABEL_KV_ISLAND: "rack-1", LABEL_KV_OUTSIDE_GBPS: "25"}},
            "spec": {"unschedulable": True},
        },
    )
    try:
        pod = engine_pod("m")
        pod["spec"]["nodeName"] = node
        await make_pod(client, namespace, pod)
        seen = await only(KubeMachines(client, namespace, "chat", Nodes(client)))
        assert seen.cordoned
        assert seen.place == Place("rack-1", None, 25e9 / 8)
        assert not (await only(KubeMachines(client, namespace, "chat"))).cordoned
    finally:
        await client.delete(PODS, namespace, "m")
        await client.delete(NODES, None, node)


async def test_watch_gives_the_whole_set_first_and_after_each_change(
    client: KubeClient, namespace: str, api_server: Bed
) -> None:
    machines = KubeMachines(client, namespace, "chat")
    async with aclosing(machines.watch()) as watch:
        assert await next_set(watch) == ()
        await make_pod(client, namespace, engine_pod("a"))
        assert [m.name for m in await next_set(watch)] == ["a"]
        run_pod(api_server, namespace, "a", "127.0.0.7")
        assert [m.host for m in await next_set(watch)] == ["127.0.0.7"]
        await machines.patch(begin((await machines.list())[0], Role.PROMPT, 1, 30, ""))
        assert [m.role_epoch for m in await next_set(watch)] == [1]
        await client.delete(PODS, namespace, "a")
        await until(watch, set())


async def test_an_expired_watch_lists_once_more_and_forgets_what_went_meanwhile(
    client: KubeClient, namespace: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    await make_pod(client, namespace, engine_pod("a"))
    await make_pod(client, namespace, engine_pod("b"))
    async with await KubeClient.connect(proxy.kubeconfig(tmp_path)) as through:
        async with aclosing(KubeMachines(through, namespace, "chat").watch()) as watch:
            await until(watch, {"a", "b"})
            proxy.watches_to_expire = 2  # the second right after the new list
            proxy.drop_watches()
            await client.delete(PODS, namespace, "b")
            await make_pod(client, namespace, engine_pod("c"))
            await until(watch, {"a", "c"})
            await make_pod(client, namespace, engine_pod("d"))
            await until(watch, {"a", "c", "d"})
        assert proxy.lists("/pods") <= 1 + 2, "more than one list for each expiry"


async def test_a_dropped_watch_goes_on_where_it_ended_without_a_list(
    client: KubeClient, namespace: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    await make_pod(client, namespace, engine_pod("a"))
    async with await KubeClient.connect(proxy.kubeconfig(tmp_path)) as through:
        async with aclosing(KubeMachines(through, namespace, "chat").watch()) as watch:
            await until(watch, {"a"})
            proxy.drop_watches()
            await make_pod(client, namespace, engine_pod("b"))
            await until(watch, {"a", "b"})
        assert proxy.lists("/pods") == 1


async def test_throttling_is_waited_out(client: KubeClient, namespace: str, proxy: FaultyProxy, tmp_path: Path) -> None:
    await make_pod(client, namespace, engine_pod("a"))
    async with await KubeClient.connect(proxy.kubeconfig(tmp_path)) as through:
        proxy.requests_to_throttle = 2
        assert [m.name for m in await KubeMachines(through, namespace, "chat").list()] == ["a"]


async def test_during_an_outage_the_last_set_stands_and_afterwards_the_watch_goes_on(
    client: KubeClient, namespace: str, api_server: Bed
) -> None:
    if not isinstance(api_server, Bed):
        pytest.skip("a lent cluster cannot be taken away")
    await make_pod(client, namespace, engine_pod("a"))
    machines = KubeMachines(client, namespace, "chat")
    async with aclosing(machines.watch()) as watch:
        await until(watch, {"a"})
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.to_thread(api_server.stop_component, "kube-apiserver")
        try:
            with pytest.raises(Unavailable):
                await machines.list()
            assert not waiting.done()
        finally:
            await asyncio.to_thread(api_server.start_component, "kube-apiserver")
        await make_pod(client, namespace, engine_pod("b"))
        async with asyncio.timeout(60):
            assert {m.name for m in await waiting} == {"a", "b"}
    # A server that has just started has no history, so a real 410 is what the watch above met and healed.
    async with aclosing(client._stream(PODS, namespace, {}, "1")) as stream:
        with pytest.raises(ApiError) as caught:
            async with asyncio.timeout(20):
                await anext(stream)
    assert caught.value.status == 410


async def test_a_list_of_many_pages_is_complete(
    client: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolwright.kube.client.PAGE_SIZE", 2)
    wanted: list[Any] = [f"m{n}" for n in range(5)]
    for name in wanted:
        await make_pod(client, namespace, engine_pod(name))
    assert [m.name for m in await KubeMachines(client, namespace, "chat").list()] == wanted
