"""From `kubectl apply` to a moved machine and back to nothing: images, chart, the example as it is, the real model.

One story on one real node, told once because its start is what takes time. Targets are chosen from what is measured
unloaded; then the load rises until the starting split misses them, and stays: one machine more in the prompt pool
decides between missed and met.
"""

import asyncio
import base64
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from poolwright.controller import names as child_names
from poolwright.core.machine import Machine, begin
from poolwright.kube.machines import SeenEpoch, patch_operations
from poolwright.local.traffic import Client, Outcome, Shape, percentile, served_while_missed, ttfts
from poolwright_protocol import keys, names
from poolwright_protocol.roles import Role, RolePut, RoleState
from support import node_prometheus
from support.helm_chart import Helm
from support.node_prometheus import NodePrometheus
from support.pod_history import PodHistory
from support.summary import SUMMARIES, Summary, milliseconds
from support.traffic import Traffic
from testbed.bed import NodeBed
from testbed.images import TARGETS, ProjectImages

pytestmark = [pytest.mark.node, pytest.mark.model, pytest.mark.prometheus, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
POOL = "smollm2"
CRD = "inferencepools.poolwright.dev"
OPERATOR = "app.kubernetes.io/name=poolwright,app.kubernetes.io/component=operator"
MINIMUMS = {Role.PROMPT: 1, Role.TOKEN: 1, Role.MIXED: 0}
CHILDREN = "deployments,pods,services,secrets,serviceaccounts,roles,rolebindings"
PROMPT_HEAVY = Shape(prompt_words=60, output_tokens=4)
DECODE_HEAVY = Shape(prompt_words=8, output_tokens=16)
# Multiples of what is measured unloaded. The load is all prompts: TBT is to be no reason to move, nor not to.
TTFT_MULTIPLE = 3.5
TBT_MULTIPLE = 8.0
# The clients' own verdict is of those who came within this time, as many as the status looks at.
WINDOW_SECONDS = 30.0
# Long enough for a router to have it computed on the prompt machine.
QUESTION: Any = [
    {
        "role": "user",
        "content": "Please answer the following question in one short sentence, without any explanation, "
        "and without any greeting at the beginning: What is the capital of France?",
    }
]


@dataclass(frozen=True)
class Installation:
    """The chart on the bed, Prometheus beside it, and a namespace for pools with the model's claim in it."""

    cluster: NodeBed
    chart: Helm
    system: str
    llm: str
    prometheus: NodePrometheus

    def pool(self, name: str = POOL) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get("pwp", name, "-n", self.llm)
        return found

    def condition(self, kind: str, name: str = POOL) -> Mapping[str, Any]:
        conditions = self.pool(name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"status": "absent", "reason": "", "message": ""})

    def until(self, claim: str, holds: Callable[[], Any], limit_seconds: float) -> Any:
        """The first true thing that `holds` gives."""
        deadline = time.monotonic() + limit_seconds
        while not (found := holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_seconds:g} s: {claim}; the status is {self.pool()['status']}")
            time.sleep(0.5)
        return found

    def scale_operator(self, replicas: int) -> None:
        place = ("-n", self.system)
        self.cluster.kubectl("scale", "deployment", "-l", OPERATOR, f"--replicas={replicas}", *place)
        if replicas:
            self.cluster.kubectl("rollout", "status", "deployment", *place, "--timeout=90s", timeout_seconds=100)
        else:
            self.cluster.kubectl("wait", "--for=delete", "pod", "-l", OPERATOR, *place, "--timeout=50s")

    def operator_log(self) -> str:
        return self.cluster.kubectl("logs", "-n", self.system, "-l", OPERATOR, "--tail=-1", check=False).stdout

    def what_is(self) -> str:
        """For a reader of a failure."""
        look = self.cluster.kubectl
        return "\n".join(
            (
                look("get", "pods", "-A", "-o", "wide", check=False).stdout,
                look("get", "pwp", "-A", "-o", "yaml", check=False).stdout,
                look("get", "events", "-n", self.llm, "--sort-by=.lastTimestamp", check=False).stdout[-4000:],
                self.operator_log()[-4000:],
            )
        )


