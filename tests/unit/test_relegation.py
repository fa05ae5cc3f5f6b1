"""Who is relegated by a router: only on predictions that were checked, and nobody who would have been in time."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from poolwright.core.admission import AdmissionReason
from poolwright.core.ledger import Entry, Ledger
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.relegation import Judged, Relegation
from poolwright.core.routes import Choice, Load, Route, RoutingRequest, Targets
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.01, 1e-4, 1e-8)), step_tokens=2048
)
TARGETS = Targets(ttft_seconds=1.0, tbt_seconds=0.05)
P, T = (
    Machine(uid, uid, "c", "10.0.0.1", True, role, 1, 0.0, None, 0.0)
    for uid, role in (("p", Role.PROMPT), ("t", Role.TOKEN))
)
SPLIT = Choice(T, P, Route.SPLIT)


def loads(wait_seconds: float = 0.0, prices: MachinePrices | None = PRICES, now: float = 0.0) -> dict[str, Load]:
    """With so long a line at the prompt machine."""
    step = PRICES.decode_seconds(1, 0)
    return {"p": Load(prices=prices, free_at=now + wait_seconds), "t": Load(prices=prices, next_step_seconds=step)}


def judge(relegation: Relegation, wait_seconds: float, now: float = 0.0, tokens: int = 100) -> Judged:
    request = RoutingRequest(tokens, output_tokens=100)
    return relegation.judge(request, [P, T], loads(wait_seconds, now=now), now, TARGETS, SPLIT)


def experienced(ratios: list[float] | None = None, now: float = 0.0) -> Relegation:
    """Predictions that were too long by these ratios."""
    relegation = Relegation()
    for ratio in ratios or [1.0] * 16:
        judged = judge(relegation, 0.5, now)
        assert judged.predicted_seconds is not None
        judged.first_token(now + judged.predicted_seconds / ratio)
    return relegation


def test_nobody_is_relegated_before_predictions_were_checked() -> None:
    relegation = Relegation()
    assert relegation.threshold(0.0) == math.inf
    for _ in range(15):
        judged = judge(relegation, 100.0)
        assert judged.reason is None
        judged.first_token(100.0)
    assert relegation.threshold(101.0) == math.inf
    judge(relegation, 100.0).first_token(100.0)
    assert relegation.threshold(101.0) == pytest.approx(1.0, abs=0.01)
    late = judge(relegation, 2.0, now=101.0)
    assert late.reason is AdmissionReason.TTFT_LATE
    assert late.predicted_seconds == pytest.approx(2.0, rel=0.1)


def test_the_first_is_late_even_where_its_prediction_is_too_long_by_the_most() -> None:
    relegation = experienced([1.0] * 15 + [1.5])
    assert relegation.threshold(0.0) == pytest.approx(1.5)
    assert judge(relegation, 1.4).reason is None
    assert judge(relegation, 1.6).reason is AdmissionReason.TTFT_LATE


def test_predictions_that_are_always_too_short_lower_no_bar() -> None:
    assert experienced([0.5] * 16).threshold(0.0) == 1.0


def test_in_a_line_that_is_late_whoever_is_late_more_likely_than_not_goes_behind_and_then_it_ends() -> None:
    relegation = experienced([1.1] * 15 + [1.5])
    assert judge(relegation, 1.2, now=0.0).reason is None
    assert judge(relegation, 1.6, now=0.0).reason is not None
    assert judge(relegation, 1.2, now=0.5).reason is not None
    assert judge(relegation, 0.3, now=1.0).reason is None
    assert judge(relegation, 1.2, now=1.6).reason is None  # nobody for a second: as long as a first token may take


def test_a_prompt_too_long_for_an_idle_pool_is_behind_and_says_nothing_of_the_line() -> None:
    relegation = experienced([1.0] * 15 + [1.5])
    assert judge(relegation, 0.0, tokens=20_000).reason is AdmissionReason.PROMPT_TOO_LONG
    assert relegation.threshold(0.0) == pytest.approx(1.5)


def test_what_was_learned_goes_stale() -> None:
    relegation = experienced(now=0.0)
    assert relegation.threshold(100.0) < math.inf
    assert relegation.threshold(130.0) == math.inf
    assert judge(relegation, 5.0, now=130.0).reason is None


def test_short_waits_teach_nothing() -> None:
    relegation = Relegation()
    for _ in range(100):
        judge(relegation, 0.0).first_token(0.001)  # predicted far too long, and of no line
    assert relegation.threshold(1.0) == math.inf


def test_another_try_teaches_nothing() -> None:
    relegation = Relegation()
    for _ in range(100):
        judged = judge(relegation, 0.5)
        judged.tried_again()
        judged.first_token(0.5)
    assert relegation.threshold(1.0) == math.inf


@pytest.mark.parametrize("route", [Route.SHORT_PROMPT, Route.BORROWED_FOR_PROMPT, Route.ONE_SIDED])
def test_who_leaves_the_line_is_not_behind_it(route: Route) -> None:
    choice = replace(SPLIT, prompt=None, route=route)
    judged = experienced().judge(RoutingRequest(100), [P, T], loads(5.0), 0.0, TARGETS, choice)
    assert judged == Judged()


def test_without_a_price_of_every_machine_nobody_is_relegated() -> None:
    unknown = loads(5.0) | {"t": Load()}
    assert experienced().judge(RoutingRequest(100), [P, T], unknown, 0.0, TARGETS, SPLIT) == Judged()


def test_streams_that_are_late_relegate_nobody() -> None:
    full = loads() | {"t": Load(prices=PRICES, streams=600, context_tokens=600_000)}
    judged = experienced().judge(RoutingRequest(100, output_tokens=10), [P, T], full, 0.0, TARGETS, SPLIT)
    assert judged.reason is None


@dataclass
class Line:
    """One prompt machine that serves prompts in order of arrival and those that are relegated after them, each in its
    price times a draw; under the router's own ledger and judgement."""

    draw: Callable[[], float]
    relegation: Relegation = field(default_factory=Relegation)
    ledger: Ledger = field(default_factory=Ledger)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"taken": [], "without": []})

    def run(self, arrivals: list[float], tokens: int) -> None:
        self.ledger.keep(["p", "t"])
        for uid in ("p", "t"):
            self.ledger.price(uid, PRICES)
        free_at = 0.0
        under_way: list[tuple[float, Entry, Judged]] = []
        for now in arrivals:
            while under_way and under_way[0][0] <= now:
                end, entry, judged = under_way.pop(0)
                entry.first_token(end)
                judged.first_token(end)
                entry.close()
            request = RoutingRequest(tokens, output_tokens=1)
            judged = self.relegation.judge(request, [P, T], self.ledger.loads(now), now, TARGETS, SPLIT)
            end = max(now, free_at) + PRICES.prefill_seconds(tokens) * self.draw()
            if judged.reason is not None:
                self.seconds["without"].append(end - now)  # had it been in its turn
                continue
            entry = self.ledger.begin(SPLIT, tokens, now, output_tokens=1)
            free_at = end
            under_way.append((end, entry, judged))
            self.seconds["taken"].append(end - now)


