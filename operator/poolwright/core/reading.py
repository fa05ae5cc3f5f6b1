"""What was measured, as values: histogram increases over a window, queues, and how far to believe them."""

import math
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class MachineWork:
    """What is outstanding on one machine now: prompts given and not computed, streams and their contexts.

    `prompt_pairs`: of each prompt, its tokens times those before them, summed (n²/2 for one of n without a cached
    prefix). `lent`: it computes prompts for the other pool.
    """

    prompt_tokens: float = 0.0
    prompt_pairs: float = 0.0
    streams: float = 0.0
    context_tokens: float = 0.0
    lent: bool = False


@dataclass(frozen=True, slots=True)
class LiveReading:
    """Asked of routers and engines directly, so a second old and not a scrape. `work` by uid of machine."""

    read_at: float
    work: Mapping[str, MachineWork] = field(default_factory=dict)

    def is_sound(self, now: float, most_age_seconds: float) -> bool:
        """Fresh, and all of it numbers; else it says nothing."""
        if not 0 <= now - self.read_at <= most_age_seconds:
            return False
        return all(
            math.isfinite(n) and n >= 0
            for w in self.work.values()
            for n in (w.prompt_tokens, w.prompt_pairs, w.streams, w.context_tokens)
        )
