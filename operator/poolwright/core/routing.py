"""Which machine decodes a request, and which one computes its prompt. A pure choice with a reason.

Prompts join the shortest queue, in estimated milliseconds, over prompt and mixed machines; a request whose prompt goes
to a prompt machine decodes where least work is outstanding, over token and mixed machines; a mixed machine keeps what
it is given. Where work has a price and the targets are known, the choice is `priced_routing`'s. It knows machines and
what this router has outstanding on them, never how anything is measured or sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from poolwright.core.machine import Machine
from poolwright.core.priced_routing import choose_priced
from poolwright.core.routes import (
    ESTIMATE_TOLERANCE,
    HANDOFF_MILLISECONDS,
    IDLE,
    LOCAL_PROMPT_TOKENS,
    STREAM_TOKENS,
    Choice,
    Load,
    NoMachine,
    Route,
    RoutingRequest,
    Targets,
)
from poolwright_protocol.roles import Role

__all__ = [
    "ESTIMATE_TOLERANCE",
    "HANDOFF_MILLISECONDS",
    "IDLE",
    "LOCAL_PROMPT_TOKENS",
    "STREAM_TOKENS",
    "Choice",
    "Load",
    "NoMachine",
    "Route",
    "RoutingRequest",
    "Targets",
    "any_machine",
    "choose",
    "is_live",
]


def choose(
    request: RoutingRequest,
    machines: Sequence[Machine],
    loads: Mapping[str, Load],
    now: float,
    targets: Targets | None = None,
) -> Choice | NoMachine:
    """The same arguments give the same choice, whatever the order of `machines`."""
    if targets is not None:
        priced = choose_priced(request, machines, loads, now, targets)
        if priced is not None:
            return priced
    usable = _usable(machines, request.tried, loads, now)
    if not usable:
        return NoMachine(_why_none(machines, request.tried))

    def load(machine: Machine) -> Load:
        return loads.get(machine.uid, IDLE)

    def prompt_milliseconds(machine: Machine) -> float:
        """From now to the end of this prompt, were it sent there."""
        at = load(machine)
        return (at.work_tokens + request.prompt_tokens) * at.milliseconds_per_token

    def prompt_cost(machine: Machine) -> float:
        handoff = HANDOFF_MILLISECONDS if machine.routing_role is Role.PROMPT else 0.0
        return prompt_milliseconds(machine) + handoff

    def least(candidates: Iterable[Machine], cost: Callable[[Machine], float], tolerance: float = 0.0) -> Machine:
        costs = {m: cost(m) for m in candidates}
        enough = min(costs.values()) * (1 + tolerance)
        equal = (m for m, value in costs.items() if value <= enough)
        return min(equal, key=lambda m: (load(m).recent_tokens, costs[m], m.uid))

    prompts = [m for m in usable if m.routing_role is not Role.TOKEN]
    tokens = [m for m in usable if m.routing_role is not Role.PROMPT]
    if not prompts or not tokens:
        return Choice(least(usable, prompt_milliseconds, ESTIMATE_TOLERANCE), None, Route.ONE_SIDED)
    prompt = least(prompts, prompt_cost, ESTIMATE_TOLERANCE)
    if prompt.routing_role is Role.MIXED:
        return Choice(prompt, None, Route.MIXED)
    token = least(tokens, lambda m: load(m).work_tokens)
    short = request.prompt_tokens <= request.local_prompt_tokens
    if short and prompt_milliseconds(token) <= prompt_cost(prompt):
        return Choice(token, None, Route.SHORT_PROMPT)
    return Choice(token, prompt, Route.SPLIT)


def any_machine(
    machines: Sequence[Machine], loads: Mapping[str, Load], tried: frozenset[str], now: float
) -> Machine | NoMachine:
    """For a call that needs an engine but no inference: the least loaded machine."""
    usable = _usable(machines, tried, loads, now)
    if not usable:
        return NoMachine(_why_none(machines, tried))
    return min(usable, key=lambda m: (loads.get(m.uid, IDLE).work_tokens, m.uid))


def is_live(machine: Machine) -> bool:
    """Takes new work at all: Ready, with an address, and not on its way out."""
    return machine.ready and machine.host is not None and not machine.deleting


def _usable(machines: Sequence[Machine], tried: frozenset[str], loads: Mapping[str, Load], now: float) -> list[Machine]:
    """The live machines of the best kind there is: sound and settled; else moving; else those that failed last."""
    live = [m for m in machines if is_live(m) and m.uid not in tried]
    sound = [m for m in live if loads.get(m.uid, IDLE).avoid_until <= now]
    return [m for m in sound if m.move is None] or sound or live


def _why_none(machines: Sequence[Machine], tried: frozenset[str]) -> str:
    live = sum(is_live(m) for m in machines)
    if live:
        return f"none of the {live} Ready machines of the pool took the request"
    if machines:
        return f"none of the {len(machines)} machines of the pool is Ready"
    return "the pool has no machine"
