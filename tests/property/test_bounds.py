"""Bounds are bounds: no step is cheaper than its prices, and nobody who was served on time is left out."""

import math
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright.sim import bounds, profiles, traces
from poolwright.sim.bounds import Deadlines, FluidBound, Shape
from poolwright.sim.profiles import ProfileStepTime, TableStepTime
from poolwright.sim.request import Request, Trace
from poolwright.sim.step_time import Chunk, StepTime
from poolwright_protocol.step_time import StepCost, StepProfile

CAPS = {"none": math.inf, "tight": 1.5, "loose": 4.0}
NAMES = ["h100-llama-70b-tp8", "a100-llama-8b-tp1", "splitwise-a100-llama2-70b-tp8", "distserve-a100-opt-66b-tp4"]


@cache
def steps(name: str, cap: str) -> bounds.Steps:
    time = profiles.machine(name).step_time
    assert isinstance(time, TableStepTime)
    return bounds.steps(time, profiles.machine(name).kv_capacity_tokens, CAPS[cap] * time.seconds([], 1, 1000))


@cache
def bound(name: str, cap: str, shape: Shape, decode_share: float) -> tuple[FluidBound, float]:
    work = bounds.Work(1000.0, 0.003, 200 * decode_share, 200 * decode_share * 1100)
    found = steps(name, cap)
    return bounds.fluid(found, work, shape=shape), found.tbt_seconds


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(CAPS)),
    st.sampled_from([0.1, 1.0]),
    st.integers(0, 8192),
    st.integers(0, 512),
    st.floats(0, 1),
)
def test_no_step_is_cheaper_than_its_prices(
    name: str, cap: str, decode_share: float, prompt: int, decodes: int, filled: float
) -> None:
    """Any step within memory and under the cap, not only the columns of the program."""
    found, cap_seconds = bound(name, cap, Shape.ANY, decode_share)
    model = profiles.machine(name)
    context = filled * model.kv_capacity_tokens if decodes else 0.0
    time = model.step_time.seconds([Chunk(0, prompt)] if prompt else [], decodes, context)
    if decodes and time > cap_seconds:
        return
    assert isinstance(model.step_time, TableStepTime)
    work = bounds.Work(prompt, model.step_time.prompt_seconds(prompt), decodes, context)
    assert found.prices.seconds(work) <= time * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cap", ["none", "loose"])
def test_any_steps_serve_at_least_what_fewer_kinds_do(name: str, cap: str) -> None:
    rates = [bound(name, cap, shape, 1.0)[0].requests_per_second for shape in Shape]
    assert rates[-1] >= max(rates) * (1 - 1e-6)


ENGINE = ProfileStepTime("engine", StepProfile(StepCost(0.008, 5e-4, 1e-7), StepCost(0.01, 2e-4, 1e-7)))
MEMORY = 6000


def served(time: StepTime, requests: Sequence[Request], deadlines: Deadlines, machines: int, chunk: int) -> int:
    """How many were on time of a simple policy: machines take turns; decodes first, then one chunk of the oldest
    prompt, within memory."""
    return sum(
        _served(time, [r for r in requests if r.number % machines == i], deadlines, chunk) for i in range(machines)
    )


def _served(time: StepTime, requests: Sequence[Request], deadlines: Deadlines, chunk: int) -> int:
    now, on_time = 0.0, 0
    waiting = list(requests)
    computed: dict[int, int] = {}
    running: dict[int, tuple[Request, int, float, bool]] = {}  # tokens out, when the last one came, on time so far
    while waiting or running:
        if not running and waiting[0].arrival_seconds > now:
            now = waiting[0].arrival_seconds
        head = waiting[0] if waiting and waiting[0].arrival_seconds <= now else None
        held = sum(r.prompt_tokens + r.output_tokens for r, *_ in running.values())
        if head is not None and held + head.prompt_tokens + head.output_tokens > MEMORY:
            head = None
        start = computed.get(head.number, 0) if head is not None else 0
        length = min(chunk, head.prompt_tokens - start) if head is not None else 0
        context = sum(r.prompt_tokens + out for r, out, *_ in running.values())
        decoding = list(running)
        now += time.seconds([Chunk(start, length)] if head is not None else [], len(decoding), context)
        for number in decoding:
            request, out, last, fine = running[number]
            fine = fine and now - last <= deadlines.tbt_seconds
            running[number] = (request, out + 1, now, fine)
            if out + 1 == request.output_tokens:
                on_time += running.pop(number)[3]
        if head is None:
            continue
        computed[head.number] = start + length
        if start + length == head.prompt_tokens:
            waiting.pop(0)
            fine = now - head.arrival_seconds <= deadlines.ttft_seconds
            if head.output_tokens == 1:
                on_time += fine
            else:
                running[head.number] = (head, 1, now, fine)
    return on_time


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 8), st.integers(1, 2500), st.integers(1, 80)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.sampled_from([64, 512, 4096]),
    st.floats(0.05, 3.0),
    st.floats(0.009, 0.4),
    st.sampled_from([0.25, 1.0]),
)
def test_no_policy_is_better_than_the_bound(
    drawn: list[tuple[float, int, int]], machines: int, chunk: int, ttft: float, tbt: float, interval: float
) -> None:
    trace: Trace = traces.made("drawn", [Request(0, *one) for one in drawn], 10.0)
    deadlines = Deadlines(tbt, ttft)
    found = bounds.finite(ENGINE, MEMORY, machines, trace, deadlines, interval_seconds=interval)
    assert found.on_time >= served(ENGINE, trace.requests, deadlines, machines, chunk) - 1e-6 * len(trace)
    assert found.on_time <= len(trace) * (1 + 1e-9)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 100), st.floats(0.3, 3.0), st.sampled_from([1.5, 3.0]))
def test_no_policy_is_better_than_the_bound_on_kernel_tables(seed: int, ttft: float, cap: float) -> None:
    model = profiles.machine("h200-llama-8b-tp1")
    time = model.step_time
    assert isinstance(time, TableStepTime)
    trace = traces.generated([(1500, 30), (300, 200), (4000, 5)], 10, 8, seed)
    trace = traces.made("short", [r for r in trace if r.prompt_tokens + r.output_tokens < MEMORY], 10.0)
    deadlines = Deadlines(cap * time.seconds([], 1, 1000), ttft)
    found = bounds.finite(time, model.kv_capacity_tokens, 1, trace, deadlines)
    assert found.on_time >= served(time, trace.requests, deadlines, 1, 512) - 1e-6
