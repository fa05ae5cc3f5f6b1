"""The children of a pool on a real API server: made, kept, left alone, adopted, and gone with their pool."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from poolwright.api.models import InferencePool
from poolwright.controller import names as child_names
from poolwright.controller import render
from poolwright.controller.children import KubeChildren
from poolwright.controller.ports import ChildrenState
from poolwright.kube import KubeClient
from poolwright.kube.resources import (
    DEPLOYMENTS,
    PODS,
    POOLS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from support.kube_fixtures import client as client
from support.kube_fixtures import edit_pool, eventually, make_pool, writes
from support.kube_fixtures import namespace as namespace
from support.kube_fixtures import pool_kind as pool_kind
from support.pods import run_pod, write_status
from testbed.bed import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("pool_kind")]

IMAGES = render.Images(engine="none.invalid/engine:1", router="none.invalid/control-plane:1")
ROOT_SECRET = b"a root secret of the tests"
KINDS = (DEPLOYMENTS, SECRETS, SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS)
LABEL = "poolwright.dev/pool"
AGENT = "poolwright-children-test"


@pytest.fixture
async def operator_client(api_server: Bed) -> AsyncIterator[KubeClient]:
    """Another client than the test's, so that the audit log tells them apart."""
    async with await KubeClient.connect(str(api_server.kubeconfig), user_agent=AGENT) as client:
        yield client


@pytest.fixture
def children(operator_client: KubeClient) -> KubeChildren:
    return KubeChildren(operator_client, IMAGES, ROOT_SECRET)


def restarted(operator_client: KubeClient) -> KubeChildren:
    """The next operator process: it remembers nothing."""
    return KubeChildren(operator_client, IMAGES, ROOT_SECRET)


async def live(client: KubeClient, namespace: str, resource: Resource, name: str) -> dict[str, Any]:
    found = await client.get(resource, namespace, name)
    assert found is not None, f"{resource.kind} {name} is not there"
    return found


async def all_of(client: KubeClient, namespace: str, pool: str = "chat") -> set[tuple[str, str]]:
    return {
        (kind.kind, item["metadata"]["name"])
        for kind in KINDS
        for item in await client.list(kind, namespace, labels=f"{LABEL}={pool}")
    }


async def settled(children: KubeChildren, pool: InferencePool) -> ChildrenState:
    state = await children.ensure(pool)
    assert (await children.ensure(pool)).changed == 0
    return state


async def until_gone(client: KubeClient, resource: Resource, namespace: str, name: str) -> None:
    async def gone() -> bool:
        return await client.get(resource, namespace, name) is None

    await eventually(gone)


async def pods_of(client: KubeClient, namespace: str, component: str, count: int) -> list[dict[str, Any]]:
    """Once the controller manager has made so many of them."""

    async def made() -> list[dict[str, Any]] | None:
        pods = await client.list(PODS, namespace, labels=f"{LABEL}=chat,poolwright.dev/component={component}")
        return pods if len(pods) == count else None

    found: list[dict[str, Any]] = await eventually(made)
    return found


