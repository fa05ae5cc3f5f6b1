"""The machines of one pool as its engine pods: the `Machines` protocol over labels, annotations and pod status.

Pod metadata is only ever written by a JSON Patch that tests uid and epoch; an apply would leave a label that another
manager set, or create a pod that has just gone. Broken annotations count as absent and are named in the log once.
"""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from poolwright.api.times import format_time, parse_time
from poolwright.core.links import Place
from poolwright.core.machine import Machine, MachinePatch, Move
from poolwright.core.router_note import RouterNote
from poolwright.kube.client import ApiError, KubeClient, Manifest, unavailable
from poolwright.kube.resources import NODES, PODS
from poolwright.machines import Conflict
from poolwright_protocol import names
from poolwright_protocol.roles import Role

log = logging.getLogger(__name__)

ENGINE_CONTAINER = "engine"
_PORTS = {"api": names.API_PORT, "admin": names.ADMIN_PORT, "kv": names.KV_PORT}
_CORDON_TTL_SECONDS = 5.0
_PLACES_TTL_SECONDS = 60.0  # labels of hardware: they change when it does
_GONE_PHASES = ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """By name: nodes that take no new pods, and where nodes stand for KV, of those whose labels say it."""

    cordoned: frozenset[str] = frozenset()
    places: Mapping[str, Place] = field(default_factory=dict)


