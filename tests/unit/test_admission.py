"""Admission: what is taken, relegated or refused, and what the refusal says."""

from dataclasses import replace

import pytest

from poolwright.core.admission import (
    MOST_RELEGATED_SHARE,
    OVERTAKEN,
    SURE,
    Admission,
    AdmissionReason,
    Tally,
    Verdict,
    admit,
)
from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.routing import Choice, Route, RoutingRequest, Targets
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile

PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.01, 1e-4, 1e-8)), step_tokens=2048
)
TARGETS = Targets(ttft_seconds=1.0, tbt_seconds=0.05)
P1, T1 = (
    Machine(uid, uid, "c", "10.0.0.1", True, role, 1, 0.0, None, 0.0)
    for uid, role in (("p", Role.PROMPT), ("t", Role.TOKEN))
)
NOW = 100.0
FULL_TALLY = Tally(100, 100)  # no more may be relegated


class Site:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.ledger.keep(["p", "t"])
        for uid in ("p", "t"):
            self.ledger.price(uid, PRICES)

    def queue(self, tokens: int, times: int) -> None:
        for _ in range(times):
            self.ledger.begin(Choice(T1, P1, Route.SPLIT), tokens, NOW)

    def decode(self, streams: int, output: float = 100) -> None:
        for _ in range(streams):
            self.ledger.begin(Choice(T1, None, Route.MIXED), 100, NOW, output_tokens=output).first_token(NOW)

    def judge(self, tokens: int = 1000, output: float = 100, tally: Tally = FULL_TALLY, **asked: object) -> Admission:
        request = RoutingRequest(tokens, output_tokens=output, **asked)  # type: ignore[arg-type]
        return admit(request, [P1, T1], self.ledger.loads(NOW), NOW, TARGETS, tally)[0]


def test_what_is_in_time_is_taken_with_both_predictions() -> None:
    taken = Site().judge()
    assert (taken.verdict, taken.reason) == (Verdict.ADMIT, AdmissionReason.IN_TIME)
    assert taken.ttft_seconds == pytest.approx(PRICES.prefill_seconds(1000) + 0.005)
    assert taken.tbt_seconds == pytest.approx(0.0101, rel=0.01)


def test_a_refusal_says_when_the_queue_will_have_drained_under_the_budget() -> None:
    site = Site()
    site.queue(1000, 40)
    refused = site.judge()
    assert (refused.verdict, refused.reason) == (Verdict.REJECT, AdmissionReason.TTFT_LATE)
    assert refused.retry_after_seconds is not None
    late = refused.ttft_seconds + OVERTAKEN * PRICES.queue_seconds(40_000, 40 * 5e5) - SURE * TARGETS.ttft_seconds
    assert late <= refused.retry_after_seconds < late + 1
    request, loads = RoutingRequest(1000, output_tokens=100), site.ledger.loads(NOW)
    then = admit(request, [P1, T1], loads, NOW + refused.retry_after_seconds, TARGETS, FULL_TALLY)[0]
    assert then.verdict is Verdict.ADMIT, "it came back when it was told to"


def test_streams_that_will_have_ended_by_the_end_of_the_prefill_do_not_count() -> None:
    """480 streams: a step of 59 ms, over the target; answers of ten tokens end in 0.6 s. A long wait sees them go."""
    site = Site()
    site.decode(480, output=10)
    now = site.judge(tokens=100, output=10)
    assert (now.verdict, now.reason) == (Verdict.REJECT, AdmissionReason.TBT_LATE)
    site.queue(1000, 4)
    assert site.judge(tokens=1000, output=10).verdict is Verdict.ADMIT


def test_streams_bound_there_by_then_do_count() -> None:
    site = Site()
    site.queue(1, 480)  # prompts of a token: the wait is short, and then all decode
    assert site.judge(tokens=10).reason is AdmissionReason.TBT_LATE


def test_a_prompt_that_no_machine_computes_in_time_is_refused_for_good_and_told_so() -> None:
    refused = Site().judge(tokens=50_000, tally=Tally(1000, 0))
    assert (refused.verdict, refused.reason) == (Verdict.REJECT, AdmissionReason.PROMPT_TOO_LONG)
    assert refused.retry_after_seconds is None
    assert Site().judge(tokens=50_000, cached_tokens={"p": 49_000}).verdict is Verdict.ADMIT


