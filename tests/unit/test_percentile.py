"""Percentile and share under a target from buckets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright.core.percentile import MalformedHistogram, Percentile, percentile, share_under, sum_at_most_seconds
from poolwright.core.reading import HistogramIncrease
from poolwright_protocol.buckets import LATENCY_BUCKETS_SECONDS

INF = math.inf
BOUNDS = (*LATENCY_BUCKETS_SECONDS, INF)


def _of(*samples: float) -> HistogramIncrease:
    return HistogramIncrease(BOUNDS, tuple(float(sum(s <= bound for s in samples)) for bound in BOUNDS))


def test_nothing_counted_is_not_zero() -> None:
    assert percentile(HistogramIncrease(), 90) is None
    assert percentile(HistogramIncrease((1.0, INF), (0.0, 0.0)), 90) is None
    assert share_under(HistogramIncrease((1.0, INF), (0.0, 0.0)), 1.0) is None


def test_samples_are_spread_evenly_inside_their_bucket() -> None:
    assert percentile(HistogramIncrease((1.0, 2.0, INF), (10.0, 20.0, 20.0)), 75) == Percentile(1.5)
    assert percentile(HistogramIncrease((1.0, INF), (10.0, 10.0)), 50) == Percentile(0.5)


def test_steady_latency_reads_within_one_bucket_of_itself() -> None:
    read = percentile(_of(*[1.05] * 100), 90)
    assert read is not None
    assert 1.05 / 1.25 <= read.seconds <= 1.05 * 1.25


def test_beyond_the_last_bound_is_a_floor_and_never_under_a_target() -> None:
    slow = HistogramIncrease((1.0, 60.0, INF), (0.0, 0.0, 1000.0))
    assert percentile(slow, 99) == Percentile(60.0, at_least=True)
    assert share_under(slow, 90.0) == 0.0


def test_last_bits_of_a_sum_do_not_move_the_percentile() -> None:
    bounds = (0.0126, 0.0168, 0.0224, 0.03, 60.0, INF)
    counts = (0.0, 99.9, 100 - 1e-12, 100 - 1e-12, 100 - 1e-12, 100.0)
    read = percentile(HistogramIncrease(bounds, counts), 100)
    assert read is not None
    assert 0.0168 < read.seconds <= 0.0224


@pytest.mark.parametrize(
    "histogram",
    [
        HistogramIncrease((1.0, 2.0, 3.0, 4.0, INF), (0.0, 0.0, 45.0, 9.0, 17.0)),
        HistogramIncrease((1.0, INF), (1.0, math.nan)),
        HistogramIncrease((1.0, INF), (1.0, INF)),
        HistogramIncrease((1.0, INF), (-1.0, 2.0)),
        HistogramIncrease((1.0, INF), (1.0,)),
        HistogramIncrease((2.0, 1.0, INF), (1.0, 2.0, 3.0)),
        HistogramIncrease((1.0, 2.0), (1.0, 2.0)),
        HistogramIncrease((math.nan, INF), (1.0, 2.0)),
    ],
)
def test_malformed_counts_are_missing_data_not_a_number(histogram: HistogramIncrease) -> None:
    with pytest.raises(MalformedHistogram):
        percentile(histogram, 90)
    with pytest.raises(MalformedHistogram):
        share_under(histogram, 1.0)


def test_sum_is_an_upper_bound_within_one_bucket() -> None:
    samples = [0.01, 0.2, 0.2, 3.0, 7.5]
    assert sum(samples) <= sum_at_most_seconds(_of(*samples)) <= sum(samples) * 1.25


_SAMPLES = st.lists(st.floats(min_value=0.002, max_value=100.0), min_size=1, max_size=60)


@given(_SAMPLES, st.integers(min_value=1, max_value=99))
def test_percentile_is_within_one_bucket_of_the_true_one(samples: list[float], percent: int) -> None:
    read = percentile(_of(*samples), percent)
    true = sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]
    assert read is not None
    assert true / 1.26 <= read.seconds <= true * 1.26


@given(_SAMPLES, st.integers(min_value=1, max_value=99))
def test_share_under_is_the_inverse_of_percentile(samples: list[float], percent: int) -> None:
    read = percentile(_of(*samples), percent)
    assert read is not None
    share = share_under(_of(*samples), read.seconds)
    assert share is not None
    assert share == pytest.approx(percent / 100, abs=1e-6)


@given(_SAMPLES)
def test_percentile_never_falls_as_the_rank_grows(samples: list[float]) -> None:
    reads = [percentile(_of(*samples), p) for p in range(1, 100)]
    values = [r.seconds for r in reads if r is not None]
    assert values == sorted(values)
