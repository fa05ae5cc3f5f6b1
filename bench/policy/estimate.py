"""How long a comparison has yet to run: its schedule played over results that are made up, priced by what runs took.

Two answers, since what is drawn again depends on what is found: where every rival is far behind, and where all are
near. Of what was run before, only what is known of it now and how long it took are looked at.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.policy.cells import Capacity, Cell
from bench.policy.contenders import OURS, uses_ours
from bench.policy.known import Known
from bench.policy.runs import MOST_SECONDS, Kind, Result, Run, Search
from bench.policy.schedule import Stages

# CPU seconds of a run for each thousand requests, where nothing like it was run: on two cores of 2026.
POLICY_SECONDS, OURS_FACTOR, MOONCAKE_FACTOR = 1.1, 1.35, 6.0
BOUND_SECONDS, CAPACITY_SECONDS = 1.0, 1.0
SEARCH_RUNS = {Search.COARSE: 7.0, Search.EXHAUSTIVE: 40.0}  # of the whole trace
FAR = 0.3  # behind ours: more than anything is looked at twice for
ABLE = Capacity((15.0,), 0.5)  # of a cell whose rate is not known


@dataclass(frozen=True, slots=True)
class Estimate:
    """CPU seconds that are left: `few` where no rival is near, `many` where all are."""

    few: float
    many: float

    def text(self, workers: int, limit_seconds: float) -> str:
        low, high = (seconds / 60 / workers for seconds in (self.few, self.many))
        said = (
            f"About {low:.0f} to {high:.0f} minutes are left on {workers} cores, depending on how many rivals are near"
        )
        if high * 60 > limit_seconds:
            said += f"; after {limit_seconds / 60:.0f} this ends with what is known, and goes on when called again"
        return said


class Imagined(Known):
    """`known`, and where that says nothing what is made up of runs that were asked for: rivals as good as ours or far
    behind."""

    def __init__(self, known: Known, near: bool) -> None:
        self._known = known
        self._near = near
        self.asked: set[Run] = set()

    def __call__(self, run: Run) -> Result | None:
        found = self._known(run)
        if found is not None:
            return found
        if run.kind is Kind.CAPACITY:  # the same at every share, and asked for before all else
            rates = ABLE.requests_per_second * (1 if run.cell.other is None else 2)
            return Result(rates[0], able={"requests_per_second": rates, "prompt_share": ABLE.prompt_share})
        if run not in self.asked:
            return None
        # Less where there is more to do, so that a bisection has something to find.
        worth = max(0.1, min(1.0, 1.1 - 0.3 * run.cell.share))
        is_own = run.kind is not Kind.POLICY or run.policy == OURS
        return Result(worth if is_own or self._near else max(0.0, worth - FAR))


MakeStagesOf = Callable[[Cell, Known], Stages]


def left(cells: Iterable[Cell], known: Known, stages: MakeStagesOf) -> Estimate:
    found = []
    for near in (False, True):
        imagined = Imagined(known, near)
        for cell in cells:
            for stage in stages(cell, imagined):
                imagined.asked.update(stage)
        found.append(sum(seconds(run, known) for run in imagined.asked if known(run) is None))
    return Estimate(*found)


def seconds(run: Run, known: Known) -> float:
    """Of CPU."""
    if run.kind is Kind.CAPACITY:
        return CAPACITY_SECONDS
    able = run.able or ABLE
    rates = able.requests_per_second
    requests = sum(rates) / len(rates) * run.cell.share * run.cell.seconds
    before = known.seconds_per_request(run.label)
    if before is not None:
        return before * requests
    if run.kind is Kind.BOUND:
        return BOUND_SECONDS * requests / 1000
    once = POLICY_SECONDS * requests / 1000 * (MOONCAKE_FACTOR if "mooncake" in run.cell.trace else 1.0)
    if run.kind is Kind.CLAIRVOYANT:
        return once * SEARCH_RUNS[Search(run.policy)]
    return min(MOST_SECONDS, once * (OURS_FACTOR if uses_ours(run.policy) else 1.0))