def test_a_tbt_below_a_step_is_never_met() -> None:
    tight = replace(TARGETS, tbt_seconds=0.005)
    request = RoutingRequest(100, output_tokens=10)
    refused = admit(request, [P1, T1], Site().ledger.loads(NOW), NOW, tight, Tally(1000, 0))[0]
    assert (refused.reason, refused.retry_after_seconds) == (AdmissionReason.TBT_INFEASIBLE, None)


def test_up_to_a_twentieth_is_relegated_and_the_rest_refused() -> None:
    site = Site()
    site.queue(1000, 40)
    tally, verdicts = Tally(), []
    for _ in range(1000):
        judged, tally = admit(RoutingRequest(1000), [P1, T1], site.ledger.loads(NOW), NOW, TARGETS, tally)
        verdicts.append(judged.verdict)
        done = len(verdicts)
        assert verdicts.count(Verdict.RELEGATE) <= MOST_RELEGATED_SHARE * done
    assert verdicts.count(Verdict.RELEGATE) == 50
    assert verdicts.count(Verdict.ADMIT) == 0


def test_where_nothing_may_be_refused_the_late_go_behind_all_others_and_nobody_else() -> None:
    site = Site()
    site.queue(1000, 40)
    request = RoutingRequest(1000, output_tokens=100)

    def judged(request: RoutingRequest) -> Admission:
        return admit(request, [P1, T1], site.ledger.loads(NOW), NOW, TARGETS, FULL_TALLY, may_refuse=False)[0]

    late = judged(request)
    assert (late.verdict, late.reason, late.retry_after_seconds) == (
        Verdict.RELEGATE,
        AdmissionReason.TTFT_LATE,
        None,
    )
    before = site.ledger.loads(NOW)
    entry = site.ledger.begin(Choice(T1, P1, Route.SPLIT), 1000, NOW, relegated=True)
    after = site.ledger.loads(NOW)
    assert after["p"].free_at == before["p"].free_at  # nobody waits for it
    assert after["t"].streams == before["t"].streams
    assert site.ledger.work()["p"].prompt_tokens == 40 * 1000 + 1000  # but it is work
    entry.first_token(NOW + 1)
    assert site.ledger.loads(NOW)["t"].streams == before["t"].streams + 1
    entry.close()
    assert site.ledger.loads(NOW)["t"].streams == before["t"].streams
    site = Site()
    site.decode(500)
    assert judged(request).verdict is Verdict.ADMIT  # to go behind others would not make its steps shorter


def test_longer_prompts_that_wait_are_not_in_the_way_of_a_short_one() -> None:
    """The engine computes the shortest first, beside a part of the one that came first."""
    site = Site()
    site.queue(2000, 6)  # 1.3 s
    assert site.judge(tokens=2000).reason is AdmissionReason.TTFT_LATE
    short = site.judge(tokens=100)
    assert short.verdict is Verdict.ADMIT
    assert short.ttft_seconds == pytest.approx(PRICES.prefill_seconds(100) + 0.005)
    site.queue(80, 10)
    behind = site.judge(tokens=100).ttft_seconds
    assert short.ttft_seconds + PRICES.queue_seconds(800, 10 * 3200) < behind < 0.5


def test_a_line_of_several_times_the_target_is_late_for_everybody() -> None:
    site = Site()
    site.queue(2000, 20)
    judged = site.judge(tokens=100)
    assert judged.reason is AdmissionReason.TTFT_LATE
    assert judged.ttft_seconds < SURE


def test_the_tally_forgets() -> None:
    tally = Tally(1000, 50)
    assert not tally.allows_one_more()
    for _ in range(100):
        tally = tally.counted(relegated=False)
    assert tally.allows_one_more()


def test_nothing_is_refused_where_nothing_can_be_predicted() -> None:
    site = Site()
    site.ledger.price("t", None)
    site.queue(2000, 50)
    assert site.judge().reason is AdmissionReason.UNPRICED
    nobody = admit(RoutingRequest(1000), [], {}, NOW, TARGETS, Tally())[0]
    assert nobody.verdict is Verdict.ADMIT, "that there is no machine is the choice's to say"


def test_token_machines_alone_are_judged_as_doing_both() -> None:
    site = Site()
    judged = admit(RoutingRequest(1000), [T1], site.ledger.loads(NOW), NOW, TARGETS, Tally())[0]
    assert judged.verdict is Verdict.ADMIT
    assert judged.ttft_seconds > 0
