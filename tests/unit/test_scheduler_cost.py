"""What scheduling must not do however long it runs: grow. Its speed is measured by `bench/scheduler_cost.py`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import scheduler_cost


def test_nothing_grows_over_many_steps() -> None:
    grown = scheduler_cost.growth(steps=40_000, running=2)
    # What is held goes up and down by a few prompts and answers; one object a step would be 20,000 more.
    assert grown["allocations_late"] - grown["allocations_early"] < 10_000


@pytest.mark.parametrize("running", [1, 8])
def test_a_step_of_decodes_does_not_touch_the_blocks_of_a_context(running: int) -> None:
    """The table travels by reference: rows of later steps hold the very list."""
    load = scheduler_cost.Load(running)
    sequence = load.scheduler.running[0]
    step = load.scheduler.schedule(10**6).step
    assert step is not None
    assert step.rows[0].block_ids is sequence.block_ids
