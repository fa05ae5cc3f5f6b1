"""Pools are to change as BlitzScale's own code had them change."""

from collections.abc import Callable
from typing import Any

from poolwright.sim.baselines.blitzscale import Load, changes


def test_the_targets_are_blitzscales(recorded: Callable[[str], Any]) -> None:
    decisions = recorded("blitzscale-target")
    assert len(decisions) >= 1000
    for (prompt, token, *load), answer in decisions:
        assert list(changes(prompt, token, Load(*load))) == answer, (prompt, token, load)
