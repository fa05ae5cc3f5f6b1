"""The chart on a real API server: what comes, what an upgrade changes, what an uninstall leaves, whose it then is."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from poolwright.controller import names as child_names
from poolwright.core.machine import Machine
from poolwright.kube import KubeClient, KubeMachines
from poolwright.kube.resources import DEPLOYMENTS, POOLS, ROLES
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.helm_chart import CHART, Helm, of_kind, the
from support.kube_fixtures import edit_pool, eventually, make_pool, pool_manifest
from support.operator_process import account_kubeconfig, stand_in_kubelet, started_operator
from testbed.bed import Bed

pytestmark = pytest.mark.cluster
CRD = "inferencepools.poolwright.dev"
SECRET = "poolwright-root"
# What Kubernetes itself puts into every namespace.
OF_THE_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


@pytest.fixture
def server(own_api_server: Bed) -> Iterator[Bed]:
    """Without the CRD, which is the whole cluster's, before each test."""
    own_api_server.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=30s")
    yield own_api_server
    for kind in ("clusterrole", "clusterrolebinding"):
        selector = "app.kubernetes.io/part-of=poolwright"
        own_api_server.kubectl("delete", kind, "-l", selector, "--wait=false")


@pytest.fixture
def system(server: Bed) -> Iterator[str]:
    """The namespace of the release; restricted pod security holds in it."""
    name = server.new_namespace("system")
    yield name
    server.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def chart(helm: Path, server: Bed, tmp_path: Path) -> Helm:
    return Helm(helm, tmp_path / "helm", server.kubeconfig)


