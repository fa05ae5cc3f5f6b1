"""What happens when, in one run: routing, hand-off, moves, losses."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from poolwright.sim.measures import gap_arrays
from poolwright.sim.network import Network
from poolwright.sim.outcome import RunOutcome
from poolwright.sim.policy import ClusterView, EngineRules, Placement, Policy, Refusal, RoleChange
from poolwright.sim.request import Arrival, Request, Trace
from poolwright.sim.simulation import Conditions, Loss, simulate
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_protocol.roles import Role
from support.linear_step_time import LinearStepTime, machine_model
from support.sim_policies import ShortestQueue, poisson_trace, setting, static_policy

P, T, M = Role.PROMPT, Role.TOKEN, Role.MIXED
MODEL = machine_model()


def trace(*requests: Request) -> Trace:
    return Trace("written", requests, requests[-1].arrival_seconds)


def play(
    roles: Sequence[Role],
    given: Trace,
    conditions: Conditions | None = None,
    model: MachineModel = MODEL,
    policy: Policy | None = None,
    bytes_per_second: float = 25e9,
) -> RunOutcome:
    world = setting([model] * len(roles), bytes_per_second)
    return simulate(policy or static_policy(roles), given, world, conditions)


class Script:
    """Role changes by the tick, a second apart."""

    period_seconds = 1.0

    def __init__(self, changes: dict[int, RoleChange]) -> None:
        self.changes = changes
        self.ticks = 0
        self.views: list[ClusterView] = []

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        self.ticks += 1
        self.views.append(view)
        change = self.changes.get(self.ticks)
        return [change] if change else []


def test_a_lone_request_takes_its_steps_and_nothing_else() -> None:
    (request,) = play([M], trace(Request(0, 1.0, 500, 3))).requests
    messages = Network(1.0).message_seconds
    prompt = MODEL.step_time.seconds((Chunk(0, 500),), 0, 0)
    second, third = (MODEL.step_time.seconds((), 1, context) for context in (501, 502))
    assert request.first_token_seconds == pytest.approx(1.0 + messages + prompt)
    assert [seconds for seconds, _ in request.gaps] == pytest.approx([second, third])
    assert request.finished_seconds == pytest.approx(1.0 + messages + prompt + second + third)


def test_a_long_prompt_is_cut_by_the_token_budget() -> None:
    (request,) = play([M], trace(Request(0, 0.0, 5000, 1))).requests
    chunks = (Chunk(0, 2048), Chunk(2048, 2048), Chunk(4096, 904))
    steps = sum(MODEL.step_time.seconds((chunk,), 0, 0) for chunk in chunks)
    assert request.first_token_seconds == pytest.approx(Network(1.0).message_seconds + steps)


def test_the_second_token_carries_the_transfer_and_the_first_does_not() -> None:
    given = trace(Request(0, 0.0, 400, 5))
    quick, slow = (play([P, T], given, bytes_per_second=rate).requests[0] for rate in (1e12, 1e9))
    seconds = 400 * MODEL.kv_bytes_per_token * (1 / 1e9 - 1 / 1e12)
    assert slow.ttft_seconds == quick.ttft_seconds
    assert slow.gaps[0][0] - quick.gaps[0][0] == pytest.approx(seconds, abs=1e-3)
    assert slow.gaps[1][0] == pytest.approx(quick.gaps[1][0])


def test_what_lies_between_a_step_and_its_client_delays_first_and_last_token_and_no_gap() -> None:
    near, far = (
        play([P, T], trace(Request(0, 0.0, 400, 5)), Conditions(network=Network(1e9, client_seconds=way))).requests[0]
        for way in (0.0, 0.25)
    )
    assert far.ttft_seconds == pytest.approx((near.ttft_seconds or 0.0) + 0.25)
    assert far.finished_seconds == pytest.approx((near.finished_seconds or 0.0) + 0.25)
    assert list(far.gaps) == list(near.gaps)


def test_kv_is_read_behind_the_step_that_was_formed_before_its_place_was_known() -> None:
    """Two prompts of a whole step wait while a short one is computed: the first one's step begins, and the second's is
    submitted behind it, before the machine that decodes says where the KV shall go."""
    given = trace(Request(0, 0.0, 64, 1), Request(1, 0.005, 2048, 2), Request(2, 0.005, 2048, 2))

    def second_gap(number: int, behind: bool) -> float:
        network = Network(1e12, serial_below_tokens=1 << 30, reads_behind_steps=behind)
        return play([P, T], given, Conditions(network=network)).requests[number].gaps[0][0]

    step = MODEL.step_time.seconds((Chunk(0, 2048),), 0, 0)
    assert second_gap(1, behind=True) - second_gap(1, behind=False) == pytest.approx(step, abs=2e-3)
    assert second_gap(2, behind=True) == pytest.approx(second_gap(2, behind=False), abs=0.2 * step)  # nothing behind it


def test_kv_does_not_leave_before_its_place_is_known() -> None:
    """The machine that decodes takes 0.21 s a step, and looks at what it is asked between two; a prompt is done in
    0.01 s, and its KV under way for 0.26 s. The second request's place is known when the first step ends."""
    model = machine_model(step_time=LinearStepTime(decode_seconds=0.2))
    given = trace(Request(0, 0.0, 20, 9), Request(1, 0.3, 20, 2))
    first, second = play([P, T], given, Conditions(network=Network(1e7)), model=model).requests
    transfer = 20 * model.kv_bytes_per_token / 1e7
    known_at = (first.first_token_seconds or 0.0) + first.gaps[0][0]
    finished_at = second.finished_seconds or 0.0
    assert second.first_token_seconds == pytest.approx(0.312, abs=0.002)
    assert known_at == pytest.approx(0.486, abs=0.002)
    assert finished_at > known_at + transfer + 2 * 0.21  # the steps under way and planned by then, and its own