@pytest.fixture
def summary(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Summary]:
    machines = yaml.safe_load(EXAMPLE.read_text())["spec"]["machines"][0]
    cpus = machines["template"]["resources"]["limits"]["cpu"]
    told = Summary(f"End to end: SmolLM2-135M on one node, {machines['replicas']} machines of {cpus} CPU")
    yield told
    pytestconfig.stash.setdefault(SUMMARIES, []).append(told.text)
    told.write(tmp_path / "summary.json")


@pytest.fixture
def installed(
    node_cluster: NodeBed,
    project_images: ProjectImages,
    helm: Path,
    smollm2_path: Path,
    tmp_path: Path,
    summary: Summary,
) -> Iterator[Installation]:
    for target in TARGETS:
        node_cluster.load_image(project_images.archive(target))
    summary.lap("load images")
    system, llm = node_cluster.new_namespace("poolwright"), node_cluster.new_namespace("llm")
    chart = Helm(helm, tmp_path / "helm", node_cluster.kubeconfig, wrapped=node_cluster.inside)
    with node_prometheus.running(node_cluster, tmp_path / "prometheus") as prometheus:
        chart.install(
            "pw",
            system,
            f"image.repository={project_images.repository}",
            f"image.tag={project_images.tag}",
            f"prometheus.url={prometheus.url}",
        )
        claim_of_the_model(node_cluster, llm, smollm2_path, tmp_path / "models")
        node_cluster.kubectl("rollout", "status", "deployment", "-n", system, "--timeout=90s", timeout_seconds=100)
        summary.lap("install the chart")
        yield Installation(node_cluster, chart, system, llm, prometheus)
    for what in (("namespace", llm), ("namespace", system), ("persistentvolume", llm)):
        node_cluster.kubectl("delete", *what, "--wait=false")
    shutil.rmtree(tmp_path / "models")


def claim_of_the_model(cluster: NodeBed, namespace: str, model: Path, folder: Path) -> None:
    """A static volume of the node that holds the model, claimed as `models`."""
    folder.mkdir()
    (folder / model.name).write_bytes(model.read_bytes())
    (folder / model.name).chmod(0o444)
    size = {"storage": "200Mi"}
    shared = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {
            **shared,
            "capacity": size,
            "claimRef": {"namespace": namespace, "name": "models"},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
        "spec": {**shared, "volumeName": namespace, "resources": {"requests": size}},
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [volume, claim]}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(both))


def test_from_apply_to_a_moved_machine_and_back_to_nothing(
    installed: Installation, summary: Summary, alone: Callable[[], AbstractContextManager[None]]
) -> None:
    with ExitStack() as ends:
        history = ends.enter_context(
            PodHistory(installed.cluster, installed.llm, POOL, installed.prometheus.pods_changed)
        )
        try:
            three_machines_come_up(installed, history)
            summary.lap("three machines Ready")
            router = ends.enter_context(router_address(installed))
            text = a_split_request_streams_what_one_engine_alone_says(installed, history, router)
            with alone():
                summary.lap("wait for quiet")
                began = time.monotonic()
                load = measure(installed, router, summary)
                summary.lap("measure")
                first, target = load.served_per_second, load.targets.ttft_seconds
                with Traffic(router, POOL, PROMPT_HEAVY, first, target, seed=1) as traffic:
                    without_moves_the_target_is_missed(installed, history, traffic, load, summary)
                    summary.lap("mode Paused")
                    a_machine_moves_and_the_target_is_met(installed, history, traffic, load, summary)
                    summary.lap("mode Active")
            assert traffic.failures == [], "a request failed or was truncated"
            nothing_was_taken_below_its_minimum_or_restarted(history, began)
            summary.say(f"Memory (MiB): {memory(installed.cluster)}")
            killed_between_the_steps_of_a_move_it_comes_back_and_the_move_ends(installed, history, summary)
            assert ask_france(f"{router}/v1") == text
            summary.lap("engines killed")
        except BaseException as error:
            error.add_note(installed.what_is())
            raise
    a_deleted_pool_leaves_nothing(installed)
    summary.lap("delete the pool")
    a_model_path_that_does_not_exist_is_named(installed)
    summary.lap("a model that is not there")
    an_uninstall_leaves_the_kind_and_the_root_secret(installed)
    summary.lap("uninstall")


# ------------------------------------------------------------------------------------------------------------- it runs


