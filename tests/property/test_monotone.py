"""In the obvious directions: worse latency, more work or more machines never make the policy do the opposite."""

import math
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from poolwright.core.admission import Tally, Verdict, admit
from poolwright.core.decide import decide
from poolwright.core.decision import Memory, Reason, Snapshot
from poolwright.core.demand import OVERLOADED, Demand
from poolwright.core.forecast import Offered
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import LiveReading, MachineWork, MetricsReading
from poolwright.core.routes import Load, RoutingRequest, Targets
from poolwright.core.spec import PoolBounds
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile
from support.pool_world import PRICES, START, M, P, T, World, pool, reading, spec

_CALM = settings(deadline=None, max_examples=100)
_roles = st.lists(st.sampled_from([P, T, M]), max_size=5).map(lambda rest: [P, T, *rest])
# How much of a prompt machine each role is.
_PROMPT_SHARE = {P: 1.0, M: 0.5, T: 0.0}


def _grown(
    roles: list[Role], seen: MetricsReading, live: LiveReading | None = None, memory: Memory | None = None
) -> float:
    """Prompt machines that this decision adds; token machines are counted against."""
    made = spec(len(roles), dwell_seconds=0.0)
    world = World(made, pool(*roles), prices={"c": PRICES} if live else {}, memory=memory or Memory())
    decision = world.decide(seen, live)
    event(decision.reason.value)
    return sum(_PROMPT_SHARE[m.to_role] - _PROMPT_SHARE[m.from_role] for m in decision.moves)


_latency = st.floats(0.001, 100.0)


@_CALM
@given(_roles, _latency, st.floats(1.0, 50.0), st.floats(0.001, 0.059))
def test_a_longer_ttft_never_gives_fewer_machines_to_prompts(
    roles: list[Role], ttft: float, times: float, tbt: float
) -> None:
    assert _grown(roles, reading(ttft * times, tbt)) >= _grown(roles, reading(ttft, tbt))


@_CALM
@given(_roles, st.floats(0.001, 5.0), st.floats(1.0, 50.0), st.floats(0.001, 0.99))
def test_a_longer_tbt_never_gives_more_machines_to_prompts(
    roles: list[Role], tbt: float, times: float, ttft: float
) -> None:
    assert _grown(roles, reading(ttft, tbt * times)) <= _grown(roles, reading(ttft, tbt))


@_CALM
@given(_roles, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 400))
def test_a_longer_line_of_prompts_never_takes_a_machine_from_them(
    roles: list[Role], tokens: float, more: float, streams: float
) -> None:
    """Between two plans, seen for the third time."""

    def grown(waiting: float) -> float:
        work = {
            f"u{i}": MachineWork(waiting, waiting * 500) if role is P else MachineWork(streams=streams)
            for i, role in enumerate(roles)
        }
        memory = Memory(planned_at=START, backlogged={P: 2, T: 2})
        return _grown(roles, reading(), LiveReading(START, work), memory)

    assert grown(tokens + more) >= min(0.0, grown(tokens))


# Steps whose time does not depend on context, so that longer prompts are work of prompt machines alone.
_prices = st.builds(
    lambda fixed, token: MachinePrices(StepProfile(StepCost(fixed, token, 0.0), StepCost(fixed, token, 0.0))),
    st.floats(0.001, 0.015),
    st.floats(1e-6, 1e-3),
)


@_CALM
@given(st.integers(2, 24), _prices, st.floats(0.1, 50), st.floats(10, 4000), st.floats(100, 400), st.floats(1, 20))
def test_longer_prompts_want_no_fewer_prompt_machines_and_more_requests_no_fewer_in_all(
    machines: int, prices: MachinePrices, rate: float, prompt: float, output: float, times: float
) -> None:
    made = spec(machines, pools={M: PoolBounds(0, 0)})
    counts = {("c", P): machines // 2, ("c", T): machines - machines // 2}

    def prompts(offered: Offered) -> int:
        steps, _ = Demand(made, {"c": prices}, offered).best(counts, machines)
        return sum((b is P) - (a is P) for _, a, b in steps)

    offered = Offered(rate, prompt, output, 1.0)
    now = Demand(made, {"c": prices}, offered).pressure(counts)
    longer = Demand(made, {"c": prices}, replace(offered, prompt_tokens=prompt * times)).pressure(counts)
    assert longer.prompt >= now.prompt - 1e-9
    more = Demand(made, {"c": prices}, replace(offered, requests_per_second=rate * times))
    assert more.machines_wanted(counts) >= Demand(made, {"c": prices}, offered).machines_wanted(counts) - 1e-9
    if now.token < OVERLOADED:  # past it both phases are, and which one gets a machine is no matter of direction
        assert prompts(replace(offered, prompt_tokens=prompt * times)) >= prompts(offered)


@_CALM
@given(st.integers(1, 20_000), st.floats(0, 60), st.floats(0, 60), st.floats(0.1, 20), st.floats(1, 10))
def test_a_longer_line_is_never_a_reason_to_take_a_request_nor_a_looser_target_to_refuse_it(
    prompt_tokens: int, line: float, more: float, ttft: float, times: float
) -> None:
    (machine,) = pool(M)
    request = RoutingRequest(prompt_tokens, output_tokens=100)

    def taken(seconds: float, target: float) -> tuple[bool, float]:
        load = Load(prices=PRICES, free_at=START + seconds, kv_free_tokens=1e6)
        targets = Targets(target, 0.5, every_gap=False)
        admission, _ = admit(request, [machine], {machine.uid: load}, START, targets, Tally())
        return admission.verdict is Verdict.ADMIT, admission.ttft_seconds

    now, longer, looser = taken(line, ttft), taken(line + more, ttft), taken(line, ttft * times)
    assert now[0] or not longer[0]
    assert looser[0] or not now[0]
    assert longer[1] >= now[1]


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_at_a_time_that_is_no_number_nothing_is_done_and_nothing_forgotten(now: float) -> None:
    """A deadline or a record of that time would hold for ever, or never."""
    made = spec(3, pools={P: PoolBounds(2)})
    memory = Memory(planned_at=START - 60, backlogged={P: 2})
    snapshot = Snapshot(pool(P, T, T), reading(ttft=30.0))
    decision, after = decide(now, snapshot, made, memory)
    assert (decision.reason, decision.moves, decision.births) == (Reason.CLOCK_UNREADABLE, (), ())
    assert decision.message
    assert math.isfinite(decision.next_plan_at)
    assert sum(count.desired for count in decision.pools.values()) == 3
    assert after is memory
    assert decide(START, snapshot, made, after)[0].moves
