"""Arrow: stateless machines, requests placed by the cost of the phase, roles flipped when nothing meets the SLO.

Algorithms 1 to 3 of Arrow (Wu et al., arXiv 2505.11916), as athrael-soju/Narwhal @cb74e11 (Apache-2.0) runs them, which
is where recorded choices come from. A role is only which pool the scheduler draws a machine from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.profile import MachineProfile, Profiles, expected_context_tokens
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, placed
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import ClusterView, MachineView, Placement, Policy, RoleChange, Setting, Slo
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role

Cost = tuple[float, float]


class Capability(NamedTuple):
    """Prompt seconds = a·n² + b·n + c; step seconds = slope · resident tokens + floor."""

    a: float
    b: float
    c: float
    slope: float
    floor_seconds: float

    @staticmethod
    def measured(profile: MachineProfile, context_tokens: float) -> "Capability":
        return Capability(*profile.prompt_quadratic(), *profile.decode_line(context_tokens))

    def prompt_seconds(self, tokens: float) -> float:
        return max(0.0, self.a * tokens * tokens + self.b * tokens + self.c)

    def most_tokens(self, tpot_seconds: float) -> float:
        """What may be resident while the TPOT target holds."""
        if self.floor_seconds > tpot_seconds:
            return 0.0
        if self.slope <= 0:
            return math.inf
        return max(0.0, (tpot_seconds - self.floor_seconds) / self.slope)


@dataclass(slots=True)
class Engine:
    """One machine as the algorithms see it. `gap_seconds`: the larger of the last interval's mean and the longest open
    gap; `interval_prompt_seconds`: resident prompt work, averaged over the last interval."""

    uid: str
    role: Role
    capability: Capability
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decodes: int = 0
    decode_tokens: int = 0
    gap_seconds: float = 0.0
    interval_prompt_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Loads are ratios to the target: 1.0 is exactly at it. `cooldown_seconds` holds back flips to decode only."""

    expand: float = 1.0
    shrink: float = 0.5
    cooldown_seconds: float = 10.0
    sustained_ticks: int = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """`flipped`: the machine whose role changed for it, its new role in `Engine.role` already."""

    uid: str
    flipped: str | None = None


