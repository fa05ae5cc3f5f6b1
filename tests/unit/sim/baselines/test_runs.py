"""Routers and scalers of the baselines on views of machines: what they look at, and what they ask for."""

from dataclasses import replace

import pytest

from poolwright.sim.baselines.arrow import arrow
from poolwright.sim.baselines.blitzscale import blitzscale
from poolwright.sim.baselines.dynamo import load
from poolwright.sim.baselines.narwhal import narwhal
from poolwright.sim.baselines.routers import ShortestQueue
from poolwright.sim.baselines.splitwise import splitwise
from poolwright.sim.baselines.traffic import Meter, mean_seconds
from poolwright.sim.baselines.xllm import xllm
from poolwright.sim.policy import Placement, RoleChange
from poolwright_protocol.roles import Role
from support.line_machine import arrival, cluster, histogram, machine, setting


def test_prompts_join_the_queue_that_ends_first_and_answers_the_emptiest_memory() -> None:
    view = cluster(
        machine("p1", Role.PROMPT, waiting_prompts=(100,) * 10),
        machine("p2", Role.PROMPT, waiting_prompts=(4000,)),
        machine("t1", Role.TOKEN, decode_context_tokens=5000, decodes=1),
        machine("t2", Role.TOKEN, bound_context_tokens=4000, bound_decodes=4),
    )
    assert ShortestQueue(setting()).route(0.0, arrival(), view) == Placement("t2", "p1", reason="split")


def test_a_mixed_machine_keeps_what_it_is_given_and_its_decodes_count() -> None:
    idle = cluster(machine("p", Role.PROMPT, waiting_prompts=(50,)), machine("m", Role.MIXED), machine("t", Role.TOKEN))
    assert ShortestQueue(setting()).route(0.0, arrival(), idle) == Placement("m", reason="mixed")
    busy = cluster(
        machine("p", Role.PROMPT, waiting_prompts=(50,)),
        machine("m", Role.MIXED, decodes=200, decode_context_tokens=90_000),
        machine("t", Role.TOKEN),
    )
    routed = ShortestQueue(setting()).route(0.0, arrival(), busy)
    assert isinstance(routed, Placement)
    assert routed.prompt_uid == "p"


@pytest.mark.parametrize(("until_idle", "goes_home"), [(False, True), (True, False)])
def test_splitwise_lends_a_token_machine_and_takes_it_back_when_prompts_are_done_or_all_is(
    until_idle: bool, goes_home: bool
) -> None:
    policy, run = splitwise(1, until_idle), setting(2)
    router, scaler = policy.router(run), policy.scaler(run)
    assert scaler is not None
    full = machine("p", Role.PROMPT, waiting_prompts=(4000, 4000))
    routed = router.route(0.0, arrival(prompt=1000), cluster(full, machine("t", Role.TOKEN, decodes=3)))
    assert isinstance(routed, tuple)
    assert routed[1] == [RoleChange("t", Role.MIXED, "lent to the mixed pool", Role.TOKEN)]
    assert routed[0].prompt_uid is None  # both phases on the lent machine, the only one with room
    computing = machine("t", Role.MIXED, home=Role.TOKEN, waiting_prompts=(500,), decodes=3)
    assert not scaler.tick(1.0, cluster(full, computing))
    drained = replace(computing, waiting_prompts=())
    changes = scaler.tick(2.0, cluster(full, drained))
    assert [c.uid for c in changes] == (["t"] if goes_home else [])
    if until_idle:
        assert [c.role for c in scaler.tick(3.0, cluster(full, replace(drained, decodes=0)))] == [Role.TOKEN]


def test_splitwise_reserves_the_expected_answer_until_the_request_ends() -> None:
    router = splitwise(1).router(setting(3))
    prompt, small = machine("p", Role.PROMPT), [machine(f"t{i}", Role.TOKEN) for i in range(2)]
    view = cluster(prompt, *small)
    tokens = [router.route(0.0, arrival(n, prompt=1000, output=60_000), view) for n in range(2)]
    assert {t[0].token_uid for t in tokens if isinstance(t, tuple)} == {"t0", "t1"}
    third = router.route(0.0, arrival(3, prompt=1000, output=60_000), view)
    assert isinstance(third, tuple)
    assert third[0].token_uid == "p"  # lent, since neither has room for another such answer
    for number in range(2):
        router.finished(1.0, number)
    fourth = router.route(1.0, arrival(4, prompt=1000, output=60_000), view)
    assert isinstance(fourth, tuple)
    assert fourth[0].token_uid in {"t0", "t1"}


