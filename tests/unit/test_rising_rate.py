"""The load of the end-to-end test is found where a target is missed for a while, and nowhere else."""

from collections.abc import Callable

from poolwright.local.traffic import Outcome
from support.traffic import MISSED_SECONDS, RISE, STEP_SECONDS, RisingRate

TARGET_SECONDS = 2.0


def driven(rate: RisingRate, ttft_seconds: Callable[[float, float], float], end: float) -> None:
    """Arrivals at this rate until `end`, or until it is found; TTFT by the moment and the arrivals a second."""
    begun: list[Outcome] = []
    now = 0.0
    while now < end and rate.found_at is None:
        rate.look([seen_at(outcome, now) for outcome in begun], now)
        begun.append(Outcome(now, ttft_seconds(now, rate.per_second)))
        now += 1 / rate.per_second


def seen_at(outcome: Outcome, now: float) -> Outcome:
    """Without a TTFT that is yet to come."""
    assert outcome.ttft_seconds is not None
    return outcome if outcome.started_at + outcome.ttft_seconds <= now else Outcome(outcome.started_at)


def test_it_rises_by_a_step_as_long_as_the_target_is_met() -> None:
    rate = RisingRate(2.0, TARGET_SECONDS, 0.0)
    driven(rate, lambda now, per_second: 1.0, 5.5 * STEP_SECONDS)
    assert rate.found_at is None
    assert rate.per_second == 2.0 * RISE**5


def test_it_stays_where_the_target_is_missed_for_a_while() -> None:
    rate = RisingRate(2.0, TARGET_SECONDS, 0.0)
    driven(rate, lambda now, per_second: 1.0 if per_second < 2.15 else 3.0, 20 * STEP_SECONDS)
    assert rate.found_at is not None
    assert rate.missed_at is not None
    assert rate.found_at - rate.missed_at >= MISSED_SECONDS
    assert rate.per_second == 2.0 * RISE**2
    found_at = rate.found_at
    rate.look([Outcome(float(i), 0.1) for i in range(1000)], found_at + 1000)
    assert (rate.found_at, rate.per_second) == (found_at, 2.0 * RISE**2)


def test_a_moment_of_missing_is_not_found() -> None:
    rate = RisingRate(2.0, TARGET_SECONDS, 0.0)
    driven(rate, lambda now, per_second: 3.0 if 30 <= now < 30 + MISSED_SECONDS / 2 else 1.0, 100.0)
    assert rate.found_at is None


def test_requests_that_wait_without_an_answer_miss_the_target() -> None:
    rate = RisingRate(2.0, TARGET_SECONDS, 0.0)
    driven(rate, lambda now, per_second: 1.0 if now < 5 else 10_000.0, 100.0)
    assert rate.found_at is not None
    assert rate.found_at < 5 + TARGET_SECONDS + 12 / 2.0 + MISSED_SECONDS + 2
