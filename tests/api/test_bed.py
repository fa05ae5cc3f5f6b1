"""The API-server bed is a real control plane, and it goes away with whoever started it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.bed import Bed

pytestmark = pytest.mark.cluster
TESTS = Path(__file__).parent.parent


def test_server_runs_the_version_that_go_mod_names(api_server: Bed) -> None:
    from testbed.binaries import kubernetes_version

    assert json.loads(api_server.kubectl("get", "--raw=/version").stdout)["gitVersion"] == kubernetes_version()


def test_controllers_run_and_collect_what_has_lost_its_owner(api_server: Bed) -> None:
    namespace = api_server.new_namespace()
    api_server.kubectl("create", "deployment", "web", "--image=none.invalid/web", "-n", namespace)
    api_server.wait_for(
        "its ReplicaSet",
        "get",
        "-n",
        namespace,
        "replicasets",
        "-l",
        "app=web",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    )
    api_server.kubectl("delete", "deployment", "web", "-n", namespace)
    deadline = time.monotonic() + 20
    while api_server.get("replicasets", "-n", namespace)["items"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_restricted_pod_security_is_enforced(api_server: Bed) -> None:
    namespace = api_server.new_namespace()
    refused = api_server.kubectl("run", "root", "--image=none.invalid/x", "-n", namespace, check=False)
    assert "violates PodSecurity" in refused.stderr


def test_audit_log_counts_every_write(api_server: Bed) -> None:
    namespace = api_server.new_namespace()
    mark = api_server.audit_mark()
    api_server.kubectl("create", "configmap", "one", "--from-literal=a=b", "-n", namespace)
    writes = [
        event
        for event in api_server.audit_events(since=mark)
        if event["verb"] == "create"
        and event["objectRef"].get("namespace") == namespace
        and event["objectRef"]["resource"] == "configmaps"
        and event["user"]["username"] == "admin"
    ]
    assert [event["requestObject"]["data"] for event in writes] == [{"a": "b"}]


def test_server_can_be_taken_away_and_brought_back_with_its_data(api_server: Bed) -> None:
    namespace = api_server.new_namespace()
    with api_server.without_component("kube-apiserver"):
        assert api_server.kubectl("get", "namespace", namespace, check=False).returncode != 0
    api_server.wait_for("the namespace is still there", "get", "namespace", namespace)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_bed_leaves_no_process_and_no_file_when_its_owner_is_killed(how: signal.Signals) -> None:
    program = (
        "import sys, time; from testbed import bed; b = bed.start();"
        "print(b.folder.path, b.keeper_pid, *b.state()['running'].values(), flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        folder, *pids = owner.stdout.readline().split()
        assert Path(folder).is_dir()
        owner.send_signal(how)
        owner.wait()
    deadline = time.monotonic() + 20
    while Path(folder).exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"left: {folder} or one of {pids}"
        time.sleep(0.1)


@pytest.mark.long
def test_bed_whose_keeper_was_killed_is_swept_by_the_next(api_server: Bed) -> None:
    from testbed import bed, keeper

    lost = bed.start()
    pids = list(lost.state()["running"].values())
    os.kill(lost.keeper_pid, signal.SIGKILL)
    lost.close()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "components outlived their keeper"
        time.sleep(0.1)
    assert lost.folder.path.exists()
    assert lost.folder.path.name in keeper.sweep()
    assert not lost.folder.path.exists()
    assert api_server.kubectl("get", "namespaces").returncode == 0, "a bed that is held was swept too"
