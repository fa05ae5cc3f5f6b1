"""Objectives as observed, and what the same histograms say about load. States, not decisions.

Unknown is not zero: no fresh metrics, no traffic and too few samples are three named states.

Load comes from Little's law: the sum of TTFT over the window, divided by the window, is the mean number of requests
that wait for their first token; the sum of TBT likewise is the mean number of streams that decode.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from poolwright.core.decision import MIN_SAMPLES, ObjectiveReading, ObjectiveState
from poolwright.core.percentile import MalformedHistogram, percentile, share_under, sum_at_most_seconds
from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright.core.spec import Metric, Objective, PolicySpec

# Below this share of busy time a miss is not queueing: in M/D/1 the wait is then under 17 % of the service time.
_BUSY_SHARE_WITHOUT_QUEUE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """Capacity of a phase in machines (a mixed machine is half a one to each), and its mean load."""

    prompt_capacity: float
    token_capacity: float
    requests_before_first_token: float
    streams: float
    mixed_machines: int

    @property
    def prompt_busy_share(self) -> float:
        return busy_share(self.requests_before_first_token, self.prompt_capacity)

    @property
    def streams_per_machine(self) -> float:
        return self.streams / self.token_capacity if self.token_capacity > 0 else math.inf


def busy_share(mean_present: float, machines: float) -> float:
    """The ρ of M/D/1 (DistServe eq. 1) with `mean_present / machines` requests present: ρ + ρ²/(2(1−ρ)), inverted."""
    if machines <= 0:
        return 1.0
    present = mean_present / machines
    return min(1.0, (1 + present) - math.sqrt(1 + present * present))


def wait_over_service(busy: float) -> float:
    """Mean wait in M/D/1 as a multiple of the service time."""
    return math.inf if busy >= 1 else busy / (2 * (1 - busy))


def measure_load(reading: MetricsReading, prompt: int, token: int, mixed: int) -> Load:
    return Load(
        prompt_capacity=prompt + mixed / 2,
        token_capacity=token + mixed / 2,
        requests_before_first_token=_mean_present(reading.ttft, reading.window_seconds),
        streams=_mean_present(reading.tbt, reading.window_seconds),
        mixed_machines=mixed,
    )


def read_objectives(
    spec: PolicySpec, reading: MetricsReading, load: Load, own_seconds: Mapping[Metric, float] | None = None
) -> tuple[ObjectiveReading, ...]:
    """`own_seconds`: the service time alone, where work has a price; a target below it cannot be met at any split."""
    return tuple(
        _read(objective, reading, load, (own_seconds or {}).get(objective.metric)) for objective in spec.objectives
    )


def _mean_present(histogram: HistogramIncrease, window_seconds: float) -> float:
    try:
        return sum_at_most_seconds(histogram) / window_seconds if window_seconds > 0 else 0.0
    except MalformedHistogram:
        return 0.0  # the objective itself is Unknown then, and nothing is decided on this


def _read(objective: Objective, reading: MetricsReading, load: Load, own_seconds: float | None) -> ObjectiveReading:
    def state(kind: ObjectiveState) -> ObjectiveReading:
        return ObjectiveReading(objective.name, objective.metric, kind, objective.target_seconds)

    if reading.state in (MetricsState.STALE, MetricsState.MISSING):
        return state(ObjectiveState.UNKNOWN)
    gauges = (reading.arrivals, reading.in_flight, reading.oldest_waiting_seconds)
    if not all(math.isfinite(g) and g >= 0 for g in gauges):
        return state(ObjectiveState.UNKNOWN)
    histogram = reading.ttft if objective.metric is Metric.TTFT else reading.tbt
    try:
        observed = percentile(histogram, objective.percentile)
        median = percentile(histogram, 50)
        share = share_under(histogram, objective.target_seconds)
    except MalformedHistogram:
        return state(ObjectiveState.UNKNOWN)

    if reading.arrivals == 0 and reading.in_flight == 0:
        # What still falls out of the window is history, not demand.
        return state(ObjectiveState.IDLE)

    # A request's TTFT is known only when it ends, so a stall reads as silence: the oldest waiter speaks for it.
    waiting = reading.oldest_waiting_seconds if objective.metric is Metric.TTFT else 0.0
    stalled = waiting > objective.target_seconds
    samples = histogram.count
    if samples + (reading.in_flight if stalled else 0) < MIN_SAMPLES:
        kind = ObjectiveState.INSUFFICIENT
    elif stalled or observed is None or observed.seconds > objective.target_seconds or observed.at_least:
        kind = ObjectiveState.MISSED
    else:
        kind = ObjectiveState.MET
    seconds = max(observed.seconds if observed else 0.0, waiting)
    return ObjectiveReading(
        name=objective.name,
        metric=objective.metric,
        state=kind,
        target_seconds=objective.target_seconds,
        observed_seconds=seconds if observed or stalled else None,
        share_under_target=share,
        samples=samples,
        at_least=bool(observed and observed.at_least),
        own_seconds=own_seconds,
        infeasible=kind is ObjectiveState.MISSED
        and (
            own_seconds >= objective.target_seconds
            if own_seconds is not None
            else not stalled
            and median is not None
            and median.seconds > objective.target_seconds
            and _without_queue(objective.metric, load)
        ),
    )


def _without_queue(metric: Metric, load: Load) -> bool:
    """Whether requests were served as if alone, so that another machine could not make them faster."""
    if metric is Metric.TTFT:
        return load.prompt_capacity > 0 and load.prompt_busy_share <= _BUSY_SHARE_WITHOUT_QUEUE
    # On a mixed machine a prompt's chunk slows the tokens beside it: that, a move can cure.
    return load.token_capacity > 0 and load.mixed_machines == 0 and load.streams_per_machine <= 0.5
