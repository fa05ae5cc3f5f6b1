"""What the policy decides, case by case."""

from dataclasses import replace

import pytest

from poolwright.core.decision import Memory, MoveRecord, ObjectiveState, Outcome, Reason
from poolwright.core.machine import Move
from poolwright.core.memory import rebuild_memory
from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright.core.spec import MachineClass, Mode, PoolBounds
from support.pool_world import START, M, P, T, World, pool, reading, spec, split

TTFT_MISSED = reading(ttft=5.0)
TBT_MISSED = reading(ttft=0.05, tbt=0.2, arrivals=50, ttft_count=50)
IDLE = reading(ttft_count=0, tbt_count=0, arrivals=0, in_flight=0)


class TestBirths:
    def test_first_roles_follow_the_starting_split(self) -> None:
        world = World(spec(), pool(None, None, None))
        decision = world.decide(IDLE)
        assert decision.reason is Reason.BORN
        assert split(world.machines) == (1, 1, 1)

    def test_birth_ignores_dwell_and_cap_and_leaves_no_record(self) -> None:
        world = World(spec(), pool(None, None, None, since=START))
        world.step(IDLE)
        assert world.memory.moves == ()

    @pytest.mark.parametrize(
        ("machines", "expected"), [(1, (0, 0, 1)), (2, (1, 1, 0)), (3, (1, 1, 1)), (4, (1, 2, 1)), (8, (3, 4, 1))]
    )
    def test_default_start_is_one_mixed_and_the_rest_alternating(
        self, machines: int, expected: tuple[int, int, int]
    ) -> None:
        free = {P: PoolBounds(), T: PoolBounds(), M: PoolBounds()}
        world = World(spec(machines, pools=free), pool(*[None] * machines))
        world.decide(IDLE)
        assert split(world.machines) == expected

    def test_starting_split_of_the_spec_is_taken(self) -> None:
        asked = {P: PoolBounds(1, None, 4), T: PoolBounds(1, None, 3), M: PoolBounds(0, 2, 1)}
        world = World(spec(8, pools=asked), pool(*[None] * 8))
        world.decide(IDLE)
        assert split(world.machines) == (4, 3, 1)

    def test_machines_that_come_up_one_by_one_reach_the_same_split(self) -> None:
        world = World(spec(), ())
        for machine in pool(None, None, None):
            world.machines += (machine,)
            world.step(IDLE)
        assert split(world.machines) == (1, 1, 1)

    def test_first_machines_leave_to_the_rest_what_only_they_may_not_do(self) -> None:
        """The free machine comes up first; the other may only be prompt."""
        classes = (MachineClass("any", 1), MachineClass("prompts", 1, frozenset({P})))
        world = World(spec(classes=classes), pool(None, machine_class="any"))
        world.step(IDLE)
        assert split(world.machines) == (0, 1, 0)
        world.machines += tuple(replace(m, uid="x", name="x") for m in pool(None, machine_class="prompts"))
        world.step(IDLE)
        assert split(world.machines) == (1, 1, 0)

    def test_replacement_takes_the_role_of_the_lost_one(self) -> None:
        world = World(spec(4), pool(P, P, T, M))
        world.step(reading())
        world.remove("u1")
        world.step(reading())
        world.machines += tuple(replace(m, uid="new", name="new") for m in pool(None))
        world.step(reading())
        assert split(world.machines) == (2, 1, 1)

    def test_machine_that_is_not_ready_gets_no_role_yet(self) -> None:
        world = World(spec(), tuple(replace(m, ready=False) for m in pool(None, None, None)))
        assert world.decide(IDLE).births == ()

    def test_class_that_left_the_spec_is_let_go(self) -> None:
        world = World(spec(), (*pool(P, T, M), *(replace(m, uid="old") for m in pool(None, machine_class="gone"))))
        assert world.decide(IDLE).births == ()


