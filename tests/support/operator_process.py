"""The operator as a process of its own, under exactly the rights the chart is to grant, and a stand-in for kubelets."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from poolwright.kube import KubeClient
from poolwright.kube.resources import PODS, POOLS
from poolwright_protocol import keys, names
from poolwright_protocol.roles import Role
from support.pods import run_pod
from support.role_engine import RoleEngine, RoleKeeper
from testbed.bed import Cluster

ROOT_SECRET = "a root secret of the tests"
LEASE_SECONDS = 10  # shorter ones are lost when a busy machine lets a process wait for seconds
START_LIMIT_SECONDS = 60

# What the operator needs where its pools live.
POOL_RULES: list[dict[str, Any]] = [
    {"apiGroups": [names.GROUP], "resources": ["inferencepools"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [names.GROUP], "resources": ["inferencepools/status"], "verbs": ["patch"]},
    # To set blockOwnerDeletion where OwnerReferencesPermissionEnforcement is on.
    {"apiGroups": [names.GROUP], "resources": ["inferencepools/finalizers"], "verbs": ["update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["services", "serviceaccounts"], "verbs": ["get", "create", "patch"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "patch"]},
    {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {
        "apiGroups": ["rbac.authorization.k8s.io"],
        "resources": ["roles", "rolebindings"],
        "verbs": ["get", "create", "patch"],
    },
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["get", "create", "update"]},
]
# In its own namespace.
LEASE_RULES: list[dict[str, Any]] = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
]
# Optional, cluster-wide: without it, cordoned nodes are not noticed.
NODE_RULES: list[dict[str, Any]] = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}]


def operator_kubeconfig(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """A service account that may do what the rules above say, and nothing else."""
    account = "operator"
    rbac = "rbac.authorization.k8s.io"
    subject = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    cluster_name = f"nodes-{namespace}"
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": {"name": account},
            "rules": [*POOL_RULES, *LEASE_RULES],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": account},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": account},
            "subjects": subject,
        },
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": cluster_name}, "rules": NODE_RULES},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": cluster_name},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": cluster_name},
            "subjects": subject,
        },
    ]
    cluster.kubectl(
        "apply", "-n", namespace, "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )
    return account_kubeconfig(cluster, account, namespace, folder)


def account_kubeconfig(cluster: Cluster, account: str, namespace: str, folder: Path) -> Path:
    """A kubeconfig that presents a token of this service account, and nothing else."""
    token = cluster.kubectl("create", "token", account, "-n", namespace).stdout.strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout)
    config["users"] = [{"name": account, "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = account
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(config))
    return path


@dataclass
class OperatorProcess:
    process: "subprocess.Popen[bytes]"
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def leads(self) -> bool:
        return "Acquired the Lease" in self.log

    async def until(self, text: str, limit_seconds: float = START_LIMIT_SECONDS) -> None:
        async with asyncio.timeout(limit_seconds):
            while text not in self.log:
                assert self.process.poll() is None or text in self.log, (
                    f"it ended with {self.process.returncode}:\n{self.log}"
                )
                await asyncio.sleep(0.05)

    async def probe(self, path: str) -> tuple[int, str]:
        port = self.log.rpartition("probe_port=")[2].split()[0]
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{port}{path}")
        return answer.status_code, answer.text

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    async def ended(self, limit_seconds: float = 30) -> int:
        return await asyncio.to_thread(self.process.wait, limit_seconds)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()


@contextmanager
def operator_process(
    kubeconfig: Path, namespace: str, folder: Path, name: str = "operator", arguments: Sequence[str] = ()
) -> Iterator[OperatorProcess]:
    scope = ["--namespace", namespace, "--engine-image", "none.invalid/engine:1"]
    images = ["--router-image", "none.invalid/control-plane:1"]
    given = [*scope, *images, "--lease-duration-seconds", str(LEASE_SECONDS), *arguments]
    with started_operator(given, kubeconfig, namespace, folder, name) as operator:
        yield operator


@contextmanager
def started_operator(
    arguments: Sequence[str],
    kubeconfig: Path,
    lease_namespace: str,
    folder: Path,
    name: str = "operator",
    root_secret: str = ROOT_SECRET,
) -> Iterator[OperatorProcess]:
    """With these arguments, and what a process outside of a pod must be told besides."""
    log_file = folder / f"{name}.log"
    command = [
        *(sys.executable, "-W", "error", "-m", "poolwright.controller", *arguments),
        *("--kubeconfig", str(kubeconfig), "--lease-namespace", lease_namespace),
        *("--probe-host", "127.0.0.1", "--probe-port", "0"),
    ]
    environment = {**os.environ, names.ENV_ROOT_SECRET: root_secret, names.ENV_POD_NAME: name, "PYTHONSAFEPATH": "1"}
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            yield OperatorProcess(process, log_file)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@dataclass
class StandInKubelet:
    """Gives every pod of a namespace an address. At an engine's, a real admin port answers; a router's is silent."""

    cluster: Cluster
    client: KubeClient
    namespace: str
    root_secret: str = ROOT_SECRET
    engines: dict[str, RoleEngine] = field(default_factory=dict)  # by uid
    _addresses: dict[str, str] = field(default_factory=dict)  # by uid
    started: list[str] = field(default_factory=list)  # uids of engines ever started: a restart would be a second entry

    async def run(self) -> None:
        pods_of_pools = self.client.watch_set(PODS, self.namespace, labels=names.LABEL_POOL)
        async with aclosing(pods_of_pools) as sets:
            async for pods in sets:
                for uid, pod in pods.items():
                    if uid not in self._addresses and "deletionTimestamp" not in pod["metadata"]:
                        await self._start(uid, pod)
                for uid in self.engines.keys() - pods.keys():
                    await self.engines.pop(uid).stop()

    async def _start(self, uid: str, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        address = f"127.{random.randrange(1, 255)}.{random.randrange(255)}.{random.randrange(1, 255)}"
        self._addresses[uid] = address
        if meta["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE:
            role = meta["labels"].get(names.LABEL_ROLE)
            epoch = int(meta["annotations"][names.ANNOTATION_ROLE_EPOCH])
            key = keys.pool_key(self.root_secret.encode(), pool_uid=await self._pool_uid(pod))
            engine = self.engines[uid] = RoleEngine(RoleKeeper(uid, Role(role) if role else None, epoch), key)
            self.started.append(uid)
            await engine.start(address, names.ADMIN_PORT)
        await asyncio.to_thread(run_pod, self.cluster, self.namespace, meta["name"], address)

    async def _pool_uid(self, pod: dict[str, Any]) -> str:
        pool = await self.client.get(POOLS, self.namespace, pod["metadata"]["labels"][names.LABEL_POOL])
        assert pool is not None
        return str(pool["metadata"]["uid"])


@asynccontextmanager
async def stand_in_kubelet(
    cluster: Cluster, client: KubeClient, namespace: str, root_secret: str = ROOT_SECRET
) -> AsyncIterator[StandInKubelet]:
    kubelet = StandInKubelet(cluster, client, namespace, root_secret)
    task = asyncio.create_task(kubelet.run())
    try:
        yield kubelet
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for engine in kubelet.engines.values():
            await engine.stop()