def test_arrow_asks_for_the_flip_with_the_request_that_needs_it() -> None:
    router = arrow(1).router(setting(4, ttft=0.5))
    late = machine("p", Role.PROMPT, waiting_prompts=(4000,) * 3)
    tokens = [machine(f"t{i}", Role.TOKEN, decodes=i) for i in range(3)]
    routed = router.route(20.0, arrival(), cluster(late, *tokens))
    assert isinstance(routed, tuple)
    assert [(c.uid, c.role) for c in routed[1]] == [("t0", Role.PROMPT)]
    assert routed[0].prompt_uid == "t0"


def test_a_flip_of_arrow_at_the_end_of_a_prompt_comes_with_the_next_tick() -> None:
    policy, run = arrow(2), setting(3, tbt=0.02)
    router, scaler = policy.router(run), policy.scaler(run)
    assert scaler is not None
    prompts = [machine("p0", Role.PROMPT), machine("p1", Role.PROMPT, waiting_prompts=(2000,))]
    full = machine("t", Role.TOKEN, decodes=90, decode_context_tokens=95_000, decode_step_seconds=0.019)
    bound = router.rebind(20.0, arrival(), Placement("t", "p1"), cluster(*prompts, full))
    assert bound == "p0"
    assert [(c.uid, c.role) for c in scaler.tick(21.0, cluster(*prompts, full))] == [("p0", Role.TOKEN)]


def test_xllm_counts_a_machine_that_is_on_its_way_where_it_goes() -> None:
    policy, run = xllm(2), setting(3, tbt=0.02)
    router, scaler = policy.router(run), policy.scaler(run)
    assert scaler is not None
    prompts = [machine("p0", Role.PROMPT), machine("p1", Role.PROMPT)]
    full = machine("t", Role.TOKEN, decodes=200, decode_context_tokens=95_000)
    routed = router.route(0.0, arrival(), cluster(*prompts, full))
    assert isinstance(routed, tuple)
    assert [(c.uid, c.role) for c in routed[1]] == [("p0", Role.TOKEN)]
    moving = cluster(replace(prompts[0], moving_to=Role.TOKEN), prompts[1], full)
    assert scaler.tick(0.1, moving) == []


def test_narwhal_grows_a_pool_that_the_offered_work_has_outgrown() -> None:
    policy, run = narwhal(1), setting(4)
    router, scaler = policy.router(run), policy.scaler(run)
    assert scaler is not None
    machines = [machine("p", Role.PROMPT), *(machine(f"t{i}", Role.TOKEN, decodes=i) for i in range(3))]
    for number in range(100):
        router.route(number * 0.1, arrival(number, prompt=3000), cluster(*machines))
    changes = scaler.tick(10.0, cluster(*machines))
    assert [(c.uid, c.role) for c in changes] == [("t0", Role.PROMPT)]


def test_blitzscale_shrinks_only_after_a_third_of_a_second() -> None:
    scaler = blitzscale(2).scaler(setting(4))
    assert scaler is not None
    machines = [machine("p0", Role.PROMPT), machine("p1", Role.PROMPT)]
    tokens = [machine(f"t{i}", Role.TOKEN, kv_used_tokens=99_000) for i in range(2)]
    view = cluster(*machines, *tokens)
    answers = [bool(scaler.tick(at, view)) for at in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert answers == [False, False, False, False, True]


def test_dynamo_sees_what_the_next_step_computes_as_scheduled_and_the_rest_as_queued() -> None:
    seen = load(machine("p", Role.PROMPT, waiting_prompts=(1500, 1000, 700), decodes=3, decode_context_tokens=900))
    assert tuple(seen.scheduled) == (2, 2048, 3, 900)
    assert tuple(seen.queued) == (1, 3200 - 2048, 0, 0)


def test_a_meter_forgets_what_is_older_than_its_interval() -> None:
    meter = Meter(ShortestQueue(setting()))
    view = cluster(machine("m", Role.MIXED), output_tokens=60.0, tbt=histogram(b0_01=2, b0_02=4, binf=4))
    meter.route(0.0, arrival(0, prompt=100), view)
    meter.route(50.0, arrival(1, prompt=300), view)
    meter.first_token(51.0, 1)
    meter.finished(55.0, 1)
    seen = meter.traffic(60.0, view, 30.0)
    assert (seen.requests, seen.prompt_tokens, seen.output_tokens) == (1, 300.0, 60.0)
    assert (seen.ttft_seconds, seen.request_seconds, seen.tbt_seconds) == (1.0, 5.0, pytest.approx(0.01))
    assert meter.traffic(200.0, cluster(), 30.0).prompt_tokens is None


def test_the_mean_of_a_histogram_takes_buckets_at_their_middle() -> None:
    assert mean_seconds(histogram(b1=1, b3=2, binf=3)) == pytest.approx((0.5 + 2.0 + 3.0) / 3)
    assert mean_seconds(histogram()) is None
