import pytest

from poolwright.core.percentile import percentile
from poolwright.core.reading import MetricsState
from poolwright.sim.meter import Meter


def test_nothing_is_known_before_two_scrapes() -> None:
    meter = Meter(0.0)
    meter.scrape(0.0)
    assert meter.reading(1.0, 60.0).state is MetricsState.MISSING


def test_a_reading_is_of_its_window_and_as_old_as_the_scrape() -> None:
    meter = Meter(delay_seconds=1.0)
    for second in range(10):
        meter.scrape(float(second))
        meter.arrived(second, second + 0.5, 100)
        meter.first_token(second, second + 0.6)
        meter.tokens(0.05, 4)
    reading = meter.reading(9.5, 3.0)  # the scrape at 8 is the last to be known
    assert reading.window_seconds == 3.0
    assert (reading.arrivals, reading.prompt_tokens, reading.output_tokens) == (3, 300, 15)
    assert (reading.ttft.count, reading.tbt.count) == (3, 12)
    observed = percentile(reading.ttft, 50)
    assert observed is not None
    assert observed.seconds == pytest.approx(0.1, rel=0.25)


def test_the_oldest_that_waits_speaks_for_a_stall() -> None:
    meter = Meter(0.0)
    meter.scrape(0.0)
    meter.arrived(1, 1.0, 10)
    meter.arrived(2, 2.0, 10)
    meter.scrape(4.0)
    assert meter.reading(4.0, 60.0).oldest_waiting_seconds == 3.0
    meter.first_token(1, 4.5)
    meter.ended(1)
    meter.scrape(5.0)
    reading = meter.reading(5.0, 60.0)
    assert (reading.in_flight, reading.oldest_waiting_seconds) == (1, 3.0)
