"""Every baseline serves a small trace to its end, the same way twice, and keeps a machine for each phase."""

import random

import pytest

from poolwright.sim.baselines.admission import Admission, with_admission
from poolwright.sim.baselines.catalog import baselines
from poolwright.sim.baselines.static_split import every_split
from poolwright.sim.outcome import RunOutcome
from poolwright.sim.policy import Policy
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, Loss, simulate
from poolwright_protocol.roles import Role
from support.line_machine import setting

NAMES = sorted(baselines(2))


def trace(seconds: float = 16.0, rate: float = 10.0) -> Trace:
    """Long prompts first, then long answers, so that the right split changes."""
    chance = random.Random(1)
    requests: list[Request] = []
    now = 0.0
    while (now := now + chance.expovariate(rate)) < seconds:
        prompt, output = (3000, 20) if now < seconds / 2 else (300, 200)
        requests.append(Request(len(requests), now, int(prompt * chance.uniform(0.5, 1.5)), output))
    return Trace("changing", requests, seconds)


def run(policy: Policy, conditions: Conditions | None = None) -> RunOutcome:
    return simulate(policy, trace(), setting(4), conditions)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_ends_with_a_machine_for_each_phase_and_a_second_run_is_the_same(name: str) -> None:
    policy = baselines(2)[name]()
    outcome = run(policy)
    assert all(r.finished_seconds is not None for r in outcome.requests)
    for at in {i.began_seconds for i in outcome.intervals}:
        roles = [i.role for i in outcome.intervals if i.began_seconds <= at < i.ended_seconds]
        assert any(r is not Role.TOKEN for r in roles), at
        assert any(r is not Role.PROMPT for r in roles), at
    again = run(policy)
    assert [(r.number, r.first_token_seconds, r.finished_seconds, r.token_uid) for r in again.requests] == [
        (r.number, r.first_token_seconds, r.finished_seconds, r.token_uid) for r in outcome.requests
    ]
    assert again.intervals == outcome.intervals


@pytest.mark.parametrize("name", NAMES)
def test_lost_machines_stop_no_policy(name: str) -> None:
    outcome = run(baselines(2)[name](), Conditions(losses=[Loss(0, 4.0, 3.0), Loss(3, 10.0, None)]))
    # Only a stream that its client had begun to read breaks with its machine.
    broken = [r for r in outcome.requests if r.finished_seconds is None]
    assert all(r.restarts and r.first_token_seconds is not None for r in broken)
    assert all(r.arrival_seconds < 10.0 for r in broken)


def test_static_splits_never_move() -> None:
    for policy in every_split(4):
        assert run(policy).moves == 0


def test_early_rejection_refuses_in_a_flood_and_only_then() -> None:
    flood = trace(8.0, rate=60.0)
    for admission in (Admission.EARLY, Admission.PREDICTED):
        policy = with_admission(baselines(2)["mooncake"](), admission)
        refused = sum(r.refused is not None for r in simulate(policy, flood, setting(4)).requests)
        assert 0 < refused < len(flood)
        calm = trace(8.0, rate=2.0)
        assert not any(r.refused for r in simulate(policy, calm, setting(4)).requests)
