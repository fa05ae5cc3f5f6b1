"""Which machine decodes a request, and which one computes its prompt. A pure choice with a reason.

Prompts join the shortest queue, in estimated milliseconds, over prompt and mixed machines; a request whose prompt goes
to a prompt machine decodes where least work is outstanding, over token and mixed machines; a mixed machine keeps what
it is given. It knows machines and what this router has outstanding on them, never how anything is measured or sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from poolwright.core.machine import Machine
from poolwright_protocol.roles import Role

# One decoding stream slows a prompt on the same machine about as much as this many more prompt tokens would.
STREAM_TOKENS = 16
# Equal machines measure this differently from one request to the next, so estimates this close count as equal.
ESTIMATE_TOLERANCE = 0.2
# What handing the KV over costs a request beside computing its prompt where it decodes.
HANDOFF_MILLISECONDS = 5.0
# Prompts up to this long may stay on the token machine: about one decode step's work, so nobody's gap grows much.
LOCAL_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """What this router has outstanding on one machine, and what it knows of its speed.

    `avoid_until` is the breaker: until then (the caller's clock) the machine is used only if no other can be.
    `recent_tokens` decays; it only breaks ties, so that idle machines take turns.
    """

    prompt_tokens: int = 0  # of prompts sent there to be computed, first token not seen yet
    streams: int = 0  # requests that decode there, or will
    milliseconds_per_token: float = 1.0
    recent_tokens: float = 0.0
    avoid_until: float = float("-inf")

    @property
    def work_tokens(self) -> int:
        return self.prompt_tokens + self.streams * STREAM_TOKENS


IDLE = Load()


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """`tried` holds uids that failed this request already; they are not chosen again."""

    prompt_tokens: int
    tried: frozenset[str] = frozenset()
    local_prompt_tokens: int = LOCAL_PROMPT_TOKENS


class Route(StrEnum):
    """Why a choice is as it is."""

    SPLIT = "split"
    MIXED = "a mixed machine is the cheapest"
    SHORT_PROMPT = "a short prompt is cheaper where it decodes"
    ONE_SIDED = "no machine for one of the phases, so any machine does both"


@dataclass(frozen=True, slots=True)
class Choice:
    """`prompt` None: the decoding machine computes the prompt too."""

    token: Machine
    prompt: Machine | None
    route: Route


@dataclass(frozen=True, slots=True)
class NoMachine:
    reason: str


def choose(
    request: RoutingRequest, machines: Sequence[Machine], loads: Mapping[str, Load], now: float
) -> Choice | NoMachine:
    """The same arguments give the same choice, whatever the order of `machines`."""
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
