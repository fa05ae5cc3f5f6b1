"""The place where machines live, on a real API server: pods whose status says where an engine's admin port listens."""

import asyncio
from typing import Any

from poolwright.core.machine import Machine
from poolwright.kube import KubeClient, KubeMachines
from poolwright.kube.machines import format_time, machine_of
from poolwright.kube.resources import PODS
from poolwright.local.processes import free_ports
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.machines_bed import EnginesOfBed
from support.pods import engine_pod, run_pod
from testbed.bed import Cluster

POOL = "chat"


class KubeBed(EnginesOfBed):
    """`MachinesBed` over pods of one namespace. Restarts, losses and addresses are those of the pods."""

    def __init__(self, cluster: Cluster, client: KubeClient, namespace: str) -> None:
        super().__init__()
        self.machines = KubeMachines(client, namespace, POOL)
        self._cluster = cluster
        self._client = client
        self._namespace = namespace

    async def add(self, name: str, role: Role | None, epoch: int) -> Machine:
        port = free_ports(1)[0]
        pod = engine_pod(name, POOL)
        pod["metadata"]["annotations"][names.ANNOTATION_ROLE_EPOCH] = str(epoch)
        if role is not None:
            pod["metadata"]["labels"][names.LABEL_ROLE] = role.value
            pod["metadata"]["annotations"][names.ANNOTATION_ROLE_SINCE] = format_time(0)
        pod["spec"]["containers"][0]["ports"] = [{"name": "admin", "containerPort": port}]
        made = await self._client.create(PODS, self._namespace, pod)
        await self._start(name, self._keeper(made["metadata"]["uid"], role, epoch), port)
        await asyncio.to_thread(run_pod, self._cluster, self._namespace, name, "127.0.0.1")
        return await self.get(name)

    async def get(self, name: str) -> Machine:
        pod = await self._client.get(PODS, self._namespace, name)
        assert pod is not None
        return machine_of(pod)[0]

    async def edit_by_hand(self, name: str, role: Role | None, epoch: int | None = None) -> None:
        label = f"/metadata/labels/{names.GROUP}~1role"
        operations: list[dict[str, Any]] = [{"op": "add", "path": label, "value": role.value if role else ""}]
        if role is None:
            operations.append({"op": "remove", "path": label})
        if epoch is not None:
            path = f"/metadata/annotations/{names.GROUP}~1role-epoch"
            operations.append({"op": "add", "path": path, "value": str(epoch)})
        await self._client.json_patch(PODS, self._namespace, name, operations)

    async def delete(self, name: str) -> None:
        await self.kill_engine(name)
        await self._client.delete(PODS, self._namespace, name)
        async with asyncio.timeout(20):
            while await self._client.get(PODS, self._namespace, name) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
