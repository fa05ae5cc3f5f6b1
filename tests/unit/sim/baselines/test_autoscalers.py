"""HPA's rates and windows, llm-d's band, and the loops of KEDA and HPA over a cluster."""

import pytest

from poolwright.sim.baselines.autoscaler import Behavior, Replicas, average_value
from poolwright.sim.baselines.hpa import QueueLength
from poolwright.sim.baselines.keda import BEHAVIOR, SloLoops, recommended
from poolwright_protocol.roles import Role
from support.line_machine import cluster, histogram, machine, setting


@pytest.mark.parametrize(
    ("values", "current", "wanted"),
    [([5, 5], 2, 2), ([5.4, 5.4], 2, 2), ([10, 2], 2, 3), ([0, 0], 2, 0), ([1, 0], 2, 1)],
)
def test_an_average_value_has_a_tolerance(values: list[float], current: int, wanted: int) -> None:
    assert average_value(values, 5.0, current) == wanted


def test_down_waits_for_the_highest_wish_of_its_window_and_up_does_not() -> None:
    replicas = Replicas()
    assert replicas.wish(0.0, 2, 5) == 5
    assert replicas.wish(15.0, 5, 1) == 5
    assert replicas.wish(299.0, 5, 1) == 5
    assert replicas.wish(301.0, 5, 1) == 1


def test_up_is_bounded_by_four_pods_or_all_again() -> None:
    assert Replicas().wish(0.0, 2, 40) == 6
    assert Replicas().wish(0.0, 10, 40) == 20


def test_llm_ds_rates_bound_a_period_not_a_sync() -> None:
    replicas = Replicas(BEHAVIOR)
    assert replicas.wish(0.0, 4, 40) == 4  # the size at the start is still in the window of 30 s
    assert replicas.wish(15.0, 4, 40) == 4
    assert replicas.wish(30.0, 4, 40) == 8
    assert replicas.wish(45.0, 8, 40) == 8  # four were added in this minute
    assert replicas.wish(91.0, 8, 40) == 16
    down = Replicas(Behavior(down_pods=1, down_period_seconds=120.0, down_window_seconds=0.0))
    assert down.wish(0.0, 5, 1) == 4
    assert down.wish(60.0, 4, 1) == 4
    assert down.wish(121.0, 4, 1) == 3


@pytest.mark.parametrize(
    ("replicas", "pressure", "wanted"),
    [(4, 0.5, 4), (4, 0.40, 4), (4, 0.55, 4), (4, 0.56, 5), (4, 1.1, 8), (4, 2.0, 15), (4, 0.2, 2), (4, 0.0, 0)],
)
def test_the_band_of_llm_d(replicas: int, pressure: float, wanted: int) -> None:
    assert recommended(replicas, pressure) == wanted


def test_late_first_tokens_bring_a_prompt_machine_from_idle_decodes() -> None:
    scaler = SloLoops(setting(4, ttft=1.0))
    view = cluster(
        machine("p", Role.PROMPT),
        *(machine(f"t{i}", Role.TOKEN, decodes=i) for i in range(3)),
        ttft=histogram(b1=1, b2=100, binf=100),
        tbt=histogram(b0_005=100, binf=100),
    )
    changes = [scaler.tick(15.0 * n, view) for n in range(1, 20)]
    moved = next(c for c in changes if c)
    assert moved[0].uid == "t0"
    assert moved[0].role is Role.PROMPT


def test_a_long_queue_brings_a_prompt_machine() -> None:
    view = cluster(
        machine("p", Role.PROMPT, waiting_prompts=(100,) * 12),
        machine("t0", Role.TOKEN, decodes=3),
        machine("t1", Role.TOKEN, decodes=1),
        machine("t2", Role.TOKEN, decodes=2),
    )
    # Three for the queue, and three that the other pool keeps for its window: two each.
    assert [c.uid for c in QueueLength().tick(15.0, view)] == ["t1"]
