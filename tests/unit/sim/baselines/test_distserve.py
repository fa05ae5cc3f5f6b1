"""DistServe's formulas, bisection and both placements; its dispatch."""

import math

import pytest

from poolwright.sim.baselines.distserve import (
    RATE_STEP,
    Dispatch,
    Parallelism,
    answers_kept,
    distserve,
    goodput,
    goodputs,
    placed_apart,
    placed_together,
    prompts_kept,
    wait_one,
    wait_pipelined,
    wait_split,
)
from poolwright.sim.baselines.profile import MachineProfile
from poolwright.sim.policy import Placement, Slo
from poolwright_protocol.roles import Role
from support.line_machine import MODEL, LineStepTime, arrival, cluster, machine, setting


def test_the_waits_are_those_of_section_3_1() -> None:
    assert wait_one(0.0, 0.5) == 0.5
    assert wait_one(1.0, 0.5) == pytest.approx(0.5 + 0.25 / (2 * 0.5))
    assert wait_pipelined(1.0, 0.5) == pytest.approx(0.5 + 0.25 / (4 * 1.5))
    assert wait_split(1.0, 0.5, 1.6) == pytest.approx(0.5 / 1.6 + 0.25 / (2 * 1.6 * 1.1))
    assert [wait_one(2.0, 0.5), wait_pipelined(4.0, 0.5), wait_split(4.0, 0.5, 1.6)] == [math.inf] * 3


def test_splitting_a_prompt_wins_at_low_rates_and_pipelining_at_high_ones() -> None:
    assert wait_split(0.1, 0.5, 1.7) < wait_pipelined(0.1, 0.5)
    assert wait_split(3.2, 0.5, 1.7) > wait_pipelined(3.2, 0.5)


def test_goodput_is_found_to_within_a_step() -> None:
    assert 7.0 - RATE_STEP <= goodput(lambda rate: rate <= 7.0) <= 7.0


def test_prompts_are_kept_up_to_what_the_machine_computes() -> None:
    profile, slo = MachineProfile(MODEL), Slo(0.5, 0.05)
    rate = goodput(lambda r: prompts_kept(profile, [(1000, 10)], r, slo))
    most = 1 / profile.prompt_seconds(1000)
    assert 0.5 * most < rate < 1.3 * most  # batches of two save a fixed cost
    assert not prompts_kept(profile, [(16384, 10)], 0.1, slo)  # takes longer than the target alone


def test_answers_are_kept_up_to_what_the_gap_allows() -> None:
    profile, slo = MachineProfile(MODEL), Slo(0.5, 0.02)
    rate = goodput(lambda r: answers_kept(profile, [(1000, 100)], r, slo))
    batch = profile.most_decodes(0.02, 1050)
    most = batch / (100 * profile.decode_seconds(batch, batch * 1050))
    assert 0.4 * most < rate < 1.2 * most
    assert not answers_kept(profile, [(1000, 100)], 0.1, Slo(0.5, 0.005))


def test_algorithm_1_places_each_phase_by_its_own_goodput_for_each_gpu() -> None:
    def prompt(p: Parallelism) -> float:
        return {1: 1.0, 2: 2.4, 4: 4.0}.get(p.tensor, 0.0) if p.pipeline == 1 else 0.0

    def token(p: Parallelism) -> float:
        return 9.0 if (p.tensor, p.pipeline) == (2, 2) else 1.0

    placement = placed_apart(2, 4, lambda p: p.gpus >= 2, prompt, token, rate=20.0)
    assert placement is not None
    assert (placement.prompt, placement.token) == (Parallelism(2, 1), Parallelism(2, 2))
    assert (placement.prompt_instances, placement.token_instances) == (9, 3)
    assert placement.gpus == 9 * 2 + 3 * 4


def test_algorithm_2_keeps_both_phases_of_a_stage_in_one_node() -> None:
    asked: list[tuple[Parallelism, Parallelism]] = []

    def both(prompt: Parallelism, token: Parallelism) -> float:
        asked.append((prompt, token))
        return 10.0 if (prompt.tensor, token.tensor, prompt.pipeline) == (3, 1, 2) else 1.0

    placement = placed_together(4, 2, lambda p: True, both, rate=25.0)
    assert placement is not None
    assert (placement.prompt, placement.token) == (Parallelism(3, 2), Parallelism(1, 2))
    assert (placement.prompt_instances, placement.token_instances) == (3, 3)
    assert all(p.tensor + t.tensor <= 4 and p.pipeline == t.pipeline for p, t in asked)


def test_where_nothing_fits_there_is_no_placement() -> None:
    assert placed_apart(1, 2, lambda p: False, lambda p: 1.0, lambda p: 1.0, 1.0) is None
    assert placed_together(2, 1, lambda p: True, lambda p, t: 0.0, 1.0) is None


def test_the_phases_get_different_parallelism_where_their_goodputs_differ() -> None:
    """Two GPUs halve a prompt's time and its fixed cost; four add nothing, and for answers two add little."""
    models = {
        Parallelism(1, 1): MODEL,
        Parallelism(2, 1): MODEL._replace(step_time=LineStepTime(0.009, 5e-5, 9e-5, 9e-8)),
        Parallelism(4, 1): MODEL._replace(step_time=LineStepTime(0.009, 4.9e-5, 9e-5, 9e-8)),
    }
    prompt, token = goodputs(models, [(2000, 100)], Slo(0.25, 0.02))
    placement = placed_apart(1, 4, lambda p: p in models, prompt, token, rate=30.0)
    assert placement is not None
    assert placement.prompt == Parallelism(2, 1)
    assert placement.token == Parallelism(1, 1)
    assert placement.prompt_instances * prompt(placement.prompt) >= 30.0
    assert placement.token_instances * token(placement.token) >= 30.0
    assert prompt(Parallelism(3, 1)) == 0.0


def test_longer_prompts_get_more_prompt_machines() -> None:
    policy = {
        n: distserve(lengths=[(n, 100)]).first_roles(setting(8, rate=20.0)).count(Role.PROMPT) for n in (200, 6000)
    }
    assert 1 <= policy[200] < policy[6000] <= 7


def test_dispatch_counts_requests() -> None:
    view = cluster(
        machine("p1", Role.PROMPT, waiting_prompts=(1, 1)),
        machine("p2", Role.PROMPT, waiting_prompts=(9000,)),
        machine("t1", Role.TOKEN, decodes=2, bound_decodes=2),
        machine("t2", Role.TOKEN, decodes=3, decode_context_tokens=50_000),
    )
    assert Dispatch(setting()).route(0.0, arrival(), view) == Placement("t2", "p2")