def three_machines_come_up(installed: Installation, history: PodHistory) -> None:
    """Of the example as it is, under restricted pod security, one in each role."""
    cluster = installed.cluster
    labels = cluster.get("namespace", installed.llm)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    cluster.wait_for("the kind is served", "apply", "-n", installed.llm, "-f", str(EXAMPLE))

    def up(machines: tuple[Machine, ...]) -> bool:
        return sorted(m.role or "" for m in machines if m.ready and m.move is None) == ["mixed", "prompt", "token"]

    machines = history.until("three machines are Ready, one in each role", up, 400)
    assert all(machine.role_epoch == 1 for machine in machines), "a birth is one step of the epoch"
    installed.until("the pool is Available", lambda: installed.condition("Available")["status"] == "True", 60)
    installed.until("metrics are there", lambda: installed.condition("MetricsAvailable")["status"] == "True", 90)
    assert installed.condition("ModelAvailable")["status"] == "True"
    assert installed.pool()["status"].get("recentMoves", []) == []


def router_address(installed: Installation) -> Any:
    """A context that gives the URL of the router's Service, for clients of this process; it answers."""
    return _RouterAddress(installed)


class _RouterAddress:
    def __init__(self, installed: Installation) -> None:
        service = installed.cluster.get("service", child_names.router_service(POOL), "-n", installed.llm)
        self._installed = installed
        self._forward = installed.cluster.forward(service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"])

    def __enter__(self) -> str:
        url = f"http://127.0.0.1:{self._forward.__enter__()}"
        # A pod that is Ready is not yet an address that kube-proxy knows.
        self._installed.until("the router's Service answers", lambda: answers(f"{url}/ready"), 30)
        return url

    def __exit__(self, *error: Any) -> None:
        self._forward.__exit__(*error)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def a_split_request_streams_what_one_engine_alone_says(
    installed: Installation, history: PodHistory, router: str
) -> str:
    (alone,) = [m for m in history.machines if m.role is Role.MIXED]
    (token,) = [m for m in history.machines if m.role is Role.TOKEN]
    assert alone.host
    with installed.cluster.forward(alone.host, alone.api_port) as port:
        expected = ask_france(f"http://127.0.0.1:{port}/v1")
    assert "Paris" in expected
    for _ in range(20):  # a router may also give an idle machine that does both phases the whole request
        assert ask_france(f"{router}/v1") == expected
        if received_by(installed, token) > 0:
            return expected
    raise AssertionError("no request was split: the token machine received no KV")


def ask_france(base_url: str) -> str:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        asked: dict[str, Any] = {"model": POOL, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
        with client.chat.completions.create(**asked, stream=True) as stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def received_by(installed: Installation, machine: Machine) -> float:
    """KV hand-offs that this machine took in."""
    assert machine.host
    with installed.cluster.forward(machine.host, machine.api_port) as port:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    found = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("poolwright_engine_kv_transfers_total{") and 'side="receive"' in line
    ]
    assert found, text
    return sum(found)


# ---------------------------------------------------------------------------------------------------------- it is moved


@dataclass(frozen=True)
class Targets:
    ttft_milliseconds: int
    tbt_milliseconds: int

    @property
    def ttft_seconds(self) -> float:
        return self.ttft_milliseconds / 1000


@dataclass(frozen=True)
class Load:
    targets: Targets
    served_per_second: float


def measure(installed: Installation, router: str, summary: Summary) -> Load:
    """Unloaded TTFT and TBT, then, in mode Paused, what the starting split serves while it misses the target."""
    prompts, decode = asyncio.run(unloaded(router))
    ttft, tbt = percentile(ttfts(prompts), 50), percentile(decode.gaps_seconds[1:], 50)
    assert ttft is not None
    assert tbt is not None
    targets = Targets(round(ttft * TTFT_MULTIPLE * 1000), round(tbt * TBT_MULTIPLE * 1000))
    pause(installed, targets)
    load = Load(targets, asyncio.run(served(router, targets)))
    summary.say(
        f"Unloaded: TTFT {ttft * 1000:.0f} ms, TBT {tbt * 1000:.0f} ms. "
        f"Targets (P90): TTFT {targets.ttft_milliseconds} ms = {TTFT_MULTIPLE:g}x, "
        f"TBT {targets.tbt_milliseconds} ms = {TBT_MULTIPLE:g}x unloaded. "
        f"While it misses them, 1/1/1 serves {load.served_per_second:.2f} prompts/s"
    )
    return load


async def unloaded(router: str) -> tuple[list[Outcome], Outcome]:
    client = Client(router, POOL)
    try:
        for _ in range(3):  # until the router knows how fast each machine is
            await client.one(PROMPT_HEAVY)
        prompts, decode = [await client.one(PROMPT_HEAVY) for _ in range(5)], await client.one(DECODE_HEAVY)
    finally:
        await client.close()
    assert [outcome.error for outcome in client.outcomes if outcome.error] == []
    return prompts, decode


async def served(router: str, targets: Targets) -> float:
    client = Client(router, POOL)
    try:
        per_second = await served_while_missed(client, PROMPT_HEAVY, targets.ttft_seconds)
    finally:
        await client.close()
    assert [outcome.error for outcome in client.outcomes if outcome.error] == []
    return per_second


def pause(installed: Installation, targets: Targets) -> None:
    pool = installed.pool()
    operations: list[dict[str, Any]] = [{"op": "replace", "path": "/spec/rebalance/mode", "value": "Paused"}]
    for index, objective in enumerate(pool["spec"]["slo"]["objectives"]):
        ttft = objective["metric"] == "TTFT"
        target = targets.ttft_milliseconds if ttft else targets.tbt_milliseconds
        path = f"/spec/slo/objectives/{index}/targetMilliseconds"
        operations.append({"op": "replace", "path": path, "value": target})
    edit(installed, operations)


def edit(installed: Installation, operations: list[dict[str, Any]]) -> None:
    installed.cluster.kubectl("patch", "pwp", POOL, "-n", installed.llm, "--type=json", "-p", json.dumps(operations))


def without_moves_the_target_is_missed(
    installed: Installation, history: PodHistory, traffic: Traffic, load: Load, summary: Summary
) -> None:
    began = time.monotonic()
    installed.until("a load is found that the clients see missed", lambda: traffic.rate.found_at, 200)
    missed, found = traffic.rate.missed_at, traffic.rate.found_at
    assert missed is not None
    assert found is not None
    installed.until("TTFT is missed", lambda: objective(installed, "TTFT")["state"] == "Missed", 60)
    installed.until("the SLO is missed", lambda: installed.condition("SLOMet")["reason"] == "Missed", 60)
    status = installed.pool()["status"]
    assert status.get("recentMoves", []) == []
    assert {m.role_epoch for seen in history.since(began) for m in seen.machines} == {1}, "a machine was moved"
    assert installed.condition("Paused")["status"] == "True"
    rate = traffic.rate.per_second
    summary.say(f"Load: {rate:.2f} prompts/s, {rate / load.served_per_second:.2f} times that, was found to be missed")
    before, after = ttfts_of(traffic, began, missed), ttfts_of(traffic, missed)
    summary.say(f"Paused, 1/1/1: TTFT {milliseconds(before)}, then {milliseconds(after)}, missed")


def a_machine_moves_and_the_target_is_met(
    installed: Installation, history: PodHistory, traffic: Traffic, load: Load, summary: Summary
) -> None:
    """The traffic goes on as it was, and nothing but the mode is edited."""
    (mixed,) = [m for m in history.machines if m.role is Role.MIXED]
    began = time.monotonic()
    edit(installed, [{"op": "replace", "path": "/spec/rebalance/mode", "value": "Active"}])
    history.until("a second machine is in the prompt pool", lambda ms: sum(m.role is Role.PROMPT for m in ms) == 2, 120)
    moved = time.monotonic()
    installed.until("the clients and the status see it met", lambda: is_met(installed, traffic, moved, load), 300)
    met = time.monotonic()
    columns = installed.cluster.kubectl("get", "pwp", POOL, "-n", installed.llm).stdout.splitlines()
    assert traffic.failures == [], "a request failed or was truncated"
    assert in_steps(history, began, mixed.name) == [("mixed", 1, None), (None, 2, "prompt"), ("prompt", 2, None)]
    the_move_is_told(installed, history.machine(mixed.name), columns)
    settled = met - WINDOW_SECONDS - load.targets.ttft_seconds
    before, after = ttfts_of(traffic, began, settled), ttfts_of(traffic, settled)
    summary.say(f"Active: moved after {moved - began:.0f} s, met {met - moved:.0f} s later")
    summary.say(f"Active, what 1/1/1 left waiting and after it: TTFT {milliseconds(before)}")
    requests = f"{len(traffic.outcomes)} requests, 0 failed, 0 truncated"
    summary.say(f"Active, 2/1/0, met: TTFT {milliseconds(after)}; {requests}")
    for line in columns:
        summary.say(f"  {line}")


def the_move_is_told(installed: Installation, machine: Machine, columns: list[str]) -> None:
    """By the pod, its engine, the status, the columns and the Events."""
    annotations = installed.cluster.get("pod", machine.name, "-n", installed.llm)["metadata"]["annotations"]
    assert annotations[names.ANNOTATION_ROLE_EPOCH] == "2"
    assert names.ANNOTATION_ROLE_SINCE in annotations
    assert names.ANNOTATION_MOVE not in annotations
    state = role_of(installed, machine)
    assert (state.role, state.epoch, state.pod_uid) == (Role.PROMPT, 2, machine.uid)
    assert state.steps_since_switch >= 1
    status = installed.pool()["status"]
    (move,) = status["recentMoves"]
    assert (move["machine"], move["uid"], move["from"], move["to"]) == (machine.name, machine.uid, "Mixed", "Prompt")
    assert (move["outcome"], move["reason"]) == ("Completed", "TTFTMissed")
    assert machine.name in status["lastMove"]["summary"]
    ready = {role: count["ready"] for role, count in status["pools"].items()}
    assert ready == {"prompt": 2, "token": 1, "mixed": 0}
    for kind, expected in (("Available", "True"), ("SLOMet", "True"), ("Rebalancing", "False"), ("Paused", "False")):
        assert installed.condition(kind)["status"] == expected, kind
    header, row = columns
    assert header.split() == ["NAME", "PROMPT", "TOKEN", "MIXED", "TTFT", "TBT", "SLO", "LAST-MOVE", "AGE"]
    assert row.split()[:4] == [POOL, "2", "1", "0"]
    assert "Met" in row.split()
    assert status["lastMove"]["summary"] in row
    events = installed.cluster.get("events.events.k8s.io", "-n", installed.llm)["items"]
    ours = [e for e in events if e.get("reportingController") == "poolwright" and machine.name in e["note"]]
    assert sorted(e["reason"] for e in ours) == ["MoveBegun", "MoveCompleted"]
    assert all(e["regarding"]["name"] == POOL for e in ours)


def is_met(installed: Installation, traffic: Traffic, moved: float, load: Load) -> bool:
    """By nine in ten of those who came within the window, all since the move, and as the status says it."""
    now = time.monotonic()
    since = now - WINDOW_SECONDS - load.targets.ttft_seconds
    if since < moved or traffic.met_share(since, now) < 0.9:
        return False
    return objective(installed, "TTFT")["state"] == "Met" and installed.condition("SLOMet")["reason"] == "Met"


def nothing_was_taken_below_its_minimum_or_restarted(history: PodHistory, began: float) -> None:
    states = history.since(began)
    for role, minimum in MINIMUMS.items():
        assert min(seen.in_pool(role) for seen in states) >= minimum, role
    assert all(machine.restarts == 0 and machine.ready for seen in states for machine in seen.machines)
    assert len({machine.uid for seen in states for machine in seen.machines}) == 3


def in_steps(history: PodHistory, began: float, name: str) -> list[tuple[str | None, int, str | None]]:
    """What the pod said of itself: (label, epoch, where a move takes it), each state once."""
    states: list[tuple[str | None, int, str | None]] = []
    for seen in history.since(began):
        for machine in seen.machines:
            role, move = machine.role, machine.move
            state = (role.value if role else None, machine.role_epoch, move.to_role.value if move else None)
            if machine.name == name and state not in states[-1:]:
                states.append(state)
    return states


def objective(installed: Installation, metric: str) -> Mapping[str, Any]:
    objectives = installed.pool()["status"].get("objectives", [])
    return next((o for o in objectives if o["metric"] == metric), {"state": "absent"})


def ttfts_of(traffic: Traffic, began: float, end: float = math.inf) -> list[float]:
    """Of the requests that arrived in between."""
    return ttfts(outcome for outcome in traffic.outcomes if began <= outcome.started_at < end)


def memory(cluster: NodeBed) -> str:
    """Resident memory of each of our programs, and of the cluster's in one."""
    ours: list[str] = []
    others = 0
    for pid in cluster.pids():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue  # it ended meanwhile
        size = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) // 1024
        words = [Path(argument.decode()).name for argument in arguments]
        verb = next((verb for verb in ("poolwright-engine", "operator", "router") if verb in words), None)
        if verb is not None and any(word.startswith("poolwright") for word in words):
            ours.append(f"{verb} {size}")
        else:
            others += size
    return ", ".join([*sorted(ours), f"the cluster's own programs {others}"])


