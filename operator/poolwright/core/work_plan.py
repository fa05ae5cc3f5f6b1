"""The plan where prices are known: the split that the offered work, forecast from arrivals, would press least.

Owns when such a shift is made: above the band's upper edge, by at least the deadband, after two plans that agree (one
where a phase is overloaded), and not out of a pool that a miss has just helped. A miss that is plain in the attainment
overrides the forecast by one machine, chosen and tested as where nothing is priced, unless the offered work would press
clearly harder then.
"""

from collections.abc import Sequence

from poolwright.core.board import Board
from poolwright.core.candidates import Candidates, may_go
from poolwright.core.choice import Choice
from poolwright.core.decision import Memory, ObjectiveReading, ObjectiveState, PlannedMove, Reason, Snapshot
from poolwright.core.demand import DEADBAND, RAISE, Demand, Step
from poolwright.core.latency_plan import by_latency, unusable
from poolwright.core.objective import Load
from poolwright.core.reading import MetricsState
from poolwright_protocol.roles import Role

LEAST_ATTAINMENT = 0.9
HELD_INTERVALS = 5
OVERLOAD = 1.0


def by_work(
    board: Board,
    snapshot: Snapshot,
    objectives: Sequence[ObjectiveReading],
    load: Load,
    demand: Demand,
    past: Memory,
    most_moves: int,
) -> Choice:
    if (blind := unusable(snapshot, objectives)) is not None:
        return blind
    if objectives and all(o.state is ObjectiveState.IDLE for o in objectives):
        return Choice(Reason.IDLE, "No arrivals and nothing in flight")
    missed = [o for o in objectives if o.state is ObjectiveState.MISSED and not o.infeasible]
    plainly = [o for o in missed if o.share_under_target is None or o.share_under_target < LEAST_ATTAINMENT]
    if plainly:
        override = by_latency(board, snapshot, objectives, load)
        if override.moves and not any(makes_worse(demand, board, move) for move in override.moves):
            return override
    if not missed and any(o.state is ObjectiveState.INSUFFICIENT for o in objectives):
        return Choice(Reason.INSUFFICIENT_SAMPLES, "Too few samples in the window to judge")

    counts = board.counts_by_class()
    now = demand.pressure(counts)
    if now.most < RAISE:
        hopeless = [o.metric.value for o in objectives if o.infeasible]
        if hopeless:
            text = f"{' and '.join(hopeless)} cannot be met at any split: it is the service time alone"
            return Choice(Reason.INFEASIBLE, text)
        return Choice(Reason.TARGETS_MET if not missed else Reason.SPLIT_FITS, f"The split holds {now}")
    steps, best = demand.best(counts, max(1, most_moves))
    if snapshot.reading.state is MetricsState.PARTIAL:
        # An unseen router can hide load: no pure pool gives on its word.
        steps = [s for s in steps if s[1] is Role.MIXED]
    if not steps or best.most > now.most - DEADBAND:
        wanted = demand.machines_wanted(counts)
        if now.most >= OVERLOAD and wanted > 0:
            text = f"No split of these machines holds the offered work, about {wanted:.1f} more would; {now}"
            return Choice(Reason.OVERLOADED, text)
        return Choice(Reason.SPLIT_FITS, f"No other split is better by more than the deadband: {now}")
    message = f"the offered work presses {now}; after {len(steps)} move(s) {best}"
    return _shift(board, snapshot, past, steps, message, at_once=now.most >= OVERLOAD)


def _shift(
    board: Board,
    snapshot: Snapshot,
    past: Memory,
    steps: Sequence[Step],
    message: str,
    at_once: bool,
) -> Choice:
    if past.helped is not None and board.now < past.helped_until:
        kept = [s for s in steps if s[1] is not past.helped]
        if not kept:
            text = f"{past.helped.value} was helped out of a miss and keeps its machines; {message}"
            return Choice(Reason.HELD_AFTER_MISS, text)
        steps = kept
    asks = frozenset((a, b) for _, a, b in steps)
    if not at_once and not asks & past.asked:
        return Choice(Reason.CONFIRMING, f"To be confirmed by the next plan: {message}", asks=asks)
    tried = board.copy()
    moves: list[PlannedMove] = []
    found = Candidates()
    for machine_class, from_role, to_role in steps:
        found = may_go(tried, snapshot, (from_role, to_role), machine_class)
        if not found.rested:
            break  # the steps after it were found to help after it
        chosen = found.rested[0]
        moves.append(PlannedMove(chosen.uid, chosen.name, from_role, to_role, Reason.WORK_SHIFTED, message))
        tried.move(chosen.uid, to_role)
    if moves:
        return Choice(Reason.WORK_SHIFTED, message, tuple(moves), asks=asks)
    return Choice(found.refusal, f"No machine may be moved, {found.message}; {message}", asks=asks)


def makes_worse(demand: Demand, board: Board, move: PlannedMove) -> bool:
    """Whether the offered work, by more than forecasts are believed, speaks against a move that something else asks
    for."""
    machine_class = next(m.machine_class for m in board.machines if m.uid == move.uid)
    return demand.is_worse_after(board.counts_by_class(), (machine_class, move.from_role, move.to_role))