def with_a_field_more(helm: Path, server: Bed, folder: Path) -> Helm:
    """The chart of a later version, whose CRD knows one field more."""
    later = folder / "later"
    shutil.copytree(CHART, later)
    (file,) = (later / "files" / "crds").glob("*.yaml")
    crd = yaml.safe_load(file.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["colour"] = {"type": "string"}
    file.write_text(yaml.safe_dump(crd))
    return Helm(helm, folder / "helm", server.kubeconfig, later)


def in_namespace(server: Bed, namespace: str) -> set[str]:
    """Everything there, of every kind that can be listed, but Events and what Kubernetes puts there."""
    kinds = server.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name", "--cached=false").stdout
    asked = ",".join(sorted(set(kinds.split()) - {"events", "events.events.k8s.io"}))
    lines = (line.partition("/") for line in server.kubectl("get", asked, "-n", namespace, "-o", "name").stdout.split())
    return {f"{kind.partition('.')[0]}/{name}" for kind, _, name in lines} - OF_THE_NAMESPACE


def on_cluster(server: Bed) -> set[str]:
    """Ours among what belongs to no namespace."""
    kinds = "crd,clusterrole,clusterrolebinding"
    selector = "app.kubernetes.io/part-of=poolwright"
    return set(server.kubectl("get", kinds, "-l", selector, "-o", "name").stdout.split())


def root_secret(server: Bed, namespace: str) -> str:
    return base64.b64decode(server.get("secret", SECRET, "-n", namespace)["data"]["root"]).decode()


def apply_pool(server: Bed, namespace: str, **spec: Any) -> None:
    manifest = json.dumps(pool_manifest(**spec))
    server.wait_for("the pool is taken", "wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=5s")
    for _ in range(50):
        done = server.kubectl("apply", "-n", namespace, "-f", "-", input=manifest, check=False)
        if done.returncode == 0:
            return
        assert "initializing" in done.stderr, done.stderr  # a new kind's storage, for about a second
    raise AssertionError(done.stderr)


def test_install_brings_the_kind_the_operator_and_its_notes(server: Bed, system: str, chart: Helm) -> None:
    notes = chart.install("pw", system).stdout.partition("NOTES:")[2]
    assert "kubectl get pwp" in notes
    assert "kubectl get inferencepool" not in notes
    assert "prometheus.url is empty" in notes
    assert f"Secret {SECRET}" in notes
    apply_pool(server, system)
    assert server.kubectl("get", "pwp", "-n", system, "-o", "name").stdout.strip().endswith("/chat")
    # Pod security lets the operator's pod in. (No node runs it here.)
    selector = "app.kubernetes.io/component=operator"
    server.wait_for("its pod", "get", "pods", "-n", system, "-l", selector, "-o", "jsonpath={.items[0].metadata.name}")


def test_notes_do_not_ask_for_a_prometheus_that_is_given(server: Bed, system: str, chart: Helm) -> None:
    notes = chart.install("pw", system, "prometheus.url=http://prometheus.invalid").stdout.partition("NOTES:")[2]
    assert "kubectl get pwp" in notes
    assert "prometheus.url is empty" not in notes


def test_upgrade_changes_the_crd_and_keeps_pools_and_root_secret(
    server: Bed, system: str, chart: Helm, helm: Path, tmp_path: Path
) -> None:
    chart.install("pw", system)
    before = root_secret(server, system)
    apply_pool(server, system)
    with_a_field_more(helm, server, tmp_path).upgrade("pw", system)
    coloured = {**pool_manifest(), "spec": {**pool_manifest()["spec"], "colour": "blue"}}
    file = tmp_path / "coloured.yaml"
    file.write_text(json.dumps(coloured))
    server.wait_for("the field is known", "apply", "-n", system, "--validate=strict", "-f", str(file))
    assert server.get("pwp", "chat", "-n", system)["spec"]["colour"] == "blue"
    assert root_secret(server, system) == before
    chart.upgrade("pw", system)  # and back
    assert root_secret(server, system) == before


def test_uninstall_leaves_the_crd_its_objects_and_the_root_secret(server: Bed, system: str, chart: Helm) -> None:
    chart.install("pw", system)
    apply_pool(server, system)
    chart.uninstall("pw", system)
    assert in_namespace(server, system) == {f"secret/{SECRET}", "inferencepool/chat"}
    assert on_cluster(server) == {f"customresourcedefinition.apiextensions.k8s.io/{CRD}"}


def test_install_again_under_the_same_name_goes_on_with_pools_and_root_secret(
    server: Bed, system: str, chart: Helm
) -> None:
    chart.install("pw", system)
    before = root_secret(server, system)
    apply_pool(server, system)
    uid = server.get("pwp", "chat", "-n", system)["metadata"]["uid"]
    chart.uninstall("pw", system)
    chart.install("pw", system)
    assert root_secret(server, system) == before
    assert server.get("pwp", "chat", "-n", system)["metadata"]["uid"] == uid
    assert {"deployment/pw-poolwright"} <= in_namespace(server, system)


def test_install_under_another_name_says_how_to_adopt_what_was_kept(server: Bed, system: str, chart: Helm) -> None:
    chart.install("old", system)
    before = root_secret(server, system)
    chart.uninstall("old", system)
    refused = chart.install("new", system, check=False)
    assert refused.returncode != 0
    assert in_namespace(server, system) == {f"secret/{SECRET}"}, "it did half of an install"
    run_printed_command(server, refused.stderr)
    chart.install("new", system)
    assert root_secret(server, system) == before
    chart.upgrade("new", system)
    assert server.get("crd", CRD)["metadata"]["annotations"]["meta.helm.sh/release-name"] == "new"


def test_crd_that_was_applied_without_helm_is_adopted_the_same_way(server: Bed, system: str, chart: Helm) -> None:
    server.kubectl("apply", "-f", str(next((CHART / "files" / "crds").glob("*.yaml"))))
    refused = chart.install("pw", system, check=False)
    run_printed_command(server, refused.stderr)
    chart.install("pw", system)
    assert in_namespace(server, system) >= {f"secret/{SECRET}", "deployment/pw-poolwright"}


def run_printed_command(server: Bed, said: str) -> None:
    (command,) = re.findall(r"^\s*(kubectl .*)$", said, re.MULTILINE)
    kubectl = f"{server._kubectl} --kubeconfig={server.kubeconfig}"
    subprocess.run(command.replace("kubectl ", f"{kubectl} "), shell=True, check=True, capture_output=True)


# -------------------------------------------------------------------------------------- the operator under its chart


THREE: dict[str, Any] = {
    "machines": [{"name": "cpu", "replicas": 3}],
    "pools": {"prompt": {"min": 1}, "token": {"min": 1}, "mixed": {"min": 0}},
    "rebalance": {"intervalSeconds": 2, "dwellSeconds": 0},
}


async def test_operator_serves_a_pool_with_the_rights_and_arguments_that_the_chart_gives(
    server: Bed, system: str, chart: Helm, tmp_path: Path
) -> None:
    """Children, births, status, Events, a class that leaves: nothing is refused, and nothing granted stays unused."""
    chart.install("pw", system)
    server.wait_for("the CRD is established", "wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=5s")
    llm = server.new_namespace("llm")
    deployment = server.get("deployment", "pw-poolwright", "-n", system)
    pod = deployment["spec"]["template"]["spec"]
    verb, *arguments = pod["containers"][0]["args"]
    assert verb == "operator"
    account = pod["serviceAccountName"]
    kubeconfig = account_kubeconfig(server, account, system, tmp_path)
    secret = root_secret(server, system)
    mark = server.audit_mark()
    async with (
        await KubeClient.connect(str(server.kubeconfig)) as client,
        stand_in_kubelet(server, client, llm, secret),
    ):
        with started_operator(arguments, kubeconfig, system, tmp_path, root_secret=secret) as operator:
            await operator.until("Acquired the Lease")
            await make_pool(client, llm, **THREE)

            async def born() -> bool:
                machines = await KubeMachines(client, llm, "chat").list()
                return sorted(str(m.role) for m in machines if settled(m)) == ["mixed", "prompt", "token"]

            await eventually(born, 90)
            wanted = {child_names.engines("chat", "cpu"), child_names.router("chat")}
            assert {d["metadata"]["name"] for d in await client.list(DEPLOYMENTS, llm)} == wanted

            async def reported() -> bool:
                pool = await client.get(POOLS, llm, "chat")
                return pool is not None and bool((pool.get("status") or {}).get("conditions"))

            await eventually(reported)
            await edit_pool(client, llm, "chat", machines=[{"name": "other", "replicas": 3}])

            async def replaced() -> bool:
                return child_names.engines("chat", "cpu") not in {
                    d["metadata"]["name"] for d in await client.list(DEPLOYMENTS, llm)
                }

            await eventually(replaced)
            assert "Traceback" not in operator.log
            assert await operator.stop() == 0
    requests = by_account(server, mark, system, account)
    assert refused(requests) == set()
    assert granted(chart) - used(requests) <= {
        (names.GROUP, "inferencepools/finalizers", "update"),  # asked by an admission plug-in that is not on here
        ("events.k8s.io", "events", "get"),  # when an Event repeats
        ("events.k8s.io", "events", "update"),
    }


def by_account(server: Bed, mark: int, namespace: str, account: str) -> list[dict[str, Any]]:
    """Finished requests of a service account since the mark."""
    user = f"system:serviceaccount:{namespace}:{account}"
    return [event for event in server.audit_events(since=mark) if event["user"]["username"] == user]


def refused(requests: list[dict[str, Any]]) -> set[str]:
    """Those that the account's rights did not cover."""
    return {
        f"{event['verb']} {event['objectRef']['resource']}"
        for event in requests
        if event["responseStatus"]["code"] in (401, 403)
    }


def settled(machine: Machine) -> bool:
    return machine.move is None and isinstance(machine.role, Role)


def granted(chart: Helm) -> set[tuple[str, str, str]]:
    objects = chart.template()
    rules = [*the(objects, "ClusterRole", "poolwright")["rules"], *the(of_kind(objects, "Role"), "Role")["rules"]]
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def used(requests: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """An apply that makes an object is a patch in the log, though it needs the right to create as well."""
    found = set()
    for event in requests:
        what = event.get("objectRef", {})
        resource = "/".join(filter(None, (what.get("resource"), what.get("subresource"))))
        found.add((what.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            found.add((what.get("apiGroup", ""), resource, "create"))
    return found


async def test_operator_of_one_namespace_serves_it_and_no_other(
    server: Bed, system: str, chart: Helm, tmp_path: Path
) -> None:
    llm, other = server.new_namespace("llm"), server.new_namespace("other")
    chart.install("pw", system, f"operator.watchNamespaces[0]={llm}")
    server.wait_for("the CRD is established", "wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=5s")
    pod = server.get("deployment", "pw-poolwright", "-n", system)["spec"]["template"]["spec"]
    kubeconfig = account_kubeconfig(server, pod["serviceAccountName"], system, tmp_path)
    _, *arguments = pod["containers"][0]["args"]
    secret = root_secret(server, system)
    mark = server.audit_mark()
    async with await KubeClient.connect(str(server.kubeconfig)) as client:
        with started_operator(arguments, kubeconfig, system, tmp_path, root_secret=secret) as operator:
            await make_pool(client, other, **THREE)
            await make_pool(client, llm, **THREE)

            async def served() -> bool:
                return len(await client.list(DEPLOYMENTS, llm)) == 2

            await eventually(served, 60)
            assert await client.list(DEPLOYMENTS, other) == []
            assert len(await client.list(ROLES, llm, labels=names.LABEL_POOL)) == 1, "it granted its router nothing"
            assert "Traceback" not in operator.log
            assert await operator.stop() == 0
    requests = by_account(server, mark, system, pod["serviceAccountName"])
    assert requests
    assert refused(requests) <= {"list nodes"}, "asked once; cordoned nodes are then not noticed"
