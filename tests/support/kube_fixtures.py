"""Fixtures of tests on a real API server: a client, a namespace, our kind, and pools made in it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from poolwright.api.models import InferencePool
from poolwright.kube import KubeClient
from poolwright.kube.resources import POOLS
from testbed.bed import Bed

CRD = Path(__file__).parents[2] / "crds" / "poolwright.dev_inferencepools.yaml"
_PARTS = ("resource", "name", "subresource")
MUTATING = ("create", "update", "patch", "delete", "deletecollection")


@pytest.fixture
async def client(api_server: Bed) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(str(api_server.kubeconfig)) as client:
        yield client


@pytest.fixture
def namespace(api_server: Bed) -> Iterator[str]:
    name = api_server.new_namespace()
    yield name
    api_server.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def pool_kind(api_server: Bed) -> None:
    """The API server serves InferencePools."""
    api_server.kubectl("apply", "-f", str(CRD))
    # `kubectl wait` fails on a CRD that has no conditions yet, so it is repeated.
    crd = "crd/inferencepools.poolwright.dev"
    api_server.wait_for("the CRD is established", "wait", "--for=condition=Established", crd, "--timeout=5s")


def pool_manifest(name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "poolwright.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "tiny", "source": {"path": "/models/tiny"}},
            "slo": {"objectives": [{"name": "ttft", "metric": "TTFT", "targetMilliseconds": 1000}]},
            "machines": [{"name": "cpu", "replicas": 2}],
            "rebalance": {"intervalSeconds": 5},
            "router": {"replicas": 1},
            **spec,
        },
    }


async def make_pool(client: KubeClient, namespace: str, name: str = "chat", **spec: Any) -> InferencePool:
    return InferencePool.parse(await client.create(POOLS, namespace, pool_manifest(name, **spec)))


async def edit_pool(client: KubeClient, namespace: str, name: str, **spec: Any) -> InferencePool:
    operations = [{"op": "add", "path": f"/spec/{key}", "value": value} for key, value in spec.items()]
    return InferencePool.parse(await client.json_patch(POOLS, namespace, name, operations))


def writes(api_server: Bed, since: int, user_agent: str) -> list[str]:
    """What this program wrote since the mark, as `verb resource/name`, dry runs left out."""
    return [
        f"{event['verb']} " + "/".join(filter(None, (event["objectRef"].get(k) for k in _PARTS)))
        for event in api_server.audit_events(since=since)
        if event["verb"] in MUTATING
        and event.get("userAgent", "") == user_agent
        and "dryRun=" not in event["requestURI"]
    ]


async def eventually(look: Callable[[], Awaitable[Any]], limit_seconds: float = 30) -> Any:
    """The first true thing that a look gives."""
    async with asyncio.timeout(limit_seconds):
        while not (found := await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return found