def arrivals(random_: random.Random, rate: float, count: int) -> list[float]:
    at, found = 0.0, []
    for _ in range(count):
        at += random_.expovariate(rate)
        found.append(at)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_in_noise_without_overload_next_to_nobody_who_would_have_been_in_time_goes_behind(seed: int) -> None:
    """Each prompt takes 0.11 s on average, up to twice as long or half; a load of 0.85 has bursts that are late."""
    rng = random.Random(seed)
    line = Line(draw=lambda: math.exp(rng.uniform(-0.7, 0.7)) / 1.08)
    line.run(arrivals(rng, 0.85 / PRICES.prefill_seconds(1000), 2000), 1000)
    wrong = sum(seconds <= TARGETS.ttft_seconds for seconds in line.seconds["without"])
    assert wrong <= 0.015 * 2000


@pytest.mark.parametrize("seed", range(5))
def test_of_half_more_than_it_can_do_a_machine_serves_in_time_nearly_all_that_it_takes_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    line = Line(draw=lambda: math.exp(rng.uniform(-0.2, 0.2)))
    line.run(arrivals(rng, 1.5 / PRICES.prefill_seconds(1000), 1000), 1000)
    taken, without = line.seconds["taken"][200:], line.seconds["without"]
    assert len(without) > 0.2 * 1000
    assert sum(seconds <= TARGETS.ttft_seconds for seconds in taken) > 0.8 * len(taken)
