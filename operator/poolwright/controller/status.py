"""The status of a pool, built from values; whether it says anything new; and the Events its changes are worth.

Pure: no client, no clock. A status that would say the same is never written, and measured values are old news until
they change by more than a tenth.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from poolwright.api import models
from poolwright.api.conditions import ConditionType, Observed, merge
from poolwright.api.models import Condition, ConditionStatus, InferencePool, InferencePoolStatus, PoolRole
from poolwright.api.times import format_time, parse_time
from poolwright.controller.ports import ChildrenState, Event
from poolwright.controller.trouble import NOT_SCHEDULED
from poolwright.core.decision import Decision, MoveRecord, ObjectiveReading, ObjectiveState, Outcome
from poolwright.core.machine import Machine
from poolwright.core.reading import MetricsReading, MetricsState
from poolwright_protocol import names
from poolwright_protocol.roles import Role

# What an engine says as its last words when its model is not there.
MODEL_MISSING = re.compile(r"model path \S+ does not exist")

NOTABLE_SHARE = 0.1
_MESSAGE_CHARACTERS = 1024
_SHORT_CHARACTERS = 253
_MAX_MILLISECONDS = 2**31 - 1

# Conditions about what is measured: they may flicker at a target, and are written no more often than values are.
_MEASURED_CONDITIONS = frozenset({"SLOMet", "Infeasible"})


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a status is made of. `old` is the status read with the pool; None where there is none that parses."""

    pool: InferencePool
    machines: Sequence[Machine]
    children: ChildrenState
    reading: MetricsReading
    decision: Decision
    moves: Sequence[MoveRecord]
    old: InferencePoolStatus | None
    held_until: float | None = None


def parse(raw: Mapping[str, Any]) -> InferencePoolStatus | None:
    """None for a status that does not parse; an empty one is a status."""
    try:
        return InferencePoolStatus.model_validate(dict(raw))
    except ValidationError:
        return None


def build(facts: Facts, now: float) -> InferencePoolStatus:
    old = facts.old or InferencePoolStatus()
    objectives = [_objective(o, old.objectives) for o in facts.decision.objectives]
    finished = [m for m in facts.moves if m.finished_at is not None and m.outcome is not None]
    last = max(finished, key=lambda m: m.finished_at or 0.0, default=None)
    return InferencePoolStatus(
        observed_generation=facts.pool.metadata.generation,
        pools=_pools(facts.decision),
        objectives=objectives,
        metrics=models.MetricsCompleteness(facts.reading.state.value),
        last_move=_last_move(last) if last else old.last_move,
        recent_moves=[_recent_move(m) for m in facts.moves[-models.MAX_RECENT_MOVES :]],
        moves_held_until=format_time(facts.held_until) if facts.held_until and facts.held_until > now else None,
        decisions=_decisions(facts, old.decisions, now),
        conditions=_conditions(facts, objectives, old.conditions, now),
    )


# ------------------------------------------------------------------------------------------------------- is it news?


def must_write(old: InferencePoolStatus | None, new: InferencePoolStatus) -> bool:
    """Whether something happened that a reader is to see at once."""
    return old is None or _without_measured(old) != _without_measured(new)


def may_write(old: InferencePoolStatus | None, new: InferencePoolStatus) -> bool:
    """Whether it says anything new at all."""
    return old != new


def _without_measured(status: InferencePoolStatus) -> InferencePoolStatus:
    conditions = [c.model_copy(update={"message": ""}) for c in status.conditions if c.type not in _MEASURED_CONDITIONS]
    decisions = [d for d in status.decisions if d.moves]
    return status.model_copy(update={"objectives": [], "decisions": decisions, "conditions": conditions})


# ------------------------------------------------------------------------------------------------------------- memory


def recorded_moves(status: InferencePoolStatus) -> tuple[MoveRecord, ...]:
    """`recentMoves` as the policy remembers them. Raises ValueError for a time that is none."""
    records = []
    for move in status.recent_moves:
        started = parse_time(move.started_at)
        ended = None if move.duration_milliseconds is None else started + move.duration_milliseconds / 1000
        records.append(
            MoveRecord(
                uid=move.uid,
                machine=move.machine,
                from_role=move.from_.role if move.from_ else None,
                to_role=move.to.role,
                reason=move.reason,
                started_at=started,
                finished_at=ended,
                outcome=Outcome(move.outcome.value) if move.outcome else None,
                repair=move.repair,
                drained_seconds=move.drained_seconds,
            )
        )
    return tuple(records)