# ------------------------------------------------------------------------------------------------------------- it dies


def killed_between_the_steps_of_a_move_it_comes_back_and_the_move_ends(
    installed: Installation, history: PodHistory, summary: Summary
) -> None:
    """With the operator away, its steps are taken by hand, with its own patches; each engine is killed after another.

    Its deadline is longer than an operator would set it, which is not back by then.
    """
    began = time.monotonic()
    installed.scale_operator(0)
    first, second = (m.name for m in history.machines if m.role is Role.PROMPT)
    (third,) = (m.name for m in history.machines if m.role is Role.TOKEN)
    uids = {m.uid for m in history.machines}
    # At rest it needs no operator to come back as what its label says.
    kill(installed, history, first)
    back_in_place(history, {first: 1})
    state = role_of(installed, history.machine(first))
    assert (state.role, state.epoch) == (Role.PROMPT, history.machine(first).role_epoch)

    begun(installed, history, first, Role.MIXED)
    begun(installed, history, second, Role.TOKEN)
    switched(installed, history, second)
    begun(installed, history, third, Role.PROMPT)
    switched(installed, history, third)
    state = role_of(installed, history.machine(third))
    assert (state.role, state.epoch) == (Role.PROMPT, history.machine(third).role_epoch)
    for name in (first, second, third):
        kill(installed, history, name)
    back_in_place(history, {first: 2, second: 1, third: 1})
    for name in (first, second, third):  # without a label it acts as mixed, and keeps the epoch
        machine = history.machine(name)
        state = role_of(installed, machine)
        assert (state.role, state.epoch) == (Role.MIXED, machine.role_epoch)
        assert machine.role is None

    installed.scale_operator(1)
    wanted = {first: Role.MIXED, second: Role.TOKEN, third: Role.PROMPT}
    machines = history.until(
        "every move has ended",
        lambda ms: {m.name: m.role for m in ms if m.move is None} == wanted and all(m.ready for m in ms),
        120,
    )
    for machine in machines:
        state = role_of(installed, machine)
        assert (state.role, state.epoch, state.pod_uid) == (machine.role, machine.role_epoch, machine.uid)
    assert {m.uid for m in machines} == uids
    installed.until(
        "the status says so",
        lambda: all(installed.pool()["status"]["pools"][role.value]["ready"] == 1 for role in Role),
        60,
    )
    took = time.monotonic() - began
    summary.say(f"Engines killed at rest and after begin, switch and verify: 4; all came back in place: {took:.0f} s")


