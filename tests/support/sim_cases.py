"""Small drawn worlds for the simulator: machines, rules, a trace, moves and losses."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from poolwright.sim.outcome import RunOutcome
from poolwright.sim.policy import ClusterView, EngineRules, Placement, Policy, RoleChange
from poolwright.sim.request import Arrival, Request, Trace
from poolwright.sim.simulation import Conditions, Loss, simulate
from poolwright_engine.scheduling.scheduler_config import Batching, TbtDeadlines
from poolwright_protocol.roles import Role
from support.linear_step_time import machine_model
from support.sim_policies import ShortestQueue, setting, static_policy

TICK_SECONDS = 0.25


@dataclass(frozen=True)
class Case:
    roles: tuple[Role, ...]
    rules: Mapping[Role, EngineRules]
    capacity_tokens: int
    stages: int
    bytes_per_second: float
    trace: Trace
    changes: tuple[tuple[int, int, Role], ...] = ()  # tick, machine, role
    losses: tuple[Loss, ...] = ()
    rebinds: frozenset[int] = frozenset()
    relegates: frozenset[int] = frozenset()


class _Router(ShortestQueue):
    def __init__(self, case: Case) -> None:
        self._case = case

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement:
        placement = super().route(now, arrival, view)
        return replace(placement, relegated=arrival.number in self._case.relegates)

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        if arrival.number not in self._case.rebinds:
            return None
        others = [m.uid for m in view.machines if m.uid not in (placement.prompt_uid, placement.token_uid)]
        return max(others, default=None)


class _Script:
    """Role changes by tick."""

    period_seconds = TICK_SECONDS

    def __init__(self, changes: Sequence[tuple[int, int, Role]]) -> None:
        self._changes = changes
        self._tick = 0

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        self._tick += 1
        alive = {m.uid for m in view.machines}
        return [
            RoleChange(f"m{place}", role, "script")
            for tick, place, role in self._changes
            if tick == self._tick and f"m{place}" in alive
        ]


def policy_of(case: Case) -> Policy:
    return replace(
        static_policy(case.roles),
        router=lambda _: _Router(case),
        scaler=lambda _: _Script(case.changes),
        rules=lambda _: case.rules,
    )


def run(case: Case, *, exact: bool) -> RunOutcome:
    model = machine_model(case.capacity_tokens, pipeline_stages=case.stages)
    world = setting([model] * len(case.roles), case.bytes_per_second)
    conditions = Conditions(losses=case.losses, exact=exact, drain_seconds=60.0, move_seconds=0.1)
    return simulate(policy_of(case), case.trace, world, conditions)


def case_of(seed: int) -> Case:
    """A world of its own for each seed; one is as good as another, so nothing is gained by shrinking."""
    chance = random.Random(seed)
    roles = tuple(chance.choice(list(Role)) for _ in range(chance.randint(1, 4)))
    batching = chance.choice(list(Batching))
    sequences = chance.choice((4, 16, 64))
    block = chance.choice((4, 16))
    rules = {
        role: EngineRules(
            batching=batching,
            token_budget=chance.choice((None, 64, 256, 2048)),
            tbt_target_seconds=chance.choice((None, 0.03)),
            tbt_deadlines=chance.choice(tuple(TbtDeadlines)),
            quick_first_tokens=chance.random() < 0.5,
            relegated_seconds=chance.choice((30.0, 0.3)),
            most_tokens=1024,
            max_sequences=sequences,
            block_tokens=block,
            max_prefill_tokens=chance.choice((None, 48)),
        )
        for role in Role
    }
    count = chance.randint(1, 40)
    pace = chance.choice((0.005, 0.03, 0.2))
    longest = chance.choice((60, 400))
    has_prefixes = chance.random() < 0.5
    now, requests = 0.0, []
    for number in range(count):
        now += chance.expovariate(1 / pace)
        prompt = chance.randint(1, longest)
        shared = chance.randint(0, prompt // 32) if has_prefixes else 0
        prefix = tuple(chance.randint(1, 3) for _ in range(shared))
        requests.append(Request(number, now, prompt, chance.randint(1, 60), prefix, 32))
    places = range(len(roles))

    def some() -> frozenset[int]:
        return frozenset(number for number in range(count) if chance.random() < 0.1)

    return Case(
        roles=roles,
        rules=rules,
        capacity_tokens=chance.choice((500, 1200, 100_000)),
        stages=chance.choice((1, 1, 1, 2)),
        bytes_per_second=chance.choice((1e9, 1e11)),
        trace=Trace("drawn", requests, now),
        changes=tuple(
            (chance.randint(1, 8), chance.choice(places), chance.choice(list(Role)))
            for _ in range(chance.choice((0, 0, 1, 4)))
        ),
        losses=tuple(
            Loss(chance.choice(places), chance.uniform(0.05, 2.0), chance.choice((None, 1.0)))
            for _ in range(chance.choice((0, 0, 1)))
        ),
        rebinds=some(),
        relegates=some(),
    )
