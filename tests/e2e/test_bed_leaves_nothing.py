"""A bed with a node leaves the machine as it was: firewall, network, mounts, cgroups, settings, folders, processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed import bed, keeper, leftovers
from testbed.bed import NodeBed
from testbed.node import TESTPOD_IMAGE

pytestmark = pytest.mark.node
TESTS = Path(__file__).parent.parent

# Starts a bed with a pod that takes a port of the node, says what belongs to it, and waits.
OWNER = f"""
import json, time
from testbed import bed
b = bed.start_with_node()
container = {{"name": "idle", "image": "{TESTPOD_IMAGE}", "ports": [{{"containerPort": 80, "hostPort": 8080}}]}}
pod = {{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "idle"}}, "spec": {{"containers": [container]}}}}
namespace = b.new_namespace(labels={{}})
b.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(pod))
b.kubectl("wait", "-n", namespace, "pod/idle", "--for=condition=Ready", "--timeout=60s")
print(json.dumps({{"folder": str(b.folder.path), "keeper": b.keeper_pid, "pids": b.pids()}}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def before(node_cluster: NodeBed) -> dict[str, str]:
    """The machine with the run's own bed up, which is there before and after alike."""
    return leftovers.snapshot()


def _gone(pids: list[int], folder: Path) -> None:
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) or folder.exists():
        assert time.monotonic() < deadline, f"left: processes {left}, folder {folder.exists()}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "how", [pytest.param("owner interrupted", marks=pytest.mark.long), "owner killed", "owner and keeper killed"]
)
def test_machine_is_as_before(before: dict[str, str], how: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        seen = json.loads(owner.stdout.readline())
        folder = Path(seen["folder"])
        assert len(seen["pids"]) >= 10
        assert leftovers.snapshot()["cgroups"] != before["cgroups"]
        if how == "owner and keeper killed":
            os.kill(seen["keeper"], signal.SIGKILL)
        owner.send_signal(signal.SIGINT if how == "owner interrupted" else signal.SIGKILL)
        owner.wait()
    if how == "owner and keeper killed":
        assert folder.exists()
        assert folder.name in keeper.sweep()
    _gone([seen["keeper"], *seen["pids"]], folder)
    after = leftovers.snapshot()
    assert {k: v for k, v in after.items() if v != before[k]} == {}


def test_bed_of_this_run_survives_the_sweep(node_cluster: NodeBed) -> None:
    assert node_cluster.folder.path.name not in keeper.sweep()
    assert node_cluster.folder.path in [b.folder.path for b in bed.running_beds()]
    assert node_cluster.kubectl("get", "node", "node").returncode == 0
