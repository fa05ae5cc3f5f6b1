"""Pressure: how hard offered work presses a split, and which split it presses least."""

from dataclasses import replace

import pytest

from poolwright.core.demand import OVERLOADED, RAISE, Demand, Pressure
from poolwright.core.forecast import Offered
from poolwright.core.pricing import STEP_MARGIN, MachinePrices
from poolwright.core.spec import MachineClass, PoolBounds
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile
from support.pool_world import PRICES, M, P, T, spec

CODE = Offered(5.0, 2000, 28)
CHAT = Offered(20.0, 500, 400)


def counts(p: int, t: int, m: int = 0, name: str = "c") -> dict[tuple[str, Role], int]:
    return {(name, P): p, (name, T): t, (name, M): m}


def demand(offered: Offered, machines: int = 8, prices: MachinePrices = PRICES) -> Demand:
    return Demand(spec(machines), {"c": prices}, offered)


def roles_after(start: dict[tuple[str, Role], int], steps: list[tuple[str, Role, Role]]) -> dict[tuple[str, Role], int]:
    after = dict(start)
    for name, a, b in steps:
        after[name, a] -= 1
        after[name, b] = after.get((name, b), 0) + 1
    return after


def test_at_the_planned_utilisation_pressure_is_the_edge_of_the_band() -> None:
    one = demand(CODE).worth("c").prompt
    exactly = replace(CODE, requests_per_second=CODE.requests_per_second * one * 4 * 0.8)
    patient = replace(spec(8), objectives=(replace(spec().objectives[0], target_seconds=60.0),))
    assert Demand(patient, {"c": PRICES}, exactly).pressure(counts(4, 4)).prompt == pytest.approx(RAISE)
    assert demand(exactly).pressure(counts(4, 4)).prompt > RAISE  # one second leaves little to wait


def test_work_that_comes_faster_than_it_is_done_is_overload() -> None:
    one = demand(CODE).worth("c").prompt
    twice = replace(CODE, requests_per_second=CODE.requests_per_second * one * 2)
    assert demand(twice).pressure(counts(1, 7)).prompt == pytest.approx(2 * OVERLOADED)


def test_prompts_pull_to_the_prompt_pool_and_answers_to_the_token_pool() -> None:
    many_prompts, many_answers = (
        replace(CODE, requests_per_second=20),
        replace(CHAT, requests_per_second=75, prompt_tokens=100),
    )
    for offered, role in ((many_prompts, P), (many_answers, T)):
        start = counts(4, 4)
        steps, pressed = demand(offered).best(start, 8)
        assert roles_after(start, steps)["c", role] > 4
        assert pressed.most < demand(offered).pressure(start).most


def test_bursts_and_a_tight_target_press_harder() -> None:
    busy = replace(CODE, requests_per_second=13)
    calm = demand(busy).pressure(counts(4, 4)).prompt
    assert demand(replace(busy, dispersion=16)).pressure(counts(4, 4)).prompt >= calm
    tight = replace(spec(8), objectives=(replace(spec().objectives[0], target_seconds=0.35), spec().objectives[1]))
    assert Demand(tight, {"c": PRICES}, replace(busy, dispersion=16)).pressure(counts(4, 4)).prompt > calm


def test_a_mixed_machine_gives_its_time_where_it_is_short() -> None:
    short_of_prompts = demand(replace(CODE, requests_per_second=18)).pressure(counts(3, 4, 1))
    short_of_tokens = demand(replace(CHAT, requests_per_second=40)).pressure(counts(6, 1, 1))
    assert short_of_prompts.mixed_share > 0.9
    assert short_of_tokens.mixed_share < 0.3


def test_the_bound_of_a_mixed_machine_shrinks_with_the_streams_beside() -> None:
    busy = demand(replace(CHAT, requests_per_second=5.0))
    bounds = [busy.bound(split, PRICES, M) for split in (counts(0, 6, 1), counts(3, 3, 1), counts(6, 0, 1))]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] >= PRICES.tile_tokens
    step = PRICES.profile.mixed.seconds(bounds[0], bounds[0])
    assert step * STEP_MARGIN <= 0.06


def test_the_bound_of_a_mixed_machine_keeps_up_with_the_prompts_that_come_to_it() -> None:
    slow = replace(PRICES, profile=StepProfile(PRICES.profile.decode, StepCost(0.045, 1e-4, 0)))
    busy = demand(replace(CODE, requests_per_second=8.0), prices=slow)
    bound = busy.bound(counts(0, 0, 4), slow, M)
    each = busy.offered.prompt_tokens_per_second / 4
    assert bound / slow.profile.mixed.seconds(bound, bound) >= each > 0
    assert bound > slow.chunk_within(0.06, 0, 0)