class TestMoves:
    def test_missed_ttft_moves_a_machine_to_prompt(self) -> None:
        world = World(spec(), pool(P, T, M))
        decision = world.decide(TTFT_MISSED)
        assert decision.reason is Reason.TTFT_MISSED
        assert split(world.machines) == (2, 1, 0)
        assert dict(decision.evidence)["split"] == "2/1/0"
        assert "of 1000 ms" in dict(decision.evidence)["ttft"]

    def test_missed_tbt_moves_a_machine_to_token(self) -> None:
        world = World(spec(), pool(P, P, T))
        assert world.decide(TBT_MISSED).reason is Reason.TBT_MISSED
        assert split(world.machines) == (1, 2, 0)

    def test_three_machines_swing_from_end_to_end(self) -> None:
        world = World(spec(), pool(P, T, M))
        world.step(TTFT_MISSED)
        assert split(world.machines) == (2, 1, 0)
        world.now += 60
        world.step(TBT_MISSED)
        assert split(world.machines) == (1, 2, 0)

    def test_nothing_moves_while_targets_are_met(self) -> None:
        world = World(spec(), pool(P, T, M))
        decision = world.decide(reading())
        assert (decision.reason, decision.moves) == (Reason.TARGETS_MET, ())

    def test_between_target_and_comfort_nothing_moves(self) -> None:
        """TTFT is missed, but token is not comfortable: the band."""
        decision = World(spec(4), pool(P, P, T, T)).decide(reading(ttft=1.2, tbt=0.047, tbt_count=2000))
        assert decision.reason is Reason.DONOR_NOT_COMFORTABLE
        assert "TBT would come to" in decision.message

    def test_donor_test_counts_the_load_that_is_left_to_fewer_machines(self) -> None:
        """30 streams on three token machines at two thirds of the target: with two, √1.5 times that is over 80 %, so
        one may only become mixed; with six of seven left, √(7/6) times that is not."""
        busy = reading(ttft=5.0, tbt=0.04, tbt_count=20 * 30 / 0.04)
        [cautious] = World(spec(4), pool(P, T, T, T)).decide(busy).moves
        [whole] = World(spec(8), pool(P, *[T] * 7)).decide(busy).moves
        assert (cautious.to_role, whole.to_role) == (M, P)

    def test_donor_of_prompts_must_not_become_too_busy(self) -> None:
        """Half the target, but the two prompt machines are nearly always busy: one alone would be swamped."""
        busy = reading(ttft=0.5, tbt=0.2, ttft_count=160, arrivals=160)
        decision = World(spec(), pool(P, P, T)).decide(busy)
        assert decision.reason is Reason.DONOR_NOT_COMFORTABLE

    def test_both_missed_moves_nothing_and_says_so(self) -> None:
        decision = World(spec(4), pool(P, P, T, T)).decide(reading(ttft=3.0, tbt=0.2))
        assert decision.reason is Reason.BOTH_MISSED
        assert "budget is too small" in decision.message

    def test_both_missed_gives_the_far_worse_one_the_mixed_machine_only(self) -> None:
        far_worse = reading(ttft=30.0, tbt=0.09)
        world = World(spec(), pool(P, T, M))
        world.decide(far_worse)
        assert split(world.machines) == (2, 1, 0)
        assert World(spec(4), pool(P, P, T, T)).decide(far_worse).moves == ()

    def test_stall_that_reads_as_silence_is_a_miss(self) -> None:
        """No first token in the whole window: only the age of the oldest waiter tells."""
        stalled = reading(ttft_count=0, tbt=0.01, arrivals=0, in_flight=40, oldest_waiting=15.0)
        decision = World(spec(), pool(P, T, M)).decide(stalled)
        assert decision.objectives[0].observed_seconds == 15.0
        assert decision.reason is Reason.TTFT_MISSED

    def test_machine_to_move_is_the_one_longest_in_its_pool(self) -> None:
        machines = (*pool(P), *pool(T, T, since=START - 500))
        world = World(
            spec(4), (replace(machines[0], uid="p"), machines[1], replace(machines[2], role_since=START - 900))
        )
        assert world.decide(TTFT_MISSED).moves[0].uid == machines[2].uid

    def test_moves_respect_what_a_class_may_be(self) -> None:
        classes = (MachineClass("c", 2), MachineClass("tokens", 2, frozenset({T})))
        machines = (*pool(P, M), *(replace(m, uid=f"t{m.uid}") for m in pool(T, T, machine_class="tokens")))
        world = World(spec(classes=classes), machines)
        assert world.decide(TTFT_MISSED).moves[0].from_role is M

    def test_maximum_is_kept_and_half_a_step_taken_instead(self) -> None:
        world = World(spec(4, pools={P: PoolBounds(1, 1)}), pool(P, T, T, T))
        world.decide(TTFT_MISSED)
        assert split(world.machines) == (1, 2, 1)

    def test_last_machine_of_a_phase_is_never_taken(self) -> None:
        unmixed = {P: PoolBounds(), T: PoolBounds(), M: PoolBounds(0, 0)}
        assert World(spec(2, pools=unmixed), pool(P, T)).decide(TTFT_MISSED).reason is Reason.NO_DONOR
        free = {P: PoolBounds(), T: PoolBounds(), M: PoolBounds()}
        assert World(spec(1, pools=free), pool(M)).decide(TTFT_MISSED).reason is Reason.NO_DONOR

    def test_last_token_machine_may_turn_mixed_since_it_still_generates(self) -> None:
        free = {P: PoolBounds(), T: PoolBounds(), M: PoolBounds()}
        world = World(spec(2, pools=free), pool(P, T))
        world.decide(TTFT_MISSED)
        assert split(world.machines) == (1, 0, 1)

    def test_infeasible_target_moves_nothing(self) -> None:
        """2 s each although machines idle four fifths of the time: no queue to take away."""
        alone = reading(ttft=2.0, ttft_count=30, arrivals=30, window=200.0)
        decision = World(spec(4), pool(P, P, T, T)).decide(alone)
        assert decision.reason is Reason.INFEASIBLE
        assert decision.objectives[0].infeasible

    def test_objective_that_was_not_asked_for_gives_freely(self) -> None:
        only_ttft = replace(spec(4), objectives=spec().objectives[:1])
        world = World(only_ttft, pool(P, T, T, T))
        world.decide(reading(ttft=5.0, tbt=2.0))
        assert split(world.machines) == (2, 2, 0)


