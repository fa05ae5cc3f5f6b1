"""Narwhal's planner: pool sizes from offered prompt work and resident decodes, moved at once, over Arrow's placement.

athrael-soju/Narwhal @cb74e11 (Apache-2.0), `planner.py`: a plan every 60 s over a window of 120 s, and every 5 s a step
towards a pool that is short while the other has too many. While it owns the pools Arrow flips nothing itself. Narwhal
reactive is Arrow itself (`arrow`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from poolwright.core.percentile import share_under
from poolwright.sim.baselines.arrow import ArrowRun, Thresholds
from poolwright.sim.baselines.pools import moves_to, prompt_count, split_roles
from poolwright.sim.baselines.routers import Routed, usable
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Setting
from poolwright.sim.request import Arrival

MONITOR_PERIOD_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """Narwhal's defaults."""

    interval_seconds: float = 60.0
    window_seconds: float = 120.0
    confirmations: int = 2
    deadband_machines: float = 0.5
    utilization: float = 0.8
    least_arrivals: int = 10
    least_demand: float = 0.5
    fast_step_seconds: float = 5.0
    attainment_floor: float = 0.9
    hold_intervals: int = 5


@dataclass(frozen=True, slots=True)
class Attained:
    """Shares of the requests that ended in the window, `count` of them, within the TTFT and within the TPOT target."""

    count: int
    ttft: float
    tpot: float


@dataclass(slots=True)
class Planner:
    """Times from the start of a run. Demands are in machines."""

    knobs: Knobs = field(default_factory=Knobs)
    next_plan: float = 60.0
    last_fast: float = 0.0
    _prompt_work: list[tuple[float, float]] = field(default_factory=list)  # (when, prompt seconds) of each arrival
    _residency: list[tuple[float, float]] = field(default_factory=list)  # (when, machines that the decodes fill)
    _least_prompt: int = 0
    _least_token: int = 0
    _hold_until: float = 0.0
    _pending: int | None = None
    _confirmed: int = 0

    def arrived(self, now: float, prompt_seconds: float) -> None:
        self._prompt_work.append((now, prompt_seconds))

    def sampled(self, now: float, decode_machines: float) -> None:
        self._residency.append((now, decode_machines))

    def fast(self, now: float, prompt: int, machines: int) -> int | None:
        """One machine towards a genuine deficit, if the other pool has more than it needs."""
        if now - self.last_fast < self.knobs.fast_step_seconds or len(self._prompt_work) < self.knobs.least_arrivals:
            return None
        need_prompt, need_token = map(self._machines, self._demand(now))
        token = machines - prompt
        if prompt < min(need_prompt, machines - 1) and token > max(need_token, 1):
            return prompt + 1
        if token < min(need_token, machines - 1) and prompt > max(need_prompt, 1):
            return prompt - 1
        return None

    def plan(self, now: float, prompt: int, machines: int, attained: Attained | None) -> int | None:
        """Prompt machines to have; None: nothing to do, or the interval is not over."""
        if now < self.next_plan:
            return None
        self.next_plan = now + self.knobs.interval_seconds
        return self._target(now, prompt, machines, attained)

    def _demand(self, now: float) -> tuple[float, float]:
        since = now - self.knobs.window_seconds
        self._prompt_work = [(at, seconds) for at, seconds in self._prompt_work if at >= since]
        self._residency = [(at, value) for at, value in self._residency if at >= since]
        span = min(self.knobs.window_seconds, now) or 1.0
        prompt = sum(seconds for _, seconds in self._prompt_work) / span
        token = sum(value for _, value in self._residency) / len(self._residency) if self._residency else 0.0
        return prompt, token

    def _machines(self, demand: float) -> int:
        return math.ceil(demand / self.knobs.utilization)

    def _target(self, now: float, current: int, machines: int, attained: Attained | None) -> int | None:
        prompt, token = self._demand(now)
        if len(self._prompt_work) < self.knobs.least_arrivals or prompt + token < self.knobs.least_demand:
            return self._settled(None)
        missed = self._missed(now, current, machines, attained)
        if missed is not None:
            return self._settled(missed)
        need_prompt, need_token = self._machines(prompt), self._machines(token)
        if need_prompt + need_token > machines:
            need_prompt = max(1, round(need_prompt * machines / (need_prompt + need_token)))
        want = max(1, min(machines - 1, need_prompt))
        if now < self._hold_until:
            if self._least_prompt:
                want = max(want, self._least_prompt)
            if self._least_token:
                want = min(want, machines - self._least_token)
        if want == current:
            return self._settled(None)
        band, share = self.knobs.deadband_machines, self.knobs.utilization
        short_of_prompt = prompt / share > current + band and want > current
        short_of_token = token / share > machines - current + band and want < current
        if short_of_prompt or short_of_token:
            return self._settled(want)
        # A mere rebalance waits until as many plans in a row have said the same.
        if want != self._pending:
            self._pending, self._confirmed = want, 1
            return None
        self._confirmed += 1
        return self._settled(want) if self._confirmed >= self.knobs.confirmations else None

    def _missed(self, now: float, current: int, machines: int, attained: Attained | None) -> int | None:
        """One machine more for the phase whose target is missed; outcomes outrank the model, and hold for a while."""
        floor = self.knobs.attainment_floor
        if floor <= 0 or attained is None or attained.count < self.knobs.least_arrivals:
            return None
        if attained.ttft < floor and attained.ttft <= attained.tpot and current < machines - 1:
            self._least_prompt, self._least_token = current + 1, 0
        elif attained.tpot < floor and attained.tpot < attained.ttft and machines - current < machines - 1:
            self._least_prompt, self._least_token = 0, machines - current + 1
        else:
            return None
        self._hold_until = now + self.knobs.hold_intervals * self.knobs.interval_seconds
        return self._least_prompt or machines - self._least_token

    def _settled(self, answer: int | None) -> int | None:
        self._pending, self._confirmed = None, 0
        return answer


