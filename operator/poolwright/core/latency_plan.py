"""What missed objectives ask for, by latency alone: where no prices of work are known."""

import math
from collections.abc import Sequence

from poolwright.core.board import Board
from poolwright.core.candidates import may_go
from poolwright.core.choice import Choice
from poolwright.core.decision import ObjectiveReading, ObjectiveState, PlannedMove, Reason, Snapshot
from poolwright.core.evidence import seconds_text, times_text
from poolwright.core.objective import Load, busy_share, wait_over_service
from poolwright.core.reading import MetricsState
from poolwright.core.spec import Metric
from poolwright_protocol.roles import Role

COMFORTABLE_STRESS = 0.8  # a donor's predicted observed/target, at most
MOST_BUSY_SHARE = 0.8  # a donor's predicted busy share, at most
DOMINANT_STRESS = 2.0  # with both objectives missed, how much worse one must be before a mixed machine goes there


def unusable(snapshot: Snapshot, objectives: Sequence[ObjectiveReading]) -> Choice | None:
    """Why nothing may be concluded from this reading, if so."""
    reading = snapshot.reading
    if reading.state is MetricsState.MISSING:
        return Choice(Reason.METRICS_MISSING, f"No metrics, so no moves: {reading.detail}")
    if reading.state is MetricsState.STALE:
        return Choice(Reason.METRICS_STALE, f"No fresh metrics, so no moves: {reading.detail}")
    if any(o.state is ObjectiveState.UNKNOWN for o in objectives):
        return Choice(Reason.METRICS_MISSING, "The histograms are malformed, so no moves")
    return None


def by_latency(board: Board, snapshot: Snapshot, objectives: Sequence[ObjectiveReading], load: Load) -> Choice:
    if (blind := unusable(snapshot, objectives)) is not None:
        return blind
    reading = snapshot.reading
    states = {o.state for o in objectives}
    missed = [o for o in objectives if o.state is ObjectiveState.MISSED]
    if not missed:
        if ObjectiveState.INSUFFICIENT in states:
            return Choice(Reason.INSUFFICIENT_SAMPLES, "Too few samples in the window to judge")
        if states == {ObjectiveState.IDLE}:
            return Choice(Reason.IDLE, "No arrivals and nothing in flight")
        return Choice(Reason.TARGETS_MET, "Every objective is met")
    feasible = [o for o in missed if not o.infeasible]
    if not feasible:
        names = " and ".join(o.metric.value for o in missed)
        return Choice(Reason.INFEASIBLE, f"{names} missed while nothing queues: no move can help")

    needy = max(feasible, key=lambda o: o.stress or 0.0)
    other = next((o for o in objectives if o.metric is not needy.metric), None)
    need, opposite = (Role.PROMPT, Role.TOKEN) if needy.metric is Metric.TTFT else (Role.TOKEN, Role.PROMPT)
    steps = [(opposite, need), (Role.MIXED, need), (opposite, Role.MIXED)]
    both = other is not None and other.state is ObjectiveState.MISSED
    if both and other is not None:
        if (needy.stress or 0.0) < DOMINANT_STRESS * (other.stress or 0.0):
            return Choice(
                Reason.BOTH_MISSED,
                f"TTFT and TBT are both missed ({needy.metric.value} {times_text(needy.stress)}, "
                f"{other.metric.value} {times_text(other.stress)}): the budget is too small for this load, "
                "and a move would trade one for the other",
            )
        steps = [(Role.MIXED, need)]  # the far worse one may have the machine that serves both, never a pure one
    elif reading.state is MetricsState.PARTIAL:
        steps = [(Role.MIXED, need)]  # an unseen router can hide load: no pure pool gives on its word
    elif other is not None and other.state is ObjectiveState.INSUFFICIENT:
        return Choice(
            Reason.INSUFFICIENT_SAMPLES, f"{needy.metric.value} is missed, but {other.metric.value} has too few samples"
        )
    return _first_step(board, snapshot, needy, None if both else other, load, steps)


def _first_step(
    board: Board,
    snapshot: Snapshot,
    needy: ObjectiveReading,
    donor: ObjectiveReading | None,
    load: Load,
    steps: Sequence[tuple[Role, Role]],
) -> Choice:
    observed, target = seconds_text(needy.observed_seconds), seconds_text(needy.target_seconds)
    wanted = f"{needy.metric.value} {observed} over its target {target}"
    refusals: list[tuple[Reason, str]] = []
    for from_role, to_role in steps:
        step = f"{from_role.value} to {to_role.value}"
        found = may_go(board, snapshot, (from_role, to_role))
        if not found.rested and found.refusal is not Reason.DWELLING:
            refusals.append((found.refusal, f"{step}: {found.message}"))
            continue
        comfort = _predicted(donor, load, from_role, to_role)
        if donor is not None and comfort > COMFORTABLE_STRESS:
            refusals.append(
                (
                    Reason.DONOR_NOT_COMFORTABLE,
                    f"{step}: {donor.metric.value} would come to {times_text(comfort)} its target",
                )
            )
            continue
        if not found.rested:
            refusals.append((found.refusal, f"{step}: {found.message}"))
            continue
        reason = Reason.TTFT_MISSED if needy.metric is Metric.TTFT else Reason.TBT_MISSED
        gives = f", {donor.metric.value} predicted at {times_text(comfort)} its target" if donor is not None else ""
        message = f"{wanted}{gives}"
        move = PlannedMove(found.rested[0].uid, found.rested[0].name, from_role, to_role, reason, message)
        return Choice(reason, message, (move,), helps=Role.PROMPT if needy.metric is Metric.TTFT else Role.TOKEN)
    order = (Reason.DWELLING, Reason.DONOR_NOT_COMFORTABLE, Reason.NO_LINK, Reason.NO_DONOR)
    reason = next(r for r in order if r in [refusal for refusal, _ in refusals])
    if snapshot.reading.state is MetricsState.PARTIAL and reason is Reason.NO_DONOR:
        return Choice(Reason.METRICS_PARTIAL, f"{wanted}; some routers are unseen, so only a mixed machine may move")
    return Choice(reason, f"{wanted}; {'; '.join(text for _, text in refusals)}")


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