@dataclass(slots=True)
class Arrow:
    """The memory of the three algorithms. The start of a run counts as a flip to decode."""

    slo: Slo
    thresholds: Thresholds = field(default_factory=Thresholds)
    may_flip: bool = True  # False: a planner owns the pools
    last_flip_to_decode: float = 0.0
    sustained: int = 0

    def place(
        self, now: float, engines: Sequence[Engine], phase: Role, tokens: int, prior: str | None = None
    ) -> Choice:
        """Algorithm 1. `phase` PROMPT or TOKEN; `prior`: where the prompt was computed; `tokens`: its length so far."""
        for engine in engines:
            if phase is Role.TOKEN and engine.uid == prior and engine.role is Role.TOKEN:
                return Choice(engine.uid)  # nothing to transfer
        candidates = [e for e in engines if e.role is phase] or list(engines)
        costs = {e.uid: self._cost(e, phase, tokens) for e in candidates}
        limit = self.slo.ttft_seconds if phase is Role.PROMPT else 0.0
        able = [e for e in candidates if costs[e.uid][1] <= limit]
        if able:
            return Choice(min(able, key=lambda e: costs[e.uid]).uid)
        if self.may_flip and (phase is Role.TOKEN or self.decode_load(engines) < self.thresholds.shrink):
            flipped = self.flip(now, engines, phase)
            if flipped is not None:
                return Choice(flipped, flipped)
        return Choice(min(candidates, key=lambda e: costs[e.uid]).uid)

    def monitor(self, now: float, engines: Sequence[Engine]) -> str | None:
        """Algorithm 2, every second: a machine flipped to decode, or none."""
        prompt, decode = self.prompt_load(engines), self.decode_load(engines)
        wanted = decode >= self.thresholds.expand or prompt <= self.thresholds.shrink <= decode
        self.sustained = self.sustained + 1 if wanted else 0
        if self.sustained < self.thresholds.sustained_ticks:
            return None
        flipped = self.flip(now, engines, Role.TOKEN)
        if flipped is not None:
            self.sustained = 0
        return flipped

    def flip(self, now: float, engines: Sequence[Engine], to: Role) -> str | None:
        """Algorithm 3: the cheapest of the other pool, never its last. One that still holds work of `to` goes first."""
        if to is Role.TOKEN and now - self.last_flip_to_decode < self.thresholds.cooldown_seconds:
            return None
        pool = [e for e in engines if e.role is not to]
        if len(pool) <= 1:
            return None

        def cost(engine: Engine) -> Cost:
            if engine.role is Role.PROMPT:
                return (0.0 if engine.decodes else 1.0, engine.prompt_seconds)
            return (0.0 if engine.prompt_tokens else 1.0, float(engine.decode_tokens))

        chosen = min(pool, key=cost)
        chosen.role = to
        if to is Role.TOKEN:
            self.last_flip_to_decode = now
        return chosen.uid

    def prompt_load(self, engines: Sequence[Engine]) -> float:
        """Over all that hold prompts, whatever their role: Algorithm 1 may have put them anywhere."""
        doing = [e for e in engines if e.role is Role.PROMPT or e.prompt_tokens]
        if not doing:
            return 0.0
        loads = (max(e.prompt_seconds, e.interval_prompt_seconds) / self.slo.ttft_seconds for e in doing)
        return sum(loads) / len(doing)

    def decode_load(self, engines: Sequence[Engine]) -> float:
        pool = [e for e in engines if e.role is Role.TOKEN]
        return sum(map(self._decode_load, pool)) / len(pool) if pool else 0.0

    def _decode_load(self, engine: Engine) -> float:
        """Gap above the floor of an empty batch, as a share of what the target leaves above it."""
        if not engine.decodes:
            return 0.0
        target, floor = self.slo.tbt_seconds, max(0.0, engine.capability.floor_seconds)
        if floor >= target:
            return engine.gap_seconds / target
        return max(0.0, engine.gap_seconds - floor) / (target - floor)

    def _cost(self, engine: Engine, phase: Role, tokens: int) -> Cost:
        """Work of the other phase first; then seconds to the first token, or tokens above what the target allows."""
        if phase is Role.PROMPT:
            own = engine.capability.prompt_seconds(tokens)
            return (float(engine.decode_tokens), engine.prompt_seconds + own)
        headroom = engine.capability.most_tokens(self.slo.tbt_seconds)
        return (float(engine.prompt_tokens), float(engine.decode_tokens + tokens) - headroom)


