"""What a run is worth, in the words of those who defined the measures. Numbers from outcomes; no policy, no plots.

Requests that were refused, lost or never ended attain nothing, and their TTFT counts as infinite. Percentiles are the
smallest value that at least so many percent are at or under. TBT is every gap; TPOT is DistServe's mean of a request;
a slow-down is Splitwise's (ISCA 2024, table VI). They answer different questions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poolwright.sim.gaps import Gaps
from poolwright.sim.outcome import RequestOutcome, RunOutcome
from poolwright.sim.policy import Slo
from poolwright.sim.step_time import Chunk, MachineModel

PERCENTS = (50, 90, 99)
# Splitwise, table VI: at most so many times what the request takes alone on the reference machine.
SLOW_DOWN_LIMITS: Mapping[str, tuple[float, float, float]] = {
    "ttft": (2.0, 3.0, 6.0),
    "tbt": (1.25, 1.5, 5.0),
    "e2e": (1.25, 1.5, 5.0),
}


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class SlowDowns:
    """By measure and percentile; `met` where all nine are."""

    ttft: Percentiles
    tbt: Percentiles
    e2e: Percentiles

    @property
    def met(self) -> bool:
        return all(
            observed is not None and observed <= limit
            for name, limits in SLOW_DOWN_LIMITS.items()
            for observed, limit in zip(_values(getattr(self, name)), limits, strict=True)
        )

    @property
    def stress(self) -> float:
        """The worst of the nine over its limit; at most 1 where all are met."""
        return max(
            math.inf if observed is None else observed / limit
            for name, limits in SLOW_DOWN_LIMITS.items()
            for observed, limit in zip(_values(getattr(self, name)), limits, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Measures:
    requests: int
    finished: int
    refused: int
    lost: int
    attainment: float
    ttft: Percentiles
    tbt: Percentiles
    tpot: Percentiles
    second_token: Percentiles
    e2e: Percentiles
    moves: int
    moves_per_hour: float
    lost_machine_seconds: float
    preemptions: int
    steps: int

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Measures":
        """Of what `asdict` made."""
        values: dict[str, Any] = dict(kept)
        for name in ("ttft", "tbt", "tpot", "second_token", "e2e"):
            values[name] = Percentiles(**kept[name])
        return cls(**values)


def measure(outcome: RunOutcome, slo: Slo) -> Measures:
    requests = outcome.requests
    finished = [r for r in requests if r.finished_seconds is not None]
    hours = outcome.horizon_seconds / 3600
    seconds, counts = all_gaps(requests)
    return Measures(
        requests=len(requests),
        finished=len(finished),
        refused=sum(r.refused is not None for r in requests),
        lost=sum(r.finished_seconds is None and r.refused is None for r in requests),
        attainment=attainment(requests, slo),
        ttft=_percentiles(np.array([math.inf if r.ttft_seconds is None else r.ttft_seconds for r in requests])),
        tbt=_percentiles(seconds, counts),
        tpot=_percentiles(np.array([t for r in finished if (t := tpot(r)) is not None])),
        second_token=_percentiles(np.array([r.gaps[0][0] for r in finished if r.output_tokens > 1])),
        e2e=_percentiles(np.array([_e2e(r) for r in requests])),
        moves=outcome.moves,
        moves_per_hour=outcome.moves / hours if hours > 0 else 0.0,
        lost_machine_seconds=outcome.lost_machine_seconds,
        preemptions=sum(r.preemptions for r in requests),
        steps=outcome.steps,
    )


def attainment(requests: Sequence[RequestOutcome], slo: Slo) -> float:
    """Share of requests that met both targets; 1 where there were none."""
    return sum(attained(r, slo) for r in requests) / len(requests) if requests else 1.0


def attained(request: RequestOutcome, slo: Slo) -> bool:
    ttft = request.ttft_seconds
    if ttft is None or request.finished_seconds is None:
        return False
    if ttft > slo.ttft_seconds + slo.ttft_seconds_per_token * request.prompt_tokens:
        return False
    seconds, counts = gap_arrays(request.gaps)
    if not len(seconds) or float(seconds.max()) <= slo.tbt_seconds:
        return True
    over = int(counts[seconds > slo.tbt_seconds].sum())
    total = int(counts.sum())
    return total - over >= total * slo.tbt_percentile / 100


def tpot(request: RequestOutcome) -> float | None:
    """(last - first) / (tokens - 1); None for an answer of one token."""
    if request.finished_seconds is None or request.first_token_seconds is None or request.output_tokens < 2:
        return None
    return (request.finished_seconds - request.first_token_seconds) / (request.output_tokens - 1)


def slow_downs(requests: Sequence[RequestOutcome], reference: MachineModel) -> SlowDowns:
    """Against the same request alone on the reference machine. TBT is a request's mean, as Splitwise's simulator has
    it: of a request alone all gaps are about equal."""
    ttft, tbt, e2e = [], [], []
    for request in requests:
        first, rest = alone_seconds(request.prompt_tokens, request.output_tokens, reference)
        ttft.append((math.inf if request.ttft_seconds is None else request.ttft_seconds) / first)
        e2e.append(_e2e(request) / (first + rest))
        if request.output_tokens > 1:
            mean = tpot(request)
            tbt.append(math.inf if mean is None else mean * (request.output_tokens - 1) / rest)
    return SlowDowns(*(_percentiles(np.array(values)) for values in (ttft, tbt, e2e)))


def alone_seconds(prompt_tokens: int, output_tokens: int, model: MachineModel) -> tuple[float, float]:
    """To the first token, and from it to the last, on an empty machine that takes the prompt in one step."""
    first = model.step_time.seconds((Chunk(0, prompt_tokens),), 0, 0.0)
    if output_tokens < 2:
        return first, 0.0
    _, rest = model.step_time.decode_run(1, prompt_tokens + 1, math.inf, output_tokens - 1)
    return first, rest


@dataclass(frozen=True, slots=True)
class Goodput:
    """`factor` attained the target, `above` did not; None: even `factor` = the highest tried did."""

    factor: float
    above: float | None
    runs: int


def goodput(
    attained_at: Callable[[float], float], target: float, low: float, high: float, tolerance: float = 0.02
) -> Goodput:
    """The largest rate factor whose attainment is at least `target`, by bisection to a relative tolerance. A factor of
    0 says that `low` missed it. Attainment is taken as falling with the rate; sets of arrivals that grow with it make
    that so but for noise."""
    runs = 1
    if attained_at(low) < target:
        return Goodput(0.0, low, runs)
    runs += 1
    if attained_at(high) >= target:
        return Goodput(high, None, runs)
    while high - low > tolerance * high:
        middle = (low + high) / 2
        runs += 1
        if attained_at(middle) >= target:
            low = middle
        else:
            high = middle
    return Goodput(low, high, runs)


def gap_arrays(gaps: Sequence[tuple[float, int]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(runs,) seconds and (runs,) counts."""
    if isinstance(gaps, Gaps):
        return gaps.arrays()
    rows = list(gaps)
    return np.array([s for s, _ in rows], dtype=np.float64), np.array([c for _, c in rows], dtype=np.int64)


