"""Whether a move is made now, whoever wants it: the modes, an edited spec, dwell, cap and cool-down.

What is wanted comes from one of three places, never from two at once: the user's counts, the offered work where it is
priced (`work_plan`), and latency where it is not (`latency_plan`). Between two plans, the fast loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from poolwright.core import fast_loop
from poolwright.core.board import Board
from poolwright.core.choice import Choice
from poolwright.core.decision import Memory, ObjectiveReading, Outcome, PlannedMove, Reason, Snapshot
from poolwright.core.demand import Demand
from poolwright.core.latency_plan import by_latency
from poolwright.core.objective import Load
from poolwright.core.spec import Mode
from poolwright.core.split import Counts
from poolwright.core.work_plan import HELD_INTERVALS, by_work, makes_worse
from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known when a plan is made. `demand` None: work has no price, or none was offered yet."""

    snapshot: Snapshot
    objectives: Sequence[ObjectiveReading]
    load: Load
    demand: Demand | None


def plan(board: Board, measured: Measured, desired: Counts, past: Memory) -> Choice:
    spec = board.spec
    if spec.mode is Mode.PAUSED:
        return Choice(Reason.PAUSED, "Mode Paused: nobody chooses moves", concluded=True)
    choice = _conform(board)
    if choice is None and spec.mode is Mode.MANUAL:
        choice = _manual(board, desired)
    snapshot, objectives, load = measured.snapshot, measured.objectives, measured.load
    if choice is None and measured.demand is not None:
        choice = by_work(board, snapshot, objectives, load, measured.demand, past, spec.max_moves_per_window)
    elif choice is None:
        choice = by_latency(board, snapshot, objectives, load)
    if choice.helps is not None and not choice.helps_seconds:
        choice = replace(choice, helps_seconds=HELD_INTERVALS * spec.interval_seconds)
    return replace(permitted(board, choice, past), concluded=True)


def between_plans(
    board: Board, snapshot: Snapshot, demand: Demand | None, ticks: Mapping[Role, int], past: Memory
) -> Choice:
    if board.spec.mode not in (Mode.ACTIVE, Mode.ADVISORY):
        return Choice(Reason.NOT_DUE, "The next plan is not due yet")
    loads = fast_loop.measure(board, snapshot)
    choice = fast_loop.by_backlog(board, snapshot, loads, ticks, past)
    if demand is not None and any(makes_worse(demand, board, move) for move in choice.moves):
        return Choice(Reason.DONOR_NOT_COMFORTABLE, f"The offered work would press harder then; {choice.message}")
    return permitted(board, choice, past)


def permitted(board: Board, choice: Choice, past: Memory) -> Choice:
    """The choice with as many of its moves as may be begun now; where none may, the reason."""
    if not choice.moves:
        return choice
    refusal = _held(board, choice, past)
    if refusal is not None:
        return replace(refusal, asks=choice.asks)
    return replace(choice, moves=choice.moves[: board.spec.max_moves_per_window - _made(board, past)])


def _made(board: Board, past: Memory) -> int:
    return sum(1 for r in past.moves if not r.repair and board.now - r.started_at < board.spec.window_seconds)


def _held(board: Board, choice: Choice, past: Memory) -> Choice | None:
    """What forbids any move now, whoever wants it."""
    now, spec = board.now, board.spec
    wanted = f"wanted: {choice.message}"
    if past.held_until is not None and now < past.held_until:
        return Choice(Reason.MEMORY_UNREADABLE, f"The last moves could not be read, so none is made yet; {wanted}")
    open_records = [r for r in past.moves if r.finished_at is None]
    if board.moving() or open_records:
        return Choice(Reason.MOVE_IN_PROGRESS, f"A move is still running; {wanted}")
    ends = [r.finished_at for r in past.moves if r.finished_at is not None and r.outcome is Outcome.ROLLED_BACK]
    if any(now - end < spec.dwell_seconds for end in ends):
        return Choice(Reason.COOLING_DOWN, f"The last move was rolled back; {wanted}")
    made = _made(board, past)
    if made >= spec.max_moves_per_window:
        return Choice(
            Reason.MOVES_CAPPED, f"{made} move(s) in the last {spec.window_seconds:.0f} s, no more allowed; {wanted}"
        )
    if choice.reason in (Reason.TTFT_MISSED, Reason.TBT_MISSED):
        ended = [r.finished_at for r in past.moves if r.finished_at is not None]
        if any(now - end < spec.metrics_window_seconds for end in ended):
            # The window still holds samples from before the last move: acting on them would overshoot.
            return Choice(Reason.SETTLING, f"The metrics window still reaches behind the last move; {wanted}")
    return None


def _conform(board: Board) -> Choice | None:
    """Follow an edit of the spec: a role its class no longer may take, a pool above its maximum."""
    stranded = board.stranding()
    move = min(_conforming(board), key=lambda m: stranded(m.uid, m.to_role), default=None)
    return None if move is None else Choice(move.reason, move.message, (move,))


def _conforming(board: Board) -> Iterator[PlannedMove]:
    """Moves that may be made now and follow the spec, whoever is most out of it first."""
    spec = board.spec
    for role in Role:
        maximum = spec.pools[role].maximum
        above = maximum is not None and board.count(role) > maximum
        for machine in board.settled(role):
            allowed = spec.roles_of(machine.machine_class)
            if (role in allowed and not above) or not board.rested(machine):
                continue
            reason = Reason.ABOVE_MAXIMUM if role in allowed else Reason.ROLE_NOT_ALLOWED
            text = (
                f"{role.value} is above its maximum"
                if reason is Reason.ABOVE_MAXIMUM
                else f"class {machine.machine_class} may no longer be {role.value}"
            )
            for to_role in sorted((r for r in Role if r in allowed and r is not role), key=board.count):
                if board.has_room(to_role) and board.may_leave(role, to_role):
                    yield PlannedMove(machine.uid, machine.name, role, to_role, reason, text)


def _manual(board: Board, desired: Counts) -> Choice:
    short = [r for r in Role if board.count(r) < desired[r]]
    over = [r for r in Role if board.count(r) > desired[r]]
    wanted = ", ".join(f"{r.value} {desired[r]}" for r in Role)
    if not short or not over:
        return Choice(Reason.COUNTS_HELD, f"Mode Manual: {wanted}")
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
        able = board.fewest_stranded(board.able(from_role, to_role), to_role)
        rested = [m for m in able if board.rested(m)]
        if rested:
            move = PlannedMove(rested[0].uid, rested[0].name, from_role, to_role, Reason.MANUAL_COUNTS, message)
            return Choice(Reason.MANUAL_COUNTS, message, (move,))
        resting = resting or bool(able)
    if resting:
        return Choice(Reason.DWELLING, f"Every machine that could move took its role too recently; {message}")
    return Choice(Reason.NO_DONOR, f"No machine may be moved; {message}")
