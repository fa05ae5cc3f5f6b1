"""Mooncake's choice of machines, and early rejection before any policy."""

from poolwright.sim.baselines.admission import Admission, with_admission
from poolwright.sim.baselines.mooncake import Conductor, mooncake
from poolwright.sim.policy import Placement, Refusal
from poolwright_protocol.roles import Role
from support.line_machine import arrival, cluster, machine, setting

PROMPT = machine("p", Role.PROMPT)
TOKEN = machine("t", Role.TOKEN)


def test_a_cached_prefix_outweighs_a_queue_that_it_saves() -> None:
    def hits(uid: str, _: object) -> int:
        return 3500 if uid == "warm" else 0

    cold, warm = machine("cold", Role.PROMPT), machine("warm", Role.PROMPT, waiting_prompts=(1000,))
    view = cluster(cold, warm, TOKEN, hit_tokens=hits)
    assert Conductor(setting()).route(0.0, arrival(prompt=4000), view) == Placement("t", "warm")
    longer = machine("warm", Role.PROMPT, waiting_prompts=(6000,))
    assert Conductor(setting()).route(0.0, arrival(prompt=4000), cluster(cold, longer, TOKEN, hit_tokens=hits)) == (
        Placement("t", "cold")
    )


def test_the_answer_goes_where_its_gap_would_be_least() -> None:
    full = machine("full", Role.TOKEN, decodes=10, decode_context_tokens=90_000)
    bound = machine("bound", Role.TOKEN, decodes=10, bound_decodes=10, bound_context_tokens=10_000)
    assert Conductor(setting()).route(0.0, arrival(), cluster(PROMPT, full, bound)) == Placement("bound", "p")


def test_without_admission_a_policy_is_itself() -> None:
    policy = mooncake(1)
    assert with_admission(policy, Admission.ALL) is policy


def test_what_would_miss_ttft_on_every_prompt_machine_is_refused_with_the_time_that_is_missing() -> None:
    router = with_admission(mooncake(1), Admission.EARLY).router(setting(ttft=1.0))
    late = machine("p", Role.PROMPT, waiting_prompts=(2048,) * 6)
    answer = router.route(0.0, arrival(prompt=1000), cluster(late, TOKEN))
    assert isinstance(answer, Refusal)
    assert answer.retry_after_seconds is not None
    assert 0 < answer.retry_after_seconds < 2
    assert router.route(0.0, arrival(prompt=1000), cluster(PROMPT, TOKEN)) == Placement("t", "p")


def test_naive_rejection_sees_the_load_of_now_and_prediction_that_of_then() -> None:
    tight = setting(ttft=30.0, tbt=0.02)
    loaded = machine("t", Role.TOKEN, decodes=100, decode_context_tokens=50_000)  # 25 ms a step
    early = with_admission(mooncake(1), Admission.EARLY).router(tight)
    assert isinstance(early.route(0.0, arrival(), cluster(PROMPT, loaded)), Refusal)
    # t_d = 200 tokens of 20 ms = 4 s: what began 5 s ago will have ended.
    predicted = with_admission(mooncake(1), Admission.PREDICTED).router(tight)
    assert isinstance(predicted.route(5.0, arrival(), cluster(PROMPT, loaded)), Placement)


def test_prediction_counts_prompts_under_way_that_naive_rejection_does_not_see() -> None:
    tight = setting(ttft=30.0, tbt=0.02)
    early = with_admission(mooncake(1), Admission.EARLY).router(tight)
    predicted = with_admission(mooncake(1), Admission.PREDICTED).router(tight)
    idle = cluster(PROMPT, TOKEN)
    assert all(isinstance(early.route(0.0, arrival(n), idle), Placement) for n in range(200))
    answers = [predicted.route(0.0, arrival(n), idle) for n in range(200)]
    assert isinstance(answers[0], Placement)
    assert isinstance(answers[-1], Refusal)
    admitted = sum(isinstance(a, Placement) for a in answers)
    for number in range(admitted):
        predicted.first_token(1.0, number)
        predicted.finished(2.0, number)
    assert isinstance(predicted.route(2.0, arrival(500), idle), Placement)
