"""The SLA planner of 2025 wants as many machines as Dynamo's own code did, over the same sweeps."""

from collections.abc import Callable
from typing import Any

from poolwright.sim.baselines.dynamo_sla import Interpolated, Observed, SlaPlanner, Sweep


def test_the_interval_decides_as_dynamo_did(recorded: Callable[[str], Any]) -> None:
    decisions = recorded("dynamo-sla-planner")
    profiles = [Interpolated(Sweep(*p.values())) for p in decisions["profiles"]]
    cases = decisions["cases"]
    assert len(cases) >= 1000
    for decision in cases:
        case = decision["in"]
        planner = SlaPlanner(
            profiles[case["profile"]],
            case["interval"],
            case["itl"],
            *case["gpus"],
            most_gpus=case["budget"],
            corrects=not case["no_correction"],
        )
        ready = planner.observe(Observed(*case["observed"]), case["decodes"])
        answer = list(planner.machines(*case["predicted"])) if ready else None
        assert answer == decision["out"], case
