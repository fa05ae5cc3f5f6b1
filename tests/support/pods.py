"""Pods of a pool without a kubelet: made as the controller manager would, or given the status that a kubelet would."""

import json
from datetime import UTC, datetime
from typing import Any

from poolwright.kube import KubeClient
from poolwright.kube.client import ApiError
from poolwright.kube.resources import PODS
from testbed.bed import Cluster

RESTRICTED_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def engine_pod(name: str, pool: str = "chat", machine_class: str = "cpu", **meta: Any) -> dict[str, Any]:
    """As a Deployment's template makes it: at epoch 0, without a role."""
    labels = {
        "poolwright.dev/pool": pool,
        "poolwright.dev/component": "engine",
        "poolwright.dev/machine-class": machine_class,
    }
    annotations = {"poolwright.dev/role-epoch": "0"}
    ports = [{"name": n, "containerPort": p} for n, p in (("api", 8000), ("admin", 8001), ("kv", 9000))]
    container = {
        "name": "engine",
        "image": "none.invalid/engine",
        "ports": ports,
        "securityContext": RESTRICTED_CONTAINER,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations, **meta},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


async def make_pod(client: KubeClient, namespace: str, pod: dict[str, Any]) -> dict[str, Any]:
    return await client.create(PODS, namespace, pod)


def run_pod(cluster: Cluster, namespace: str, name: str, address: str, *, ready: bool = True) -> None:
    """Says of the pod what a kubelet would: it runs at this address."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": now}
    write_status(
        cluster,
        namespace,
        name,
        {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now,
            "conditions": [condition],
        },
    )


def write_status(cluster: Cluster, namespace: str, name: str, status: dict[str, Any]) -> None:
    """As a kubelet does: a pod that is gone meanwhile needs no status any more."""
    patch = json.dumps({"status": status})
    where = (name, "-n", namespace, "--subresource=status")
    done = cluster.kubectl("patch", "pod", *where, "--type=merge", "-p", patch, check=False)
    if done.returncode != 0 and "NotFound" not in done.stderr:
        raise AssertionError(f"the status of pod {name} could not be written: {done.stderr}")


async def pod_metadata(client: KubeClient, namespace: str, name: str) -> dict[str, Any]:
    pod = await client.get(PODS, namespace, name)
    if pod is None:
        raise ApiError(404, "NotFound", name)
    meta: dict[str, Any] = pod["metadata"]
    return meta