def test_kv_of_a_long_prompt_leaves_beside_the_computation() -> None:
    rate = 400 * MODEL.kv_bytes_per_token / 0.02  # 20 ms for what is computed in 26 ms

    def second_gap(network: Network) -> float:
        return play([P, T], trace(Request(0, 0.0, 400, 2)), Conditions(network=network)).requests[0].gaps[0][0]

    serial, layered = (second_gap(Network(rate, serial_below_tokens=below)) for below in (512, 64))
    assert serial - layered == pytest.approx(0.02 * (1 - 1 / 80), abs=1e-3)


def test_transfers_to_one_machine_wait_for_each_other() -> None:
    later = 0.01
    given = trace(Request(0, 0.0, 400, 2), Request(1, later, 400, 2))
    outcome = play([P, P, T], given, bytes_per_second=1e9)
    first, second = (r.gaps[0][0] for r in outcome.requests)
    assert {r.prompt_uid for r in outcome.requests} == {"m0", "m1"}
    assert second - first == pytest.approx(400 * MODEL.kv_bytes_per_token / 1e9 - later, abs=0.012)
    assert outcome.transferred_bytes == 2 * 400 * MODEL.kv_bytes_per_token


def test_the_same_arguments_give_the_same_outcome() -> None:
    given = poisson_trace(200, 40)
    once, again = (play([P, T, M], given) for _ in range(2))
    assert [(r.first_token_seconds, r.finished_seconds) for r in once.requests] == [
        (r.first_token_seconds, r.finished_seconds) for r in again.requests
    ]


def test_who_never_fits_into_memory_is_refused() -> None:
    outcome = play([M], trace(Request(0, 0.0, 900, 200), Request(1, 0.0, 10, 2)), model=machine_model(1000))
    refused, served = outcome.requests
    assert refused.refused is not None
    assert refused.first_token_seconds is None
    assert served.finished_seconds is not None


