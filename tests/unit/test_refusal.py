"""Who is refused by a router, with which reason, and whether coming back when told is worth it."""

import math
from collections import Counter
from dataclasses import replace
from heapq import heappop, heappush

import pytest

from poolwright.core.admission import AdmissionReason
from poolwright.core.ledger import Entry, Ledger
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.relegation import Judged, Relegation
from poolwright.core.routes import Choice, Load, Route, RoutingRequest, Targets
from poolwright.router.comeback import MOST_SECONDS, Comeback
from poolwright.router.refusal import Refusal, Refusals
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
FULL = Load(prices=PRICES, streams=600, context_tokens=600_000)


class Router:
    """Relegation and refusals as a router asks them."""

    def __init__(self, ratio: float = 1.0, relegates: bool = False) -> None:
        self.relegation = Relegation()
        self.refusals = Refusals(self.relegation)
        self.relegates = relegates
        for _ in range(16):
            judged = self._judged(self._request(100), self._loads(0.5, {}), 0.0)
            assert judged.predicted_seconds is not None
            judged.first_token(judged.predicted_seconds / ratio)

    @staticmethod
    def _request(tokens: int) -> RoutingRequest:
        return RoutingRequest(tokens, output_tokens=10)

    @staticmethod
    def _loads(wait_seconds: float, changes: dict[str, Load]) -> dict[str, Load]:
        step = PRICES.decode_seconds(1, 0)
        idle = {"p": Load(prices=PRICES, free_at=wait_seconds), "t": Load(prices=PRICES, next_step_seconds=step)}
        return idle | changes

    def _judged(self, request: RoutingRequest, loads: dict[str, Load], now: float) -> Judged:
        return self.relegation.judge(request, [P, T], loads, now, TARGETS, SPLIT)

    def refuses(
        self, wait_seconds: float = 0.0, tokens: int = 100, targets: Targets = TARGETS, **changes: Load
    ) -> Refusal | None:
        request, loads = self._request(tokens), self._loads(wait_seconds, changes)
        judged = self._judged(request, loads, 0.0)
        return self.refusals.judge(request, [P, T], loads, 0.0, targets, judged, self.relegates)


def test_who_is_in_time_is_served() -> None:
    assert Router().refuses(wait_seconds=0.5) is None


def test_who_would_be_late_is_told_by_how_much_the_line_is_too_long() -> None:
    refusal = Router().refuses(wait_seconds=3.0)
    assert refusal is not None
    assert refusal.reason is AdmissionReason.TTFT_LATE
    assert refusal.predicted_seconds == pytest.approx(3.0, rel=0.1)
    assert refusal.retry_seconds is not None
    assert 2.0 <= refusal.retry_seconds <= 5.0
    assert str(refusal) == "The first token is predicted after 3.03 s; the pool promises it in 1.00 s."


def test_a_prediction_known_to_be_too_long_is_put_right_before_it_is_told() -> None:
    refusal = Router(ratio=2.0).refuses(wait_seconds=6.0)
    assert refusal is not None
    assert refusal.predicted_seconds == pytest.approx(3.0, rel=0.1)
    assert refusal.retry_seconds is not None
    assert 2.0 <= refusal.retry_seconds <= 5.0
    assert Router(ratio=2.0).refuses(wait_seconds=1.8) is None


def test_predictions_that_nobody_checked_refuse_nobody() -> None:
    router = Router()
    router.relegation = Relegation()
    router.refusals = Refusals(router.relegation)
    assert router.refuses(wait_seconds=100.0) is None


def test_a_prompt_too_long_for_an_idle_pool_is_not_told_to_come_back() -> None:
    refusal = Router().refuses(tokens=20_000)
    assert refusal is not None
    assert refusal.reason is AdmissionReason.PROMPT_TOO_LONG
    assert refusal.retry_seconds is None


def test_where_gaps_would_be_late_for_all_one_more_stream_is_refused() -> None:
    refusal = Router().refuses(t=FULL)
    assert refusal is not None
    assert refusal.reason is AdmissionReason.TBT_LATE
    assert refusal.predicted_seconds > refusal.target_seconds == TARGETS.tbt_seconds
    assert refusal.retry_seconds is not None


