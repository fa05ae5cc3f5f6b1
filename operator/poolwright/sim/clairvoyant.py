"""A run that knows the future: as near to what is possible as a search finds, a bound from below beside `bounds`.

It knows every request's output length, moves machines at no cost, relegates what cannot be on time any more, serves
queues by the earliest deadline, and has for each window of the trace the split and the chunk that were best there, by
trying all of a grid: on the window alone, after a stretch of what came before it. Of that plan, every unchanging one,
and what other policies do with the same knowledge, the best run counts. Nothing here is a policy for use.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from poolwright.sim import traces
from poolwright.sim.baselines.pools import held, settled, split_roles
from poolwright.sim.baselines.routers import Routed, ShortestQueue
from poolwright.sim.baselines.rules import in_blocks
from poolwright.sim.measures import attained, attainment
from poolwright.sim.outcome import RunOutcome
from poolwright.sim.policy import (
    ClusterView,
    EngineRules,
    MachineView,
    Placement,
    Policy,
    RoleChange,
    Setting,
)
from poolwright.sim.request import Arrival, Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright_protocol.roles import Role

SOURCE = "no publication: it knows the future"
WINDOW_SECONDS = 60.0
_MOST_STEP_TOKENS = 2048
_GRID = 10  # splits tried at first where there are many machines, and then those around the best


@dataclass(frozen=True, slots=True)
class Grid:
    """What is tried. `chunks`: prompt tokens of a step that has decodes, at most. `most_mixed`: mixed machines beside
    pools, up to so many; all mixed is always tried. `stretch_seconds`: of the trace, its middle that an unchanging
    split is chosen by; inf: all of it. `lead_seconds`: of what came before a window, that is run with it."""

    chunks: Sequence[int] = (256, 512, _MOST_STEP_TOKENS)
    most_mixed: int = 1
    stretch_seconds: float = math.inf
    lead_seconds: float = math.inf


# Every count of mixed machines where there are few of them; and a search that costs a tenth.
EXHAUSTIVE = Grid(most_mixed=4)
COARSE = Grid((512, _MOST_STEP_TOKENS), 0, 120.0, 30.0)


@dataclass(frozen=True, slots=True)
class Split:
    """The rest of the machines are token machines. `chunk_tokens`: the bound of those that are not prompt machines."""

    prompt: int
    mixed: int
    chunk_tokens: int

    def roles(self, setting: Setting) -> Sequence[Role]:
        return split_roles(setting, self.prompt, self.mixed)


Plan = Sequence[Split]  # one for each window; the last one stays


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """`by_name`: the attainment of each kind of run that was tried, of which `outcome` is the best."""

    outcome: RunOutcome
    attainment: float
    plan: Plan | None
    by_name: Mapping[str, float]
    runs: int


def knowing(conditions: Conditions) -> Conditions:
    """The same world, where outputs are known and moves cost nothing."""
    return replace(conditions, expect_output=lambda request: float(request.output_tokens), move_seconds=0.0)


def clairvoyant(
    trace: Trace,
    setting: Setting,
    conditions: Conditions | None = None,
    *,
    others: Sequence[Policy] = (),
    window_seconds: float = WINDOW_SECONDS,
    grid: Grid = Grid(),
    block_tokens: int | None = None,
    worth: Callable[[RunOutcome], float] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Clairvoyant:
    """`block_tokens`: of all engines' KV caches, where they are not what rules say. `worth`: of a whole run, what is to
    be most; the attainment of the setting's SLO if not given."""
    search = _Search(trace, setting, knowing(conditions or Conditions()), window_seconds, grid, worth, progress)
    search.block_tokens = block_tokens
    best_split = search.unchanging()
    search.take("one split", planned([best_split], window_seconds), [best_split])
    if not search.is_perfect:
        plan = search.windows()
        search.take("windows", planned(plan, window_seconds), plan)
        # Where a window leaves a backlog to the next one, its own best is not the whole's.
        calm = [split if split.mixed == best_split.mixed else best_split for split in plan]
        search.take("windows of one kind", planned(calm, window_seconds), calm)
    for policy in others:
        search.take(policy.name, policy, None)
    return search.result()


def planned(plan: Plan, window_seconds: float) -> Policy:
    return Policy(
        name="clairvoyant",
        source=SOURCE,
        router=_Informed,
        scaler=lambda setting: _Planned(plan, window_seconds, setting) if len(plan) > 1 else None,
        first_roles=lambda setting: plan[0].roles(setting),
        rules=lambda setting: _rules(setting, plan[0].chunk_tokens),
        parameters={"windows": len(plan), "window_seconds": window_seconds},
    )


def _rules(setting: Setting, chunk_tokens: int) -> Mapping[Role, EngineRules]:
    beside = EngineRules(
        token_budget=None,
        tbt_target_seconds=setting.slo.tbt_seconds,
        most_tokens=_MOST_STEP_TOKENS,
        max_prefill_tokens=chunk_tokens,
    )
    return {Role.PROMPT: EngineRules(token_budget=_MOST_STEP_TOKENS), Role.TOKEN: beside, Role.MIXED: beside}


