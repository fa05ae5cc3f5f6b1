"""Between two plans: one machine to a pool that is behind by what routers and engines say now. It only ever grows.

The triggers are Arrow's (arXiv 2505.11916, algorithm 2): a pool is behind where the work on its machines, priced, fills
its objective, on three looks in a row; the giver must hold its own with one machine fewer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from poolwright.core.board import Board
from poolwright.core.candidates import Candidates, may_go
from poolwright.core.choice import Choice
from poolwright.core.decision import Memory, Outcome, PlannedMove, Reason, Snapshot
from poolwright.core.reading import MachineWork
from poolwright.core.spec import Metric
from poolwright_protocol.roles import Role

BEHIND = 1.0
HOLDS = 0.8  # what the giver's load may come to without the machine
TICKS = 3
PROMPT_COOL_DOWN_SECONDS = 10.0  # between two machines taken from the prompt pool; token machines give ungated
_NO_WORK = MachineWork()


@dataclass(frozen=True, slots=True)
class Loads:
    """Work outstanding over what the objective allows, averaged over the machines of a pool; 1 is full."""

    prompt: float
    token: float


def measure(board: Board, snapshot: Snapshot) -> Loads | None:
    """None where nothing is known."""
    live, spec = snapshot.live, board.spec
    if live is None:
        return None
    ttft, tbt = spec.objective(Metric.TTFT), spec.objective(Metric.TBT)
    prompts: list[float] = []
    tokens: list[float] = []
    for m in board.machines:
        prices, work, role = snapshot.prices.get(m.machine_class), live.work.get(m.uid, _NO_WORK), board.role_of(m.uid)
        if prices is None or role is None:
            continue
        if ttft is not None and role is not Role.TOKEN:
            prompts.append(prices.queue_seconds(work.prompt_tokens, work.prompt_pairs) / ttft.target_seconds)
        if tbt is not None and role is not Role.PROMPT:
            floor = prices.decode_seconds(1, 0)
            room = tbt.target_seconds - floor
            step = prices.decode_seconds(work.streams, work.context_tokens) - floor
            tokens.append(max(0.0, step / room) if room > 0 else 0.0)
    return Loads(_mean(prompts), _mean(tokens))


def count_ticks(loads: Loads | None, past: Memory) -> Mapping[Role, int]:
    """Looks in a row, at least one interval apart, that saw a pool behind while the other was not."""
    if loads is None:
        return {}
    behind = {Role.PROMPT: loads.prompt >= BEHIND, Role.TOKEN: loads.token >= BEHIND}
    if all(behind.values()):
        return {}
    return {role: past.backlogged.get(role, 0) + 1 for role, is_behind in behind.items() if is_behind}


def by_backlog(
    board: Board, snapshot: Snapshot, loads: Loads | None, ticks: Mapping[Role, int], past: Memory
) -> Choice:
    nothing = Choice(Reason.NOT_DUE, "The next plan is not due yet")
    ready = [role for role, count in ticks.items() if count >= TICKS]
    if loads is None or not ready:
        return nothing
    need = ready[0]
    giver = Role.TOKEN if need is Role.PROMPT else Role.PROMPT
    load = loads.token if giver is Role.TOKEN else loads.prompt
    reason = Reason.PROMPT_BACKLOG if need is Role.PROMPT else Reason.TOKEN_BACKLOG
    text = f"work on {need.value} machines is {max(loads.prompt, loads.token):.2f} of what the target allows"
    if giver is Role.PROMPT and _cooling(board.now, past):
        return Choice(Reason.COOLING_DOWN, f"A prompt machine was taken a moment ago; {text}")
    refusals: list[Candidates] = []
    for from_role in (Role.MIXED, giver) if board.count(giver) < board.count(Role.MIXED) else (giver, Role.MIXED):
        n = board.count(from_role)
        if from_role is giver and (n < 2 or load * n / (n - 1) > HOLDS):
            continue
        if from_role is Role.MIXED and not board.count(giver):
            continue  # a machine of one phase is of no use without one of the other: the plan makes pairs
        found = may_go(board, snapshot, (from_role, need))
        if found.rested:
            chosen = found.rested[0]
            move = PlannedMove(chosen.uid, chosen.name, from_role, need, reason, text)
            return Choice(reason, text, (move,), helps=need, helps_seconds=board.spec.interval_seconds)
        if found.refusal is not Reason.NO_DONOR:
            refusals.append(found)
    if refusals:
        return Choice(refusals[0].refusal, f"No machine may be moved, {refusals[0].message}; {text}")
    return Choice(Reason.DONOR_NOT_COMFORTABLE, f"No pool would hold its own with one machine fewer; {text}")


def _cooling(now: float, past: Memory) -> bool:
    return any(
        r.from_role is Role.PROMPT
        and r.outcome is not Outcome.ROLLED_BACK
        and 0 <= now - r.started_at < PROMPT_COOL_DOWN_SECONDS
        for r in past.moves
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
