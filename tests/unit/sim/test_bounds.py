"""Bounds: the numbers they are known to give, and small cases that can be counted by hand."""

import itertools
import math
from functools import cache

import pytest

from poolwright.sim import bounds, profiles, traces
from poolwright.sim.bounds import Deadlines, Shape
from poolwright.sim.profiles import ProfileStepTime, TableStepTime
from poolwright.sim.request import Request, Trace
from poolwright_protocol.step_time import StepCost, StepProfile

UNCAPPED = math.inf
# A millisecond for each prompt token, and ten for a step of decodes, however many.
PLAIN = ProfileStepTime("plain", StepProfile(StepCost(0.01, 0.0, 0.0), StepCost(0.0, 1e-3, 0.0)))
MEMORY = 10_000


@cache
def azure(name: str) -> Trace:
    return traces.recorded(f"azure-{name}")


@cache
def steps(machine: str, trace: str, tbt_seconds: float) -> bounds.Steps:
    model = profiles.machine(machine)
    contexts = bounds.context_range(azure(trace))
    return bounds.steps(time_of(machine), model.kv_capacity_tokens, tbt_seconds, contexts)


def time_of(machine: str) -> TableStepTime:
    time = profiles.machine(machine).step_time
    assert isinstance(time, TableStepTime)
    return time


@cache
def work_of(machine: str, trace: str) -> bounds.Work:
    return bounds.mean(bounds.works(time_of(machine), azure(trace)))


def kernel_bound(machine: str, trace: str, shape: Shape, cap: float) -> bounds.FluidBound:
    """`cap` in steps of one decode alone; `inf`: none."""
    found = steps(machine, trace, cap * time_of(machine).seconds([], 1, 1000))
    return bounds.fluid(found, work_of(machine, trace), shape=shape)


@pytest.mark.parametrize(
    ("machine", "trace", "shape", "cap", "rate"),
    [
        ("h100-llama-70b-tp8", "code", Shape.AGGREGATED, 3, 9.1),
        ("h100-llama-70b-tp8", "code", Shape.AGGREGATED, 8, 10.8),
        ("h100-llama-70b-tp8", "code", Shape.DISAGGREGATED, 1.5, 10.8),
        ("h100-llama-70b-tp8", "code", Shape.DISAGGREGATED, 3, 11.1),
        ("h100-llama-70b-tp8", "code", Shape.ANY, 8, 11.15),
        ("h100-llama-70b-tp8", "conversation", Shape.AGGREGATED, 3, 13.3),
        ("h100-llama-70b-tp8", "conversation", Shape.AGGREGATED, 8, 15.6),
        ("h100-llama-70b-tp8", "conversation", Shape.DISAGGREGATED, 3, 15.2),
        ("h100-llama-70b-tp8", "conversation", Shape.ANY, 8, 15.8),
        ("h100-llama-70b-tp4", "code", Shape.DISAGGREGATED, 3, 7.3),
        ("h100-llama-70b-tp4", "conversation", Shape.AGGREGATED, 3, 9.3),
        ("h100-llama-70b-tp4", "conversation", Shape.DISAGGREGATED, 3, 10.0),
        ("h200-llama-8b-tp1", "code", Shape.DISAGGREGATED, 3, 21.6),
        ("h200-llama-8b-tp1", "conversation", Shape.AGGREGATED, 3, 24.5),
        ("h200-llama-8b-tp1", "conversation", Shape.DISAGGREGATED, 3, 24.5),
    ],
)
def test_fluid_bounds_agree_with_those_of_a_coarser_grid(
    machine: str, trace: str, shape: Shape, cap: float, rate: float
) -> None:
    """Computed before over columns of 64 prompt tokens and eight decodes, which can only find less; they took a
    prompt's attention for that of a prompt as long as the step, where ours charges each prompt its own."""
    assert 0.965 * rate <= kernel_bound(machine, trace, shape, cap).requests_per_second <= 1.04 * rate


def test_prices_agree_with_those_of_a_coarser_grid() -> None:
    """Milliseconds a prompt token and a decode at 3×, conversation: .0427 and .078, context and attention within."""
    prices = kernel_bound("h100-llama-70b-tp8", "conversation", Shape.ANY, 3).prices
    work = work_of("h100-llama-70b-tp8", "conversation")
    assert prices.prompt(work) / work.prompt_tokens * 1e3 == pytest.approx(0.0427, rel=0.03)
    decode = prices.decode + prices.context_token * work.context_tokens / work.decode_steps
    assert decode * 1e3 == pytest.approx(0.078, rel=0.08)


