"""The plan by offered work, the fast loop between plans, and which machine goes; case by case."""

from dataclasses import replace

import pytest

from poolwright.core.decision import Decision, Memory, ObjectiveState, Reason
from poolwright.core.machine import Machine
from poolwright.core.memory import rebuild_memory
from poolwright.core.reading import LiveReading, MachineWork, MetricsReading, MetricsState
from poolwright.core.spec import MachineClass, Mode, PoolBounds
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile
from support.pool_world import PRICES, START, M, P, T, World, islands, pool, reading, spec, split


def load(
    per_second: float, prompt: float, output: float, *, ttft: float = 0.3, tbt: float = 0.02, **rest: object
) -> MetricsReading:
    arrivals = per_second * 20
    return reading(
        ttft,
        tbt,
        ttft_count=arrivals,
        tbt_count=arrivals * (output - 1),
        arrivals=arrivals,
        prompt_tokens=arrivals * prompt,
        **rest,  # type: ignore[arg-type]
    )


PROMPTS = load(18, 2000, 20)  # wants about six of eight machines for prompts
ANSWERS = load(40, 250, 500)  # about five for tokens
LIGHT = load(2, 500, 50)


def world(*roles: Role, **changes: object) -> World:
    made = spec(len(roles), max_moves_per_window=4, **changes)  # type: ignore[arg-type]
    return World(made, pool(*roles), prices={"c": PRICES})


def after(it: World, seen: MetricsReading, plans: int, seconds: float = 30) -> Decision:
    for _ in range(plans):
        decision = it.step(seen, seconds=seconds)
    return decision