class NarwhalRun(ArrowRun):
    """The planner decides the sizes; Arrow places, and flips nothing."""

    period_seconds = MONITOR_PERIOD_SECONDS

    def __init__(self, setting: Setting, knobs: Knobs) -> None:
        super().__init__(setting, Thresholds(), may_flip=False)
        self._setting = setting
        self._knobs = knobs
        self._planner = Planner(knobs, next_plan=knobs.interval_seconds)
        self._arrived: dict[int, float] = {}
        self._in_time: list[tuple[float, bool]] = []

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if machines:
            seconds = (self.engines.capability(m).prompt_seconds(arrival.prompt_tokens) for m in machines)
            self._planner.arrived(now, sum(seconds) / len(machines))
        self._arrived[arrival.number] = now
        return super().route(now, arrival, view)

    def first_token(self, now: float, number: int) -> None:
        began = self._arrived.pop(number, None)
        if began is not None:
            self._in_time.append((now, now - began <= self._setting.slo.ttft_seconds))

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        machines = usable(view)
        if len(machines) < 2:
            return []
        target = self._setting.slo.tbt_seconds
        most = sum(self.engines.capability(m).most_tokens(target) for m in machines) / len(machines)
        if most > 0:
            self._planner.sampled(now, sum(m.decode_context_tokens for m in machines) / most)
        prompt, total = prompt_count(view), len(view.machines)
        step = self._planner.fast(now, prompt, total)
        if step is not None and moves_to(view, step, "step"):
            self._planner.last_fast = now
            prompt = step
        plan = self._planner.plan(now, prompt, total, self._attained(now, view))
        return moves_to(view, prompt if plan is None else plan, "step" if plan is None else "plan")

    def _attained(self, now: float, view: ClusterView) -> Attained | None:
        """TTFT of each request; TPOT as the share of gaps within the target, as routers know no more."""
        window = self._knobs.window_seconds
        self._in_time = [(at, good) for at, good in self._in_time if at >= now - window]
        share = share_under(view.reading(window).tbt, self._setting.slo.tbt_seconds)
        if not self._in_time or share is None:
            return None
        count = len(self._in_time)
        return Attained(count, sum(good for _, good in self._in_time) / count, share)


def narwhal(prompt: int, knobs: Knobs | None = None) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    chosen = knobs or Knobs()
    runs = PerRun(lambda setting: NarwhalRun(setting, chosen))
    return Policy(
        name="Narwhal planner",
        source="athrael-soju/Narwhal @cb74e11, Apache-2.0, planner.py",
        router=runs.router,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={
            "interval_seconds": chosen.interval_seconds,
            "window_seconds": chosen.window_seconds,
            "utilization": chosen.utilization,
            "attainment_floor": chosen.attainment_floor,
        },
    )