class Nodes:
    """What the pools of one operator need of nodes; nothing for good where it may not read them. Only nodes that are
    cordoned or labelled are ever asked for, so that a large cluster costs little."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._facts = NodeFacts()
        self._cordons_at: float | None = None
        self._places_at: float | None = None
        self._forbidden = False
        self._complaints: dict[str, str] = {}

    async def facts(self) -> NodeFacts:
        now = monotonic()
        try:
            if not self._forbidden and _is_old(self._cordons_at, now, _CORDON_TTL_SECONDS):
                nodes = await self._client.list(NODES, None, fields="spec.unschedulable=true")
                self._facts = replace(self._facts, cordoned=frozenset(str(n["metadata"]["name"]) for n in nodes))
                self._cordons_at = now
            if not self._forbidden and _is_old(self._places_at, now, _PLACES_TTL_SECONDS):
                nodes = await self._client.list(NODES, None, labels=names.LABEL_KV_ISLAND)
                self._facts = replace(self._facts, places=self._places(nodes))
                self._places_at = now
        except ApiError as error:
            if error.status not in (401, 403):
                raise
            self._forbidden = True
            log.warning("Nodes are not readable; cordons and links are not noticed error=%s", error.message)
        return self._facts

    def _places(self, nodes: Sequence[Manifest]) -> dict[str, Place]:
        """A node whose labels are broken has no place, and is named in the log once."""
        places: dict[str, Place] = {}
        complaints: dict[str, str] = {}
        for node in nodes:
            name = str(node["metadata"]["name"])
            try:
                place = Place.of_labels(node["metadata"].get("labels") or {})
            except ValueError as error:
                complaints[name] = str(error)
                if self._complaints.get(name) != complaints[name]:
                    log.warning("Labels of a node were ignored node=%s error=%s", name, error)
                continue
            if place is not None:
                places[name] = place
        self._complaints = complaints
        return places


def _is_old(read_at: float | None, now: float, ttl_seconds: float) -> bool:
    return read_at is None or now - read_at >= ttl_seconds


@dataclass(frozen=True, slots=True)
class SeenEpoch:
    """The epoch annotation as it was read, also where it is missing or broken: what a patch must find unchanged."""

    text: str | None
    has_annotations: bool = True


class KubeMachines:
    """`machines.Machines` over the engine pods of one pool."""

    def __init__(self, client: KubeClient, namespace: str, pool: str, nodes: Nodes | None = None) -> None:
        self._client = client
        self._namespace = namespace
        self._labels = engine_selector(pool)
        self._nodes = nodes
        self._facts = NodeFacts()
        self._odd_epochs: dict[str, SeenEpoch] = {}  # by uid; only those that read as 0 without saying "0"
        self._complaints: dict[str, str] = {}  # uid → last complaint, so that each is logged once

    async def list(self) -> tuple[Machine, ...]:
        try:
            pods = await self._client.list(PODS, self._namespace, labels=self._labels)
            self._facts = await self._nodes.facts() if self._nodes else NodeFacts()
        except ApiError as error:
            raise unavailable(error) from error
        return self._machines(pods, self._facts)

    async def watch(self) -> AsyncGenerator[tuple[Machine, ...], None]:
        last: tuple[Machine, ...] | None = None
        sets = self._client.watch_set(PODS, self._namespace, labels=self._labels)
        async with aclosing(sets):
            async for pods in sets:
                machines = self._machines(tuple(pods.values()), NodeFacts())
                if machines != last:  # most changes of a pod, such as heartbeats of conditions, change no machine
                    last = machines
                    yield machines

    async def patch(self, patch: MachinePatch) -> Machine:
        operations = patch_operations(patch, self._epoch_to_test(patch))
        try:
            pod = await self._client.json_patch(PODS, self._namespace, patch.name, operations)
        except ApiError as error:
            if error.status in (404, 409, 422):
                self._odd_epochs.pop(patch.uid, None)
                what = "is gone" if error.status == 404 else f"is no longer {patch.uid} at epoch {patch.expected_epoch}"
                raise Conflict(f"machine {patch.name} {what}") from error
            raise unavailable(error) from error
        self._remember(pod)
        return machine_of(pod, self._facts)[0]

    async def annotate(self, machine: Machine, note: RouterNote | None) -> None:
        # A pod of a pool has annotations from its template: its epoch, at least.
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": machine.uid},
            {"op": "add", "path": _annotation(names.ANNOTATION_ROUTING), "value": note.to_json() if note else ""},
        ]
        if note is None:  # a remove alone fails where there is nothing to remove
            operations.append({"op": "remove", "path": _annotation(names.ANNOTATION_ROUTING)})
        try:
            await self._client.json_patch(PODS, self._namespace, machine.name, operations)
        except ApiError as error:
            if error.status in (404, 409, 422):
                raise Conflict(f"machine {machine.name} is gone, or another machine now") from error
            raise unavailable(error) from error

    def _machines(self, pods: Sequence[Manifest], nodes: NodeFacts) -> tuple[Machine, ...]:
        machines = []
        alive = set()
        for pod in pods:
            if pod.get("status", {}).get("phase") in _GONE_PHASES:
                continue  # evicted or finished: it never serves again, and its ReplicaSet replaces it
            machine, complaint = machine_of(pod, nodes)
            machines.append(machine)
            alive.add(machine.uid)
            self._remember(pod)
            if complaint and self._complaints.get(machine.uid) != complaint:
                log.warning("Annotations of a pod were ignored machine=%s error=%s", machine.name, complaint)
                self._complaints[machine.uid] = complaint
        for known in (self._odd_epochs, self._complaints):
            for uid in known.keys() - alive:
                known.pop(uid)
        return tuple(sorted(machines, key=lambda machine: machine.name))

    def _remember(self, pod: Manifest) -> None:
        annotations = pod["metadata"].get("annotations") or {}
        text = annotations.get(names.ANNOTATION_ROLE_EPOCH)
        uid = pod["metadata"]["uid"]
        if text is None or not _is_epoch(text):
            self._odd_epochs[uid] = SeenEpoch(text, has_annotations=bool(annotations))
        else:
            self._odd_epochs.pop(uid, None)

    def _epoch_to_test(self, patch: MachinePatch) -> SeenEpoch:
        """What the reader of this patch saw; never anything newer that was read since."""
        written = SeenEpoch(str(patch.expected_epoch))
        return self._odd_epochs.get(patch.uid, written) if patch.expected_epoch == 0 else written


def engine_selector(pool: str) -> str:
    return f"{names.LABEL_POOL}={pool},{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"


def router_selector(pool: str) -> str:
    return f"{names.LABEL_POOL}={pool},{names.LABEL_COMPONENT}={names.COMPONENT_ROUTER}"


def machine_of(pod: Manifest, nodes: NodeFacts | None = None) -> tuple[Machine, str]:
    """The pod as a machine, and what was wrong with its annotations ("" if nothing was)."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    nodes, node = nodes or NodeFacts(), spec.get("nodeName")
    complaints: list[str] = []

    def parsed(key: str, where: dict[str, str], parse: Any) -> Any:
        text = where.get(key)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            complaints.append(f"{key}: {error}")
            return None

    role = parsed(names.LABEL_ROLE, labels, Role)
    epoch = parsed(names.ANNOTATION_ROLE_EPOCH, annotations, _parse_epoch)
    role_since = parsed(names.ANNOTATION_ROLE_SINCE, annotations, parse_time)
    move = parsed(names.ANNOTATION_MOVE, annotations, Move.from_json)
    note = parsed(names.ANNOTATION_ROUTING, annotations, RouterNote.from_json)
    ports = _ports(spec)
    machine = Machine(
        name=meta["name"],
        uid=meta["uid"],
        machine_class=labels.get(names.LABEL_MACHINE_CLASS, ""),
        host=status.get("podIP") or None,
        ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()),
        role=role,
        role_epoch=epoch or 0,
        role_since=role_since,
        move=move,
        created_at=parse_time(meta["creationTimestamp"]),
        api_port=ports["api"],
        admin_port=ports["admin"],
        kv_port=ports["kv"],
        deleting="deletionTimestamp" in meta,
        cordoned=node in nodes.cordoned,
        restarts=sum(
            c.get("restartCount", 0) for c in status.get("containerStatuses") or () if c["name"] == ENGINE_CONTAINER
        ),
        place=nodes.places.get(node) if node else None,
        note=note,
    )
    return machine, "; ".join(complaints)


