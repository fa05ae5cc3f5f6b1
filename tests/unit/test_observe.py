"""Bucket counts are believed only where they can be a histogram's."""

import math

import pytest

from poolwright.controller import observe
from poolwright.core.reading import MetricsState


def test_rounding_of_sums_is_mended_to_monotone() -> None:
    made = observe.histogram({0.0168: 99.9, 0.0224: 100 - 1e-12, 60.0: 100 - 2e-12, math.inf: 100 - 3e-12})
    assert list(made.cumulative_counts) == sorted(made.cumulative_counts)
    assert made.count == 100 - 1e-12


@pytest.mark.parametrize(
    "buckets",
    [
        {},
        {1.0: 3.0},
        {0.1: 0.0, 0.2: 45.0, 0.4: 9.0, math.inf: 0.0},
        {0.1: math.nan, math.inf: 1.0},
        {0.1: 0.0, math.inf: math.inf},
    ],
    ids=["none", "no +Inf", "not cumulative", "NaN", "infinite"],
)
def test_what_is_no_histogram_is_malformed(buckets: dict[float, float]) -> None:
    with pytest.raises(observe.Malformed):
        observe.histogram(buckets)


@pytest.mark.parametrize(
    ("live", "fresh", "state"),
    [
        (["a", "b"], ["a", "b"], MetricsState.COMPLETE),
        (["a", "b"], ["a", "b", "gone"], MetricsState.COMPLETE),
        (["a", "b"], ["b"], MetricsState.PARTIAL),
        (["a", "b"], [], MetricsState.STALE),
        ([], ["gone"], MetricsState.STALE),
    ],
)
def test_freshness_is_judged_by_live_routers_only(live: list[str], fresh: list[str], state: MetricsState) -> None:
    assert observe.judge(live, fresh)[0] is state