def begun(installed: Installation, history: PodHistory, name: str, to_role: Role) -> None:
    machine = history.machine(name)
    patch = begin(machine, to_role, time.time(), 600, "ByHand")
    operations = json.dumps(patch_operations(patch, SeenEpoch(str(machine.role_epoch))))
    installed.cluster.kubectl("patch", "pod", name, "-n", installed.llm, "--type=json", "-p", operations)
    history.until("the move is on the pod", lambda ms: any(m.name == name and m.move for m in ms), 10)


def switched(installed: Installation, history: PodHistory, name: str) -> None:
    machine = history.machine(name)
    assert machine.move is not None
    role_of(installed, machine, RolePut(machine.uid, machine.move.to_role, machine.role_epoch, None))


def kill(installed: Installation, history: PodHistory, name: str) -> None:
    container = history.pod(name)["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    installed.cluster.run_in(["ctr", "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])


def back_in_place(history: PodHistory, restarts: Mapping[str, int]) -> None:
    """The same pods, started again, and Ready. (A second start of one waits ten seconds.)"""
    history.until(
        f"they are Ready again after restarts: {restarts}",
        lambda ms: all(m.restarts == restarts[m.name] and m.ready for m in ms if m.name in restarts),
        300,
    )


def role_of(installed: Installation, machine: Machine, put: RolePut | None = None) -> RoleState:
    """What its engine says, after it was told something or not."""
    secret = installed.cluster.get("secret", child_names.key_secret(POOL), "-n", installed.llm)["data"]["pool-key"]
    pool_key = bytes.fromhex(base64.b64decode(secret).decode())
    assert machine.host
    with installed.cluster.forward(machine.host, machine.admin_port) as port:
        answer = httpx.request(
            "PUT" if put else "GET",
            f"http://127.0.0.1:{port}/admin/role",
            headers={"authorization": f"Bearer {keys.admin_token(pool_key)}"},
            json=put.to_json() if put else None,
            trust_env=False,
            timeout=10,
        )
    answer.raise_for_status()
    return RoleState.from_json(answer.json())