def recorded_hold(status: InferencePoolStatus) -> float | None:
    """Raises ValueError for a time that is none."""
    return None if status.moves_held_until is None else parse_time(status.moves_held_until)


def recorded_counts(status: InferencePoolStatus) -> dict[Role, int] | None:
    if status.pools is None:
        return None
    return {role: getattr(status.pools, role.value).desired for role in Role}


# ------------------------------------------------------------------------------------------------------------- events


def events(old: InferencePoolStatus | None, new: InferencePoolStatus) -> list[Event]:
    """What happened between two statuses, each thing once: read from what is written, so a restart repeats nothing."""
    known = {(m.uid, m.started_at): m.outcome for m in (old.recent_moves if old else ())}
    found: list[Event] = []
    for move in new.recent_moves:
        key = (move.uid, move.started_at)
        step = _step(move)
        if key not in known:
            found.append(Event("Normal", "MoveBegun", f"Began to move machine {move.machine} {step}: {move.reason}"))
        if move.outcome is None or known.get(key) is move.outcome:
            continue
        match move.outcome:
            case models.MoveOutcome.COMPLETED:
                found.append(Event("Normal", "MoveCompleted", f"Moved machine {move.machine} {step}: {move.reason}"))
            case models.MoveOutcome.ROLLED_BACK:
                text = f"Machine {move.machine} did not move {step} in time and was rolled back"
                found.append(Event("Warning", "MoveRolledBack", text))
            case models.MoveOutcome.LOST:
                found.append(Event("Warning", "MoveLost", f"Machine {move.machine} went away while it moved {step}"))
    before = {c.type: c.status for c in (old.conditions if old else ())}
    for condition in new.conditions:
        if before.get(condition.type) is not condition.status and (event := _transition(condition, before)):
            found.append(event)
    return found


# The reason of an Event when a condition becomes True, and when it becomes False. Others pass in silence.
_TRANSITIONS: Mapping[tuple[str, ConditionStatus], tuple[str, bool]] = {
    ("Available", ConditionStatus.TRUE): ("Available", True),
    ("Available", ConditionStatus.FALSE): ("Unavailable", False),
    ("SLOMet", ConditionStatus.TRUE): ("SLOMet", True),
    ("SLOMet", ConditionStatus.FALSE): ("SLOMissed", False),
    ("MetricsAvailable", ConditionStatus.TRUE): ("MetricsAvailable", True),
    ("MetricsAvailable", ConditionStatus.FALSE): ("MetricsUnavailable", False),
    ("MinimumsMet", ConditionStatus.FALSE): ("MinimumUnmet", False),
    ("ModelAvailable", ConditionStatus.FALSE): ("ModelMissing", False),
    ("Infeasible", ConditionStatus.TRUE): ("Infeasible", False),
    ("ChildConflict", ConditionStatus.TRUE): ("ChildConflict", False),
    ("CapacityShortage", ConditionStatus.TRUE): ("CapacityShortage", False),
    ("Paused", ConditionStatus.TRUE): ("Paused", True),
}


_BORN_FALSE = frozenset({"Available", "MetricsAvailable", "MinimumsMet"})


def _transition(condition: Condition, before: Mapping[str, ConditionStatus]) -> Event | None:
    if condition.type not in before and condition.type in _BORN_FALSE:
        return None  # a pool that has just been made has no machine yet, and nothing has been measured
    reason, good = _TRANSITIONS.get((condition.type, condition.status), ("", True))
    return Event("Normal" if good else "Warning", reason, condition.message or condition.reason) if reason else None


# --------------------------------------------------------------------------------------------------------- the pieces


def _pools(decision: Decision) -> models.PoolCounts:
    counts = {
        role.value: models.PoolCount(ready=count.ready, desired=count.desired) for role, count in decision.pools.items()
    }
    return models.PoolCounts(**{role.value: models.PoolCount(ready=0, desired=0) for role in Role} | counts)


def _objective(reading: ObjectiveReading, old: Iterable[models.ObjectiveStatus]) -> models.ObjectiveStatus:
    observed = None if reading.observed_seconds is None else _milliseconds(reading.observed_seconds)
    share = None if reading.share_under_target is None else max(0, min(100, int(reading.share_under_target * 100)))
    new = models.ObjectiveStatus(
        name=reading.name,
        metric=models.Metric(reading.metric.value),
        target_milliseconds=_milliseconds(reading.target_seconds),
        observed_milliseconds=observed,
        share_under_target_percent=share,
        state=models.ObjectiveState(reading.state.value),
    )
    before = next((o for o in old if o.name == new.name), None)
    return before if before is not None and not _notable(before, new) else new


