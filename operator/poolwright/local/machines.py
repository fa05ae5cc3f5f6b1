"""`Machines` without Kubernetes: the machines of one pool in this process, with the same test-and-set as pods have.

Owns the records only; starting and watching processes is the supervisor's work, which tells it here what it sees. With
a file, the records outlive a killed controller, as annotations on pods outlive an operator.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from poolwright.core.machine import Machine, MachinePatch, apply
from poolwright.core.router_note import RouterNote
from poolwright.machines import Conflict


class LocalMachines:
    """Use from one event loop. Every change is on disk before it is seen, when there is a file."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._machines: dict[str, Machine] = load(file) if file and file.exists() else {}
        self._watchers: set[asyncio.Event] = set()
        self.writes = 0  # patches and notes written since the start

    async def list(self) -> tuple[Machine, ...]:
        return tuple(self._machines.values())

    async def watch(self) -> AsyncIterator[tuple[Machine, ...]]:
        changed = asyncio.Event()
        changed.set()
        self._watchers.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield tuple(self._machines.values())
        finally:
            self._watchers.discard(changed)

    async def patch(self, patch: MachinePatch) -> Machine:
        machine = self._machines.get(patch.name)
        if machine is None:
            raise Conflict(f"{patch.name} is gone")
        if machine.uid != patch.uid:
            raise Conflict(f"{patch.name} is another machine now: uid {machine.uid}, expected {patch.uid}")
        if machine.role_epoch != patch.expected_epoch:
            raise Conflict(f"{patch.name} is at epoch {machine.role_epoch}, expected {patch.expected_epoch}")
        self.writes += 1
        return self._store(apply(machine, patch))

    async def annotate(self, machine: Machine, note: RouterNote | None) -> None:
        now = self._machines.get(machine.name)
        if now is None or now.uid != machine.uid:
            raise Conflict(f"{machine.name} is gone, or another machine now")
        self.writes += 1
        self._store(replace(now, note=note))

    def put(self, machine: Machine) -> None:
        """A machine appeared, or a new one took its name."""
        self._store(machine)

    def observe(self, name: str, **facts: Any) -> Machine | None:
        """What the supervisor saw of a machine (host, ready, restarts, …); no write where nothing changed."""
        machine = self._machines.get(name)
        if machine is None:
            return None
        seen = replace(machine, **facts)
        return machine if seen == machine else self._store(seen)

    def remove(self, name: str) -> None:
        if self._machines.pop(name, None) is not None:
            self._changed()

    def get(self, name: str) -> Machine | None:
        return self._machines.get(name)

    def _store(self, machine: Machine) -> Machine:
        self._machines[machine.name] = machine
        self._changed()
        return machine

    def _changed(self) -> None:
        if self._file:
            _save(self._file, self._machines)
        for watcher in self._watchers:
            watcher.set()


def _save(file: Path, machines: dict[str, Machine]) -> None:
    """Whole or not at all: written beside the file, then renamed over it."""
    rows = [machine.to_row() for machine in machines.values()]
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps(rows, indent=1))
    os.replace(fresh, file)


def load(file: Path) -> dict[str, Machine]:
    """Raises ValueError that names the file."""
    try:
        rows = json.loads(file.read_text())
        machines = [Machine.from_row(row) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} does not hold the machines of a pool: {error}") from error
    return {m.name: m for m in machines}
