"""The bed's node is real: pods run under restricted pod security, are reached, logged, entered, and reach the API."""

import json
import sys
import urllib.request

import pytest

from testbed.bed import NodeBed
from testbed.node import TESTPOD_IMAGE

pytestmark = pytest.mark.node

WEB = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "web",
                "image": TESTPOD_IMAGE,
                "args": ["serve", ":8080"],
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
                "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}},
            }
        ],
    },
}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
}


@pytest.fixture
def namespace(node_cluster: NodeBed) -> str:
    """A restricted namespace in which pod `web` is Ready behind Service `web`, and the node has heard of both."""
    name = node_cluster.new_namespace()
    objects = {"apiVersion": "v1", "kind": "List", "items": [WEB, SERVICE]}
    node_cluster.kubectl("apply", "-n", name, "-f", "-", input=json.dumps(objects))
    node_cluster.kubectl("wait", "-n", name, "pod/web", "--for=condition=Ready", "--timeout=30s")
    # Ready does not mean that kube-proxy has the address yet: until then connections are refused.
    url = f"http://{_service_address(node_cluster, name)}/"
    command = ["exec", "-n", name, "web", "--", "/testpod", "get", url]
    node_cluster.wait_for("the Service answers", *command, timeout_seconds=15)
    return name


def _service_address(node_cluster: NodeBed, namespace: str) -> str:
    address: str = node_cluster.get("service", "web", "-n", namespace)["spec"]["clusterIP"]
    return address


def test_pod_answers_on_its_service_from_node_and_pod_alike(node_cluster: NodeBed, namespace: str) -> None:
    address = _service_address(node_cluster, namespace)
    program = f"import urllib.request; print(urllib.request.urlopen('http://{address}/', timeout=10).read().decode())"
    assert "hello from web" in node_cluster.run_in([sys.executable, "-c", program]).stdout
    inside = node_cluster.kubectl("exec", "-n", namespace, "web", "--", "/testpod", "get", f"http://{address}/")
    assert "hello from web" in inside.stdout


def test_logs_and_exec_reach_the_pod(node_cluster: NodeBed, namespace: str) -> None:
    assert "serving on :8080" in node_cluster.kubectl("logs", "-n", namespace, "web").stdout
    refused = node_cluster.kubectl("exec", "-n", namespace, "web", "--", "/testpod", "nonsense", check=False)
    assert "usage: testpod" in refused.stderr


def test_pod_reaches_the_api_with_its_own_account(node_cluster: NodeBed, namespace: str) -> None:
    url = f"https://10.96.0.1/api/v1/namespaces/{namespace}/pods"
    answer = node_cluster.kubectl("exec", "-n", namespace, "web", "--", "/testpod", "get", url)
    assert "403 Forbidden" in answer.stdout
    assert f"system:serviceaccount:{namespace}:default" in answer.stdout


def test_limits_are_real_control_groups_of_the_bed(node_cluster: NodeBed, namespace: str) -> None:
    from testbed.leftovers import CGROUPS

    uid = node_cluster.get("pod", "web", "-n", namespace)["metadata"]["uid"]
    limits = [
        *CGROUPS.glob(f"*/{node_cluster.folder.name}/**/*{uid}/**/memory.limit_in_bytes"),
        *CGROUPS.glob(f"{node_cluster.folder.name}/**/*{uid}/**/memory.max"),
    ]
    assert str(64 << 20) in {path.read_text().strip() for path in limits}


def test_clients_of_this_process_reach_the_cluster_through_a_forward(node_cluster: NodeBed, namespace: str) -> None:
    address = _service_address(node_cluster, namespace)
    with (
        node_cluster.forward(address, 80) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer,
    ):
        assert b"hello from web" in answer.read()


def test_killed_container_is_started_again_in_the_same_pod(node_cluster: NodeBed, namespace: str) -> None:
    before = node_cluster.get("pod", "web", "-n", namespace)
    container = before["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    node_cluster.run_in(["ctr", "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])
    restarted = "--for=jsonpath={.status.containerStatuses[0].restartCount}=1"
    node_cluster.kubectl("wait", "-n", namespace, "pod/web", restarted, "--timeout=30s")
    after = node_cluster.get("pod", "web", "-n", namespace)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podIP"] == before["status"]["podIP"]
