"""The machines as one decision sees and shifts them: who counts where, and who may leave."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy

from poolwright.core.decision import MOVE_DEADLINE_SECONDS
from poolwright.core.links import Reach
from poolwright.core.machine import Machine
from poolwright.core.spec import PolicySpec
from poolwright.core.split import budget_by_class
from poolwright_protocol.roles import Role

UNREADY_GRACE_SECONDS = MOVE_DEADLINE_SECONDS  # a container that restarts in place keeps its place this long

_PHASES = (frozenset({Role.PROMPT, Role.MIXED}), frozenset({Role.TOKEN, Role.MIXED}))


def is_unlabelled(machine: Machine) -> bool:
    """Born, at rest, and without its label: a hand removed it, and the mover is about to put it back."""
    return machine.role is None and machine.move is None and machine.role_epoch > 0


class Board:
    """The machines as this decision sees and shifts them. A machine that is going counts nowhere.

    `reach`: who has a way for its KV; None where nothing is known of links."""

    def __init__(
        self, now: float, spec: PolicySpec, machines: Sequence[Machine], unready_since: Mapping[str, float]
    ) -> None:
        self.now = now
        self.spec = spec
        self.reach: Reach | None = None
        self.machines = sorted(
            (m for m in machines if not m.deleting and spec.roles_of(m.machine_class)),
            key=lambda m: (m.created_at, m.uid),
        )
        self._role: dict[str, Role | None] = {m.uid: m.effective_role for m in self.machines}
        self._settled = {
            m.uid for m in self.machines if m.role is not None and m.move is None and m.ready and not m.cordoned
        }
        self._counted = {
            m.uid
            for m in self.machines
            if not m.cordoned
            and ((m.ready and not is_unlabelled(m)) or now - unready_since.get(m.uid, now) < UNREADY_GRACE_SECONDS)
        }

    def copy(self) -> "Board":
        """To try moves on."""
        other = copy(self)
        other._role, other._settled = dict(self._role), set(self._settled)
        return other

    def counts_by_class(self) -> dict[tuple[str, Role], int]:
        counts: dict[tuple[str, Role], int] = {}
        for m in self.machines:
            role = self._role[m.uid]
            if m.uid in self._counted and role is not None:
                counts[m.machine_class, role] = counts.get((m.machine_class, role), 0) + 1
        return counts

    def uids(self, *roles: Role) -> list[str]:
        """Machines that are in one of these pools or on their way into it."""
        return [uid for uid, role in self._role.items() if role in roles and uid in self._counted]

    def role_of(self, uid: str) -> Role | None:
        return self._role.get(uid)

    def count(self, role: Role) -> int:
        """Machines that are in this pool or on their way into it."""
        return sum(1 for uid in self._counted if self._role[uid] is role)

    def ready(self, role: Role) -> int:
        return sum(1 for m in self.machines if m.ready and m.move is None and m.role is role)

    def settled(self, role: Role) -> list[Machine]:
        """Machines that could leave this pool, longest in it first."""
        return sorted(
            (m for m in self.machines if m.uid in self._settled and self._role[m.uid] is role),
            key=lambda m: (self.since(m), m.uid),
        )

    @staticmethod
    def since(machine: Machine) -> float:
        """A label that was set by hand has no date: the machine's own stands in."""
        return machine.created_at if machine.role_since is None else machine.role_since

    def unborn(self) -> list[Machine]:
        return [
            m
            for m in self.machines
            if m.role is None and m.move is None and m.role_epoch == 0 and m.ready and not m.cordoned
            if self._role[m.uid] is None
        ]

    def unlabelled(self) -> int:
        """Machines whose role is being asked of their engine, for a while: they may be what a pool seems to lack."""
        return sum(1 for m in self.machines if is_unlabelled(m) and m.uid in self._counted)

    def born(self, uid: str, role: Role) -> None:
        self._role[uid] = role

    def move(self, uid: str, role: Role) -> None:
        self._role[uid] = role
        self._settled.discard(uid)

    def may_leave(self, role: Role, to_role: Role) -> bool:
        """No move takes a pool below its minimum, nor leaves a phase without a machine. Only settled, ready ones count.

        Where the machine goes counts too: the last token machine may turn mixed, since it still generates.
        """
        if len(self.settled(role)) - 1 < self.spec.pools[role].minimum:
            return False
        left = {r: len(self.settled(r)) - (1 if r is role else 0) for r in Role}
        return all(to_role in phase or any(left[r] > 0 for r in phase) for phase in _PHASES if role in phase)

    def has_room(self, role: Role) -> bool:
        maximum = self.spec.pools[role].maximum
        return maximum is None or self.count(role) < maximum

    def able(self, role: Role, to_role: Role) -> list[Machine]:
        return [m for m in self.settled(role) if to_role in self.spec.roles_of(m.machine_class)]

    def stranding(self) -> Callable[[str, Role], int]:
        """From a machine and its new role to how many prompt machines would lose the way for their KV, or begin without
        one."""
        if self.reach is None:
            return lambda uid, to_role: 0
        return self.reach.stranding(self.uids(Role.PROMPT), self.uids(Role.TOKEN, Role.MIXED))

    def without_way(self) -> int:
        """Prompt machines without a machine that decodes over a link that holds their KV."""
        if self.reach is None:
            return 0
        return self.reach.without_way(self.uids(Role.PROMPT), self.uids(Role.TOKEN, Role.MIXED))

    def fewest_stranded(self, machines: Sequence[Machine], to_role: Role) -> list[Machine]:
        """Those first that leave every prompt machine its way; else in the order given."""
        stranded = self.stranding()
        return sorted(machines, key=lambda m: stranded(m.uid, to_role))

    def rested(self, machine: Machine) -> bool:
        return self.now - self.since(machine) >= self.spec.dwell_seconds

    def unplaced_by_class(self) -> dict[str, int]:
        """Machines of the budget that hold no role now: unborn, not ready, or not there yet."""
        left = budget_by_class(self.spec)
        for m in self.machines:
            if m.uid in self._counted and self._role[m.uid] is not None:
                left[m.machine_class] = max(0, left[m.machine_class] - 1)
        return left

    def room_by_class(self) -> dict[str, int]:
        """How many more machines may get a role; one that is not ready keeps its place for as long as it exists."""
        room = budget_by_class(self.spec)
        for m in self.machines:
            if self._role[m.uid] is not None and not m.cordoned:
                room[m.machine_class] -= 1
        return room

    def surplus(self) -> int:
        """Machines that wait for a role since their class has its replicas."""
        room = self.room_by_class()
        waiting = Counter(m.machine_class for m in self.unborn())
        return sum(max(0, n - max(0, room[name])) for name, n in waiting.items())

    def moving(self) -> bool:
        return any(m.move is not None and m.move.from_role is not None for m in self.machines)
