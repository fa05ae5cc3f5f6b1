"""Which machine of a pool goes, of those that may: it loses least by going, and leaves every prompt machine a link.

The rule of work is Arrow's (arXiv 2505.11916, algorithm 3): first a machine that already works for the other pool, then
the one with the least of its own work on it. The rule of links is DistServe's (OSDI 2024, algorithm 2) for machines
that exist: KV must leave a prompt machine as fast as it makes it, so a token machine must be near.
"""

import math
from collections.abc import Callable

from poolwright.core.board import Board
from poolwright.core.decision import Snapshot
from poolwright.core.demand import Demand
from poolwright.core.machine import Machine
from poolwright.core.reading import MachineWork
from poolwright_protocol.roles import Role

_NO_WORK = MachineWork()


def may_go(
    board: Board, snapshot: Snapshot, demand: Demand | None, step: tuple[Role, Role], machine_class: str | None = None
) -> list[Machine]:
    """Best first; none where the pool may not give. `machine_class` None: any that may take the role."""
    from_role, to_role = step
    if not board.may_leave(from_role, to_role) or not board.has_room(to_role):
        return []
    able = [m for m in board.able(from_role, to_role) if machine_class in (None, m.machine_class)]
    far = _prompts_without_link(board, snapshot, demand)

    def key(machine: Machine) -> tuple[float, bool, float, float, str]:
        work = snapshot.live.work.get(machine.uid, _NO_WORK) if snapshot.live else _NO_WORK
        return (
            far(machine, to_role),
            not work.lent,
            _own_seconds(machine, from_role, work, snapshot),
            board.since(machine),
            machine.uid,
        )

    return sorted(able, key=key)


def _own_seconds(machine: Machine, role: Role, work: MachineWork, snapshot: Snapshot) -> float:
    """What a machine still has of its own pool's work, in its own seconds; streams at one step each."""
    prices = snapshot.prices.get(machine.machine_class)
    if prices is None:
        return 0.0
    prompts = prices.queue_seconds(work.prompt_tokens, work.prompt_pairs) if role is not Role.TOKEN else 0.0
    streams = prices.decode_seconds(work.streams, work.context_tokens) if role is not Role.PROMPT else 0.0
    return prompts + streams


def _prompts_without_link(board: Board, snapshot: Snapshot, demand: Demand | None) -> Callable[[Machine, Role], float]:
    """How many prompt machines would have no token or mixed machine over a link that holds their KV."""
    links = snapshot.links
    if links is None or demand is None:
        return lambda machine, to_role: 0.0
    prompts, others = board.uids(Role.PROMPT), board.uids(Role.TOKEN, Role.MIXED)
    sizes = [p.kv_bytes_per_token for p in snapshot.prices.values() if p.kv_bytes_per_token]
    rate = demand.offered.prompt_tokens_per_second * max(sizes, default=0) / max(1, len(prompts))
    if links.between_bytes_per_second >= rate:
        return lambda machine, to_role: 0.0
    if links.inside_bytes_per_second < rate:
        return lambda machine, to_role: math.inf
    # Only islands matter: a prompt machine is served where its island holds another that decodes.
    decoding: dict[str, int] = {}
    prompting: dict[str, int] = {}
    for uids, held in ((others, decoding), (prompts, prompting)):
        for uid in uids:
            island = links.domains.get(uid, uid)
            held[island] = held.get(island, 0) + 1
    unserved = sum(n for island, n in prompting.items() if not decoding.get(island))

    def after(machine: Machine, to_role: Role) -> float:
        island = links.domains.get(machine.uid, machine.uid)
        was_prompt = board.role_of(machine.uid) is Role.PROMPT
        prompts_here = prompting.get(island, 0) - was_prompt + (to_role is Role.PROMPT)
        decoding_here = decoding.get(island, 0) - (not was_prompt) + (to_role is not Role.PROMPT)
        before = 0 if decoding.get(island) else prompting.get(island, 0)
        return float(unserved - before + (0 if decoding_here else prompts_here))

    return after
