"""Every state that the pods of a pool went through, as one watch saw them.

Owns the watch and the waiting on it; what a state must be is the test's to say.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from poolwright.core.machine import Machine
from poolwright.kube.machines import machine_of
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from testbed.bed import Cluster

Pods = Mapping[str, Mapping[str, Any]]
"""By uid."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The machines after one change. `at` is the monotonic clock's."""

    at: float
    machines: tuple[Machine, ...]

    def in_pool(self, role: Role) -> int:
        """Machines whose label says so: those that a router sends this pool's work."""
        return sum(machine.role is role for machine in self.machines)


class PodHistory:
    """Use as a context: the watch runs from its begin to its end."""

    def __init__(
        self, cluster: Cluster, namespace: str, pool: str, on_change: Callable[[Pods], None] = lambda _: None
    ) -> None:
        self._command = cluster.kubectl_command(
            *("get", "pods", "-n", namespace, "-l", f"{names.LABEL_POOL}={pool}"),
            *("--watch", "--output-watch-events", "-o", "json"),
        )
        self._on_change = on_change
        self._changed = threading.Condition()
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._seen: list[Seen] = []
        self._broken: BaseException | None = None
        self._closing = False

    def __enter__(self) -> Self:
        self._watch = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, name="pod history")
        self._reader.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing = True
        self._watch.terminate()
        self._reader.join()
        for pipe in (self._watch.stdout, self._watch.stderr):
            assert pipe is not None
            pipe.close()
        self._watch.wait()

    @property
    def machines(self) -> tuple[Machine, ...]:
        with self._changed:
            return self._seen[-1].machines if self._seen else ()

    def machine(self, name: str) -> Machine:
        (found,) = [machine for machine in self.machines if machine.name == name]
        return found

    def pod(self, name: str) -> Mapping[str, Any]:
        with self._changed:
            (found,) = [pod for pod in self._pods.values() if pod["metadata"]["name"] == name]
            return found

    def since(self, at: float) -> list[Seen]:
        """What was so at that moment, and every state after it."""
        with self._changed:
            before = [seen for seen in self._seen if seen.at < at]
            return [*before[-1:], *(seen for seen in self._seen if seen.at >= at)]

    def until(
        self, claim: str, holds: Callable[[tuple[Machine, ...]], bool], limit_seconds: float
    ) -> tuple[Machine, ...]:
        """Waits for a state of which this holds; gives it."""
        deadline = time.monotonic() + limit_seconds
        with self._changed:
            while True:
                machines = self._seen[-1].machines if self._seen else ()
                if holds(machines):
                    return machines
                if self._broken is not None:
                    raise AssertionError("the watch on pods broke") from self._broken
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"not within {limit_seconds:g} s: {claim}; there are {machines}")

    def _read(self) -> None:
        assert self._watch.stdout is not None
        try:
            for line in self._watch.stdout:  # kubectl writes each event on a line of its own
                self._take(json.loads(line))
            if not self._closing:
                assert self._watch.stderr is not None
                raise RuntimeError(f"kubectl ended: {self._watch.stderr.read()}")
        except BaseException as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _take(self, event: Mapping[str, Any]) -> None:
        pod = event["object"]
        uid = pod["metadata"]["uid"]
        with self._changed:
            if event["type"] == "DELETED":
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = pod
            machines = [
                machine_of(dict(known))[0]
                for known in self._pods.values()
                if known["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE
            ]
            self._seen.append(Seen(time.monotonic(), tuple(sorted(machines, key=lambda machine: machine.name))))
            self._on_change(dict(self._pods))
            self._changed.notify_all()