def test_a_machine_that_cannot_keep_the_target_beside_a_chunk_is_not_counted_on_for_prompts() -> None:
    slow = replace(PRICES, profile=StepProfile(PRICES.profile.decode, StepCost(0.055, 1e-3, 0)))
    assert demand(CODE, prices=slow).worth("c").mixed_prompt == 0.0


def test_memory_that_holds_few_streams_makes_a_token_machine_worth_less() -> None:
    small = replace(PRICES, kv_capacity_tokens=10_000)
    assert demand(CHAT, prices=small).worth("c").token < demand(CHAT).worth("c").token / 2


def test_classes_take_what_each_is_better_at() -> None:
    """One class computes prompts twice as fast, both decode alike: prompts on H100 and tokens on A100, say."""
    fast = replace(PRICES, profile=StepProfile(PRICES.profile.decode, StepCost(0.005, 5e-5, 5e-10)))
    two = spec(classes=(MachineClass("a100", 4), MachineClass("h100", 4)))
    both = Demand(two, {"a100": PRICES, "h100": fast}, replace(CODE, requests_per_second=16.0, output_tokens=300))
    wrong = {**counts(4, 0, name="a100"), **counts(0, 4, name="h100")}
    right = roles_after(wrong, both.best(wrong, 16)[0])
    assert right["h100", P] + right["h100", M] == 4
    assert right["a100", T] > 0 == right["h100", T]


def test_bounds_of_pools_and_roles_of_classes_are_kept() -> None:
    heavy = replace(CODE, requests_per_second=60)
    capped = Demand(spec(8, pools={P: PoolBounds(1, 5), T: PoolBounds(2), M: PoolBounds(0, 0)}), {"c": PRICES}, heavy)
    after = roles_after(counts(3, 5), capped.best(counts(3, 5), 16)[0])
    assert after["c", P] == 5
    tokens_only = Demand(spec(classes=(MachineClass("c", 8, frozenset({T, M})),)), {"c": PRICES}, heavy)
    assert all(b is not P for _, _, b in tokens_only.best(counts(1, 7), 16)[0])


def test_missing_machines_are_counted() -> None:
    wanted = demand(replace(CODE, requests_per_second=40)).machines_wanted(counts(4, 4))
    assert wanted > 2
    assert demand(CODE).machines_wanted(counts(4, 4)) < 0


def test_the_lesser_worst_is_better_and_then_the_lesser_sum() -> None:
    assert Pressure(0.5, 0.5).is_better_than(Pressure(0.6, 0.1))
    assert Pressure(0.6, 0.1).is_better_than(Pressure(0.6, 0.2))
    assert not Pressure(0.6, 0.1).is_better_than(Pressure(0.6, 0.1))


class TestLatePairs:
    """P99 of gaps of 25 ms where a step takes 10: a hand-over is too long for any second token."""

    SPEC = replace(
        spec(8, pools={P: PoolBounds(), T: PoolBounds()}),
        objectives=(spec().objectives[0], replace(spec().objectives[1], percentile=99, target_seconds=0.025)),
    )

    def demand(self, offered: Offered) -> Demand:
        return Demand(self.SPEC, {"c": PRICES}, offered)

    def test_machines_that_do_both_are_chosen_where_they_hold_the_work(self) -> None:
        light = self.demand(Offered(4.0, 500, 200))
        assert roles_after(counts(3, 4, 1), light.best(counts(3, 4, 1), 8)[0]) == counts(0, 0, 8)
        assert light.pressure(counts(0, 0, 8)).served == 1.0

    def test_token_machines_that_are_lent_count_as_mixed_ones(self) -> None:
        busy = self.demand(Offered(20.0, 500, 200))
        lent, mixed = busy.pressure(counts(0, 7, 1)), busy.pressure(counts(0, 0, 8))
        assert mixed.most < lent.most < 1.2 * mixed.most
        assert busy.pressure(counts(0, 8, 0)).most == float("inf"), "nobody whose part prompts are"

    def test_long_answers_bear_one_late_gap_and_let_prompt_machines_take_what_is_too_much(self) -> None:
        heavy = self.demand(Offered(30.0, 1200, 800))
        split = roles_after(counts(0, 0, 8), heavy.best(counts(0, 0, 8), 8)[0])
        assert split["c", P] > 0
        served = heavy.pressure(split).served
        assert heavy.pressure(counts(0, 0, 8)).served < served < 1
        short = self.demand(Offered(60.0, 1200, 20))
        assert short.best(counts(0, 0, 8), 8)[0] == [], "of short ones nearly none would be in time"
