"""The clairvoyant run: at least as good as what it searched, and never better than the bound."""

from functools import cache

import pytest

from poolwright.sim import bounds, profiles, traces
from poolwright.sim.baselines.static_split import every_split
from poolwright.sim.clairvoyant import Clairvoyant, Split, clairvoyant, knowing, planned
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
