"""Which machine of a pool goes, of those that may: it loses least by going.

The rule is Arrow's (arXiv 2505.11916, algorithm 3): first a machine that already works for the other pool, then the one
with the least of its own work on it. Nobody goes who would leave a prompt machine without a way for its KV.
"""

from dataclasses import dataclass

from poolwright.core.board import Board
from poolwright.core.decision import Reason, Snapshot
from poolwright.core.machine import Machine
from poolwright.core.reading import MachineWork
from poolwright_protocol.roles import Role

_NO_WORK = MachineWork()


@dataclass(frozen=True, slots=True)
class Candidates:
    """`rested`: best first, who may go now. Where there is none: `refusal`, and in words what is in the way."""

    rested: tuple[Machine, ...] = ()
    refusal: Reason = Reason.NO_DONOR
    message: str = ""


def may_go(board: Board, snapshot: Snapshot, step: tuple[Role, Role], machine_class: str | None = None) -> Candidates:
    """`machine_class` None: any that may take the role."""
    from_role, to_role = step
    if not board.may_leave(from_role, to_role):
        return Candidates(message="none to give")
    if not board.has_room(to_role):
        return Candidates(message=f"{to_role.value} is at its maximum")
    able = [m for m in board.able(from_role, to_role) if machine_class in (None, m.machine_class)]
    if not able:
        return Candidates(message="none to give")
    stranded = board.stranding()
    linked = [m for m in able if not stranded(m.uid, to_role)]
    if not linked:
        text = "each would leave a prompt machine without a token machine over a link that holds its KV"
        return Candidates(refusal=Reason.NO_LINK, message=text)
    rested = [m for m in linked if board.rested(m)]
    if not rested:
        return Candidates(refusal=Reason.DWELLING, message="every machine that could move took its role too recently")

    def key(machine: Machine) -> tuple[bool, float, float, str]:
        work = snapshot.live.work.get(machine.uid, _NO_WORK) if snapshot.live else _NO_WORK
        return not work.lent, _own_seconds(machine, from_role, work, snapshot), board.since(machine), machine.uid

    return Candidates(tuple(sorted(rested, key=key)))


def _own_seconds(machine: Machine, role: Role, work: MachineWork, snapshot: Snapshot) -> float:
    """What a machine still has of its own pool's work, in its own seconds; streams at one step each."""
    prices = snapshot.prices.get(machine.machine_class)
    if prices is None:
        return 0.0
    prompts = prices.queue_seconds(work.prompt_tokens, work.prompt_pairs) if role is not Role.TOKEN else 0.0
    streams = prices.decode_seconds(work.streams, work.context_tokens) if role is not Role.PROMPT else 0.0
    return prompts + streams
