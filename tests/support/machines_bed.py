"""What a test of moves needs from the place where machines live; and that place without Kubernetes.

The same tests run on every implementation of `MachinesBed`.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines
from poolwright.machines import Machines
from poolwright_protocol.roles import Role
from support.role_engine import RoleEngine, RoleKeeper

POOL_KEY = bytes(range(32))


class MachinesBed(Protocol):
    """Machines by name, each with a real engine's admin port behind its address."""

    @property
    def machines(self) -> Machines: ...

    @property
    def pool_key(self) -> bytes: ...

    async def add(self, name: str, role: Role | None, epoch: int) -> Machine:
        """A ready machine whose engine was told `role` at `epoch`; None: newborn. Its `role_since` is 0 where it has a
        role."""
        ...

    async def get(self, name: str) -> Machine:
        """As it is now."""
        ...

    async def edit_by_hand(self, name: str, role: Role | None, epoch: int | None = None) -> None:
        """The label (None removes it) and, where given, the epoch, changed past all tests, as by kubectl."""
        ...

    def engine(self, name: str) -> RoleKeeper:
        """The engine that runs there now."""
        ...

    def set_loading(self, name: str, loading: bool) -> None:
        """While it loads its model, the engine answers 503."""
        ...

    async def kill_engine(self, name: str) -> None:
        """Nothing listens at the address any more. The machine stays."""
        ...

    async def restart_engine(self, name: str) -> None:
        """In place: role and epoch come from the machine's own record now, as by downward API."""
        ...

    async def give_address_away(self, name: str) -> RoleKeeper:
        """The engine has gone, and another pod's engine listens at its address."""
        ...

    async def delete(self, name: str) -> None:
        """The machine and its engine are gone."""
        ...


class EnginesOfBed(ABC):
    """What every bed does with the small engines behind its machines; where the machines live is the bed's own."""

    pool_key = POOL_KEY

    def __init__(self, keeper: Callable[[str, Role | None, int], RoleKeeper] = RoleKeeper) -> None:
        self._keeper = keeper
        self._engines: dict[str, RoleEngine] = {}

    @abstractmethod
    async def get(self, name: str) -> Machine: ...

    def engine(self, name: str) -> RoleKeeper:
        return self._engines[name].keeper

    def set_loading(self, name: str, loading: bool) -> None:
        self._engines[name].loading = loading

    async def kill_engine(self, name: str) -> None:
        await self._engines[name].stop()

    async def restart_engine(self, name: str) -> None:
        machine = await self.get(name)
        await self.kill_engine(name)
        await self._start(name, self._keeper(machine.uid, machine.role, machine.role_epoch), machine.admin_port)

    async def give_address_away(self, name: str) -> RoleKeeper:
        await self.kill_engine(name)
        other = self._keeper("uid-of-another-pod", Role.MIXED, 7)
        await self._start(name, other, (await self.get(name)).admin_port)
        return other

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.stop()

    async def _start(self, name: str, keeper: RoleKeeper, port: int) -> int:
        engine = self._engines[name] = RoleEngine(keeper, POOL_KEY)
        await engine.start("127.0.0.1", port)
        return engine.port


class LocalBed(EnginesOfBed):
    """In this process: `LocalMachines`, and an address and port of its own for each engine."""

    def __init__(self, keeper: Callable[[str, Role | None, int], RoleKeeper] = RoleKeeper) -> None:
        super().__init__(keeper)
        self.machines = LocalMachines()

    async def add(self, name: str, role: Role | None, epoch: int) -> Machine:
        uid = f"uid-{name}-{uuid.uuid4().hex[:6]}"
        port = await self._start(name, self._keeper(uid, role, epoch), 0)
        machine = Machine(
            name=name,
            uid=uid,
            machine_class="small",
            host="127.0.0.1",
            ready=True,
            role=role,
            role_epoch=epoch,
            role_since=None if role is None else 0.0,
            move=None,
            created_at=0.0,
            admin_port=port,
        )
        self.machines.put(machine)
        return machine

    async def get(self, name: str) -> Machine:
        machine = self.machines.get(name)
        assert machine is not None
        return machine

    async def edit_by_hand(self, name: str, role: Role | None, epoch: int | None = None) -> None:
        machine = await self.get(name)
        self.machines.put(replace(machine, role=role, role_epoch=machine.role_epoch if epoch is None else epoch))

    async def delete(self, name: str) -> None:
        await self.kill_engine(name)
        self.machines.remove(name)
