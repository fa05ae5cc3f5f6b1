"""`--full`: goodput per machine at 90 and 99 % by bisection, and published policies tuned on a held-out slice.

A bisection asks for one rate after another; what is not known yet is what is to be run next. Knows no processes.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.policy.cells import Cell, tuning
from bench.policy.contenders import OURS
from bench.policy.known import Known
from bench.policy.runs import Run
from bench.policy.schedule import Effort, Stages, capacity_of, comparison, questions, shortened

from poolwright.sim.measures import goodput

TARGETS = (0.9, 0.99)
LOWEST_SHARE, HIGHEST_SHARE = 0.1, 1.3
GOODPUT_SEEDS = 2
HELD_OUT_SECONDS = 600.0


class Missing(Exception):
    """These have to be run first."""

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(f"{len(runs)} runs are missing")
        self.runs = runs


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second of one machine at each of TARGETS; None where no rate that was tried attains it."""

    policy: str
    per_machine: Sequence[float | None]


def goodputs(cell: Cell, known: Known, policies: Sequence[str]) -> list[Goodput]:
    """Raises Missing."""
    lacking: list[Run] = []
    found = []
    for policy in policies:
        try:
            found.append(Goodput(policy, [_goodput(cell, known, policy, target) for target in TARGETS]))
        except Missing as missing:
            lacking += missing.runs
    if lacking:
        raise Missing(lacking)
    return found


def _goodput(cell: Cell, known: Known, policy: str, target: float) -> float | None:
    asked = questions(cell, known)
    if asked is None:
        raise Missing([capacity_of(cell)])
    at = goodput(attained_at(cell, known, policy), target, LOWEST_SHARE, HIGHEST_SHARE)
    rates = asked.able.requests_per_second
    return at.factor * statistics.fmean(rates) / cell.machines if at.factor else None


def attained_at(cell: Cell, known: Known, policy: str) -> Callable[[float], float]:
    def attained(share: float) -> float:
        asked = questions(replace(cell, share=share), known)
        assert asked is not None  # the capacity does not depend on the share
        runs = [asked.policy(policy, seed) for seed in range(1, GOODPUT_SEEDS + 1)]
        lacking = [run for run in runs if known(run) is None]
        if lacking:
            raise Missing(lacking)
        return statistics.fmean(known.value(run) or 0.0 for run in runs)

    return attained


def held_out(cell: Cell) -> Cell:
    number, _ = tuning()
    return replace(shortened(cell, HELD_OUT_SECONDS), slice=number)


def candidates(cell: Cell) -> dict[str, list[str]]:
    """For each policy with something to choose, its forms."""
    found = {}
    for policy, grid in tuning()[1].items():
        names = []
        for values in itertools.product(*grid.values()):
            options = dict(zip(grid, values, strict=True))
            if (share := options.pop("prompt_share", None)) is not None:
                options["prompt"] = max(1, min(cell.machines - 1, round(share * cell.machines)))
            names.append(f"{policy}:" + ",".join(f"{key}={value:g}" for key, value in options.items()))
        found[policy] = list(dict.fromkeys(names))
    return found


def tuned(cell: Cell, known: Known) -> dict[str, str]:
    """The form of each that attains most on the held-out slice. Raises Missing."""
    other = held_out(cell)
    asked = questions(other, known)
    if asked is None:
        raise Missing([capacity_of(other)])
    forms = candidates(cell)
    runs = [asked.policy(name, 1) for names in forms.values() for name in names]
    lacking = [run for run in runs if known(run) is None]
    if lacking:
        raise Missing(lacking)
    return {policy: max(names, key=lambda name: asked.value(name, 1) or 0.0) for policy, names in forms.items()}


def stages(cell: Cell, known: Known, effort: Effort) -> Stages:
    yield from comparison(cell, known, effort)
    asked = questions(cell, known)
    if asked is None:
        return
    best: dict[str, str] = {}

    def tune() -> None:
        best.update(tuned(cell, known))

    yield from _until(tune)
    yield [asked.policy(name, seed) for name in best.values() for seed in range(1, effort.seeds + 1)]
    names = all_names(cell, known, effort)
    yield from _until(lambda: goodputs(cell, known, names))


def all_names(cell: Cell, known: Known, effort: Effort) -> list[str]:
    """Raises Missing."""
    asked = questions(cell, known)
    splits = asked.splits_known()[:1] if asked is not None else []
    return list(dict.fromkeys([OURS, *splits, *effort.policies, *tuned(cell, known).values()]))


def _until(what: Callable[[], object]) -> Stages:
    """Whatever it misses, until it misses nothing."""
    while True:
        try:
            what()
        except Missing as missing:
            yield missing.runs
        else:
            return