# ------------------------------------------------------------------------------------------------------------- it goes


def a_deleted_pool_leaves_nothing(installed: Installation, name: str = POOL) -> None:
    cluster = installed.cluster
    cluster.kubectl("delete", "pwp", name, "-n", installed.llm, "--timeout=30s")

    def left() -> str:
        selector = f"{names.LABEL_POOL}={name}"
        return cluster.kubectl("get", CHILDREN, "-n", installed.llm, "-l", selector, "-o", "name").stdout

    deadline = time.monotonic() + 120
    while left():
        assert time.monotonic() < deadline, left()
        time.sleep(0.5)


def a_model_path_that_does_not_exist_is_named(installed: Installation) -> None:
    cluster = installed.cluster
    pool = yaml.safe_load(EXAMPLE.read_text())
    pool["metadata"]["name"] = "broken"
    pool["spec"]["model"]["source"]["persistentVolumeClaim"]["path"] = "no/such.gguf"
    pool["spec"]["machines"][0]["replicas"] = 1
    pool["spec"]["pools"] = {"prompt": {"min": 0}, "token": {"min": 0}, "mixed": {"min": 1}}
    cluster.kubectl("apply", "-n", installed.llm, "-f", "-", input=json.dumps(pool))
    deadline = time.monotonic() + 120
    while (said := installed.condition("ModelAvailable", "broken"))["status"] != "False":
        assert time.monotonic() < deadline, installed.what_is()
        time.sleep(0.5)
    assert said["reason"] == "ModelPathMissing"
    assert "no/such.gguf does not exist" in said["message"]
    assert installed.condition("Available", "broken")["status"] == "False"
    selector = f"{names.LABEL_POOL}=broken,{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    (pod,) = cluster.get("pods", "-n", installed.llm, "-l", selector)["items"]
    # The last container may be starting just now; then the one before it has said it all.
    logs = [
        cluster.kubectl("logs", "-n", installed.llm, pod["metadata"]["name"], *which, check=False).stdout.splitlines()
        for which in ((), ("--previous",))
    ]
    assert any(len(lines) == 1 and "no/such.gguf does not exist" in lines[0] for lines in logs), logs
    a_deleted_pool_leaves_nothing(installed, "broken")


def an_uninstall_leaves_the_kind_and_the_root_secret(installed: Installation) -> None:
    cluster = installed.cluster
    installed.chart.uninstall("pw", installed.system)
    cluster.kubectl("wait", "--for=delete", "pod", "-l", OPERATOR, "-n", installed.system, "--timeout=50s")
    kinds = f"{CHILDREN},replicasets,configmaps,leases"
    left = set(cluster.kubectl("get", kinds, "-n", installed.system, "-o", "name").stdout.split())
    assert left - {"configmap/kube-root-ca.crt", "serviceaccount/default"} == {"secret/poolwright-root"}
    selector = "app.kubernetes.io/part-of=poolwright"
    on_cluster = cluster.kubectl("get", "crd,clusterrole,clusterrolebinding", "-l", selector, "-o", "name").stdout
    assert on_cluster.split() == [f"customresourcedefinition.apiextensions.k8s.io/{CRD}"]
    cluster.kubectl("delete", "crd", CRD, "--timeout=30s")
