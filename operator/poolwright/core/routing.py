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
    NoRoute,
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
    "NoRoute",
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
        return _none(machines)

    def load(machine: Machine) -> Load:
        return loads.get(machine.uid, IDLE)

    def new_tokens(machine: Machine) -> int:
        return max(1, request.prompt_tokens - request.cached_tokens.get(machine.uid, 0))

    def prompt_milliseconds(machine: Machine) -> float:
        """From now to the end of this prompt, were it sent there: so a cached prefix is worth its recompute."""
        at = load(machine)
        return (at.work_tokens + new_tokens(machine)) * at.milliseconds_per_token

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
        one = least(usable, prompt_milliseconds, ESTIMATE_TOLERANCE)
        return Choice(one, None, Route.ONE_SIDED, prompt_milliseconds(one) / 1000)
    prompt = least(prompts, prompt_cost, ESTIMATE_TOLERANCE)
    if prompt.routing_role is Role.MIXED:
        return Choice(
            prompt,
            None,
            Route.PREFIX if prompt.uid in request.cached_tokens else Route.MIXED,
            prompt_cost(prompt) / 1000,
        )
    token = least(tokens, lambda m: load(m).work_tokens)
    short = new_tokens(token) <= request.local_prompt_tokens
    if short and prompt_milliseconds(token) <= prompt_cost(prompt):
        return Choice(token, None, Route.SHORT_PROMPT, prompt_milliseconds(token) / 1000)
    return Choice(
        token, prompt, Route.PREFIX if prompt.uid in request.cached_tokens else Route.SPLIT, prompt_cost(prompt) / 1000
    )


def any_machine(
    machines: Sequence[Machine], loads: Mapping[str, Load], tried: frozenset[str], now: float
) -> Machine | NoMachine:
    """For a call that needs an engine but no inference: the least loaded machine."""
    usable = _usable(machines, tried, loads, now)
    if not usable:
        return _none(machines)
    return min(usable, key=lambda m: (loads.get(m.uid, IDLE).work_tokens, m.uid))


def is_live(machine: Machine) -> bool:
    """Takes new work at all: Ready, with an address, and not on its way out."""
    return machine.ready and machine.host is not None and not machine.deleting


def _usable(machines: Sequence[Machine], tried: frozenset[str], loads: Mapping[str, Load], now: float) -> list[Machine]:
    """The live machines of the best kind there is: sound and settled; else moving; else those that failed last."""
    live = [m for m in machines if is_live(m) and m.uid not in tried]
    sound = [m for m in live if loads.get(m.uid, IDLE).avoid_until <= now]
    return [m for m in sound if m.move is None] or sound or live


def _none(machines: Sequence[Machine]) -> NoMachine:
    live = sum(is_live(m) for m in machines)
    why = NoRoute.ALL_TRIED if live else NoRoute.NONE_READY if machines else NoRoute.NO_MACHINE
    return NoMachine(why, len(machines), live)
