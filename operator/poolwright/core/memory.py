"""The policy's memory after a restart: from the status it wrote and the traces on the machines themselves."""

from collections.abc import Mapping, Sequence

from poolwright.core.decision import Memory, MoveRecord
from poolwright.core.machine import Machine
from poolwright.core.spec import PolicySpec
from poolwright_protocol.roles import Role

# A birth raises the epoch to 1; only a move raises it further.
_EPOCH_OF_BIRTH = 1
_TRACE = "found on the machine; not in the status"


def rebuild_memory(
    now: float,
    machines: Sequence[Machine],
    recent_moves: Sequence[MoveRecord] | None,
    desired: Mapping[Role, int] | None,
    spec: PolicySpec,
    held_until: float | None = None,
) -> Memory:
    """`recent_moves` None means: the status could not be read. Then no move by policy for one window. `held_until` is
    the end of such a window that was still open before this restart: its status tells no more than the lost one did.

    An operator may die between a move and its record. The machine's own traces (`move`, or a fresh `role-since` at an
    epoch only a move reaches) then stand in for the record and count against the cap: safe, if once too strict.
    """
    if recent_moves is None:
        return Memory(held_until=now + spec.window_seconds, desired=_valid(desired, spec))
    records = list(recent_moves)
    for machine in machines:
        trace = _trace(machine)
        if trace is not None and not any(_same(record, trace) for record in records):
            records.append(trace)
    records.sort(key=lambda r: r.started_at)
    return Memory(moves=tuple(records), desired=_valid(desired, spec), held_until=held_until)


def _trace(machine: Machine) -> MoveRecord | None:
    if machine.move is not None:
        move = machine.move
        if move.from_role is None:
            return None  # a birth
        begun_from, begun_to = (move.to_role, move.from_role) if move.rolling_back else (move.from_role, move.to_role)
        return MoveRecord(machine.uid, machine.name, begun_from, begun_to, move.reason or _TRACE, move.started_at)
    if machine.role is None or machine.role_since is None or machine.role_epoch <= _EPOCH_OF_BIRTH:
        return None
    return MoveRecord(
        machine.uid, machine.name, None, machine.role, _TRACE, machine.role_since, machine.role_since, None
    )


def _same(record: MoveRecord, trace: MoveRecord) -> bool:
    """Whether this record is of the move that left the trace: begun before it ended, and nothing newer is known."""
    if record.uid != trace.uid:
        return False
    if trace.finished_at is None:  # still in move: the start is written on both
        return abs(record.started_at - trace.started_at) < 1.0
    # `role-since` is written at the end. A record that ended earlier is of an earlier move; one still open is this one.
    return record.finished_at is None or record.finished_at >= trace.started_at - 1.0


def _valid(desired: Mapping[Role, int] | None, spec: PolicySpec) -> Mapping[Role, int] | None:
    """Counts that are of this budget; others are of an older spec."""
    if desired is None or any(n < 0 for n in desired.values()) or sum(desired.values()) != spec.budget:
        return None
    return {role: desired.get(role, 0) for role in Role}
