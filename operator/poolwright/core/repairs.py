"""First roles of new machines, and moves that lift pools to their minimum: in every mode, whatever is measured."""

from collections.abc import Sequence

from poolwright.core.board import Board
from poolwright.core.decision import Birth, MoveRecord, PlannedMove, Reason
from poolwright.core.machine import Machine
from poolwright.core.split import Counts, fillable
from poolwright_protocol.roles import Role

_Hop = tuple[Machine, Role, Role]  # who, from, to


def births_of(board: Board, desired: Counts) -> list[Birth]:
    """A machine beyond the replicas of its class waits for its role until another has gone: a roll-out with a machine
    too many, or an edit, would put the pool over its budget."""
    births = []
    room = board.room_by_class()
    for machine in board.unborn():
        if room[machine.machine_class] <= 0:
            continue
        room[machine.machine_class] -= 1
        role = _first_role(board, machine, desired)
        board.born(machine.uid, role)
        births.append(Birth(machine.uid, machine.name, role))
    return births


def _first_role(board: Board, machine: Machine, desired: Counts) -> Role:
    """The largest gap, minimums first, then roles that leave KV its way; among classes, so that what is still missing
    can be filled by the rest."""
    spec = board.spec
    allowed = spec.roles_of(machine.machine_class)
    minimum_gap = {r: spec.pools[r].minimum - board.count(r) for r in Role}
    gap = {r: desired[r] - board.count(r) for r in Role}
    stranded = board.stranding()

    def key(role: Role) -> tuple[int, bool, int, int]:
        return -max(0, minimum_gap[role]), gap[role] <= 0, stranded(machine.uid, role), -gap[role]

    order = sorted((r for r in Role if r in allowed), key=key)
    rest = board.unplaced_by_class()
    rest[machine.machine_class] = max(0, rest[machine.machine_class] - 1)
    for gaps in (gap, minimum_gap):
        for role in order:
            if gaps[role] > 0:
                missing = {r: max(0, gaps[r] - (1 if r is role else 0)) for r in Role}
                if fillable(missing, rest, spec):
                    return role
    with_room = [r for r in order if board.has_room(r)]
    return (with_room or order)[0]


def repairs_of(board: Board, records: Sequence[MoveRecord]) -> tuple[list[PlannedMove], str]:
    """Moves that lift pools to their minimum, and in words what cannot be lifted. Dwell and cap do not hold them."""
    repairs: list[PlannedMove] = []
    unmet: list[str] = []
    for role in Role:
        while (missing := board.spec.pools[role].minimum - board.count(role)) > 0:
            if board.unlabelled():
                unmet.append(
                    f"{role.value} is short, and a machine's role label was removed: its engine is asked first"
                )
                break
            hop = _hop_towards(board, role, one_hop_only=board.moving() or bool(repairs))
            if hop is None:
                unmet.append(f"{role.value} has {board.count(role)} of at least {board.count(role) + missing}")
                break
            machine, from_role, to_role = hop
            message = (
                f"{role.value} was below its minimum of {board.spec.pools[role].minimum}{_at_the_price(board, hop)}"
            )
            repairs.append(
                PlannedMove(machine.uid, machine.name, from_role, to_role, Reason.MINIMUM_REPAIRED, message, True)
            )
            board.move(machine.uid, to_role)
            if to_role is not role:
                break  # the way there has two steps: this one frees a machine for the next
    return repairs, "; ".join(unmet)


def _at_the_price(board: Board, hop: _Hop) -> str:
    """A minimum counts for more than links do; what it costs is said."""
    machine, _, to_role = hop
    stranded = board.stranding()(machine.uid, to_role)
    return f"; {stranded} prompt machine(s) then have no way for their KV" if stranded else ""


def _hop_towards(board: Board, role: Role, one_hop_only: bool) -> _Hop | None:
    """One machine that may go to `role`, or, where classes are in the way, one whose going lets another go there."""
    donors = sorted(
        (r for r in Role if r is not role),
        key=lambda r: (-(len(board.settled(r)) - board.spec.pools[r].minimum), r is Role.MIXED),
    )
    hops: list[_Hop] = []
    for donor in donors:
        if board.may_leave(donor, role) and (able := board.able(donor, role)):
            hops.append((board.fewest_stranded(able, role)[0], donor, role))
    if hops:
        stranded = board.stranding()
        return min(hops, key=lambda hop: stranded(hop[0].uid, role))
    if one_hop_only:
        return None
    for donor in donors:
        between = next(r for r in donors if r is not donor)
        if board.may_leave(donor, between) and board.able(between, role) and (able := board.able(donor, between)):
            return board.fewest_stranded(able, between)[0], donor, between
    return None
