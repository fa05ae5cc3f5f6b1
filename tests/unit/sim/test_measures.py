import math

import numpy as np
import pytest

from poolwright.sim.measures import (
    alone_seconds,
    attained,
    attainment,
    goodput,
    measure,
    percentile,
    slow_downs,
    tpot,
)
from poolwright.sim.outcome import RequestOutcome
from poolwright.sim.policy import Slo
from poolwright.sim.simulation import simulate
from poolwright_protocol.roles import Role
from support.linear_step_time import machine_model
from support.sim_policies import poisson_trace, setting, static_policy

SLO = Slo(1.0, 0.1, ttft_seconds_per_token=0.001)


def request(ttft: float | None, gaps: list[tuple[float, int]], refused: str | None = None) -> RequestOutcome:
    tokens = sum(count for _, count in gaps) + 1
    finished = None if ttft is None else 5.0 + ttft + sum(seconds * count for seconds, count in gaps)
    return RequestOutcome(0, 5.0, 500, tokens, None if ttft is None else 5.0 + ttft, finished, gaps, refused)


@pytest.mark.parametrize(
    ("ttft", "gaps", "is_met"),
    [
        (1.5, [(0.1, 10)], True),
        (1.51, [(0.1, 10)], False),  # 1 s and a millisecond for each of 500 tokens
        (1.0, [(0.05, 99), (9.0, 1)], True),  # one gap of a hundred may be over
        (1.0, [(0.05, 98), (9.0, 2)], False),
        (1.0, [], True),
        (None, [], False),
    ],
)
def test_a_request_attains_both_targets_or_does_not(
    ttft: float | None, gaps: list[tuple[float, int]], is_met: bool
) -> None:
    assert attained(request(ttft, gaps), SLO) is is_met


def test_refused_and_unfinished_requests_count_as_missed() -> None:
    cut = RequestOutcome(1, 0.0, 10, 10, 0.5, None, [(0.01, 3)])
    assert attainment([request(0.5, [(0.01, 5)]), request(None, [], "full"), cut], SLO) == pytest.approx(1 / 3)
    assert attainment([], SLO) == 1.0


def test_percentiles_are_of_all_gaps_and_not_of_requests() -> None:
    seconds, counts = np.array([0.5, 0.01]), np.array([1, 99])
    assert percentile(seconds, 99, counts) == 0.01
    assert percentile(seconds, 99.5, counts) == 0.5
    assert percentile(np.array([3.0, 1.0, 2.0]), 50) == 2.0
    assert percentile(np.empty(0), 50) is None


def test_tpot_is_a_requests_mean() -> None:
    assert tpot(request(1.0, [(0.1, 3), (0.5, 1)])) == pytest.approx(0.2)
    assert tpot(request(1.0, [])) is None


def test_a_request_alone_is_slowed_down_by_nothing() -> None:
    model = machine_model()
    first, rest = alone_seconds(500, 21, model)
    alone = RequestOutcome(0, 5.0, 500, 21, 5.0 + first, 5.0 + first + rest, [(rest / 20, 20)])
    slow = slow_downs([alone], model)
    assert (slow.ttft.p50, slow.tbt.p99, slow.e2e.p90) == pytest.approx((1.0, 1.0, 1.0))
    assert slow.met
    assert slow.stress == pytest.approx(1 / 1.25)


def test_one_of_nine_percentiles_missed_is_all_missed() -> None:
    model = machine_model()
    first, rest = alone_seconds(500, 21, model)
    late = RequestOutcome(0, 0.0, 500, 21, 6.1 * first, 6.1 * first + rest, [(rest / 20, 20)])
    assert not slow_downs([late], model).met
    assert slow_downs([request(None, [])], model).stress == math.inf


def test_goodput_is_between_what_attained_and_what_did_not() -> None:
    found = goodput(lambda factor: 1.0 if factor <= 3.3 else 0.5, 0.9, 1.0, 8.0, tolerance=0.01)
    assert found.factor <= 3.3 < (found.above or 0.0)
    assert (found.above or 0.0) - found.factor <= 0.01 * 8
    assert goodput(lambda _: 0.0, 0.9, 1.0, 8.0).factor == 0.0
    assert goodput(lambda _: 1.0, 0.9, 1.0, 8.0) == (type(found)(8.0, None, 2))


def test_a_run_is_measured_whole() -> None:
    roles = [Role.PROMPT, Role.TOKEN]
    outcome = simulate(static_policy(roles), poisson_trace(100, 10), setting([machine_model()] * 2))
    measured = measure(outcome, SLO)
    assert (measured.requests, measured.finished, measured.refused, measured.lost) == (100, 100, 0, 0)
    assert measured.second_token.p50 is not None
    assert measured.tbt.p50 is not None
    assert measured.second_token.p50 > measured.tbt.p50  # it carries the KV
    assert measured.moves_per_hour == 0