def all_gaps(requests: Iterable[RequestOutcome]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    parts = [gap_arrays(request.gaps) for request in requests]
    if not parts:
        return np.empty(0), np.empty(0, dtype=np.int64)
    return np.concatenate([s for s, _ in parts]), np.concatenate([c for _, c in parts])


def percentile(values: NDArray[np.float64], percent: float, counts: NDArray[np.int64] | None = None) -> float | None:
    """The smallest value that at least `percent` of all are at or under; None of nothing."""
    if not len(values):
        return None
    order = np.argsort(values, kind="stable")
    if counts is None:
        rank = max(1, math.ceil(len(values) * percent / 100 - 1e-9))
        return float(values[order[rank - 1]])
    total = np.cumsum(counts[order])
    rank = max(1, math.ceil(int(total[-1]) * percent / 100 - 1e-9))
    return float(values[order[np.searchsorted(total, rank)]])


def _percentiles(values: NDArray[np.float64], counts: NDArray[np.int64] | None = None) -> Percentiles:
    return Percentiles(*(percentile(values, percent, counts) for percent in PERCENTS))


def _values(percentiles: Percentiles) -> tuple[float | None, float | None, float | None]:
    return percentiles.p50, percentiles.p90, percentiles.p99


def _e2e(request: RequestOutcome) -> float:
    return math.inf if request.finished_seconds is None else request.finished_seconds - request.arrival_seconds