class TestGuards:
    def test_dwell_holds_a_machine_in_its_role(self) -> None:
        world = World(spec(), pool(P, T, M, since=START - 9))
        assert world.decide(TTFT_MISSED).reason is Reason.DWELLING
        world.now += 5
        assert world.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED

    def test_moves_in_a_window_are_capped(self) -> None:
        world = World(spec(8, max_moves_per_window=1), pool(P, *[T] * 7))
        world.step(TTFT_MISSED)
        world.now += 100
        assert world.decide(TTFT_MISSED).reason is Reason.MOVES_CAPPED
        world.now += 200
        assert world.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED

    def test_samples_from_before_the_last_move_are_not_acted_on(self) -> None:
        world = World(spec(8), pool(P, *[T] * 7))
        world.step(TTFT_MISSED)
        assert world.step(TTFT_MISSED).reason is Reason.SETTLING
        world.now += 20
        assert world.step(TTFT_MISSED).reason is Reason.TTFT_MISSED

    def test_one_move_at_a_time(self) -> None:
        world = World(spec(8), pool(P, *[T] * 7))
        world.decide(TTFT_MISSED)
        world.now += 6
        assert world.decide(TTFT_MISSED).reason is Reason.MOVE_IN_PROGRESS

    def test_roll_back_is_followed_by_a_cool_down_and_is_no_move_of_its_own(self) -> None:
        world = World(spec(8, dwell_seconds=50.0, metrics_window_seconds=5.0), pool(P, *[T] * 7))
        world.decide(TTFT_MISSED)
        world.now += 30
        world.roll_back_moves()
        world.now += 1
        world.finish_moves()
        world.now += 10
        assert world.decide(TTFT_MISSED).reason is Reason.COOLING_DOWN
        assert [r.outcome for r in world.memory.moves] == [Outcome.ROLLED_BACK]
        world.now += 45
        assert world.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED

    def test_between_two_plans_nothing_is_planned(self) -> None:
        world = World(spec(), pool(P, T, M))
        world.step(reading(), seconds=1)
        decision = world.decide(TTFT_MISSED)
        assert (decision.reason, decision.planned) == (Reason.NOT_DUE, False)
        assert decision.next_plan_at == START + 5

    def test_move_that_never_began_is_forgotten_after_its_deadline(self) -> None:
        world = World(spec(8), pool(P, *[T] * 7))
        before = world.machines
        world.decide(TTFT_MISSED)
        world.machines = before
        world.now += 31
        assert world.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED
        assert len(world.memory.moves) == 1

    def test_machine_lost_in_its_move_closes_the_record(self) -> None:
        world = World(spec(8), pool(P, *[T] * 7))
        uid = world.decide(TTFT_MISSED).moves[0].uid
        world.remove(uid)
        world.now += 6
        world.decide(TTFT_MISSED)
        assert world.memory.moves[0].outcome is Outcome.LOST


