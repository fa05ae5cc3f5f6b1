"""The cost of steps: the grid, the fit, and the file."""

import json
from pathlib import Path

import pytest

from poolwright_engine.offline.profile import Point, fit, fitted, measure, predicted, shapes
from poolwright_engine.process.config import ConfigError
from poolwright_engine.process.first_steps import Shape
from poolwright_engine.process.step_profile import read_step_profile
from poolwright_protocol.step_time import PROFILE_FORMAT, StepCost
from support.scripted_runner import ScriptedRunner

COST = StepCost(0.01, 2e-4, 3e-8)


def test_a_step_counts_its_tokens_and_the_contexts_of_all_its_rows() -> None:
    shape = Shape(prefill_tokens=100, decodes=3, context=50)
    assert (shape.tokens, shape.kv_tokens) == (103, 150 + 3 * 51)
    assert Shape(0, 2, 16).kv_tokens == 34


def test_the_grid_keeps_to_what_the_engine_can_hold() -> None:
    found = list(shapes(most_tokens=512, most_rows=16, most_context=600, most_blocks=100, block_size=16))
    assert found == list(dict.fromkeys(found))
    assert {shape.decodes for shape in found if not shape.prefill_tokens} == {1, 2, 4, 8, 16}
    assert max(shape.tokens for shape in found) <= 512
    assert max(shape.context + shape.prefill_tokens for shape in found) <= 600
    assert any(shape.decodes and shape.prefill_tokens for shape in found)


def test_a_fit_of_exact_times_finds_what_made_them() -> None:
    points = [Point(shape, predicted(COST, shape)) for shape in shapes(2048, 64, 4096, 4096, 16)]
    for cost in (fit(points), fitted(points).decode, fitted(points).mixed):
        assert cost.fixed_seconds == pytest.approx(COST.fixed_seconds)
        assert cost.token_seconds == pytest.approx(COST.token_seconds)
        assert cost.kv_token_seconds == pytest.approx(COST.kv_token_seconds)


def test_no_part_of_a_cost_is_negative_and_nothing_cannot_be_fitted() -> None:
    falling = [Point(Shape(0, 1, 16), 0.02), Point(Shape(0, 2, 16), 0.019), Point(Shape(0, 4, 256), 0.018)]
    cost = fit(falling)
    assert min(cost.fixed_seconds, cost.token_seconds, cost.kv_token_seconds) >= 0
    assert cost.fixed_seconds == pytest.approx(0.019, rel=0.05)
    with pytest.raises(ValueError, match="no step"):
        fit([])


def test_steps_are_measured_on_the_runner_as_the_loop_would_submit_them() -> None:
    runner = ScriptedRunner(num_blocks=200)
    wanted = list(shapes(64, 8, 300, 199, runner.block_size))
    points = measure(runner, wanted, rounds=1)
    assert [point.shape for point in points] == wanted
    assert all(point.seconds >= 0 for point in points)


def test_a_file_comes_back_as_the_profile_it_holds_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cost = {"fixed_seconds": 0.01, "token_seconds": 2e-4, "kv_token_seconds": 3e-8}
    path.write_text(json.dumps({"format": PROFILE_FORMAT, "decode": cost, "mixed": cost}))
    assert read_step_profile(path).mixed == COST
    for text in ("no json", "{}", json.dumps({"format": 99}), json.dumps({"format": 1, "decode": {}, "mixed": cost})):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"profile\.json"):
            read_step_profile(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_step_profile(tmp_path / "missing.json")