async def test_all_children_are_made_and_pods_pass_restricted_admission(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    pool = await make_pool(client, namespace)
    state = await settled(children, pool)
    assert (state.conflicts, state.problems, state.routers_desired) == ((), (), 1)
    assert await all_of(client, namespace) == {
        ("Deployment", child_names.engines("chat", "cpu")),
        ("Deployment", child_names.router("chat")),
        ("Secret", child_names.key_secret("chat")),
        ("Service", child_names.engine_service("chat")),
        ("Service", child_names.router_service("chat")),
        ("ServiceAccount", child_names.engine_service_account("chat")),
        ("ServiceAccount", child_names.router_service_account("chat")),
        ("Role", child_names.router_role("chat")),
        ("RoleBinding", child_names.router_role_binding("chat")),
    }
    await pods_of(client, namespace, "engine", 2)
    await pods_of(client, namespace, "router", 1)


async def test_neither_a_second_look_nor_one_after_a_restart_writes_anything(
    client: KubeClient, namespace: str, children: KubeChildren, operator_client: KubeClient, api_server: Bed
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    mark = api_server.audit_mark()
    for looker in (children, restarted(operator_client), restarted(operator_client)):
        assert (await looker.ensure(pool)).changed == 0
    await asyncio.sleep(0.2)
    assert writes(api_server, mark, AGENT) == []


async def test_values_that_the_server_rewrites_settle_too(
    client: KubeClient, namespace: str, children: KubeChildren, operator_client: KubeClient
) -> None:
    resources = {"limits": {"cpu": "1000m", "memory": "1024Mi"}, "requests": {"cpu": "0.5"}}
    pool = await make_pool(
        client, namespace, machines=[{"name": "cpu", "replicas": 1, "template": {"resources": resources}}]
    )
    await settled(children, pool)
    await settled(restarted(operator_client), pool)


async def test_policy_edits_write_no_child_of_the_engines(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    await children.ensure(await make_pool(client, namespace))
    engines = child_names.engines("chat", "cpu")
    before = await live(client, namespace, DEPLOYMENTS, engines)
    edited = await edit_pool(
        client,
        namespace,
        "chat",
        slo={"objectives": [{"name": "tbt", "metric": "TBT", "targetMilliseconds": 9}]},
        pools={"prompt": {"min": 1}, "token": {"min": 0}, "mixed": {"min": 0}},
        rebalance={"mode": "Paused"},
        router={"replicas": 2},
    )
    assert (await children.ensure(edited)).changed == 1
    after = await live(client, namespace, DEPLOYMENTS, engines)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert (await live(client, namespace, DEPLOYMENTS, child_names.router("chat")))["spec"]["replicas"] == 2


@pytest.mark.parametrize("forget", [False, True], ids=["same process", "after a restart"])
@pytest.mark.parametrize(
    "drift",
    [
        ("scale", "deployment", "{engines}", "--replicas=5"),
        ("set", "image", "deployment/{engines}", "engine=none.invalid/other"),
        ("patch", "service", "{service}", "--type=merge", "-p", '{"spec":{"selector":{"poolwright.dev/pool":"x"}}}'),
        ("label", "deployment", "{engines}", "--overwrite", "poolwright.dev/component=other"),
        ("delete", "service", "{service}"),
        ("delete", "role", "{role}"),
    ],
    ids=["scaled", "image", "selector", "label", "deleted service", "deleted role"],
)
async def test_what_somebody_changed_by_hand_is_put_back_once(
    client: KubeClient,
    namespace: str,
    children: KubeChildren,
    operator_client: KubeClient,
    api_server: Bed,
    drift: tuple[str, ...],
    forget: bool,
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    names = {
        "engines": child_names.engines("chat", "cpu"),
        "service": child_names.router_service("chat"),
        "role": child_names.router_role("chat"),
    }
    api_server.kubectl(
        *(word.format(**names) if "{" in word and "spec" not in word else word for word in drift), "-n", namespace
    )
    looker = restarted(operator_client) if forget else children
    assert (await looker.ensure(pool)).changed == 1
    assert (await looker.ensure(pool)).changed == 0
    engines = await live(client, namespace, DEPLOYMENTS, names["engines"])
    assert engines["spec"]["replicas"] == 2
    assert engines["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGES.engine
    assert engines["metadata"]["labels"]["poolwright.dev/component"] == "engine"
    service = await live(client, namespace, SERVICES, names["service"])
    assert service["spec"]["selector"][LABEL] == "chat"
    await live(client, namespace, ROLES, names["role"])


async def test_what_others_add_is_left_to_them(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    engines = child_names.engines("chat", "cpu")
    api_server.kubectl("label", "deployment", engines, "team=llm", "-n", namespace)
    api_server.kubectl("annotate", "deployment", engines, "note=kept", "-n", namespace)
    assert (await children.ensure(pool)).changed == 0
    assert (await live(client, namespace, DEPLOYMENTS, engines))["metadata"]["labels"]["team"] == "llm"


async def test_an_object_of_somebody_else_is_left_alone_and_named(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    name = child_names.router_service("chat")
    api_server.kubectl("create", "service", "clusterip", name, "--tcp=5:5", "-n", namespace)
    pool = await make_pool(client, namespace)
    state = await settled(children, pool)
    assert len(state.conflicts) == 1
    assert f"Service {name}" in state.conflicts[0]
    service = await live(client, namespace, SERVICES, name)
    assert service["spec"]["ports"][0]["port"] == 5
    assert "ownerReferences" not in service["metadata"]
    await live(client, namespace, DEPLOYMENTS, child_names.engines("chat", "cpu"))


async def test_a_child_of_another_living_pool_is_never_taken(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    other = await make_pool(client, namespace, "other")
    await settled(children, other)
    stolen = child_names.router_service("chat")
    theirs = await live(client, namespace, SERVICES, child_names.router_service("other"))
    owner = theirs["metadata"]["ownerReferences"]
    await client.create(
        SERVICES,
        namespace,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": stolen, "ownerReferences": owner},
            "spec": {"ports": [{"port": 5}]},
        },
    )
    state = await settled(children, await make_pool(client, namespace))
    assert len(state.conflicts) == 1
    assert "InferencePool other" in state.conflicts[0]
    assert (await live(client, namespace, SERVICES, stolen))["metadata"]["ownerReferences"] == owner


async def test_a_secret_that_somebody_else_wrote_is_not_overwritten(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    name = child_names.key_secret("chat")
    api_server.kubectl("create", "secret", "generic", name, "--from-literal=pool-key=theirs", "-n", namespace)
    state = await children.ensure(await make_pool(client, namespace))
    assert any(f"Secret {name}" in conflict for conflict in state.conflicts)
    assert (await live(client, namespace, SECRETS, name))["data"] == {"pool-key": "dGhlaXJz"}


async def test_children_of_a_dead_namesake_are_adopted(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    dead = await make_pool(client, namespace)
    await settled(children, dead)
    with api_server.without_component("kube-controller-manager"):  # the collector is late
        await client.delete(POOLS, namespace, "chat")
        await until_gone(client, POOLS, namespace, "chat")
        heir = await make_pool(client, namespace)
        assert heir.metadata.uid != dead.metadata.uid
        state = await settled(children, heir)
        assert state.conflicts == ()
        for kind in KINDS:
            for item in await client.list(kind, namespace, labels=f"{LABEL}=chat"):
                assert [o["uid"] for o in item["metadata"]["ownerReferences"]] == [heir.metadata.uid], item["metadata"][
                    "name"
                ]
    await asyncio.sleep(3)
    assert len(await all_of(client, namespace)) == 9, "the collector took what was adopted"


async def test_pools_whose_names_run_together_have_children_of_their_own(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    for name, machine_class in (("chat", "a-b"), ("chat-a", "b")):
        pool = await make_pool(client, namespace, name, machines=[{"name": machine_class, "replicas": 1}])
        assert (await settled(children, pool)).conflicts == ()
    assert len(await all_of(client, namespace, "chat")) == len(await all_of(client, namespace, "chat-a")) == 9


async def test_an_edit_the_server_refuses_for_one_class_rolls_none(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    classes = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
    await settled(children, await make_pool(client, namespace, machines=classes))
    before = await live(client, namespace, DEPLOYMENTS, child_names.engines("chat", "a"))
    bad = {"volumes": [{"name": "v", "hostPaths": {"path": "/x"}}]}
    edited = await edit_pool(
        client,
        namespace,
        "chat",
        machines=[
            {"name": "a", "replicas": 1, "template": {"nodeSelector": {"x": "y"}}},
            {"name": "b", "replicas": 1, "template": bad},
        ],
    )
    state = await children.ensure(edited)
    assert state.changed == 0
    (refused,) = [problem for problem in state.problems if "was refused" in problem]
    assert child_names.engines("chat", "b") in refused
    assert "hostPaths" in refused
    after = await live(client, namespace, DEPLOYMENTS, child_names.engines("chat", "a"))
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


async def test_pods_that_admission_refuses_are_named(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    forbidden = {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}
    pool = await make_pool(client, namespace, machines=[{"name": "cpu", "replicas": 1, "template": forbidden}])

    async def refused() -> list[str]:
        return [p for p in (await children.ensure(pool)).problems if "cannot make pods" in p]

    (problem,) = await eventually(refused)
    assert "hostPath" in problem
    assert "violates PodSecurity" in problem


async def test_engines_of_a_class_that_left_the_spec_are_deleted(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    classes = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
    await settled(children, await make_pool(client, namespace, machines=classes))
    pool = await edit_pool(client, namespace, "chat", machines=classes[:1])
    await children.ensure(pool)
    await until_gone(client, DEPLOYMENTS, namespace, child_names.engines("chat", "b"))
    assert (await children.ensure(pool)).changed == 0
    await live(client, namespace, DEPLOYMENTS, child_names.engines("chat", "a"))
    await live(client, namespace, DEPLOYMENTS, child_names.router("chat"))


async def test_a_deleted_secret_is_made_again_once_a_pod_needs_it(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    secret = child_names.key_secret("chat")
    before = await live(client, namespace, SECRETS, secret)
    await client.delete(SECRETS, namespace, secret)
    pods = await pods_of(client, namespace, "engine", 2)
    waiting = {"reason": "CreateContainerConfigError", "message": f'secret "{secret}" not found'}
    status = {
        "name": "engine",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }
    write_status(api_server, namespace, pods[0]["metadata"]["name"], {"containerStatuses": [status]})
    state = await children.ensure(pool)
    assert state.changed == 1
    assert any(secret in problem for problem in state.problems)
    assert (await live(client, namespace, SECRETS, secret))["data"] == before["data"]


async def test_the_last_words_of_an_engine_are_a_problem_with_a_count(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    pods = await pods_of(client, namespace, "engine", 2)
    for number, pod in enumerate(pods):
        ended = {"exitCode": 2, "message": "model path /models/tiny does not exist\n", "reason": "Error"}
        waiting = {"reason": "CrashLoopBackOff", "message": f"back-off {10 * 2**number}s restarting failed container"}
        status = {
            "name": "engine",
            "image": "x",
            "imageID": "",
            "ready": False,
            "restartCount": number,
            "state": {"waiting": waiting},
            "lastState": {"terminated": ended},
        }
        write_status(
            api_server, namespace, pod["metadata"]["name"], {"phase": "Running", "containerStatuses": [status]}
        )
    expected = "2 engine pods: container engine ended with code 2: model path /models/tiny does not exist"
    assert expected in (await children.ensure(pool)).problems


async def test_only_ready_routers_count_and_are_named(
    client: KubeClient, namespace: str, children: KubeChildren, api_server: Bed
) -> None:
    pool = await make_pool(client, namespace, router={"replicas": 2})
    await settled(children, pool)
    pods = await pods_of(client, namespace, "router", 2)
    run_pod(api_server, namespace, pods[0]["metadata"]["name"], "127.0.0.1")
    run_pod(api_server, namespace, pods[1]["metadata"]["name"], "127.0.0.1", ready=False)
    state = await children.ensure(pool)
    assert (state.routers_ready, state.routers_desired) == (1, 2)
    assert state.router_uids == (pods[0]["metadata"]["uid"],)


async def test_deleting_the_pool_leaves_nothing_and_nothing_is_made_again(
    client: KubeClient, namespace: str, children: KubeChildren
) -> None:
    pool = await make_pool(client, namespace)
    await settled(children, pool)
    await client.delete(POOLS, namespace, "chat")

    async def nothing_left() -> bool:
        return not await all_of(client, namespace) and not await client.list(PODS, namespace, labels=f"{LABEL}=chat")

    await eventually(nothing_left, 60)
