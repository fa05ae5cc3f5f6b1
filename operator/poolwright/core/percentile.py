"""Percentile and share under a target from bucket increases: the one formula, on a cluster and locally alike.

Samples are taken as spread evenly inside their bucket, so the two functions are inverses of each other: a P90 at the
target and 90 % under the target are one statement.
"""

import itertools
import math
from dataclasses import dataclass

from poolwright.core.reading import HistogramIncrease

# Sums over routers may differ in the last bits; anything that falls by more than this share is not cumulative.
_RELATIVE_TOLERANCE = 1e-9


class MalformedHistogram(ValueError):
    """Counts that fall, are not finite, or do not match their bounds: missing data, never a number."""


@dataclass(frozen=True, slots=True)
class Percentile:
    """`at_least`: it lies beyond the last finite bucket, so `seconds` is that bound and the truth is larger."""

    seconds: float
    at_least: bool = False


def percentile(histogram: HistogramIncrease, percent: float) -> Percentile | None:
    """None where nothing was counted. Raises MalformedHistogram."""
    bounds, counts = _checked(histogram)
    if not counts or counts[-1] <= 0:
        return None
    rank = counts[-1] * percent / 100
    lower_bound, lower_count = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        # The tolerance keeps a rank that differs from a count in the last bit out of the next bucket.
        if count > 0 and count >= rank * (1 - _RELATIVE_TOLERANCE):
            if math.isinf(bound):
                return Percentile(lower_bound, at_least=True)
            inside = count - lower_count
            share = min(1.0, max(0.0, (rank - lower_count) / inside)) if inside > 0 else 1.0
            return Percentile(lower_bound + (bound - lower_bound) * share)
        lower_bound, lower_count = bound, count
    raise MalformedHistogram("the last count is not the largest")


def share_under(histogram: HistogramIncrease, target_seconds: float) -> float | None:
    """Share of samples at or under the target, 0 to 1. None where nothing was counted. Raises MalformedHistogram."""
    bounds, counts = _checked(histogram)
    if not counts or counts[-1] <= 0:
        return None
    lower_bound, lower_count = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if target_seconds <= bound:
            if math.isinf(bound):
                return min(1.0, lower_count / counts[-1])  # beyond the last finite bound: counted as over
            inside = (target_seconds - lower_bound) / (bound - lower_bound) * (count - lower_count)
            return min(1.0, (lower_count + inside) / counts[-1])
        lower_bound, lower_count = bound, count
    return 1.0


def sum_at_most_seconds(histogram: HistogramIncrease) -> float:
    """Upper estimate of the sum of all samples: each at the upper bound of its bucket (the last finite one)."""
    bounds, counts = _checked(histogram)
    total, lower_bound, lower_count = 0.0, 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        total += (count - lower_count) * (lower_bound if math.isinf(bound) else bound)
        lower_bound, lower_count = bound, count
    return total


def _checked(histogram: HistogramIncrease) -> tuple[tuple[float, ...], tuple[float, ...]]:
    bounds, counts = histogram.upper_bounds_seconds, histogram.cumulative_counts
    if len(bounds) != len(counts):
        raise MalformedHistogram(f"{len(bounds)} bounds for {len(counts)} counts")
    if bounds and not math.isinf(bounds[-1]):
        raise MalformedHistogram("the last bound is not +Inf")
    if any(math.isnan(b) for b in bounds) or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise MalformedHistogram("bounds do not ascend")
    repaired: list[float] = []
    highest = 0.0
    for count in counts:
        if not math.isfinite(count) or count < 0:
            raise MalformedHistogram(f"count {count}")
        if count < highest * (1 - _RELATIVE_TOLERANCE):
            raise MalformedHistogram("counts fall: not cumulative")
        highest = max(highest, count)
        repaired.append(highest)
    return bounds, tuple(repaired)
