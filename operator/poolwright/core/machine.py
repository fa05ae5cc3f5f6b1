"""A machine as a value, and the patches that move it. All move state lives on the machine itself.

A patch is applied by `Machines.patch` only if uid and epoch still are what the reader saw; so any operator can take up
any move after any crash, and two operators cannot both win.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from poolwright.core.links import Place
from poolwright.core.router_note import RouterNote
from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class Move:
    """Annotation `poolwright.dev/move`. `from_role` is None at a birth. Times are Unix seconds."""

    from_role: Role | None
    to_role: Role
    started_at: float
    deadline: float
    reason: str = ""
    rolling_back: bool = False

    def to_json(self) -> str:
        body: dict[str, Any] = {
            "from": self.from_role.value if self.from_role else None,
            "to": self.to_role.value,
            "startedAt": self.started_at,
            "deadline": self.deadline,
            "reason": self.reason,
        }
        if self.rolling_back:
            body["rollingBack"] = True
        return json.dumps(body, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Move":
        """Raises ValueError for anything that is not a move."""
        try:
            raw = json.loads(text)
            return cls(
                from_role=Role(raw["from"]) if raw["from"] is not None else None,
                to_role=Role(raw["to"]),
                started_at=float(raw["startedAt"]),
                deadline=float(raw["deadline"]),
                reason=str(raw.get("reason", "")),
                rolling_back=bool(raw.get("rollingBack", False)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a move: {text!r}") from error


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine pod, or one local engine process. Unix seconds throughout.

    `role` None with no move means: not yet born (or the label was removed by hand); routers treat it as mixed.
    """

    name: str
    uid: str
    machine_class: str
    host: str | None  # pod IP; None until it has one
    ready: bool
    role: Role | None
    role_epoch: int
    role_since: float | None
    move: Move | None
    created_at: float
    api_port: int = 8000
    admin_port: int = 8001
    kv_port: int = 9000
    deleting: bool = False
    cordoned: bool = False  # its node takes no new pods; the machine is expected to go
    restarts: int = 0
    place: Place | None = field(default=None, hash=False)  # None: nobody said where its node stands
    note: RouterNote | None = field(default=None, hash=False)  # beside the role; None: routers are told nothing yet

    def to_row(self) -> dict[str, Any]:
        """As plain JSON values: how local mode stores machines."""
        move, note = self.move.to_json() if self.move else None, self.note.to_json() if self.note else None
        return {**asdict(self), "move": move, "note": note}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Machine":
        """Raises ValueError, TypeError or KeyError for anything that is not a machine."""
        role = Role(row["role"]) if row["role"] else None
        move = Move.from_json(row["move"]) if row["move"] else None
        note = RouterNote.from_json(row["note"]) if row.get("note") else None
        place = Place(**row["place"]) if row.get("place") else None
        return cls(**{**row, "role": role, "move": move, "note": note, "place": place})

    @property
    def effective_role(self) -> Role | None:
        """The pool this machine counts in: its role, or where its move takes it."""
        return self.move.to_role if self.move else self.role

    @property
    def routing_role(self) -> Role:
        """How a router treats it: its label, else mixed, so that the data plane works while the operator is away."""
        return self.role or Role.MIXED


@dataclass(frozen=True, slots=True)
class MachinePatch:
    """A test-and-set on one machine. The three desired fields are written whole: None removes."""

    name: str
    uid: str
    expected_epoch: int
    epoch: int
    role: Role | None
    role_since: float | None
    move: Move | None


def begin(machine: Machine, to_role: Role, now: float, deadline_seconds: float, reason: str) -> MachinePatch:
    """Step 1: raise the epoch, write the move, remove the label."""
    move = Move(machine.role, to_role, now, now + deadline_seconds, reason)
    return MachinePatch(machine.name, machine.uid, machine.role_epoch, machine.role_epoch + 1, None, None, move)


def finish(machine: Machine, now: float) -> MachinePatch:
    """Step 4: the label of the move's end, `role-since`, no move; the epoch stays."""
    assert machine.move is not None
    return MachinePatch(
        machine.name, machine.uid, machine.role_epoch, machine.role_epoch, machine.move.to_role, now, None
    )


def roll_back(machine: Machine, now: float, deadline_seconds: float) -> MachinePatch:
    """Past the deadline: raise the epoch and run the same path back to where it came from."""
    assert machine.move is not None
    assert machine.move.from_role is not None
    move = replace(
        machine.move,
        from_role=machine.move.to_role,
        to_role=machine.move.from_role,
        deadline=now + deadline_seconds,
        rolling_back=True,
    )
    return MachinePatch(machine.name, machine.uid, machine.role_epoch, machine.role_epoch + 1, None, None, move)


def apply(machine: Machine, patch: MachinePatch) -> Machine:
    """The machine after the patch; the caller has tested uid and epoch."""
    return replace(machine, role=patch.role, role_epoch=patch.epoch, role_since=patch.role_since, move=patch.move)