@pytest.mark.parametrize(
    ("trace", "rates"),
    [("code", (5.94, 6.33, 6.47, 6.56)), ("conversation", (3.77, 4.79, 5.28, 5.62))],
)
def test_fluid_bounds_of_splitwise_costs_agree(trace: str, rates: tuple[float, ...]) -> None:
    """Llama-2 70B on H100, disaggregated, at 56, 90, 135 and 224 ms."""
    machine = "splitwise-h100-llama2-70b-tp8"
    for cap, rate in zip((0.056, 0.090, 0.135, 0.224), rates, strict=True):
        found = bounds.fluid(steps(machine, trace, cap), work_of(machine, trace), shape=Shape.DISAGGREGATED)
        assert found.requests_per_second == pytest.approx(rate, rel=0.02)


def test_the_fluid_bound_of_prompts_alone_is_their_time() -> None:
    found = bounds.fluid(bounds.steps(PLAIN, MEMORY), bounds.Work(200, 0.05, 0, 0))
    assert found.requests_per_second == pytest.approx(1 / (0.2 + 0.05))
    assert found.prices.prompt_token == pytest.approx(1e-3)


def test_the_fluid_bound_of_decodes_is_limited_by_memory() -> None:
    """Ten decodes of 1,000 tokens fill it: 10 ms for ten of them."""
    found = bounds.fluid(bounds.steps(PLAIN, MEMORY), bounds.Work(0, 0, 100, 100 * 1000))
    assert 1 / found.requests_per_second == pytest.approx(100 * 0.01 / 10)
    assert found.prices.context_token == pytest.approx(0.01 / MEMORY)


def test_a_looser_target_never_lowers_the_bound() -> None:
    rates = [kernel_bound("h200-llama-8b-tp1", "code", Shape.AGGREGATED, cap).requests_per_second for cap in (2, 4, 8)]
    assert rates == sorted(rates)


def test_gaps_that_may_be_late_raise_the_bound_between_the_cap_and_none() -> None:
    work = bounds.Work(100, 0, 20, 20 * 200)
    shape = Shape.AGGREGATED

    def rate(cap: float, late: float) -> float:
        return bounds.fluid(bounds.steps(PLAIN, 1000, cap), work, shape=shape, late_share=late).requests_per_second

    rates = [rate(0.02, 0.0), rate(0.02, 0.01), rate(0.02, 0.1), rate(UNCAPPED, 0.0)]
    assert all(few <= more * (1 + 1e-9) for few, more in itertools.pairwise(rates))
    assert rates[0] < rates[-1]


def test_a_target_below_every_step_is_refused() -> None:
    with pytest.raises(ValueError, match="TBT"):
        bounds.fluid(bounds.steps(PLAIN, MEMORY, 0.005), bounds.Work(10, 0, 10, 100))


def test_the_columns_of_a_bound_fill_its_time() -> None:
    found = kernel_bound("h100-llama-70b-tp8", "conversation", Shape.ANY, 3)
    work = work_of("h100-llama-70b-tp8", "conversation")
    attention = work.prompt_seconds * found.requests_per_second
    assert sum(share for *_, share in found.columns) + attention == pytest.approx(1.0)
    assert all(context <= 1_364_379 for _, _, context, _ in found.columns)


def test_prefixes_that_were_seen_need_no_computing() -> None:
    twice = traces.made("twice", [Request(n, float(n), 1100, 1, prefix=(7, 8)) for n in range(2)], 2.0)
    assert [work.prompt_tokens for work in bounds.works(PLAIN, twice)] == [1100, 1100 - 1024]
    assert [work.prompt_tokens for work in bounds.works(PLAIN, twice, prefix_cache=False)] == [1100, 1100]


def at_once(count: int, prompt: int = 1000, output: int = 1) -> Trace:
    return traces.made("at once", [Request(n, 0.0, prompt, output) for n in range(count)], 20.0)


