"""Which machine takes which role now, and why: births, repair of minimums, then at most one move by policy.

Pure: `decide(now, snapshot, spec, memory)` answers a decision and the next memory. Same input, same answer.

The band. A move is wanted when an objective is missed, that is when its percentile exceeds the target. The published
.55/.40 are shares of a scaling signal that multiplies replicas; here latency itself is the signal and one machine is
the step, so the upper edge is the target and the lower edge is the donor test: the giving phase, with that machine
gone, must be predicted at or under 80 % of its own target (Dynamo's sensitivity, Narwhal's planning utilisation).
Between the two edges nothing moves. The prediction scales only what a machine can change: TTFT by the M/D/1 wait at
the higher busy share (so (N−1)/N acts on the load, not on the service time alone), TBT by streams per machine.

A mixed machine counts as half a machine for each phase. Steps are tried from large to small: from the other pure
pool, then from the mixed pool, then half a step by making a machine of the other pure pool mixed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poolwright.core.decision import (
    MOVE_DEADLINE_SECONDS,
    Birth,
    Decision,
    Memory,
    MoveRecord,
    ObjectiveReading,
    ObjectiveState,
    Outcome,
    PlannedMove,
    PoolCount,
    Reason,
    Snapshot,
)
from poolwright.core.machine import Machine
from poolwright.core.objective import Load, busy_share, measure_load, read_objectives, wait_over_service
from poolwright.core.reading import MetricsState
from poolwright.core.spec import Metric, Mode, PolicySpec
from poolwright.core.split import Counts, budget_by_class, desired_counts, fillable
from poolwright_protocol.roles import Role

COMFORTABLE_STRESS = 0.8  # a donor's predicted observed/target, at most
MOST_BUSY_SHARE = 0.8  # a donor's predicted busy share, at most
DOMINANT_STRESS = 2.0  # with both objectives missed, how much worse one must be before a mixed machine goes there
UNREADY_GRACE_SECONDS = MOVE_DEADLINE_SECONDS  # a container that restarts in place keeps its place this long
KEPT_RECORDS = 32

_PHASES = (frozenset({Role.PROMPT, Role.MIXED}), frozenset({Role.TOKEN, Role.MIXED}))


def decide(now: float, snapshot: Snapshot, spec: PolicySpec, memory: Memory) -> tuple[Decision, Memory]:
    records = settle_records(now, snapshot.machines, memory.moves)
    unready_since = {
        m.uid: min(now, memory.unready_since.get(m.uid, now))
        for m in snapshot.machines
        if (not m.ready and m.effective_role is not None) or _unlabelled(m)
    }
    board = _Board(now, spec, snapshot.machines, unready_since)
    desired = desired_counts(memory.desired, spec)
    load = measure_load(snapshot.reading, *(board.count(role) for role in (Role.PROMPT, Role.TOKEN, Role.MIXED)))
    objectives = read_objectives(spec, snapshot.reading, load)

    births = _births(board, desired)
    repairs, unmet = _repairs(board, records)
    due = memory.planned_at is None or not 0 <= now - memory.planned_at < spec.interval_seconds
    past = replace(memory, moves=records)
    if repairs:
        choice = _Choice(Reason.MINIMUM_REPAIRED, repairs[0].message)
    elif not board.machines:
        choice = _Choice(Reason.NO_MACHINES, "No machine of this pool exists")
    elif births:
        choice = _Choice(Reason.BORN, f"{len(births)} new machine(s) got a first role")
    elif unmet:
        choice = _Choice(Reason.MINIMUM_UNMET, unmet)
    elif not due:
        choice = _Choice(Reason.NOT_DUE, "The next plan is not due yet")
    else:
        choice = _plan(board, snapshot, objectives, load, desired, past)

    planned_moves = list(repairs)
    advised: tuple[PlannedMove, ...] = ()
    if choice.move is not None:
        if spec.mode is Mode.ADVISORY:
            advised = (choice.move,)
        else:
            planned_moves.append(choice.move)
            board.move(choice.move.uid, choice.move.to_role)
            desired = {**desired, choice.move.from_role: desired[choice.move.from_role] - 1}
            desired[choice.move.to_role] += 1

    counts: Counts = {role: board.count(role) for role in Role}
    if spec.mode is Mode.MANUAL:
        desired = desired_counts(None, spec)
    elif sum(counts.values()) == spec.budget:
        desired = counts  # every machine is there and has a role: this is the split now
    planned = choice.reason is not Reason.NOT_DUE
    planned_at = now if due and choice.concluded else memory.planned_at
    decision = Decision(
        reason=choice.reason,
        message=choice.message,
        births=tuple(births),
        moves=tuple(planned_moves),
        advised=advised,
        objectives=objectives,
        pools={role: PoolCount(board.ready(role), desired[role]) for role in Role},
        evidence=_evidence(snapshot, objectives, load, counts),
        planned=planned,
        next_plan_at=now if planned_at is None else max(now, planned_at + spec.interval_seconds),
        minimum_unmet=unmet,
    )
    new_records = tuple(
        MoveRecord(m.uid, m.machine, m.from_role, m.to_role, m.reason.value, now, repair=m.repair)
        for m in planned_moves
    )
    return decision, replace(
        memory,
        moves=_trimmed(now, (*records, *new_records), spec),
        desired=desired,
        held_until=memory.held_until if memory.held_until is not None and memory.held_until > now else None,
        planned_at=planned_at,
        unready_since=unready_since,
    )


def settle_records(now: float, machines: Sequence[Machine], records: Sequence[MoveRecord]) -> tuple[MoveRecord, ...]:
    """Close the records of moves that have ended, by what the machines say. A move that never began is forgotten."""
    by_uid = {m.uid: m for m in machines}
    settled = []
    for record in records:
        machine = by_uid.get(record.uid)
        if record.finished_at is not None:
            settled.append(record)
        elif machine is None or machine.deleting:
            settled.append(replace(record, finished_at=now, outcome=Outcome.LOST))
        elif machine.move is not None and machine.move.from_role is not None:
            settled.append(record)
        elif machine.role_since is not None and machine.role_since >= record.started_at:
            outcome = Outcome.COMPLETED if machine.role is record.to_role else Outcome.ROLLED_BACK
            settled.append(replace(record, finished_at=machine.role_since, outcome=outcome))
        elif now < record.started_at + MOVE_DEADLINE_SECONDS:
            settled.append(record)  # begun a moment ago, or about to be
    return tuple(settled)


# ----------------------------------------------------------------------------------------------------------- the board


def _unlabelled(machine: Machine) -> bool:
    """Born, at rest, and without its label: a hand removed it, and the mover is about to put it back."""
    return machine.role is None and machine.move is None and machine.role_epoch > 0


class _Board:
    """The machines as this decision sees and shifts them. A machine that is going counts nowhere."""

    def __init__(
        self, now: float, spec: PolicySpec, machines: Sequence[Machine], unready_since: dict[str, float]
    ) -> None:
        self.now = now
        self.spec = spec
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
            and ((m.ready and not _unlabelled(m)) or now - unready_since.get(m.uid, now) < UNREADY_GRACE_SECONDS)
        }

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
        return sum(1 for m in self.machines if _unlabelled(m) and m.uid in self._counted)

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

    def rested(self, machine: Machine) -> bool:
        return self.now - self.since(machine) >= self.spec.dwell_seconds

    def unplaced_by_class(self) -> dict[str, int]:
        """Machines of the budget that hold no role now: unborn, not ready, or not there yet."""
        left = budget_by_class(self.spec)
        for m in self.machines:
            if m.uid in self._counted and self._role[m.uid] is not None:
                left[m.machine_class] = max(0, left[m.machine_class] - 1)
        return left

    def moving(self) -> bool:
        return any(m.move is not None and m.move.from_role is not None for m in self.machines)


# -------------------------------------------------------------------------------------------------- births and repairs


def _births(board: _Board, desired: Counts) -> list[Birth]:
    births = []
    for machine in board.unborn():
        role = _first_role(board, machine, desired)
        board.born(machine.uid, role)
        births.append(Birth(machine.uid, machine.name, role))
    return births


def _first_role(board: _Board, machine: Machine, desired: Counts) -> Role:
    """The largest gap, minimums first; among classes, so that what is still missing can be filled by the rest."""
    spec = board.spec
    allowed = spec.roles_of(machine.machine_class)
    minimum_gap = {r: spec.pools[r].minimum - board.count(r) for r in Role}
    gap = {r: desired[r] - board.count(r) for r in Role}
    order = sorted((r for r in Role if r in allowed), key=lambda r: (-max(0, minimum_gap[r]), -gap[r]))
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


def _repairs(board: _Board, records: Sequence[MoveRecord]) -> tuple[list[PlannedMove], str]:
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
            message = f"{role.value} was below its minimum of {board.spec.pools[role].minimum}"
            repairs.append(
                PlannedMove(machine.uid, machine.name, from_role, to_role, Reason.MINIMUM_REPAIRED, message, True)
            )
            board.move(machine.uid, to_role)
            if to_role is not role:
                break  # the way there has two steps: this one frees a machine for the next
    return repairs, "; ".join(unmet)


def _hop_towards(board: _Board, role: Role, one_hop_only: bool) -> tuple[Machine, Role, Role] | None:
    """One machine that may go to `role`, or, where classes are in the way, one whose going lets another go there."""
    donors = sorted(
        (r for r in Role if r is not role),
        key=lambda r: (-(len(board.settled(r)) - board.spec.pools[r].minimum), r is Role.MIXED),
    )
    for donor in donors:
        if board.may_leave(donor, role) and (able := board.able(donor, role)):
            return able[0], donor, role
    if one_hop_only:
        return None
    for donor in donors:
        between = next(r for r in donors if r is not donor)
        if board.may_leave(donor, between) and board.able(between, role) and (able := board.able(donor, between)):
            return able[0], donor, between
    return None


# ------------------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True, slots=True)
class _Choice:
    """`concluded`: the plan looked at everything, so the next look is one interval away."""

    reason: Reason
    message: str
    move: PlannedMove | None = None
    concluded: bool = False


def _plan(
    board: _Board,
    snapshot: Snapshot,
    objectives: Sequence[ObjectiveReading],
    load: Load,
    desired: Counts,
    past: Memory,
) -> _Choice:
    spec = board.spec
    if spec.mode is Mode.PAUSED:
        return _Choice(Reason.PAUSED, "Mode Paused: nobody chooses moves", concluded=True)
    choice = _conform(board)
    if choice is None and spec.mode is Mode.MANUAL:
        choice = _manual(board, desired)
    if choice is None:
        choice = _by_objectives(board, snapshot, objectives, load)
    if choice.move is not None and (held := _held(board, choice, past)) is not None:
        choice = held
    return replace(choice, concluded=True)


def _held(board: _Board, choice: _Choice, past: Memory) -> _Choice | None:
    """What forbids any move now, whoever wants it."""
    now, spec = board.now, board.spec
    wanted = f"wanted: {choice.message}"
    if past.held_until is not None and now < past.held_until:
        return _Choice(Reason.MEMORY_UNREADABLE, f"The last moves could not be read, so none is made yet; {wanted}")
    open_records = [r for r in past.moves if r.finished_at is None]
    if board.moving() or open_records:
        return _Choice(Reason.MOVE_IN_PROGRESS, f"A move is still running; {wanted}")
    ends = [r.finished_at for r in past.moves if r.finished_at is not None and r.outcome is Outcome.ROLLED_BACK]
    if any(now - end < spec.dwell_seconds for end in ends):
        return _Choice(Reason.COOLING_DOWN, f"The last move was rolled back; {wanted}")
    made = sum(1 for r in past.moves if not r.repair and now - r.started_at < spec.window_seconds)
    if made >= spec.max_moves_per_window:
        return _Choice(
            Reason.MOVES_CAPPED, f"{made} move(s) in the last {spec.window_seconds:.0f} s, no more allowed; {wanted}"
        )
    if choice.reason in (Reason.TTFT_MISSED, Reason.TBT_MISSED):
        ended = [r.finished_at for r in past.moves if r.finished_at is not None]
        if any(now - end < spec.metrics_window_seconds for end in ended):
            # The window still holds samples from before the last move: acting on them would overshoot.
            return _Choice(Reason.SETTLING, f"The metrics window still reaches behind the last move; {wanted}")
    return None


def _conform(board: _Board) -> _Choice | None:
    """Follow an edit of the spec: a role its class no longer may take, a pool above its maximum."""
    spec = board.spec
    for role in Role:
        maximum = spec.pools[role].maximum
        above = maximum is not None and board.count(role) > maximum
        for machine in board.settled(role):
            allowed = spec.roles_of(machine.machine_class)
            if role in allowed and not above:
                continue
            reason = Reason.ABOVE_MAXIMUM if role in allowed else Reason.ROLE_NOT_ALLOWED
            for to_role in sorted((r for r in Role if r in allowed and r is not role), key=board.count):
                if board.has_room(to_role) and board.may_leave(role, to_role) and board.rested(machine):
                    message = (
                        f"{role.value} is above its maximum"
                        if reason is Reason.ABOVE_MAXIMUM
                        else f"class {machine.machine_class} may no longer be {role.value}"
                    )
                    move = PlannedMove(machine.uid, machine.name, role, to_role, reason, message)
                    return _Choice(reason, message, move)
    return None


def _manual(board: _Board, desired: Counts) -> _Choice:
    short = [r for r in Role if board.count(r) < desired[r]]
    over = [r for r in Role if board.count(r) > desired[r]]
    wanted = ", ".join(f"{r.value} {desired[r]}" for r in Role)
    if not short or not over:
        return _Choice(Reason.COUNTS_HELD, f"Mode Manual: {wanted}")
    message = f"mode Manual asks for {wanted}"
    resting = False
    # Direct steps first; where classes are in the way, one through the third pool.
    steps = [(a, b) for a in over for b in short] + [
        (a, between) for a in over for between in Role if between not in over and between not in short
    ]
    for from_role, to_role in steps:
        if not board.may_leave(from_role, to_role):
            continue
        if to_role not in short and not any(board.able(to_role, b) for b in short):
            continue
        able = board.able(from_role, to_role)
        rested = [m for m in able if board.rested(m)]
        if rested:
            move = PlannedMove(rested[0].uid, rested[0].name, from_role, to_role, Reason.MANUAL_COUNTS, message)
            return _Choice(Reason.MANUAL_COUNTS, message, move)
        resting = resting or bool(able)
    if resting:
        return _Choice(Reason.DWELLING, f"Every machine that could move took its role too recently; {message}")
    return _Choice(Reason.NO_DONOR, f"No machine may be moved; {message}")


def _by_objectives(board: _Board, snapshot: Snapshot, objectives: Sequence[ObjectiveReading], load: Load) -> _Choice:
    reading = snapshot.reading
    if reading.state is MetricsState.MISSING:
        return _Choice(Reason.METRICS_MISSING, f"No metrics, so no moves: {reading.detail}")
    if reading.state is MetricsState.STALE:
        return _Choice(Reason.METRICS_STALE, f"No fresh metrics, so no moves: {reading.detail}")
    states = {o.state for o in objectives}
    if ObjectiveState.UNKNOWN in states:
        return _Choice(Reason.METRICS_MISSING, "The histograms are malformed, so no moves")
    missed = [o for o in objectives if o.state is ObjectiveState.MISSED]
    if not missed:
        if ObjectiveState.INSUFFICIENT in states:
            return _Choice(Reason.INSUFFICIENT_SAMPLES, "Too few samples in the window to judge")
        if states == {ObjectiveState.IDLE}:
            return _Choice(Reason.IDLE, "No arrivals and nothing in flight")
        return _Choice(Reason.TARGETS_MET, "Every objective is met")
    feasible = [o for o in missed if not o.infeasible]
    if not feasible:
        names = " and ".join(o.metric.value for o in missed)
        return _Choice(Reason.INFEASIBLE, f"{names} missed while nothing queues: no move can help")

    needy = max(feasible, key=lambda o: o.stress or 0.0)
    other = next((o for o in objectives if o.metric is not needy.metric), None)
    need, opposite = (Role.PROMPT, Role.TOKEN) if needy.metric is Metric.TTFT else (Role.TOKEN, Role.PROMPT)
    steps = [(opposite, need), (Role.MIXED, need), (opposite, Role.MIXED)]
    both = other is not None and other.state is ObjectiveState.MISSED
    if both and other is not None:
        if (needy.stress or 0.0) < DOMINANT_STRESS * (other.stress or 0.0):
            return _Choice(
                Reason.BOTH_MISSED,
                f"TTFT and TBT are both missed ({needy.metric.value} {_times(needy.stress)}, "
                f"{other.metric.value} {_times(other.stress)}): the budget is too small for this load, "
                "and a move would trade one for the other",
            )
        steps = [(Role.MIXED, need)]  # the far worse one may have the machine that serves both, never a pure one
    elif reading.state is MetricsState.PARTIAL:
        steps = [(Role.MIXED, need)]  # an unseen router can hide load: no pure pool gives on its word
    elif other is not None and other.state is ObjectiveState.INSUFFICIENT:
        return _Choice(
            Reason.INSUFFICIENT_SAMPLES, f"{needy.metric.value} is missed, but {other.metric.value} has too few samples"
        )
    return _first_step(board, needy, None if both else other, load, steps, reading.state)


def _first_step(
    board: _Board,
    needy: ObjectiveReading,
    donor: ObjectiveReading | None,
    load: Load,
    steps: Sequence[tuple[Role, Role]],
    state: MetricsState,
) -> _Choice:
    wanted = f"{needy.metric.value} {_seconds(needy.observed_seconds)} over its target {_seconds(needy.target_seconds)}"
    refusals: list[tuple[Reason, str]] = []
    for from_role, to_role in steps:
        step = f"{from_role.value} to {to_role.value}"
        able = board.able(from_role, to_role)
        if not able or not board.may_leave(from_role, to_role):
            refusals.append((Reason.NO_DONOR, f"{step}: none to give"))
            continue
        if not board.has_room(to_role):
            refusals.append((Reason.NO_DONOR, f"{step}: {to_role.value} is at its maximum"))
            continue
        comfort = _predicted(donor, load, from_role, to_role)
        if donor is not None and comfort > COMFORTABLE_STRESS:
            refusals.append(
                (
                    Reason.DONOR_NOT_COMFORTABLE,
                    f"{step}: {donor.metric.value} would come to {_times(comfort)} its target",
                )
            )
            continue
        rested = [m for m in able if board.rested(m)]
        if not rested:
            refusals.append((Reason.DWELLING, f"{step}: every machine took its role too recently"))
            continue
        reason = Reason.TTFT_MISSED if needy.metric is Metric.TTFT else Reason.TBT_MISSED
        gives = f", {donor.metric.value} predicted at {_times(comfort)} its target" if donor is not None else ""
        message = f"{wanted}{gives}"
        move = PlannedMove(rested[0].uid, rested[0].name, from_role, to_role, reason, message)
        return _Choice(reason, message, move)
    order = (Reason.DWELLING, Reason.DONOR_NOT_COMFORTABLE, Reason.NO_DONOR)
    reason = next(r for r in order if r in [refusal for refusal, _ in refusals])
    if state is MetricsState.PARTIAL and reason is Reason.NO_DONOR:
        return _Choice(Reason.METRICS_PARTIAL, f"{wanted}; some routers are unseen, so only a mixed machine may move")
    return _Choice(reason, f"{wanted}; {'; '.join(text for _, text in refusals)}")


def _predicted(donor: ObjectiveReading | None, load: Load, from_role: Role, to_role: Role) -> float:
    """The donor's observed/target once the machine is gone. Infinite where its phase would be left with nothing."""
    if donor is None or donor.state is ObjectiveState.IDLE or donor.stress is None:
        return 0.0
    phase = Role.PROMPT if donor.metric is Metric.TTFT else Role.TOKEN
    before = load.prompt_capacity if phase is Role.PROMPT else load.token_capacity
    after = before - _share(from_role, phase) + _share(to_role, phase)
    if after <= 0:
        return math.inf
    if phase is Role.TOKEN:
        # A step is between memory-bound (its time does not depend on the streams in it) and compute-bound (it grows
        # with them): the geometric middle of the two.
        return donor.stress * math.sqrt(max(1.0, load.streams / after) / max(1.0, load.streams / before))
    busy = busy_share(load.requests_before_first_token, before)
    busier = busy * before / after
    if busier > MOST_BUSY_SHARE:
        return math.inf
    return donor.stress * (1 + wait_over_service(busier)) / (1 + wait_over_service(busy))


