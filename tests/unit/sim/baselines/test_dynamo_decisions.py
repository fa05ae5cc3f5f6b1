"""Dynamo's loops, budget and Kalman forecast decide as Dynamo's own code did, over the same forward pass."""

from collections.abc import Callable
from typing import Any

import pytest

from poolwright.sim.baselines.dynamo import EngineLimits, EngineLoad, Knobs, Planner, Target, Work, clamped_pair
from poolwright.sim.baselines.forecast import Kalman

Recorded = Callable[[str], Any]


def load(numbers: list[int]) -> EngineLoad:
    return EngineLoad(Work(*numbers[:4]), Work(*numbers[4:]))


def planner(case: dict[str, Any]) -> Planner:
    constant, per_prompt_token, per_decode, per_kv_token = case["coef"]

    def forward(prompt_tokens: int, decodes: int, kv_tokens: int) -> float:
        return float(constant + per_prompt_token * prompt_tokens + per_decode * decodes + per_kv_token * kv_tokens)

    knobs = Knobs(
        case["ttft"],
        case["itl"],
        Target(case["target"]),
        *case["budget"],
        throughput_loop=case["throughput"],
        load_loop=case["load"],
    )
    return Planner(knobs, forward, EngineLimits(*case["caps"]))


def test_both_loops_decide_as_dynamo_does(recorded: Recorded) -> None:
    decisions = recorded("dynamo-planner")
    assert len(decisions) >= 1000
    for decision in decisions:
        case, out = decision["in"], decision["out"]
        loops = planner(case)
        loops.floors = tuple(case["floors"])
        for prompts, tokens in case["rounds"]:
            loads = [load(p) for p in prompts], [load(t) for t in tokens]
            loops.observe(*loads)
        if case["which"] == "load":
            expected = [e for e in case["expected"] if e is not None]
            moving = bool(expected) and expected != [len(x) for x in loads]
            answer = loops.load(*loads, case["hit"], moving)
        else:
            requests, prompt_tokens, output_tokens = case["predicted"]
            answer = loops.throughput(requests / 180.0, prompt_tokens, output_tokens, case["hit"])
        assert (None if answer is None else list(answer)) == out["decision"], case
        assert list(loops.floors) == out["floors"], case


def test_the_budget_is_dynamos(recorded: Recorded) -> None:
    decisions = recorded("dynamo-budget")
    assert len(decisions) >= 1000
    for arguments, answer in decisions:
        assert list(clamped_pair(*arguments)) == answer, arguments


def test_the_kalman_forecast_is_dynamos(recorded: Recorded) -> None:
    count = 0
    for steps in recorded("dynamo-kalman"):
        forecast = Kalman()
        for value, *predictions in steps:
            forecast.add(value)
            count += 1
            for prediction in predictions:
                assert forecast.next() == pytest.approx(prediction, rel=1e-8, abs=1e-6)
    assert count >= 1000