@pytest.mark.parametrize("machines", [1, 2])
def test_no_more_prompts_are_on_time_than_fit_before_their_deadline(machines: int) -> None:
    """A second each, due after three."""
    found = bounds.finite(PLAIN, 100_000, machines, at_once(10), Deadlines(1.0, 3.0))
    assert found.on_time == pytest.approx(3 * machines)
    assert found.on_time_share == pytest.approx(0.3 * machines)


def test_a_prompt_that_takes_longer_than_its_target_is_never_on_time() -> None:
    assert bounds.finite(PLAIN, 100_000, 9, at_once(3), Deadlines(1.0, 0.9)).on_time == 0
    assert bounds.finite(PLAIN, 100_000, 9, at_once(3), Deadlines(1.0, 0.0, 1.1e-3)).on_time == 3


def test_long_prompts_take_as_many_steps_as_the_budget_asks_for() -> None:
    fixed = ProfileStepTime("fixed", StepProfile(StepCost(0.01, 0, 0), StepCost(0.5, 1e-3, 0)))
    work = [bounds.Work(tokens, 0.25, 0, 0) for tokens in (1, 1000, 4000)]
    times = bounds.quickest_prompts(fixed, work, most_prompt_tokens=2000)
    assert times.tolist() == pytest.approx([0.751, 1.75, 2 * 2.5 + 0.25])


def test_decodes_slower_than_the_target_are_never_on_time() -> None:
    late = Deadlines(0.009, 9.0)
    assert bounds.finite(PLAIN, 100_000, 2, at_once(2, output=5), late).on_time == 0
    assert bounds.finite(PLAIN, 100_000, 2, at_once(2, output=1), late).on_time == 2


def test_decodes_that_memory_cannot_hold_together_are_not_all_on_time() -> None:
    """Memory for one of them; 100 steps of 10 ms for each, due within 1.5 times that."""
    trace = at_once(6, prompt=100, output=101)
    alone = bounds.finite(PLAIN, 210, 1, trace, Deadlines(0.015, 0.6))
    assert 1 <= alone.on_time < 5
    assert bounds.finite(PLAIN, 2000, 1, trace, Deadlines(0.015, 0.6)).on_time > alone.on_time + 1


def test_more_machines_and_time_never_lower_the_bound() -> None:
    trace = traces.generated([(500, 20), (200, 100)], 6, 30, seed=1)
    found = [
        bounds.finite(PLAIN, MEMORY, machines, trace, Deadlines(0.02, ttft), interval_seconds=0.5).on_time
        for machines, ttft in ((1, 1.0), (1, 2.0), (2, 2.0), (4, 2.0))
    ]
    assert found == sorted(found)
    assert found[0] < found[-1] <= len(trace)


def test_the_bound_of_a_trace_falls_below_all_where_the_rate_passes_the_fluid_bound() -> None:
    """Four H100 at splitwise-sim's costs, TTFT 1 s, 90 ms between tokens: 4 × 4.8 requests a second in the long run."""
    machine = profiles.machine("splitwise-h100-llama2-70b-tp8")
    part = traces.between(azure("conversation"), 600, 720)
    shares = []
    for rate in (8, 40):
        trace = traces.scaled(part, rate * 120 / len(part), seed=1)
        found = bounds.finite(
            time_of(machine.name), machine.kv_capacity_tokens, 4, trace, Deadlines(0.09, 1.0), interval_seconds=2.0
        )
        shares.append(found.on_time_share)
    assert shares[0] > 0.97
    assert 0.5 < shares[1] < 0.907


def test_a_late_gap_that_may_last_for_ever_leaves_the_rest_without_a_deadline() -> None:
    """200 steps of 10 ms each for six requests that fit one at a time; two gaps of each may be late."""
    trace = at_once(6, prompt=100, output=201)

    def on_time(late_share: float, longest: float) -> float:
        deadlines = Deadlines(0.011, 0.7, late_share=late_share, longest_gap_seconds=longest)
        return bounds.finite(PLAIN, 310, 1, trace, deadlines).on_time

    strict, short, endless = on_time(0.0, math.inf), on_time(0.01, 0.5), on_time(0.01, math.inf)
    assert strict < short < endless == 6


def test_without_requests_there_is_nothing_to_bound() -> None:
    with pytest.raises(ValueError, match="no requests"):
        bounds.finite(PLAIN, MEMORY, 1, traces.made("none", [], 1.0), Deadlines(1.0, 1.0))
