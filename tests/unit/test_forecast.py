"""Offered work from arrivals: what a series of readings teaches."""

import math
from dataclasses import replace
from random import Random

import pytest

from poolwright.core.forecast import Forecast, Offered
from poolwright.core.reading import MetricsReading
from support.pool_world import reading

WINDOW = 60.0


def seen(per_second: float, prompt: float = 1000, output: float = 101, served: float = 1.0) -> MetricsReading:
    """`served`: the share of arrivals that got tokens."""
    arrivals = per_second * WINDOW
    return reading(
        0.3,
        0.02,
        window=WINDOW,
        ttft_count=arrivals * served,
        tbt_count=arrivals * served * (output - 1),
        arrivals=arrivals,
        prompt_tokens=arrivals * prompt,
    )


def after(*readings: MetricsReading, start: float = 0.0) -> Forecast:
    forecast = Forecast()
    for i, one in enumerate(readings, 1):
        forecast = forecast.read(start + i * WINDOW, one)
    return forecast


def offered(forecast: Forecast, when: float) -> Offered:
    found = forecast.offered(when)
    assert found is not None
    return found


def test_nothing_is_known_before_a_reading_and_one_is_enough() -> None:
    assert Forecast().offered(100.0) is None
    first = offered(after(seen(5)), WINDOW)
    assert (first.requests_per_second, first.prompt_tokens, first.output_tokens) == pytest.approx((5, 1000, 101))


def test_steady_arrivals_are_forecast_as_they_are() -> None:
    steady = offered(after(*[seen(5)] * 10), 10 * WINDOW)
    assert steady.requests_per_second == pytest.approx(5, rel=0.01)
    assert steady.prompt_tokens_per_second == pytest.approx(5000, rel=0.01)
    assert steady.decodes_per_second == pytest.approx(500, rel=0.01)


def test_a_rise_is_followed_and_led() -> None:
    rising = after(*[seen(5 + i) for i in range(12)])
    last_middle = 5 + 11
    assert offered(rising, 12.5 * WINDOW).requests_per_second > last_middle


def test_a_jam_does_not_read_as_calm() -> None:
    """Half of the arrivals get no token: the work that is offered is the same."""
    jammed = offered(after(*[seen(5)] * 5, *[seen(5, served=0.5)] * 5), 10 * WINDOW)
    assert jammed.requests_per_second == pytest.approx(5, rel=0.01)
    assert jammed.decodes_per_second == pytest.approx(500, rel=0.01)


def test_counts_that_stray_raise_the_dispersion_and_poisson_does_not() -> None:
    random = Random(1)
    poisson = [seen(round(random.gauss(300, math.sqrt(300))) / WINDOW) for _ in range(40)]
    bursts = [seen(1 if i % 2 else 15) for i in range(40)]
    assert offered(after(*poisson), 40 * WINDOW).dispersion < 4
    assert offered(after(*bursts), 40 * WINDOW).dispersion > 8


def test_a_gap_or_a_clock_set_back_starts_anew() -> None:
    forecast = after(*[seen(5)] * 5)
    for later in (1e6, -1e6):
        anew = forecast.read(later, seen(50))
        assert offered(anew, later).requests_per_second == pytest.approx(50)


def test_no_trend_more_than_doubles() -> None:
    steep = after(seen(1), seen(10), seen(100))
    assert offered(steep, 100 * WINDOW).requests_per_second <= 2 * 100
    assert offered(after(seen(100), seen(1)), 100 * WINDOW).requests_per_second >= 0


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 1e300])
def test_what_is_no_number_teaches_nothing(lie: float) -> None:
    known = after(seen(5))
    assert known.read(2 * WINDOW, replace(seen(50), prompt_tokens=lie)) == known
    assert known.read(2 * WINDOW, replace(seen(50), window_seconds=lie)) == known


def test_no_arrivals_are_no_work() -> None:
    assert offered(after(seen(0)), WINDOW).requests_per_second == 0