class _Informed(ShortestQueue):
    """Relegates what would be late anyway; the others wait in the order of their deadlines."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._slo = setting.slo

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        routed = super().route(now, arrival, view)
        if not isinstance(routed, Placement):
            return routed
        uid = routed.prompt_uid or routed.token_uid
        machine = next(m for m in view.machines if m.uid == uid)
        target = self._slo.ttft_seconds + self._slo.ttft_seconds_per_token * arrival.prompt_tokens
        due = arrival.arrival_seconds + target
        return replace(
            routed, relegated=now + self.seconds_to_first_token(machine, arrival, view) > due, due_seconds=due
        )


class _Planned:
    def __init__(self, plan: Plan, window_seconds: float, setting: Setting) -> None:
        self._plan = plan
        self._setting = setting
        self.period_seconds = window_seconds

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        split = self._plan[min(len(self._plan) - 1, round(now / self.period_seconds))]
        wanted = list(split.roles(self._setting))
        bound = split.chunk_tokens
        changes: list[RoleChange] = []
        others: list[MachineView] = []
        for machine in settled(view):
            if machine.role in wanted:
                wanted.remove(machine.role)
                if machine.role is not Role.PROMPT:
                    changes.append(RoleChange(machine.uid, machine.role, "window", max_prefill_tokens=bound))
            else:
                others.append(machine)
        for machine, role in zip(sorted(others, key=held), wanted, strict=False):
            chunk = None if role is Role.PROMPT else bound
            changes.append(RoleChange(machine.uid, role, "window", max_prefill_tokens=chunk))
        return changes


class _Search:
    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        conditions: Conditions,
        window_seconds: float,
        grid: Grid,
        worth: Callable[[RunOutcome], float] | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._trace = trace
        self._setting = setting
        self._conditions = conditions
        self._window = window_seconds
        self._grid = grid
        self.block_tokens: int | None = None
        self._worth = worth or (lambda outcome: attainment(outcome.requests, setting.slo))
        self._progress = progress or (lambda _: None)
        self._runs = 0
        self._by_name: dict[str, float] = {}
        self._best: tuple[float, RunOutcome, Plan | None] | None = None

    def take(self, name: str, policy: Policy, plan: Plan | None) -> None:
        outcome = self._run(policy, self._trace)
        share = self._worth(outcome)
        self._by_name[name] = share
        self._progress(f"{name}: {share:.4f}")
        if self._best is None or share > self._best[0]:
            self._best = (share, outcome, plan)

    @property
    def is_perfect(self) -> bool:
        return self._best is not None and self._best[0] >= 1.0

    def result(self) -> Clairvoyant:
        assert self._best is not None
        share, outcome, plan = self._best
        return Clairvoyant(outcome, share, plan, self._by_name, self._runs)

    def unchanging(self) -> Split:
        end = self._trace.horizon_seconds
        before = max(0.0, (end - self._grid.stretch_seconds) / 2)
        if not before:
            return self.best_split(self._trace, 0.0, end)
        part = traces.between(self._trace, before, end - before)
        return self.best_split(part if len(part) else self._trace, 0.0, end)

    def windows(self) -> Plan:
        count = max(1, round(self._trace.horizon_seconds / self._window))
        plan = []
        for index in range(count):
            start = index * self._window
            lead = min(start, self._window, self._grid.lead_seconds)
            part = traces.between(self._trace, start - lead, start + self._window)
            plan.append(self.best_split(part, lead, lead + self._window))
            self._progress(f"window {index + 1} of {count}: {plan[-1]}")
        return plan

    def best_split(self, trace: Trace, start_seconds: float, stop_seconds: float) -> Split:
        """By the requests that arrive in [start, stop) of `trace`; the earliest of equals."""
        tried: dict[Split, tuple[float, float]] = {}

        def worth(split: Split) -> tuple[float, float]:
            """Of equal shares, the one that answers sooner."""
            if split not in tried:
                outcome = self._run(planned([split], self._window), trace)
                counted = [r for r in outcome.requests if start_seconds <= r.arrival_seconds < stop_seconds]
                ends = [r.finished_seconds for r in outcome.requests]
                last = max((end for end in ends if end is not None), default=0.0)
                on_time = sum(attained(r, self._setting.slo) for r in counted)
                tried[split] = (on_time / max(1, len(counted)), -last)
            return tried[split]

        step = max(1, len(self._setting.machines) // _GRID)
        best = max(self._splits(step), key=worth)
        while step > 1:
            step //= 2
            around = [replace(best, prompt=best.prompt + offset) for offset in (-step, 0, step)]
            best = max((split for split in around if self._is_split(split)), key=worth)
        return best

    def _splits(self, step: int) -> Iterator[Split]:
        machines = len(self._setting.machines)
        chunks = self._grid.chunks
        for chunk in chunks:
            yield Split(0, machines, chunk)
            if machines == 1:
                continue
            for prompt in range(0, machines, step):
                for mixed in range(min(self._grid.most_mixed, machines - 1) + 1):
                    split = Split(prompt, mixed, chunk)
                    # Without a mixed machine, chunks are cut nowhere.
                    if self._is_split(split) and (mixed or chunk == chunks[-1]):
                        yield split

    def _is_split(self, split: Split) -> bool:
        machines = len(self._setting.machines)
        rest = machines - split.prompt - split.mixed
        return split.prompt >= 0 and rest >= 0 and split.prompt + split.mixed > 0 and rest + split.mixed > 0

    def _run(self, policy: Policy, trace: Trace) -> RunOutcome:
        self._runs += 1
        if self.block_tokens is not None:
            policy = in_blocks(policy, self.block_tokens)
        return simulate(policy, trace, self._setting, self._conditions)
