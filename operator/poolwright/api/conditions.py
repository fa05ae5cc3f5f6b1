"""Condition types, the closed list of reasons of each, and the merge by Kubernetes' conventions.

A condition is there from the first visit, Unknown until observed; its transition time changes only with its status.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from poolwright.api.models import Condition, ConditionStatus


class ConditionType(StrEnum):
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    SLO_MET = "SLOMet"
    METRICS_AVAILABLE = "MetricsAvailable"
    REBALANCING = "Rebalancing"
    MINIMUMS_MET = "MinimumsMet"
    INFEASIBLE = "Infeasible"
    MODEL_AVAILABLE = "ModelAvailable"
    CHILD_CONFLICT = "ChildConflict"
    PAUSED = "Paused"
    CAPACITY_SHORTAGE = "CapacityShortage"


NOT_OBSERVED = "NotObserved"

_REASONS: Mapping[ConditionType, frozenset[str]] = {
    # True: clients are served, be it by fewer machines than asked for.
    ConditionType.AVAILABLE: frozenset({"Serving", "Starting", "NoReadyMachine", "NoReadyRouter"}),
    # True: on the way. False: there, or stuck, and then the message says on what.
    ConditionType.PROGRESSING: frozenset(
        {"MachinesStarting", "RoutersStarting", "AsSpecified", "Blocked", "InvalidSpec"}
    ),
    ConditionType.SLO_MET: frozenset({"Met", "Missed", "Idle", "InsufficientSamples", "MetricsUnknown"}),
    ConditionType.METRICS_AVAILABLE: frozenset({"Complete", "Partial", "Stale", "Missing"}),
    ConditionType.REBALANCING: frozenset({"Moving", "Settled"}),
    ConditionType.MINIMUMS_MET: frozenset({"EveryPoolHasItsMinimum", "MinimumUnmet"}),
    ConditionType.INFEASIBLE: frozenset({"ServiceTimeAboveTarget", "Feasible"}),
    ConditionType.MODEL_AVAILABLE: frozenset({"Loaded", "NotYetLoaded", "ModelPathMissing"}),
    ConditionType.CHILD_CONFLICT: frozenset({"OwnedByAnother", "NoConflict"}),
    ConditionType.PAUSED: frozenset({"ModePaused", "ModeNotPaused"}),
    # True: machines that the cluster has no place for. Nothing waits for them: the others are decided on.
    ConditionType.CAPACITY_SHORTAGE: frozenset({"MachinesUnschedulable", "EveryMachineHasAPlace"}),
}


def reasons(kind: ConditionType) -> frozenset[str]:
    """All words that may stand in `reason`."""
    return _REASONS[kind] | {NOT_OBSERVED}


@dataclass(frozen=True, slots=True)
class Observed:
    """What a condition is now; when it became so is the merge's to find."""

    kind: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


def merge(previous: Iterable[Condition], observed: Sequence[Observed], generation: int, now: str) -> list[Condition]:
    """Every type, in fixed order. What is not observed this time stays as it was. `now` is RFC 3339.

    Raises ValueError for a reason outside the closed list.
    """
    before = {c.type: c for c in previous}
    latest = {o.kind: o for o in observed}
    merged = []
    for kind in ConditionType:
        old, new = before.get(kind.value), latest.get(kind)
        if new is None and old is not None:
            merged.append(old)
            continue
        new = new or Observed(kind, ConditionStatus.UNKNOWN, NOT_OBSERVED)
        if new.reason not in reasons(kind):
            raise ValueError(f"{new.reason} is no reason of condition {kind.value}")
        merged.append(
            Condition(
                type=kind.value,
                status=new.status,
                reason=new.reason,
                message=new.message[:2048],
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old and old.status is new.status else now,
            )
        )
    return merged