class TestPlan:
    def test_a_split_that_holds_is_kept(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        assert after(it, LIGHT, 3).reason is Reason.TARGETS_MET
        assert it.begun == []

    def test_work_that_presses_is_met_before_any_target_is_missed(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        decision = it.step(PROMPTS)
        assert {o.state for o in decision.objectives} == {ObjectiveState.MET}
        assert decision.reason is Reason.WORK_SHIFTED
        assert {m.to_role for m in decision.moves} == {P}
        assert float(dict(decision.evidence)["pressure"].split()[1].rstrip(",")) >= 0

    def test_below_overload_two_plans_must_agree(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        pressing = load(15.5, 2000, 20)
        first = it.step(pressing, seconds=30)
        assert (first.reason, first.moves) == (Reason.CONFIRMING, ())
        assert it.step(pressing, seconds=30).reason is Reason.WORK_SHIFTED

    def test_a_plan_that_changes_its_mind_starts_over(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        assert it.step(load(15.5, 2000, 20), seconds=30).reason is Reason.CONFIRMING
        it.step(LIGHT, seconds=30)
        assert it.memory.asked == frozenset()

    def test_several_machines_go_at_once_within_the_cap(self) -> None:
        it = world(P, *[T] * 7)
        assert len(it.step(PROMPTS).moves) == 4
        tight = world(P, *[T] * 7)
        tight.spec = replace(tight.spec, max_moves_per_window=1)
        assert len(tight.step(PROMPTS).moves) == 1

    def test_decode_work_moves_machines_the_other_way(self) -> None:
        it = world(*[P] * 6, T, M)
        decision = after(it, ANSWERS, 4)
        assert split(it.machines)[1] >= 3, decision

    def test_offered_work_that_no_split_holds_is_said_with_what_is_missing(self) -> None:
        it = world(P, P, P, P, P, P, T, M)
        decision = after(it, load(60, 2000, 20), 6)
        assert decision.reason is Reason.OVERLOADED
        assert decision.machines_wanted is not None
        assert decision.machines_wanted > 1

    def test_a_plain_miss_overrides_the_forecast_and_the_helped_pool_keeps_its_machine(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        missed = load(4, 500, 50, ttft=5.0)
        assert it.step(missed).reason is Reason.TTFT_MISSED
        assert it.memory.helped is P
        back = load(80, 50, 700)
        reasons = [it.step(back, seconds=5).reason for _ in range(3)]
        assert Reason.HELD_AFTER_MISS in reasons
        assert not any(a is P for _, _, a, _, _ in it.begun)

    def test_a_miss_of_the_tail_alone_is_left_to_the_plan(self) -> None:
        """95 % in time, and P99 asked for."""
        p99 = replace(spec(8).objectives[0], percentile=99)
        it = world(P, P, P, T, T, T, T, M, objectives=(p99, spec().objectives[1]))
        seen = LIGHT
        counts = tuple(
            c * 0.95 if b < 2.0 else c
            for b, c in zip(seen.ttft.upper_bounds_seconds, seen.ttft.cumulative_counts, strict=True)
        )
        seen = replace(seen, ttft=replace(seen.ttft, cumulative_counts=counts))
        decision = it.step(seen)
        assert decision.objectives[0].state is ObjectiveState.MISSED
        assert decision.moves == ()

    def test_a_target_below_the_service_time_is_infeasible_whatever_queues(self) -> None:
        slow = replace(PRICES, profile=StepProfile(StepCost(0.1, 1e-4, 0), PRICES.profile.mixed))
        it = world(P, P, T, T)
        it.prices = {"c": slow}
        decision = it.step(load(2, 500, 50, tbt=0.12))
        assert decision.objectives[1].infeasible
        assert decision.objectives[1].queued is None
        assert decision.reason is Reason.INFEASIBLE

    def test_only_what_queueing_made_of_a_latency_counts(self) -> None:
        it = world(P, P, T, T)
        ttft = it.step(load(2, 500, 50, ttft=0.5)).objectives[0]
        own = PRICES.prefill_seconds(500)
        assert ttft.own_seconds == pytest.approx(own, rel=0.01)
        assert ttft.observed_seconds is not None
        assert ttft.queued == pytest.approx((ttft.observed_seconds - own) / (1.0 - own), rel=0.01)

    @pytest.mark.parametrize("state", [MetricsState.MISSING, MetricsState.STALE])
    def test_without_fresh_metrics_nothing_moves_and_nothing_is_learned(self, state: MetricsState) -> None:
        it = world(P, P, P, T, T, T, T, M)
        it.step(LIGHT)
        learned = it.memory.forecast
        decision = after(it, replace(PROMPTS, state=state), 3)
        assert decision.moves == ()
        assert it.memory.forecast == learned

    def test_partial_metrics_take_from_the_mixed_pool_only(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        it.step(PROMPTS)
        it.machines = pool(P, P, P, T, T, T, M, M)
        it.memory = replace(it.memory, moves=(), asked=frozenset({(M, P)}))
        it.now += 400
        decision = it.decide(replace(PROMPTS, state=MetricsState.PARTIAL))
        assert {m.from_role for m in decision.moves} <= {M}

    def test_few_samples_hold_and_idle_asks_for_nothing(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        assert after(it, load(0.5, 2000, 20), 1).reason is Reason.INSUFFICIENT_SAMPLES
        assert after(it, load(0, 0, 1, in_flight=0), 1).reason is Reason.IDLE

    def test_a_class_without_a_price_leaves_the_plan_to_latency(self) -> None:
        it = world(P, T, M, classes=(MachineClass("c", 2), MachineClass("d", 1)))
        assert it.step(reading(ttft=5.0)).reason is Reason.TTFT_MISSED
        assert it.memory.forecast.requests is not None

    def test_dwell_holds_and_is_said(self) -> None:
        it = World(spec(8, max_moves_per_window=4), pool(P, *[T] * 7, since=START - 5), prices={"c": PRICES})
        assert it.step(PROMPTS).reason is Reason.DWELLING

    def test_advisory_says_what_it_would_do(self) -> None:
        it = world(P, *[T] * 7, mode=Mode.ADVISORY)
        decision = it.step(PROMPTS)
        assert (decision.moves, len(decision.advised)) == ((), 4)
        assert it.memory.moves == ()

    def test_memory_lost_in_a_restart_is_learned_again_and_moves_nothing_for_a_window(self) -> None:
        it = world(P, *[T] * 7)
        it.memory = rebuild_memory(START, it.machines, None, None, it.spec)
        assert it.step(PROMPTS).reason is Reason.MEMORY_UNREADABLE
        it.now = START + 301
        assert it.step(PROMPTS).reason is Reason.WORK_SHIFTED


class TestBounds:
    def test_machines_with_streams_get_a_bound_and_prompt_machines_none(self) -> None:
        it = world(P, P, P, T, T, T, T, M)
        decision = it.step(LIGHT)
        assert set(decision.bounds) == {"u3", "u4", "u5", "u6", "u7"}
        assert all(bound % PRICES.tile_tokens == 0 for bound in decision.bounds.values())
        assert decision.bounds["u3"] < decision.bounds["u7"], "beside the streams that fill it"

    def test_more_streams_make_it_smaller_and_little_changes_leave_it(self) -> None:
        it = world(P, P, P, T, M)
        first = it.step(load(10, 500, 50)).bounds["u4"]
        assert it.step(load(10.2, 500, 50)).bounds["u4"] == first
        busier = world(*[P] * 3, T, M, mode=Mode.PAUSED)
        assert busier.step(load(40, 100, 400)).bounds["u4"] < first

    def test_the_users_own_bound_stands(self) -> None:
        it = world(P, P, T, M, pools={M: PoolBounds(0, None, None, 128)})
        assert set(it.step(LIGHT).bounds) == {"u2"}

    def test_no_price_no_bound(self) -> None:
        assert World(spec(3), pool(P, T, M)).step(LIGHT).bounds == {}


QUEUED = MachineWork(prompt_tokens=50_000, prompt_pairs=0.0)
FREE = MachineWork()
FULL = MachineWork(streams=600, context_tokens=600_000)


class TestFastLoop:
    def looks(self, it: World, *, prompt: MachineWork, token: MachineWork, times: int = 3) -> list[Decision]:
        """Looks between two plans, 5 s apart."""
        it.spec = replace(it.spec, interval_seconds=120.0)
        it.step(LIGHT)
        decisions = []
        for _ in range(times):
            work = {m.uid: prompt if m.role is P else token if m.role is T else FREE for m in it.machines}
            decisions.append(it.step(LIGHT, live=LiveReading(it.now - 1, work)))
        return decisions

    def test_a_backlog_on_three_looks_brings_one_machine(self) -> None:
        it = world(P, T, T, T, T)
        decisions = self.looks(it, prompt=QUEUED, token=FREE)
        assert [d.reason for d in decisions] == [Reason.NOT_DUE, Reason.NOT_DUE, Reason.PROMPT_BACKLOG]
        assert split(it.machines) == (2, 3, 0)

    def test_streams_over_the_target_bring_one_the_other_way(self) -> None:
        it = world(P, P, P, T)
        assert self.looks(it, prompt=FREE, token=FULL)[-1].reason is Reason.TOKEN_BACKLOG
        assert split(it.machines) == (2, 2, 0)

    def test_a_passing_burst_moves_nothing(self) -> None:
        it = world(P, T, T, T, T)
        self.looks(it, prompt=QUEUED, token=FREE, times=2)
        it.step(LIGHT, live=LiveReading(it.now, {m.uid: FREE for m in it.machines}))
        assert it.memory.backlogged == {}
        assert it.begun == []

    def test_a_giver_that_would_not_hold_keeps_its_machine(self) -> None:
        busy = MachineWork(streams=420, context_tokens=420_000)
        it = world(P, T, T)
        decision = self.looks(it, prompt=QUEUED, token=busy)[-1]
        assert (decision.reason, it.begun) == (Reason.DONOR_NOT_COMFORTABLE, [])

    def test_both_behind_moves_nothing(self) -> None:
        it = world(P, P, T, T)
        assert all(d.moves == () for d in self.looks(it, prompt=QUEUED, token=FULL, times=6))

    def test_no_machine_of_one_phase_is_made_where_none_is_of_the_other(self) -> None:
        it = world(M, M, M, pools={P: PoolBounds(), T: PoolBounds()})
        it.spec = replace(it.spec, interval_seconds=120.0)
        it.step(LIGHT)
        for _ in range(5):
            it.step(LIGHT, live=LiveReading(it.now, {m.uid: QUEUED for m in it.machines}))
        assert it.begun == []

    def test_it_never_takes_what_it_did_not_see_lately(self) -> None:
        it = world(P, T, T, T, T)
        it.spec = replace(it.spec, interval_seconds=120.0)
        it.step(LIGHT)
        for _ in range(6):
            it.step(LIGHT, live=LiveReading(it.now - 60, {m.uid: QUEUED for m in it.machines if m.role is P}))
        assert it.begun == []

    def test_looks_that_come_too_often_count_once(self) -> None:
        it = world(P, T, T, T, T)
        it.spec = replace(it.spec, interval_seconds=120.0)
        it.step(LIGHT)
        for _ in range(5):
            it.step(LIGHT, seconds=0.5, live=LiveReading(it.now, {"u0": QUEUED}))
        assert it.begun == []

    def test_a_move_that_the_offered_work_speaks_against_is_not_made(self) -> None:
        it = world(P, T, T)
        it.spec = replace(it.spec, interval_seconds=120.0)
        it.step(ANSWERS)
        work = {m.uid: QUEUED if m.role is P else FREE for m in it.machines}
        decisions = [it.step(ANSWERS, live=LiveReading(it.now - 1, work)) for _ in range(4)]
        assert decisions[-1].reason is Reason.DONOR_NOT_COMFORTABLE
        assert split(it.machines) == (1, 2, 0)

    def test_cap_dwell_and_mode_hold_it_too(self) -> None:
        it = world(P, T, T, T, T)
        it.spec = replace(it.spec, max_moves_per_window=1)
        self.looks(it, prompt=QUEUED, token=FREE)
        more = [
            it.step(LIGHT, live=LiveReading(it.now, {m.uid: QUEUED for m in it.machines if m.role is P}))
            for _ in range(4)
        ]
        assert more[-1].reason is Reason.MOVES_CAPPED
        paused = world(P, T, T, T, T, mode=Mode.PAUSED)
        assert self.looks(paused, prompt=QUEUED, token=FREE, times=5)[-1].moves == ()


class TestWhoGoes:
    def shifted(self, it: World, work: dict[str, MachineWork]) -> str:
        decision = it.decide(PROMPTS, LiveReading(it.now, work))
        assert decision.reason is Reason.WORK_SHIFTED
        return decision.moves[0].uid

    def machines(self) -> World:
        it = world(P, *[T] * 7)
        it.spec = replace(it.spec, max_moves_per_window=1)
        return it

    def test_the_one_with_the_least_work_of_its_own(self) -> None:
        busy = {f"u{i}": MachineWork(streams=50, context_tokens=5e4) for i in range(1, 8)}
        assert self.shifted(self.machines(), {**busy, "u5": MachineWork(streams=3, context_tokens=3e3)}) == "u5"

    def test_a_lent_one_before_all_others(self) -> None:
        busy = {f"u{i}": MachineWork(streams=5, context_tokens=5e3) for i in range(1, 8)}
        assert (
            self.shifted(self.machines(), {**busy, "u3": MachineWork(streams=90, context_tokens=9e4, lent=True)})
            == "u3"
        )

    def test_no_prompt_machine_is_left_without_a_token_machine_over_a_fast_link(self) -> None:
        """Two islands of four. The prompt machine is on the first, with one token machine only; KV does not fit between
        islands. The others of its island are already prompt machines, so the one token machine there must stay."""
        it = world(P, T, P, P, T, T, T, T, pools={M: PoolBounds(0, 0)})
        it.spec = replace(it.spec, max_moves_per_window=1)
        two = {f"u{i}": "one" if i < 4 else "two" for i in range(8)}
        it.links = islands(two, 600e9, 1e6)
        assert it.decide(PROMPTS).moves[0].uid != "u1"
        it.links = islands(two, 600e9, 600e9)
        other = world(P, T, P, P, T, T, T, T)
        other.spec, other.links = it.spec, it.links
        assert other.decide(PROMPTS).moves[0].uid == "u1"


def test_deciding_is_the_same_in_any_order_of_machines() -> None:
    one, two = world(P, *[T] * 7), world(P, *[T] * 7)
    two.machines = tuple(reversed(two.machines))
    live = LiveReading(START, {"u4": FULL})
    assert one.decide(PROMPTS, live) == two.decide(PROMPTS, live)
    assert one.memory == two.memory


def test_a_pending_machine_of_one_pool_holds_up_no_plan_of_the_other() -> None:
    """A token pool is short for good: its machine is not there. The prompt pool still gets what it needs."""
    machines: tuple[Machine, ...] = pool(P, T, T, T, M, M)
    classes = (MachineClass("c", 6), MachineClass("gone", 1, frozenset({T})))
    it = World(spec(classes=classes, pools={T: PoolBounds(4)}, max_moves_per_window=4), machines)
    it.prices = {"c": PRICES, "gone": PRICES}
    it.memory = Memory()
    decision = it.decide(PROMPTS)
    assert decision.moves
    assert all(m.from_role is not T for m in decision.moves)