def test_a_relegated_request_is_served_after_all_others() -> None:
    class Relegating(ShortestQueue):
        def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement:
            return replace(super().route(now, arrival, view), relegated=arrival.number == 1)

    given = trace(*(Request(number, 0.0, 2048, 2) for number in range(4)))
    rules = {role: EngineRules(max_sequences=1) for role in Role}
    policy = replace(static_policy([M]), router=lambda _: Relegating(), rules=lambda _: rules)
    first = [r.first_token_seconds or 0.0 for r in play([M], given, policy=policy).requests]
    assert max(first) == first[1]


def test_a_refusal_ends_a_request() -> None:
    class Refusing(ShortestQueue):
        def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement | Refusal:  # type: ignore[override]
            return Refusal("full", 3.0)

    policy = replace(static_policy([M]), router=lambda _: Refusing())
    (request,) = play([M], trace(Request(0, 0.0, 10, 2)), policy=policy).requests
    assert request.refused == "full"


def test_work_that_runs_is_finished_in_the_old_place_after_a_move() -> None:
    script = Script({1: RoleChange("m1", P, "tried")})
    given = trace(Request(0, 0.0, 100, 300), Request(1, 3.0, 100, 3))
    outcome = play([P, T, T], given, policy=static_policy([P, T, T], scaler=script))
    running, later = outcome.requests
    assert running.token_uid == "m1"
    assert running.finished_seconds is not None
    assert running.finished_seconds > 3.0
    assert float(gap_arrays(running.gaps)[0].max()) < 0.05  # and never stood still
    assert later.token_uid == "m2"
    assert outcome.moves == 1
    assert [(i.role, i.reason) for i in outcome.intervals if i.uid == "m1"] == [(T, ""), (P, "tried")]


def test_a_move_takes_its_time_and_begins_at_a_step_boundary() -> None:
    script = Script({1: RoleChange("m1", P)})
    step = LinearStepTime(fixed_seconds=0.4)
    given = trace(Request(0, 0.0, 10, 12))
    policy = static_policy([P, T, T], scaler=script)
    outcome = play([P, T, T], given, Conditions(move_seconds=0.7), machine_model(step_time=step), policy)
    began = next(i.began_seconds for i in outcome.intervals if i.uid == "m1" and i.role is P)
    assert 1.7 <= began < 1.7 + 0.41
    moving = [v.moving_to for view in script.views[1:2] for v in view.machines if v.uid == "m1"]
    assert moving in ([P], [None])


def test_a_bound_alone_changes_no_role() -> None:
    script = Script({1: RoleChange("m0", M, "bound", max_prefill_tokens=100)})
    given = trace(Request(0, 0.0, 1000, 2), Request(1, 2.0, 1000, 2))
    outcome = play([M], given, policy=static_policy([M], scaler=script))
    before, after = ((r.ttft_seconds or 0.0) for r in outcome.requests)
    assert outcome.moves == 0
    assert after > before + 8 * LinearStepTime().fixed_seconds


@pytest.mark.parametrize(("at", "restarts", "served"), [(0.005, 1, True), (1.0, 1, False)])
def test_a_lost_request_is_tried_once_more_while_its_client_has_nothing(at: float, restarts: int, served: bool) -> None:
    outcome = play([M, M], trace(Request(0, 0.0, 1000, 200)), Conditions(losses=[Loss(0, at)]))
    (request,) = outcome.requests
    assert request.restarts == restarts
    assert (request.finished_seconds is not None) is served
    if served:
        assert request.token_uid == "m1"
    else:
        assert 0 < sum(count for _, count in request.gaps) < 199  # what the client had stays


def test_a_lost_prompt_machine_leaves_the_prompt_to_the_one_that_decodes() -> None:
    (request,) = play([P, T], trace(Request(0, 0.0, 2000, 20)), Conditions(losses=[Loss(0, 0.02)])).requests
    assert request.finished_seconds is not None
    assert request.restarts == 1
    assert request.token_uid == "m1"


def test_another_machine_takes_the_place_of_a_lost_one() -> None:
    given = trace(*(Request(number, float(number), 100, 5) for number in range(10)))
    outcome = play([M], given, Conditions(losses=[Loss(0, 2.5, back_after_seconds=2.0)]))
    assert [r.refused is None for r in outcome.requests] == [True] * 3 + [False] * 2 + [True] * 5
    assert {i.uid for i in outcome.intervals} == {"m0", "m0'"}
    assert outcome.lost_machine_seconds == pytest.approx(2.0)