def _notable(old: models.ObjectiveStatus, new: models.ObjectiveStatus) -> bool:
    if (old.metric, old.state, old.target_milliseconds) != (new.metric, new.state, new.target_milliseconds):
        return True
    was, now = old.observed_milliseconds, new.observed_milliseconds
    if was is None or now is None:
        return was is not now
    return abs(now - was) > NOTABLE_SHARE * max(was, 1)


def _recent_move(record: MoveRecord) -> models.RecentMove:
    took = None if record.finished_at is None else max(0, round((record.finished_at - record.started_at) * 1000))
    return models.RecentMove(
        machine=record.machine,
        uid=record.uid,
        from_=PoolRole(record.from_role.title_case) if record.from_role else None,
        to=PoolRole(record.to_role.title_case),
        reason=record.reason[:_SHORT_CHARACTERS],
        repair=record.repair,
        started_at=format_time(record.started_at),
        duration_milliseconds=took,
        drained_seconds=None if record.drained_seconds is None else max(0, round(record.drained_seconds)),
        outcome=models.MoveOutcome(record.outcome.value) if record.outcome else None,
    )


def _last_move(record: MoveRecord) -> models.LastMove:
    move = _recent_move(record)
    summary = f"{move.machine} {_step(move)}, {record.outcome.value if record.outcome else ''}"
    return models.LastMove(
        time=format_time(record.finished_at or record.started_at), summary=summary[:_SHORT_CHARACTERS]
    )


def _step(move: models.RecentMove) -> str:
    return f"{f'from {move.from_.value} ' if move.from_ else ''}to {move.to.value}"


def _decisions(facts: Facts, old: Sequence[models.DecisionStatus], now: float) -> list[models.DecisionStatus]:
    decision = facts.decision
    if not decision.planned:
        return list(old)
    new = models.DecisionStatus(
        time=format_time(now),
        mode=facts.pool.spec.rebalance.mode,
        reason=decision.reason.value,
        message=decision.message[:_MESSAGE_CHARACTERS],
        moves=[
            models.ProposedMove(
                machine=m.machine, from_=PoolRole(m.from_role.title_case), to=PoolRole(m.to_role.title_case)
            )
            for m in (*decision.moves, *decision.advised)
        ][:16],
        evidence=[models.Evidence(name=n, value=v[:_SHORT_CHARACTERS]) for n, v in decision.evidence][:32],
    )
    last = old[-1] if old else None
    if last is not None and (last.mode, last.reason, last.moves) == (new.mode, new.reason, new.moves):
        return list(old)  # the same again, in the light of slightly other numbers
    return [*old, new][-models.MAX_DECISIONS :]


# --------------------------------------------------------------------------------------------------------- conditions

_Said = tuple[ConditionStatus, str, str]  # status, reason, message


def _conditions(
    facts: Facts, objectives: Sequence[models.ObjectiveStatus], old: Iterable[Condition], now: float
) -> list[Condition]:
    unmet = facts.decision.minimum_unmet
    said: dict[ConditionType, _Said] = {
        ConditionType.AVAILABLE: _available(facts),
        ConditionType.PROGRESSING: _progressing(facts),
        ConditionType.SLO_MET: _slo_met(objectives, facts.reading),
        ConditionType.METRICS_AVAILABLE: _metrics_available(facts.reading),
        ConditionType.REBALANCING: _rebalancing(facts),
        ConditionType.MINIMUMS_MET: _is(not unmet, "EveryPoolHasItsMinimum", "MinimumUnmet", unmet),
        ConditionType.INFEASIBLE: _infeasible(facts.decision.objectives),
        ConditionType.MODEL_AVAILABLE: _model_available(facts),
        ConditionType.CHILD_CONFLICT: _child_conflict(facts.children),
        ConditionType.CAPACITY_SHORTAGE: _capacity_shortage(facts.children),
        ConditionType.PAUSED: _is(facts.pool.spec.rebalance.mode is models.Mode.PAUSED, "ModePaused", "ModeNotPaused"),
    }
    observed = [Observed(kind, *words) for kind, words in said.items()]
    return merge(old, observed, facts.pool.metadata.generation, format_time(now, fraction=False))


def _is(true: bool, reason: str, otherwise: str, message: str = "") -> _Said:
    return (ConditionStatus.TRUE, reason, message) if true else (ConditionStatus.FALSE, otherwise, message)


