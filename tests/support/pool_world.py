"""A pool in memory, for tests of the policy: does what a decision says, with the patches of the real move."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from poolwright.core import machine as machines
from poolwright.core.decide import decide
from poolwright.core.decision import MOVE_DEADLINE_SECONDS, Decision, Memory, Snapshot
from poolwright.core.links import Links, Place
from poolwright.core.machine import Machine, MachinePatch
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import HistogramIncrease, LiveReading, MetricsReading, MetricsState
from poolwright.core.spec import MachineClass, Metric, Objective, PolicySpec, PoolBounds
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

BOUNDS = (*LATENCY_BUCKETS_SECONDS, math.inf)
START = 1_000_000.0
P, T, M = Role.PROMPT, Role.TOKEN, Role.MIXED

# A step takes 10 ms, 0.1 ms for each token and 1 ms for a million tokens of context.
PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-9), mixed=StepCost(0.01, 1e-4, 1e-9)),
    step_tokens=2048,
    kv_capacity_tokens=1_000_000,
    kv_bytes_per_token=100_000,
)


def histogram(seconds: float, count: float) -> HistogramIncrease:
    """`count` samples, all of this latency."""
    return HistogramIncrease(BOUNDS, tuple(count if seconds <= bound else 0.0 for bound in BOUNDS))


def reading(
    ttft: float = 0.3,
    tbt: float = 0.02,
    *,
    window: float = 20.0,
    ttft_count: float = 200,
    tbt_count: float = 2000,
    state: MetricsState = MetricsState.COMPLETE,
    arrivals: float = 200,
    in_flight: float = 5,
    oldest_waiting: float = 0.0,
    prompt_tokens: float | None = None,
) -> MetricsReading:
    """200 requests in 20 s. At 0.3 s TTFT, 3 wait for a first token; at 0.02 s TBT, 2 streams decode. Prompts have 500
    tokens, answers eleven."""
    return MetricsReading(
        state=state,
        window_seconds=window,
        ttft=histogram(ttft, ttft_count),
        tbt=histogram(tbt, tbt_count),
        arrivals=arrivals,
        prompt_tokens=arrivals * 500 if prompt_tokens is None else prompt_tokens,
        in_flight=in_flight,
        oldest_waiting_seconds=oldest_waiting,
        detail="the reason",
    )


def spec(
    replicas: int = 3,
    *,
    pools: Mapping[Role, PoolBounds] | None = None,
    classes: tuple[MachineClass, ...] | None = None,
    **changes: object,
) -> PolicySpec:
    """TTFT P90 1 s, TBT P90 60 ms; prompt and token keep one machine."""
    base = PolicySpec(
        objectives=(Objective("ttft", Metric.TTFT, 90, 1.0), Objective("tbt", Metric.TBT, 90, 0.06)),
        classes=classes or (MachineClass("c", replicas),),
        pools={P: PoolBounds(1), T: PoolBounds(1), M: PoolBounds(0), **(pools or {})},
        interval_seconds=5.0,
        metrics_window_seconds=20.0,
        dwell_seconds=10.0,
        max_moves_per_window=2,
        window_seconds=300.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def pool(*roles: Role | None, machine_class: str = "c", since: float = START - 1000) -> tuple[Machine, ...]:
    return tuple(
        Machine(
            name=f"m{i}",
            uid=f"u{i}",
            machine_class=machine_class,
            host="127.0.0.1",
            ready=True,
            role=role,
            role_epoch=0 if role is None else 1,
            role_since=None if role is None else since,
            move=None,
            created_at=since,
        )
        for i, role in enumerate(roles)
    )


def islands(of: Mapping[str, str], inside: float | None, outside: float | None, kv_bytes: int | None = None) -> Links:
    """`of`: the island of each machine; bytes a second inside and between."""
    return Links({uid: Place(island, inside, outside) for uid, island in of.items()}, kv_bytes)


def split(ms: tuple[Machine, ...]) -> tuple[int, int, int]:
    """Prompt, token, mixed; a machine in move counts where it goes."""
    p, t, m = (sum(1 for x in ms if x.effective_role is role) for role in (P, T, M))
    return p, t, m


@dataclass
class World:
    spec: PolicySpec
    machines: tuple[Machine, ...]
    now: float = START
    memory: Memory = field(default_factory=Memory)
    begun: list[tuple[float, str, Role, Role, bool]] = field(default_factory=list)  # when, uid, from, to, repair
    prices: Mapping[str, MachinePrices] = field(default_factory=dict)
    links: Links | None = None

    def decide(self, seen: MetricsReading, live: LiveReading | None = None) -> Decision:
        """Decide, begin what was decided, finish nothing yet."""
        snapshot = Snapshot(self.machines, seen, self.prices, live, self.links)
        decision, self.memory = decide(self.now, snapshot, self.spec, self.memory)
        for birth in decision.births:
            self._patch(machines.begin(self._of(birth.uid), birth.to_role, self.now, MOVE_DEADLINE_SECONDS, "birth"))
        for move in decision.moves:
            self.begun.append((self.now, move.uid, move.from_role, move.to_role, move.repair))
            self._patch(machines.begin(self._of(move.uid), move.to_role, self.now, MOVE_DEADLINE_SECONDS, "move"))
        return decision

    def finish_moves(self) -> None:
        for machine in self.machines:
            if machine.move is not None:
                self._patch(machines.finish(machine, self.now))

    def roll_back_moves(self) -> None:
        for machine in self.machines:
            if machine.move is not None and machine.move.from_role is not None and not machine.move.rolling_back:
                self._patch(machines.roll_back(machine, self.now, MOVE_DEADLINE_SECONDS))

    def step(self, seen: MetricsReading, seconds: float = 5.0, live: LiveReading | None = None) -> Decision:
        """One tick: decide, do it all, let time pass."""
        decision = self.decide(seen, live)
        self.finish_moves()
        self.now += seconds
        return decision

    def replace(self, uid: str, **changes: object) -> None:
        self.machines = tuple(
            replace(m, **changes) if m.uid == uid else m  # type: ignore[arg-type]
            for m in self.machines
        )

    def remove(self, uid: str) -> None:
        self.machines = tuple(m for m in self.machines if m.uid != uid)

    def _of(self, uid: str) -> Machine:
        return next(m for m in self.machines if m.uid == uid)

    def _patch(self, patch: MachinePatch) -> None:
        before = self._of(patch.uid)
        assert before.role_epoch == patch.expected_epoch
        self.machines = tuple(machines.apply(m, patch) if m.uid == patch.uid else m for m in self.machines)