def test_a_prefix_that_was_computed_here_is_not_computed_again() -> None:
    shared = (1, 2)
    given = trace(Request(0, 0.0, 1100, 2, shared, 512), Request(1, 1.0, 1100, 2, shared, 512))
    first, second = play([M], given).requests
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    assert (second.ttft_seconds or 0) < (first.ttft_seconds or 0) / 2


def test_a_policy_sees_hits_before_it_chooses() -> None:
    seen: list[int] = []

    class Looking(ShortestQueue):
        def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement:
            seen.append(view.prefix_hit_tokens("m0", arrival))
            return super().route(now, arrival, view)

    given = trace(Request(0, 0.0, 1100, 2, (1, 2), 512), Request(1, 1.0, 1100, 2, (1, 7), 512))
    play([M], given, policy=replace(static_policy([M]), router=lambda _: Looking()))
    assert seen == [0, 512]


def test_a_scaler_reads_what_was_scraped_and_no_more() -> None:
    script = Script({})
    given = poisson_trace(300, 20, output_tokens=20)
    conditions = Conditions(scrape_seconds=2.0, scrape_delay_seconds=3.0)
    readings: list[tuple[float, float]] = []

    class Reading(Script):
        def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
            reading = view.reading(4.0)
            readings.append((now, reading.arrivals))
            return []

    script = Reading({})
    play([M, M], given, conditions, policy=static_policy([M, M], scaler=script))
    assert all(arrivals == 0 for now, arrivals in readings if now < 5.0)
    at = dict(readings)
    expected = sum(2.0 < r.arrival_seconds <= 6.0 for r in given)  # scrapes at 2 and 6 are known at 9
    assert at[9.0] == expected


def test_two_stages_serve_two_batches_at_once() -> None:
    given = poisson_trace(300, 60)
    one, two = (play([M], given, model=machine_model(pipeline_stages=stages)) for stages in (1, 2))
    ends = [max(r.finished_seconds or 0.0 for r in outcome.requests) for outcome in (one, two)]
    assert all(r.finished_seconds is not None for r in two.requests)
    assert ends[1] < ends[0]


def test_a_stage_waits_behind_a_longer_batch() -> None:
    """The bubble: a decode that could pass in its own time waits in the pipeline for the prompt before it."""
    model = machine_model(pipeline_stages=2, step_time=LinearStepTime(prompt_token_seconds=1e-3))
    alone = play([M], trace(Request(0, 0.0, 10, 400)), model=model).requests[0]
    both = play([M], trace(Request(0, 0.0, 10, 400), Request(1, 1.0, 1000, 2)), model=model).requests[0]
    longest = [float(gap_arrays(request.gaps)[0].max()) for request in (alone, both)]
    assert longest[1] > longest[0] + 0.3
    assert longest[1] < 1.5


def test_a_policy_that_names_no_machine_of_the_pool_is_told_so() -> None:
    class Lost(ShortestQueue):
        def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement:
            return Placement("nowhere")

    with pytest.raises(ValueError, match="not there"):
        play([M], trace(Request(0, 0.0, 1, 1)), policy=replace(static_policy([M]), router=lambda _: Lost()))


def test_roles_must_be_as_many_as_machines() -> None:
    with pytest.raises(ValueError, match="2 roles for 1 machines"):
        play([M], trace(Request(0, 0.0, 1, 1)), policy=static_policy([M, M]))


def test_what_has_not_ended_is_said() -> None:
    given = trace(*(Request(number, 0.0, 100, 2000) for number in range(3)))
    outcome = play([M], given, Conditions(drain_seconds=1.0))
    assert any("3 requests had not ended" in note for note in outcome.notes)
    assert all(sum(count for _, count in r.gaps) > 10 for r in outcome.requests)