def _available(facts: Facts) -> _Said:
    serving = sum(m.ready and not m.deleting for m in facts.machines)
    if facts.children.routers_ready and serving:
        return ConditionStatus.TRUE, "Serving", ""
    starting = facts.old is None or all(c.type != "Available" or c.reason == "Starting" for c in facts.old.conditions)
    lacking = "machine" if facts.children.routers_ready else "router"
    return ConditionStatus.FALSE, "Starting" if starting else f"NoReady{lacking.capitalize()}", f"No {lacking} is Ready"


def _progressing(facts: Facts) -> _Said:
    if facts.children.problems:
        return ConditionStatus.FALSE, "Blocked", "; ".join(facts.children.problems)
    ready = sum(m.ready and not m.deleting for m in facts.machines)
    wanted = facts.pool.spec.budget
    if ready != wanted or len(facts.machines) != wanted:
        return ConditionStatus.TRUE, "MachinesStarting", f"{ready} of {wanted} machines are Ready"
    if facts.children.routers_ready != facts.children.routers_desired:
        count = f"{facts.children.routers_ready} of {facts.children.routers_desired}"
        return ConditionStatus.TRUE, "RoutersStarting", f"{count} routers are Ready"
    return ConditionStatus.FALSE, "AsSpecified", ""


def _slo_met(objectives: Sequence[models.ObjectiveStatus], reading: MetricsReading) -> _Said:
    states = {o.state for o in objectives}
    message = "; ".join(_observed(o) for o in objectives)
    if models.ObjectiveState.UNKNOWN in states or not states:
        return ConditionStatus.UNKNOWN, "MetricsUnknown", reading.detail
    if models.ObjectiveState.MISSED in states:
        return ConditionStatus.FALSE, "Missed", message
    if models.ObjectiveState.INSUFFICIENT in states:
        return ConditionStatus.UNKNOWN, "InsufficientSamples", message
    if states == {models.ObjectiveState.IDLE}:
        return ConditionStatus.TRUE, "Idle", "No request came and none is in flight"
    return ConditionStatus.TRUE, "Met", message


def _observed(objective: models.ObjectiveStatus) -> str:
    if objective.observed_milliseconds is None:
        return f"{objective.name}: {objective.state.value}"
    seen = f"{objective.observed_milliseconds} ms, target {objective.target_milliseconds} ms"
    return f"{objective.name}: {objective.state.value}, {seen}"


def _metrics_available(reading: MetricsReading) -> _Said:
    usable = reading.state in (MetricsState.COMPLETE, MetricsState.PARTIAL)
    return _is(usable, reading.state.value, reading.state.value, reading.detail)


def _rebalancing(facts: Facts) -> _Said:
    moving = [
        f"{m.name} to {m.move.to_role.title_case}" for m in facts.machines if m.move and m.move.from_role is not None
    ]
    return _is(bool(moving), "Moving", "Settled", ", ".join(moving))


def _infeasible(objectives: Iterable[ObjectiveReading]) -> _Said:
    names = ", ".join(o.name for o in objectives if o.infeasible and o.state is ObjectiveState.MISSED)
    message = f"{names}: missed although nothing queues, so no move can help" if names else ""
    return _is(bool(names), "ServiceTimeAboveTarget", "Feasible", message)


def _model_available(facts: Facts) -> _Said:
    missing = [p for p in facts.children.problems if MODEL_MISSING.search(p)]
    if missing:
        return ConditionStatus.FALSE, "ModelPathMissing", "; ".join(missing)
    if any(m.ready for m in facts.machines):
        return ConditionStatus.TRUE, "Loaded", ""
    return ConditionStatus.UNKNOWN, "NotYetLoaded", ""


def _child_conflict(children: ChildrenState) -> _Said:
    return _is(bool(children.conflicts), "OwnedByAnother", "NoConflict", "; ".join(children.conflicts))


def _capacity_shortage(children: ChildrenState) -> _Said:
    without_place = [p for p in children.problems if NOT_SCHEDULED in p and names.COMPONENT_ENGINE in p]
    return _is(bool(without_place), "MachinesUnschedulable", "EveryMachineHasAPlace", "; ".join(without_place))


# -------------------------------------------------------------------------------------------------------------- times


def _milliseconds(seconds: float) -> int:
    return min(_MAX_MILLISECONDS, max(0, round(min(seconds, _MAX_MILLISECONDS) * 1000)))