class TestMetrics:
    @pytest.mark.parametrize(
        ("state", "reason"),
        [(MetricsState.MISSING, Reason.METRICS_MISSING), (MetricsState.STALE, Reason.METRICS_STALE)],
    )
    def test_without_fresh_metrics_objectives_are_unknown_and_nothing_moves(
        self, state: MetricsState, reason: Reason
    ) -> None:
        decision = World(spec(), pool(P, T, M)).decide(reading(ttft=9.0, state=state))
        assert decision.reason is reason
        assert "the reason" in decision.message
        assert {o.state for o in decision.objectives} == {ObjectiveState.UNKNOWN}

    def test_minimum_is_repaired_without_metrics(self) -> None:
        world = World(spec(), pool(P, P, M))
        decision = world.decide(MetricsReading(MetricsState.MISSING, 20.0))
        assert decision.reason is Reason.MINIMUM_REPAIRED
        assert split(world.machines)[1] == 1

    def test_partial_metrics_let_only_a_mixed_machine_go(self) -> None:
        partial = reading(ttft=5.0, state=MetricsState.PARTIAL)
        assert World(spec(), pool(P, T, M)).decide(partial).reason is Reason.TTFT_MISSED
        assert World(spec(4), pool(P, T, T, T)).decide(partial).reason is Reason.METRICS_PARTIAL

    def test_few_samples_hold(self) -> None:
        few = reading(ttft=5.0, ttft_count=19, tbt_count=500, arrivals=19, in_flight=0)
        decision = World(spec(), pool(P, T, M)).decide(few)
        assert decision.reason is Reason.INSUFFICIENT_SAMPLES
        assert decision.objectives[0].state is ObjectiveState.INSUFFICIENT

    def test_unknown_donor_holds(self) -> None:
        decision = World(spec(), pool(P, T, M)).decide(reading(ttft=5.0, tbt_count=3))
        assert decision.reason is Reason.INSUFFICIENT_SAMPLES

    def test_idle_is_no_arrivals_and_nothing_in_flight_and_asks_for_nothing(self) -> None:
        """Old slow samples may still be in the window."""
        decision = World(spec(), pool(P, T, M)).decide(reading(ttft=9.0, arrivals=0, in_flight=0))
        assert decision.reason is Reason.IDLE

    def test_malformed_histogram_is_missing_data(self) -> None:
        broken = replace(reading(), ttft=HistogramIncrease((1.0, float("inf")), (5.0, 3.0)))
        decision = World(spec(), pool(P, T, M)).decide(broken)
        assert decision.reason is Reason.METRICS_MISSING
        assert decision.objectives[0].state is ObjectiveState.UNKNOWN

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    def test_gauge_that_is_no_number_is_missing_data(self, value: float) -> None:
        decision = World(spec(), pool(P, T, M)).decide(replace(reading(ttft=9.0), oldest_waiting_seconds=value))
        assert decision.reason is Reason.METRICS_MISSING


