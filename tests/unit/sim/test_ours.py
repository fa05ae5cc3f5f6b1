"""Poolwright's own policy under the simulator: `core` decides, and what it says is done."""

from dataclasses import replace

import pytest

from poolwright.sim.measures import measure
from poolwright.sim.ours import Options, first_roles, ours, spec_of
from poolwright.sim.policy import Setting, Slo
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, Loss, simulate
from poolwright_protocol.roles import Role
from support.linear_step_time import LinearStepTime, machine_model
from support.sim_policies import poisson_trace

# Slow, so that few requests are a load.
MODEL = machine_model(
    step_time=LinearStepTime(fixed_seconds=0.03, prompt_token_seconds=4e-4, decode_seconds=1e-3, kv_token_seconds=1e-7)
)


def world(machines: int, per_second: float, prompt: float = 800.0, output: float = 60.0) -> Setting:
    return Setting(Slo(4.0, 0.2), [MODEL] * machines, 25e9, prompt, output, per_second)


def test_a_light_load_is_served_within_its_targets() -> None:
    setting = world(4, 2)
    outcome = simulate(ours(), poisson_trace(200, 2), setting)
    assert measure(outcome, setting.slo).attainment > 0.98


def test_the_first_split_follows_the_expected_load() -> None:
    """Where a tenth of the gaps may be late. Where nearly none may, all machines do both, if that holds the load."""
    often = Slo(4.0, 0.2, tbt_percentile=90)
    prompts, answers = (
        first_roles(replace(world(8, 4, *lengths), slo=often), Options()).count(Role.PROMPT)
        for lengths in ((3000, 40), (100, 800))
    )
    assert prompts > answers
    assert set(first_roles(world(8, 1, 3000, 40), Options())) == {Role.MIXED}


def test_a_wrong_split_is_put_right_and_costs_little_until_then() -> None:
    setting = world(6, 4)
    wrong = [Role.TOKEN] * 5 + [Role.PROMPT]
    given = poisson_trace(5 * 240, 5, prompt_tokens=1500, output_tokens=15)
    quick = Options(interval_seconds=20.0, metrics_window_seconds=20.0, dwell_seconds=10.0, window_seconds=60.0)
    moving, still, unpriced = (
        simulate(replace(ours(options), first_roles=lambda _: wrong), given, setting)
        for options in (quick, replace(quick, moves=False), replace(quick, moves=False, priced=False))
    )
    assert moving.moves >= 1
    assert still.moves == 0
    late, late_still, late_unpriced = (1 - measure(o, setting.slo).attainment for o in (moving, still, unpriced))
    assert max(late, late_still) <= late_unpriced / 2
    assert all(interval.role in Role for interval in moving.intervals)


def test_moves_stay_under_the_cap_of_their_window() -> None:
    options = Options(interval_seconds=10.0, metrics_window_seconds=20.0, dwell_seconds=5.0, window_seconds=60.0)
    setting = world(6, 4)
    outcome = simulate(ours(options), poisson_trace(4 * 150, 4, 1, 2500, 10), setting)
    starts = sorted(i.began_seconds for i in outcome.intervals if i.began_seconds > 0)
    for start in starts:
        assert sum(start <= other < start + 55 for other in starts) <= options.max_moves_per_window


def test_a_lost_machine_is_not_chosen_again() -> None:
    setting = world(3, 1.5)
    outcome = simulate(ours(), poisson_trace(100, 1.5), setting, Conditions(losses=[Loss(0, 20.0)]))
    late = [r for r in outcome.requests if r.arrival_seconds > 20.0]
    assert late
    assert all("m0" not in (r.prompt_uid, r.token_uid) for r in late)
    assert sum(r.finished_seconds is None for r in outcome.requests) <= 10  # those that had a token from it


def test_a_shared_prefix_draws_its_requests_together() -> None:
    setting = world(4, 2)
    requests = [Request(n, n * 0.5, 1100, 5, (n % 2, 10 + n % 2), 512) for n in range(60)]
    outcome = simulate(ours(), Trace("shared", requests, 30.0), setting)
    cached = sum(r.cached_tokens for r in outcome.requests)
    assert cached > 0.8 * 60 * 1024


def test_admission_is_its_own_switch() -> None:
    setting = world(2, 10)
    given = poisson_trace(150, 10)
    taken = simulate(ours(), given, setting)
    chosen = simulate(ours(Options(admission=True)), given, setting)
    assert sum(r.refused is not None for r in taken.requests) == 0
    assert sum(r.refused is not None for r in chosen.requests) > 0
    served = [r.ttft_seconds for r in chosen.requests if r.ttft_seconds is not None]
    everyone = [r.ttft_seconds for r in taken.requests if r.ttft_seconds is not None]
    assert max(served) < max(everyone)


@pytest.mark.parametrize("part", ["moves", "priced", "live", "affinity", "slack_budget", "planned_start", "relegate"])
def test_each_part_can_be_off(part: str) -> None:
    setting = world(4, 2)
    outcome = simulate(ours(replace(Options(), **{part: False})), poisson_trace(60, 2), setting)
    assert measure(outcome, setting.slo).finished == 60


def test_the_resource_has_the_budget_that_there_is() -> None:
    setting = replace(world(1, 1), machines=[MODEL, MODEL._replace(name="other"), MODEL])
    spec = spec_of(setting, Options())
    assert {c.name: c.replicas for c in spec.classes} == {"linear": 2, "other": 1}
    assert spec.budget == 3