def test_a_target_that_no_machine_can_hold_refuses_nobody() -> None:
    assert Router().refuses(targets=replace(TARGETS, tbt_seconds=0.001), t=FULL) is None


def test_where_machines_have_no_price_nobody_is_refused() -> None:
    assert Router().refuses(wait_seconds=100.0, t=Load()) is None


def test_of_the_late_one_in_twenty_is_served_behind_all_others_where_that_is_allowed() -> None:
    router = Router(relegates=True)
    for _ in range(400):
        assert router.refuses() is None
    outcomes = Counter(router.refuses(wait_seconds=3.0) is None for _ in range(600))
    assert 0.04 * 1000 <= outcomes[True] <= 0.05 * 1000


def test_whoever_is_turned_away_comes_back_behind_those_told_before() -> None:
    comeback = Comeback()
    for number in range(20):
        comeback.ended(number * 0.5)  # two in a second
    told = [comeback.turn(10.0) for _ in range(8)]
    assert told == sorted(told)
    assert told[0] == 1
    assert 4 <= told[-1] <= 5
    assert comeback.turn(60.0) == 1  # they were served, or are gone


def test_without_experience_it_is_soon_and_never_later_than_anyone_would_wait() -> None:
    comeback = Comeback()
    assert [comeback.turn(0.0) for _ in range(3)] == [1, 1, 1]
    assert comeback.turn(0.0, 2.3) == 3
    assert comeback.turn(0.0, math.inf) == MOST_SECONDS
    assert comeback.turn(0.0, 1e9) == MOST_SECONDS


def test_a_long_silence_is_no_pace() -> None:
    comeback = Comeback()
    comeback.ended(0.0)
    for now in (1000.0, 1000.1, 1000.2):
        comeback.ended(now)
    assert [comeback.turn(1000.2) for _ in range(3)] == [1, 2, 2]


class Burst:
    """One prompt machine behind a router that refuses; whoever is refused comes back when told."""

    def __init__(self) -> None:
        self.router = Router()
        self.ledger = Ledger()
        self.ledger.keep(["p", "t"])
        for uid in ("p", "t"):
            self.ledger.price(uid, PRICES)
        self.comeback = Comeback()
        self.tries: list[int] = []
        self.late = 0
        self.under_way: list[tuple[float, Entry]] = []
        self.free_at = 0.0

    def _end(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            end, entry = self.under_way.pop(0)
            entry.first_token(end)
            entry.close()
            self.comeback.ended(end)

    def run(self, arrivals: list[float], tokens: int) -> None:
        coming = [(at, number, 1) for number, at in enumerate(arrivals)]
        while coming:
            now, number, tries = heappop(coming)
            self._end(now)
            request = RoutingRequest(tokens, output_tokens=1)
            loads = self.ledger.loads(now)
            judged = self.router.relegation.judge(request, [P, T], loads, now, TARGETS, SPLIT)
            refusal = self.router.refusals.judge(request, [P, T], loads, now, TARGETS, judged, False)
            if refusal is not None:
                assert refusal.retry_seconds is not None
                heappush(
                    coming,
                    (now + self.comeback.turn(now, refusal.retry_seconds, refusal.pace_seconds), number, tries + 1),
                )
                continue
            self.tries.append(tries)
            self.free_at = max(now, self.free_at) + PRICES.prefill_seconds(tokens)
            self.late += self.free_at - now > TARGETS.ttft_seconds
            self.under_way.append((self.free_at, self.ledger.begin(SPLIT, tokens, now, output_tokens=1)))


def test_after_a_burst_nearly_all_who_come_back_when_told_are_served_in_time_at_their_first_return() -> None:
    burst = Burst()
    burst.run([*(0.5 * n for n in range(20)), *(10.0 + 0.001 * n for n in range(60))], 1000)  # 0.11 s each
    assert len(burst.tries) == 80
    assert burst.late == 0
    assert max(burst.tries) > 1
    assert sum(tries > 2 for tries in burst.tries) <= 6
    assert burst.free_at < 10.0 + 60 * PRICES.prefill_seconds(1000) * 1.5  # and the machine was not left idle for long