class TestMinimums:
    def test_repair_ignores_dwell_cap_and_plan_and_is_counted_apart(self) -> None:
        world = World(spec(4, max_moves_per_window=1), pool(P, P, P, T, since=START))
        world.memory = replace(
            world.memory,
            moves=(MoveRecord("u0", "m0", T, P, "x", START - 30, START - 29, Outcome.COMPLETED),),
            planned_at=START,
        )
        world.remove("u3")
        decision = world.decide(reading())
        assert decision.reason is Reason.MINIMUM_REPAIRED
        assert decision.moves[0].repair
        assert split(world.machines) == (2, 1, 0)

    @pytest.mark.parametrize("going", [{"deleting": True}, {"cordoned": True}])
    def test_machine_that_will_go_is_replaced_at_once(self, going: dict[str, bool]) -> None:
        world = World(spec(), pool(P, T, M))
        world.replace("u1", **going)
        world.decide(reading())
        assert world.begun == [(START, "u2", M, T, True)]

    def test_engine_that_restarts_in_place_keeps_its_place_for_a_while(self) -> None:
        world = World(spec(), pool(P, T, M))
        world.replace("u1", ready=False)
        assert world.step(reading(), seconds=29).moves == ()
        world.now += 2
        assert world.decide(reading()).reason is Reason.MINIMUM_REPAIRED

    def test_minimum_that_nobody_can_fill_is_said(self) -> None:
        world = World(spec(2), pool(P))
        decision = world.decide(reading())
        assert decision.reason is Reason.MINIMUM_UNMET
        assert "token has 0 of at least 1" in decision.minimum_unmet

    def test_repair_goes_through_a_third_pool_where_classes_are_in_the_way(self) -> None:
        """Prompt is empty; the spare machine may be token or mixed, and a token machine may be prompt."""
        classes = (MachineClass("a", 2, frozenset({T, M})), MachineClass("b", 1, frozenset({P, T})))
        machines = (
            *(replace(m, uid=f"a{m.uid}") for m in pool(M, M, machine_class="a")),
            *pool(T, machine_class="b"),
        )
        world = World(spec(classes=classes), machines)
        world.step(reading())
        world.step(reading())
        assert split(world.machines) == (1, 1, 1)

    def test_label_removed_by_hand_is_left_to_the_mover(self) -> None:
        world = World(spec(), pool(P, T, M))
        world.replace("u1", role=None)
        decision = world.decide(reading())
        assert (decision.births, decision.moves) == ((), ())
        assert "label was removed" in decision.minimum_unmet

    def test_spec_that_forbids_a_role_or_lowers_a_maximum_is_followed(self) -> None:
        forbidden = World(spec(classes=(MachineClass("c", 3, frozenset({P, T})),)), pool(P, T, M))
        assert forbidden.decide(reading()).reason is Reason.ROLE_NOT_ALLOWED
        lowered = World(spec(4, pools={M: PoolBounds(0, 1)}), pool(P, T, M, M))
        assert lowered.decide(reading()).reason is Reason.ABOVE_MAXIMUM
        assert split(lowered.machines) == (2, 1, 1)


class TestModes:
    COUNTS = {P: PoolBounds(1, None, 1), T: PoolBounds(1, None, 3), M: PoolBounds(0, None, 0)}  # noqa: RUF012

    def test_advisory_records_what_it_would_do_and_does_not_do_it(self) -> None:
        world = World(spec(mode=Mode.ADVISORY), pool(P, T, M))
        decision = world.decide(TTFT_MISSED)
        assert decision.reason is Reason.TTFT_MISSED
        assert (len(decision.advised), decision.moves) == (1, ())
        assert world.memory.moves == ()

    def test_manual_reaches_the_counts_and_holds_them(self) -> None:
        world = World(spec(4, mode=Mode.MANUAL, pools=self.COUNTS, max_moves_per_window=4), pool(P, P, P, T))
        for _ in range(8):
            world.step(TTFT_MISSED, seconds=10)
        assert split(world.machines) == (1, 3, 0)
        assert world.decide(TTFT_MISSED).reason is Reason.COUNTS_HELD

    def test_manual_keeps_dwell_and_cap(self) -> None:
        capped = World(spec(4, mode=Mode.MANUAL, pools=self.COUNTS, max_moves_per_window=1), pool(P, P, P, T))
        capped.step(reading(), seconds=10)
        assert capped.decide(reading()).reason is Reason.MOVES_CAPPED
        dwelling = World(spec(4, mode=Mode.MANUAL, pools=self.COUNTS), pool(P, P, P, T, since=START))
        assert dwelling.decide(reading()).reason is Reason.DWELLING

    def test_paused_still_gives_births_and_repairs(self) -> None:
        world = World(spec(4, mode=Mode.PAUSED), pool(P, P, None, None))
        world.step(TTFT_MISSED)
        assert split(world.machines)[1] >= 1
        world.machines = tuple(m for m in world.machines if m.role is not T)
        decision = world.decide(TTFT_MISSED)
        assert decision.reason is Reason.MINIMUM_REPAIRED
        quiet = World(spec(mode=Mode.PAUSED), pool(P, T, M))
        assert quiet.decide(TTFT_MISSED).reason is Reason.PAUSED


