"""One run: what it is made of, the key that its result is kept under, and doing it.

A run is a value that can be sent to another process; a result is a value that can be written as a line of JSON.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Any

from bench.policy import contenders, source
from bench.policy.cells import AS_IT_IS, Capacity, Cell, Twist, World, capacity, model_of, world
from bench.policy.parts import without

from poolwright.sim import bounds, clairvoyant
from poolwright.sim.bounds import Deadlines
from poolwright.sim.measures import attained, gap_arrays, measure, slow_downs
from poolwright.sim.outcome import RequestOutcome, RunOutcome
from poolwright.sim.policy import Slo
from poolwright.sim.profiles import TableStepTime
from poolwright.sim.simulation import simulate
from poolwright.sim.traces import Copies

MOST_SECONDS = 180.0  # of CPU for one simulation; what takes longer is said to
CLAIRVOYANT_WINDOW_SECONDS = 60.0
COARSE_WINDOWS = 5
BOUND_INTERVAL_SECONDS = 2.0
_SHARED = (
    "poolwright.sim.simulation",
    "poolwright.sim.measures",
    "poolwright.sim.bounds",
    "poolwright.sim.baselines.catalog",
    "poolwright.sim.baselines.static_split",
    "bench.policy.cells",
)
_ALONE = ("bench.policy.contenders", "bench.policy.parts", "bench.policy.runs")


class Kind(StrEnum):
    """CAPACITY: what the fluid bound allows. POLICY: a simulation. BOUND: of the trace. CLAIRVOYANT: the search."""

    CAPACITY = "capacity"
    POLICY = "policy"
    BOUND = "bound"
    CLAIRVOYANT = "clairvoyant"


class Search(StrEnum):
    """Of CLAIRVOYANT, how much is tried."""

    COARSE = "coarse"
    EXHAUSTIVE = "exhaustive"


class Cause(StrEnum):
    """Why a request did not attain; the first that holds."""

    REFUSED = "refused"
    LOST = "lost"
    LATE_FIRST = "late first tokens"
    LATE_GAPS = "late gaps"


@dataclass(frozen=True, slots=True)
class Run:
    """`able` None for CAPACITY only. `policy`: of CLAIRVOYANT, its Search. `longest_gap_seconds`: of BOUND, see
    sim.bounds."""

    kind: Kind
    cell: Cell
    policy: str = ""
    seed: int = 0
    copies: Copies = Copies.JITTERED
    twist: Twist = AS_IT_IS
    able: Capacity | None = None
    longest_gap_seconds: float = 0.0

    @property
    def label(self) -> str:
        if self.kind is Kind.CAPACITY:
            return f"{self.cell.name} rate"
        what = self.policy if self.kind is Kind.POLICY else " ".join(filter(None, (self.kind.value, self.policy)))
        return f"{self.cell.name} {what} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """`value`: the share of requests that attained; in a cell of nine percentiles 1 where all are met, else the inverse
    of the worst over its limit; of CAPACITY requests a second. None where there is none, `note` says why; `crashed`: by
    a fault of the program, which says nothing of the policy."""

    value: float | None
    note: str = ""
    requests: int = 0
    causes: Mapping[str, float] = field(default_factory=dict)
    moves_per_hour: float = 0.0
    lost_machine_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    figures: Mapping[str, float | None] = field(default_factory=dict)
    able: Mapping[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    crashed: bool = False
    own_machines: bool = False  # not the cell's, of which the bound is

    @property
    def capacity(self) -> Capacity:
        return Capacity(tuple(self.able["requests_per_second"]), self.able["prompt_share"])

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class TooSlow(Exception):
    pass


# Keys.


@cache
def sources(ours: bool, searches: bool = False) -> str:
    roots = [
        *_SHARED,
        *(["poolwright.sim.ours"] if ours else []),
        *(["poolwright.sim.clairvoyant"] if searches else []),
    ]
    return source.digest(roots, _ALONE)


@cache
def key(run: Run) -> str:
    if run.kind is Kind.CAPACITY:
        # The slice and the machines, and neither the share nor what happens to the cell.
        kept = ("trace", "slice", "machine", "machines", "seconds", "ttft", "cap", "nine", "reference", "other")
        document = run.cell.document()
        inputs: Any = {name: document[name] for name in (*kept, "ttft_per_token", "every_seconds")}
        used = source.digest(["poolwright.sim.bounds", "poolwright.sim.profiles", "bench.policy.cells"])
    else:
        is_ours = run.kind is Kind.POLICY and contenders.uses_ours(run.policy)
        used = sources(is_ours, run.kind is Kind.CLAIRVOYANT)
        inputs = {
            "cell": run.cell.document(),
            "policy": run.policy,
            "seed": run.seed,
            "copies": run.copies.value,
            "twist": dataclasses.asdict(run.twist),
            "able": dataclasses.asdict(run.able) if run.able is not None else None,
            "longest_gap_seconds": run.longest_gap_seconds,
        }
    text = json.dumps([run.kind.value, inputs, used], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Doing it.


def perform(run: Run) -> Result:
    began = time.process_time()
    try:
        result = _DO[run.kind](run)
    except TooSlow:
        result = Result(None, f"took more than {MOST_SECONDS:.0f} s")
    except ValueError as error:
        result = Result(None, str(error))
    except Exception as error:
        # One policy that fails takes nothing from the others, and the comparison says that it did.
        result = Result(None, f"{type(error).__name__}: {error}", crashed=True)
    return replace(result, cpu_seconds=time.process_time() - began)


def world_of(run: Run) -> World:
    assert run.able is not None
    return world(run.cell, run.able, run.seed, run.copies, run.twist)


def _capacity(run: Run) -> Result:
    able = capacity(run.cell)
    return Result(sum(able.requests_per_second) / len(able.requests_per_second), able=dataclasses.asdict(able))


def _policy(run: Run) -> Result:
    where = contenders.own_world(run.policy, world_of(run))
    policy, told = contenders.policy_of(run.policy, where)
    limit = time.process_time() + MOST_SECONDS

    def within_time(_: float) -> None:
        if time.process_time() > limit:
            raise TooSlow

    conditions = replace(where.conditions, progress=within_time)
    with without(contenders.part_left_out(run.policy)):
        outcome = simulate(policy, where.trace, told, conditions, seed=run.seed)
    result = judged(outcome, where)
    said = "; ".join(text for text in (contenders.machines_text(where), result.note) if text)
    return replace(result, note=said, own_machines=bool(contenders.machines_text(where)))


def judged(outcome: RunOutcome, where: World) -> Result:
    slo, requests = where.setting.slo, outcome.requests
    causes = Counter(cause for r in requests if (cause := cause_of(r, slo)) is not None)
    count = max(1, len(requests))
    value = 1 - causes.total() / count
    found = measure(outcome, slo)
    figures: dict[str, float | None] = {"attainment": value}
    for name, percentiles in (("ttft", found.ttft), ("tbt", found.tbt), ("e2e", found.e2e)):
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}_seconds"] = finite(getattr(percentiles, f"p{percent}"))
    if where.cell.nine:
        assert where.cell.reference is not None
        stress = slow_downs(requests, model_of(where.cell.reference)).stress
        figures["stress"] = finite(stress)
        value = min(1.0, 1 / stress)
    return Result(
        value,
        "; ".join(outcome.notes)[:200],
        requests=len(requests),
        causes={cause.value: causes[cause] / count for cause in Cause},
        moves_per_hour=found.moves_per_hour,
        lost_machine_seconds=found.lost_machine_seconds,
        longest_gap_seconds=_longest_gap(requests, slo),
        figures=figures | {"preemptions": float(found.preemptions), "steps": float(found.steps)},
    )


def cause_of(request: RequestOutcome, slo: Slo) -> Cause | None:
    if attained(request, slo):
        return None
    if request.refused is not None:
        return Cause.REFUSED
    ttft = request.ttft_seconds
    if ttft is None or ttft > slo.ttft_seconds + slo.ttft_seconds_per_token * request.prompt_tokens:
        return Cause.LATE_FIRST if ttft is not None else Cause.LOST
    return Cause.LOST if request.finished_seconds is None else Cause.LATE_GAPS


def _longest_gap(requests: Sequence[RequestOutcome], slo: Slo) -> float:
    """Of those that attained."""
    longest = 0.0
    for request in requests:
        seconds = gap_arrays(request.gaps)[0]
        if len(seconds) and float(seconds.max()) > longest and attained(request, slo):
            longest = float(seconds.max())
    return longest


def _bound(run: Run) -> Result:
    where = world_of(run)
    model, slo = model_of(run.cell.machine), where.setting.slo
    assert isinstance(model.step_time, TableStepTime)
    deadlines = Deadlines(
        slo.tbt_seconds,
        slo.ttft_seconds,
        slo.ttft_seconds_per_token,
        late_share=1 - slo.tbt_percentile / 100,
        longest_gap_seconds=run.longest_gap_seconds or math.inf,
    )
    found = bounds.finite(
        model.step_time,
        model.kv_capacity_tokens,
        run.cell.machines,
        where.trace,
        deadlines,
        interval_seconds=BOUND_INTERVAL_SECONDS,
    )
    return Result(found.on_time_share, requests=found.requests)


def _clairvoyant(run: Run) -> Result:
    where = world_of(run)
    horizon, is_coarse = where.trace.horizon_seconds, run.policy == Search.COARSE
    # A stationary world has no better split for one minute than for all.
    window = min(CLAIRVOYANT_WINDOW_SECONDS, horizon)
    if is_coarse:
        window = max(window, horizon / COARSE_WINDOWS)
    found = clairvoyant.clairvoyant(
        where.trace,
        where.setting,
        where.conditions,
        window_seconds=window if run.cell.changes else horizon,
        grid=clairvoyant.COARSE if is_coarse else clairvoyant.EXHAUSTIVE,
        block_tokens=run.cell.block_tokens,
        worth=lambda outcome: judged(outcome, where).value or 0.0,
    )
    plan = "" if found.plan is None else ", ".join(f"{s.prompt}P{s.mixed}M" for s in found.plan)
    return replace(judged(found.outcome, where), note=f"{found.runs} runs: {plan}", figures=dict(found.by_name))


_DO = {Kind.CAPACITY: _capacity, Kind.POLICY: _policy, Kind.BOUND: _bound, Kind.CLAIRVOYANT: _clairvoyant}


def finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