def patch_operations(patch: MachinePatch, seen: SeenEpoch) -> list[dict[str, Any]]:
    """The JSON Patch of a test-and-set."""
    operations: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/uid", "value": patch.uid}]
    if seen.has_annotations:
        operations.append({"op": "test", "path": _annotation(names.ANNOTATION_ROLE_EPOCH), "value": seen.text})
    else:
        operations.append({"op": "test", "path": "/metadata/annotations", "value": None})
        operations.append({"op": "add", "path": "/metadata/annotations", "value": {}})
    operations.append({"op": "add", "path": _annotation(names.ANNOTATION_ROLE_EPOCH), "value": str(patch.epoch)})
    desired = [
        (_label(names.LABEL_ROLE), patch.role.value if patch.role else None),
        (
            _annotation(names.ANNOTATION_ROLE_SINCE),
            format_time(patch.role_since) if patch.role_since is not None else None,
        ),
        (_annotation(names.ANNOTATION_MOVE), patch.move.to_json() if patch.move else None),
    ]
    for path, value in desired:
        operations.append({"op": "add", "path": path, "value": value or ""})
        if value is None:  # a remove alone fails where there is nothing to remove
            operations.append({"op": "remove", "path": path})
    return operations


def _parse_epoch(text: str) -> int:
    if not _is_epoch(text):
        raise ValueError(f"not a non-negative integer: {text!r}")
    return int(text)


def _is_epoch(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _ports(spec: Manifest) -> dict[str, int]:
    found = dict(_PORTS)
    for container in spec.get("containers") or ():
        if container.get("name") == ENGINE_CONTAINER:
            for port in container.get("ports") or ():
                if port.get("name") in found:
                    found[port["name"]] = int(port["containerPort"])
    return found


def _label(key: str) -> str:
    return "/metadata/labels/" + _escape(key)


def _annotation(key: str) -> str:
    return "/metadata/annotations/" + _escape(key)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