class EngineViews:
    """Machines of the simulator as engines of the algorithms, with the interval means that they want."""

    def __init__(self, setting: Setting) -> None:
        self._profiles = Profiles(setting)
        self._context = expected_context_tokens(setting)
        self._capabilities: dict[str, Capability] = {}
        self._queues: dict[str, tuple[Sequence[int], int, float]] = {}
        self._resident: dict[str, tuple[float, float]] = {}  # last value, and its integral over the interval
        self._published: dict[str, float] = {}
        self._looked = self._interval_began = 0.0

    def capability(self, machine: MachineView) -> Capability:
        name = machine.model.name
        if name not in self._capabilities:
            self._capabilities[name] = Capability.measured(self._profiles.of(machine.model), self._context)
        return self._capabilities[name]

    def look(self, now: float, view: ClusterView) -> list[Engine]:
        engines = []
        for machine in view.machines:
            if not machine.ready:
                continue
            engine = Engine(
                machine.uid,
                machine.moving_to or machine.role,  # a flip counts at once, as it does there
                self.capability(machine),
                *self._queue(machine),
                machine.decodes,
                machine.decode_context_tokens,
                max(machine.decode_step_seconds, machine.last_step_seconds if machine.decodes else 0.0),
                self._published.get(machine.uid, 0.0),
            )
            value, integral = self._resident.get(machine.uid, (0.0, 0.0))
            self._resident[machine.uid] = (engine.prompt_seconds, integral + value * (now - self._looked))
            engines.append(engine)
        self._looked = now
        return engines

    def _queue(self, machine: MachineView) -> tuple[int, float]:
        """Tokens and seconds of the prompts; a queue that did not change is not added up again."""
        queue, tokens, seconds = self._queues.get(machine.uid, ((), 0, 0.0))
        if queue is not machine.waiting_prompts:
            queue = machine.waiting_prompts
            tokens, seconds = sum(queue), sum(map(self.capability(machine).prompt_seconds, queue))
            self._queues[machine.uid] = (queue, tokens, seconds)
        return tokens, seconds

    def end_interval(self, now: float) -> None:
        span = now - self._interval_began
        if span > 0:
            self._published = {uid: integral / span for uid, (_, integral) in self._resident.items()}
        self._resident = {uid: (value, 0.0) for uid, (value, _) in self._resident.items()}
        self._interval_began = now


class ArrowRun(QuietRouter):
    """Router and scaler of one run. A flip at the end of a prompt is done with the next request or tick."""

    period_seconds = 1.0

    def __init__(self, setting: Setting, thresholds: Thresholds, may_flip: bool = True) -> None:
        self.engines = EngineViews(setting)
        self.arrow = Arrow(setting.slo, thresholds, may_flip)
        self._due: list[RoleChange] = []

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        engines = self.engines.look(now, view)
        if not engines:
            return NO_MACHINE
        prompt = self.arrow.place(now, engines, Role.PROMPT, arrival.prompt_tokens)
        self._note(prompt, Role.PROMPT)
        # Where it decodes is decided when its prompt ends; until then the cheapest place, without a flip for it.
        asking = replace(self.arrow, may_flip=False)
        token = asking.place(now, engines, Role.TOKEN, arrival.prompt_tokens + 1, prompt.uid)
        machines = {m.uid: m for m in view.machines}
        return placed(machines[prompt.uid], machines[token.uid]), self._flips()

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        engines = self.engines.look(now, view)
        if not engines:
            return None
        prior = placement.prompt_uid or placement.token_uid
        choice = self.arrow.place(now, engines, Role.TOKEN, arrival.prompt_tokens + 1, prior)
        self._note(choice, Role.TOKEN)
        # The simulator's hand-off always goes to another machine: where Arrow would stay, the one bound before decodes.
        return None if choice.uid == placement.prompt_uid else choice.uid

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        flipped = self.arrow.monitor(now, self.engines.look(now, view))
        self.engines.end_interval(now)
        if flipped is not None:
            self._due.append(RoleChange(flipped, Role.TOKEN, "Algorithm 2"))
        return self._flips()

    def _note(self, choice: Choice, role: Role) -> None:
        if choice.flipped is not None:
            self._due.append(RoleChange(choice.flipped, role, "Algorithm 1"))

    def _flips(self) -> list[RoleChange]:
        due, self._due = self._due, []
        return due


def arrow(prompt: int, thresholds: Thresholds | None = None) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    limits = thresholds or Thresholds()
    runs = PerRun(lambda setting: ArrowRun(setting, limits))
    return Policy(
        name="Arrow",
        source="Arrow, arXiv 2505.11916, Algorithms 1-3, as athrael-soju/Narwhal @cb74e11, Apache-2.0",
        router=runs.router,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={
            "expand": limits.expand,
            "shrink": limits.shrink,
            "cooldown_seconds": limits.cooldown_seconds,
            "sustained_ticks": limits.sustained_ticks,
        },
    )