class TestMemory:
    def test_unreadable_memory_means_no_move_for_one_window(self) -> None:
        world = World(spec(), pool(P, T, M))
        world.memory = rebuild_memory(START, world.machines, None, None, world.spec)
        assert world.step(TTFT_MISSED).reason is Reason.MEMORY_UNREADABLE
        world.now = START + 299
        assert world.decide(TTFT_MISSED).reason is Reason.MEMORY_UNREADABLE
        world.now = START + 305
        assert world.decide(TTFT_MISSED).reason is Reason.TTFT_MISSED

    def test_move_found_on_a_machine_counts_though_no_status_knows_it(self) -> None:
        machines = tuple(replace(m, role_epoch=2, role_since=START - 50) if m.uid == "u0" else m for m in pool(P, T, M))
        memory = rebuild_memory(START, machines, (), None, spec())
        assert [r.uid for r in memory.moves] == ["u0"]

    def test_move_under_way_is_taken_up_once(self) -> None:
        move = Move(M, P, START - 3, START + 27, "TTFTMissed")
        machines = tuple(replace(m, role=None, role_epoch=2, move=move) if m.uid == "u2" else m for m in pool(P, T, M))
        alone = rebuild_memory(START, machines, (), None, spec())
        assert [(r.uid, r.to_role, r.finished_at) for r in alone.moves] == [("u2", P, None)]
        known = MoveRecord("u2", "m2", M, P, "TTFTMissed", START - 3)
        assert len(rebuild_memory(START, machines, (known,), None, spec()).moves) == 1

    def test_finished_move_that_the_status_knows_is_not_counted_twice(self) -> None:
        machines = tuple(replace(m, role_epoch=2, role_since=START - 50) if m.uid == "u0" else m for m in pool(P, T, M))
        for known in (
            MoveRecord("u0", "m0", M, P, "x", START - 52, START - 50, Outcome.COMPLETED),
            MoveRecord("u0", "m0", M, P, "x", START - 52),
        ):
            assert len(rebuild_memory(START, machines, (known,), None, spec()).moves) == 1

    def test_births_leave_no_trace(self) -> None:
        assert rebuild_memory(START, pool(P, T, M, since=START - 1), (), None, spec()).moves == ()

    def test_desired_of_another_budget_is_forgotten(self) -> None:
        assert rebuild_memory(START, (), (), {P: 2, T: 2, M: 0}, spec(3)).desired is None
        assert rebuild_memory(START, (), (), {P: 2, T: 1, M: 0}, spec(3)).desired == {P: 2, T: 1, M: 0}

    def test_same_input_gives_the_same_answer(self) -> None:
        one, two = World(spec(), pool(P, T, M)), World(spec(), tuple(reversed(pool(P, T, M))))
        assert one.decide(TTFT_MISSED) == two.decide(TTFT_MISSED)
        assert one.memory == two.memory

    def test_no_machines_is_a_named_state(self) -> None:
        assert World(spec(), (), memory=Memory()).decide(reading()).reason is Reason.NO_MACHINES


def test_a_machine_leaves_a_pool_in_which_nobody_was_wanted_and_no_count_falls_below_none() -> None:
    """One of three machines is missing, and the split that is remembered had no token machine."""
    world = World(spec(3, pools={P: PoolBounds(), T: PoolBounds()}), pool(T, T))
    world.memory = Memory(desired={P: 3, T: 0, M: 0})
    decision = world.decide(reading(ttft=5.0))
    assert [(m.from_role, m.to_role) for m in decision.moves] == [(T, P)]
    assert {role: count.desired for role, count in decision.pools.items()} == {P: 3, T: 0, M: 0}
