"""Percentiles of runs beside those of their simulations, and whether they agree. Numbers from latencies, nothing else.

A row's error is the simulator's median over the repeats against the pool's. The pool does not agree with itself either:
the allowance is the stated limit, but never less than the largest distance of one of its runs from their median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from bench.policy_agreement.replay import Latencies

from poolwright.sim.measures import percentile
from poolwright.sim.step_time import Chunk, StepTime


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds; shares for what ends in error, spread, allowance and limit."""

    measure: str
    percent: int
    real: float
    lowest: float
    highest: float
    simulated: float
    limit: float

    @property
    def error(self) -> float:
        return self.simulated / self.real - 1

    @property
    def spread(self) -> float:
        return max(self.highest - self.real, self.real - self.lowest) / self.real

    @property
    def allowance(self) -> float:
        return max(self.limit, self.spread)

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= self.allowance

    def as_json(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("error", "spread", "allowance", "agrees")}
        return {**asdict(self), **derived}


def rows(
    real: Sequence[Latencies], simulated: Sequence[Latencies], limits: Mapping[tuple[str, int], float]
) -> list[Row]:
    """`limits`: by measure ("ttft" or "tbt") and percent."""
    made = []
    for (measure, percent), limit in limits.items():
        own = [_percentile(getattr(run, measure), percent) for run in real]
        theirs = [_percentile(getattr(run, measure), percent) for run in simulated]
        made.append(Row(measure, percent, median(own), min(own), max(own), median(theirs), limit))
    return made


def _percentile(values: Sequence[float], percent: int) -> float:
    found = percentile(np.array(values), percent)
    if found is None:
        raise ValueError("there is nothing to compare")
    return found


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Of the steps of real runs. Shares: `mean` of |predicted / measured - 1|, `total` of all their time together."""

    steps: int
    mean: float
    total: float
    with_prompts: float  # mean error of those
    decodes: float  # of the others


def step_errors(steps: Sequence[Sequence[Any]], step_time: StepTime) -> StepErrors:
    """`steps`: rows of a `WatchedRunner`."""
    errors: list[tuple[bool, float]] = []
    predicted_sum = measured_sum = 0.0
    for _, measured, chunks, decodes, context in steps:
        predicted = step_time.seconds([Chunk(*chunk) for chunk in chunks], decodes, context)
        errors.append((bool(chunks), abs(predicted / measured - 1)))
        predicted_sum += predicted
        measured_sum += measured

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    return StepErrors(
        len(errors),
        mean([error for _, error in errors]),
        predicted_sum / measured_sum - 1 if measured_sum else 0.0,
        mean([error for has_prompts, error in errors if has_prompts]),
        mean([error for has_prompts, error in errors if not has_prompts]),
    )
