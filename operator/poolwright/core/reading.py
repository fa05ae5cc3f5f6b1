"""What was measured, as values: histogram increases over a window, queues, and how far to believe them."""

from dataclasses import dataclass, field
from enum import StrEnum


class MetricsState(StrEnum):
    """Complete: every live router seen. Partial: some missing. Stale: none fresh. Missing: no answer at all."""

    COMPLETE = "Complete"
    PARTIAL = "Partial"
    STALE = "Stale"
    MISSING = "Missing"


@dataclass(frozen=True, slots=True)
class HistogramIncrease:
    """Increase of cumulative bucket counts over one window, summed over routers.

    `upper_bounds_seconds` ascend and end in inf; `cumulative_counts` has the same length and never falls.
    """

    upper_bounds_seconds: tuple[float, ...] = ()
    cumulative_counts: tuple[float, ...] = ()

    @property
    def count(self) -> float:
        return self.cumulative_counts[-1] if self.cumulative_counts else 0.0


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """One observation of one pool. `detail` names the failing query or the missing routers, for a condition."""

    state: MetricsState
    window_seconds: float
    ttft: HistogramIncrease = field(default_factory=HistogramIncrease)
    tbt: HistogramIncrease = field(default_factory=HistogramIncrease)
    arrivals: float = 0.0  # increase over the window
    prompt_tokens: float = 0.0  # increase over the window
    output_tokens: float = 0.0  # increase over the window
    in_flight: float = 0.0  # now
    oldest_waiting_seconds: float = 0.0  # now; age of the oldest request without a first token
    detail: str = ""
