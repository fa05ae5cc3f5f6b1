"""The clairvoyant run: at least as good as what it searched, and never better than the bound."""

from functools import cache

import pytest

from poolwright.sim import bounds, profiles, traces
from poolwright.sim.baselines.static_split import every_split
from poolwright.sim.clairvoyant import COARSE, EXHAUSTIVE, Clairvoyant, Split, clairvoyant, knowing, planned
from poolwright.sim.measures import attainment
from poolwright.sim.policy import Setting, Slo
from poolwright.sim.profiles import TableStepTime
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright_protocol.roles import Role

MACHINES = 2
WINDOW = 5.0


@cache
def swinging() -> Trace:
    """Long prompts at first, long answers then: no split is right for both."""
    prompts = traces.generated([(6000, 2)], 11, WINDOW, seed=1)
    answers = traces.generated([(3000, 200)], 12, WINDOW, seed=2)
    late = [Request(0, r.arrival_seconds + WINDOW, r.prompt_tokens, r.output_tokens) for r in answers]
    return traces.made("swinging", [*prompts.requests, *late], 2 * WINDOW)


@cache
def setting() -> Setting:
    model = profiles.machine("h200-llama-8b-tp1")
    found = traces.means(swinging())
    slo = Slo(ttft_seconds=0.5, tbt_seconds=0.009, tbt_percentile=100)
    expected = found.prompt_tokens, found.output_tokens, found.requests_per_second
    return Setting(slo, [model] * MACHINES, 50e9, *expected)


@cache
def result() -> Clairvoyant:
    return clairvoyant(swinging(), setting(), others=[next(every_split(MACHINES))], window_seconds=WINDOW)


def test_it_is_the_best_of_what_was_tried() -> None:
    found = result()
    assert found.attainment == max(found.by_name.values())
    assert found.attainment == attainment(found.outcome.requests, setting().slo)
    assert set(found.by_name) >= {"one split", "windows"}
    assert len(found.by_name) == 4


def test_every_unchanging_split_is_at_most_as_good() -> None:
    for prompt in range(MACHINES):
        policy = planned([Split(prompt, 0, 2048)], WINDOW) if prompt else planned([Split(0, MACHINES, 2048)], WINDOW)
        outcome = simulate(policy, swinging(), setting(), knowing(Conditions()))
        assert attainment(outcome.requests, setting().slo) <= result().attainment


def test_it_stays_under_the_bound() -> None:
    time = setting().machines[0].step_time
    assert isinstance(time, TableStepTime)
    slo = setting().slo
    deadlines = bounds.Deadlines(slo.tbt_seconds, slo.ttft_seconds)
    bound = bounds.finite(time, setting().machines[0].kv_capacity_tokens, MACHINES, swinging(), deadlines)
    assert 0 < result().attainment <= bound.on_time_share + 1e-9


def test_a_plan_is_followed_at_no_cost() -> None:
    plan = [Split(1, 0, 2048), Split(0, 1, 256)]
    outcome = simulate(planned(plan, WINDOW), swinging(), setting(), knowing(Conditions()))
    moves = [interval for interval in outcome.intervals if interval.began_seconds > 0]
    assert {interval.role for interval in moves} == {Role.MIXED}
    # A switch waits for the end of a step and for nothing else.
    assert all(interval.began_seconds == pytest.approx(WINDOW, abs=0.5) for interval in moves)


def test_the_same_search_finds_the_same() -> None:
    trace = traces.between(swinging(), 0, 2)
    once, again = (clairvoyant(trace, setting(), window_seconds=WINDOW) for _ in range(2))
    assert (once.attainment, once.plan, once.runs) == (again.attainment, again.plan, again.runs)


def test_the_earliest_deadline_is_served_first() -> None:
    """A long prompt, whose target is later, came before a short one: while both wait, the short one goes first."""
    model = profiles.machine("h200-llama-8b-tp1")
    requests = [Request(0, 0.0, 60_000, 2), Request(1, 0.01, 60_000, 2), Request(2, 0.02, 500, 2)]
    trace = traces.made("waiting", requests, 1.0)
    slo = Slo(ttft_seconds=30.0, tbt_seconds=1.0, ttft_seconds_per_token=0.001)
    told = Setting(slo, [model], 50e9, 20_000.0, 2.0, 1.0)
    outcome = simulate(planned([Split(0, 1, 2048)], 1.0), trace, told, knowing(Conditions()))
    firsts = [request.first_token_seconds or 0.0 for request in outcome.requests]
    assert firsts[2] < firsts[1]


def test_a_coarse_grid_tries_less() -> None:
    coarse = clairvoyant(swinging(), setting(), window_seconds=WINDOW, grid=COARSE)
    whole = clairvoyant(swinging(), setting(), window_seconds=WINDOW, grid=EXHAUSTIVE)
    assert coarse.runs < whole.runs
    assert coarse.attainment <= whole.attainment + 0.05


def test_what_is_to_be_most_can_be_said() -> None:
    trace = traces.between(swinging(), 0, 2)
    found = clairvoyant(trace, setting(), window_seconds=WINDOW, worth=lambda outcome: -len(outcome.intervals))
    assert found.attainment == -len(found.outcome.intervals)
