"""Rules that every reading of the routers' metrics shares, wherever the numbers come from.

Owns what makes a reading Complete, Partial, Stale or Missing, and what makes bucket counts believable. Unknown is never
zero: a number that cannot be had, or is not finite, makes the reading Missing.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping

from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright_protocol import names

# Fewer scrapes than this in a window and an increase says more about scrape times than about traffic.
SCRAPES_PER_WINDOW = 4
# A router is fresh while its last sample is younger than this many scrape intervals.
FRESH_INTERVALS = 3
# Sums of floats make a cumulative count fall by rounding; anything larger is not a histogram.
_MONOTONE_TOLERANCE = 1e-9


class Malformed(Exception):
    """An answer that is not what was asked for."""


def missing(window_seconds: float, detail: str) -> MetricsReading:
    return MetricsReading(MetricsState.MISSING, window_seconds, detail=detail)


def pool_labels(namespace: str, pool: str) -> dict[str, str]:
    return {names.METRIC_POOL: pool, names.METRIC_POOL_NAMESPACE: namespace}


def judge(live: Collection[str], fresh: Collection[str]) -> tuple[MetricsState, str]:
    """State and detail from the uids of live routers and of those whose numbers are fresh."""
    if not live:
        return MetricsState.STALE, "no router is running"
    unseen = sorted(set(live) - set(fresh))
    if not unseen:
        return MetricsState.COMPLETE, ""
    which = f"no fresh {names.ROUTER_INFO} from router {', '.join(unseen)}"
    return (MetricsState.STALE if len(unseen) == len(set(live)) else MetricsState.PARTIAL), which


def histogram(cumulative: Mapping[float, float]) -> HistogramIncrease:
    """From upper bound (inf included) to cumulative count. Raises Malformed."""
    bounds = sorted(cumulative)
    if not bounds or bounds[-1] != math.inf:
        raise Malformed("the buckets do not end in +Inf")
    counts: list[float] = []
    highest = 0.0
    for bound in bounds:
        count = finite(cumulative[bound], f"bucket le={bound:g}")
        if count < highest * (1 - _MONOTONE_TOLERANCE) - _MONOTONE_TOLERANCE:
            raise Malformed(f"bucket le={bound:g} counts {count:g}, fewer than a smaller bucket ({highest:g})")
        highest = max(highest, count)
        counts.append(highest)
    return HistogramIncrease(tuple(bounds), tuple(counts))


def finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise Malformed(f"{what} is {value}")
    return value


def typical_gap(times: Iterable[float]) -> float | None:
    """Median distance of consecutive times; None for fewer than two."""
    ordered = sorted(times)
    gaps = sorted(after - before for before, after in itertools.pairwise(ordered) if after > before)
    return gaps[len(gaps) // 2] if gaps else None