def _share(role: Role, phase: Role) -> float:
    """How much of a machine of this role serves this phase."""
    return 0.5 if role is Role.MIXED else float(role is phase)


# ------------------------------------------------------------------------------------------------------------ evidence


def _evidence(
    snapshot: Snapshot, objectives: Sequence[ObjectiveReading], load: Load, counts: Counts
) -> tuple[tuple[str, str], ...]:
    reading = snapshot.reading
    lines = [
        ("split", "/".join(str(counts[r]) for r in (Role.PROMPT, Role.TOKEN, Role.MIXED))),
        ("metrics", reading.state.value),
    ]
    for o in objectives:
        share = "" if o.share_under_target is None else f", {o.share_under_target:.0%} under"
        bound = ">= " if o.at_least else ""
        lines.append(
            (
                o.name,
                f"{o.state.value}: {bound}{_seconds(o.observed_seconds)} of {_seconds(o.target_seconds)}{share}, "
                f"{o.samples:.0f} samples",
            )
        )
    if reading.state in (MetricsState.COMPLETE, MetricsState.PARTIAL):
        lines += [
            ("arrivals", f"{reading.arrivals:.0f} in {reading.window_seconds:.0f} s"),
            ("in-flight", f"{reading.in_flight:.0f}"),
            ("oldest-waiting", _seconds(reading.oldest_waiting_seconds)),
            ("before-first-token", f"{load.requests_before_first_token:.2f} requests"),
            ("decoding", f"{load.streams:.2f} streams"),
        ]
    return tuple(lines)


def _seconds(value: float | None) -> str:
    if value is None:
        return "nothing observed"
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


def _times(value: float | None) -> str:
    return "more than any" if value is None or math.isinf(value) else f"{value:.2f}x"


def _trimmed(now: float, records: tuple[MoveRecord, ...], spec: PolicySpec) -> tuple[MoveRecord, ...]:
    """The last ones, and none that still counts: open, or begun inside the window."""
    counting = [
        r for r in records if r.finished_at is None or (not r.repair and now - r.started_at < spec.window_seconds)
    ]
    rest = [r for r in records if r not in counting]
    kept = rest[max(0, len(rest) - max(0, KEPT_RECORDS - len(counting))) :]
    return tuple(r for r in records if r in counting or r in kept)
