"""What a cell's results say: each policy against ours, draw by draw, and by how much ours falls short where it does.

Numbers and words only; it runs nothing and lays out nothing.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from bench.policy.cells import AS_IT_IS, Cell, Twist
from bench.policy.contenders import OURS
from bench.policy.known import Known
from bench.policy.runs import Result
from bench.policy.schedule import FAR_BEHIND, Effort, Questions, has_clairvoyant, questions, with_admission

from poolwright.sim.traces import Copies

CONFIDENCE = 95.0
RESAMPLES = 10_000
# What is to be shown: shares of the best split in hindsight, of clairvoyant, and of the bound.
OF_SPLIT, OF_CLAIRVOYANT, OF_BOUND = 0.98, 0.95, 0.9


class Standing(StrEnum):
    """Of ours beside another. ONE_DRAW: far ahead in the first draw, and not drawn again. OPEN: not drawn yet."""

    AHEAD = "ahead"
    LEVEL = "level"
    SHORT = "short"
    ONE_DRAW = "far ahead, one draw"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Difference:
    """Of ours less another's, over the draws that both have; `low` and `high` None with one draw."""

    mean: float
    low: float | None
    high: float | None
    draws: int


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one cell, means over its draws. `admission`: behind admission. `why`: where ours falls short, what
    more of its requests are lost to than of this policy's."""

    policy: str
    value: float | None
    draws: int
    note: str
    causes: Mapping[str, float]
    moves_per_hour: float
    lost_machine_seconds: float
    admission: float | None
    difference: Difference | None
    standing: Standing
    why: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is to be shown of ours in this cell: `ratio` to be at least `least`. None: not known."""

    name: str
    ratio: float | None
    least: float

    @property
    def holds(self) -> bool | None:
        return None if self.ratio is None else self.ratio >= self.least


@dataclass(frozen=True, slots=True)
class Judged:
    cell: Cell
    requests_per_second: float
    requests: int
    rows: Sequence[Row]  # ours first, then the best split in hindsight, then the published ones from the best
    split: str
    clairvoyant: float | None
    bound: float | None
    shuffled: Mapping[str, float]
    claims: Sequence[Claim]
    faults: Sequence[str]

    @property
    def ours(self) -> Row:
        return self.rows[0]

    @property
    def verdict(self) -> str:
        if self.ours.value is None:
            return "ours was not run" + (f": {self.ours.note}" if self.ours.note else "")
        short = [row for row in self.rows[1:] if row.standing is Standing.SHORT and row.difference is not None]
        open_ = [row for row in self.rows[1:] if row.standing is Standing.OPEN]
        said = [f"not drawn yet: {len(open_)}"] if open_ else []
        if not short:
            return "; ".join(["at least as good as all" + (" that was drawn" if open_ else ""), *said])
        worst = min(short, key=lambda row: row.difference.mean if row.difference else 0.0)
        assert worst.difference is not None
        behind = f"short of {worst.policy} by {-worst.difference.mean:.3f}{_interval(worst.difference)}: {worst.why}"
        others = [f"and of {len(short) - 1} more by less"] if len(short) > 1 else []
        return "; ".join([behind, *others, *said])


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return ""
    return f" [{-difference.high:.3f}, {-difference.low:.3f}]"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """By draw. The same resamples whenever it is asked."""
    both = sorted(own.keys() & other.keys())
    if not both:
        return None
    found = np.array([own[seed] - other[seed] for seed in both])
    if len(found) < 2:
        return Difference(float(found.mean()), None, None, 1)
    drawn = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(found[drawn].mean(axis=1), [tail, 100 - tail])
    return Difference(float(found.mean()), float(low), float(high), len(found))


def standing(difference: Difference | None, draws: int) -> Standing:
    """`draws`: of ours, which a rival is to have as well."""
    if difference is None:
        return Standing.OPEN
    if difference.low is None or difference.high is None:
        if draws == 1:
            return Standing.SHORT if difference.mean < 0 else Standing.LEVEL
        return Standing.ONE_DRAW if difference.mean >= FAR_BEHIND else Standing.OPEN
    if difference.high < 0:
        return Standing.SHORT
    return Standing.AHEAD if difference.low > 0 else Standing.LEVEL


def judge(cell: Cell, known: Known, effort: Effort) -> Judged | None:
    """None where not even the rate of the cell is known."""
    asked = questions(cell, known)
    if asked is None:
        return None
    seeds = range(1, effort.seeds + 1)
    own = _results(asked, OURS, seeds)
    splits = asked.splits_known()
    drawn = [name for name in splits if len(_results(asked, name, seeds)) > 1] or splits[:1]
    split = max(drawn, key=lambda name: _mean_value(_results(asked, name, seeds)) or 0.0, default="")
    published = [_row(asked, name, seeds, own, effort) for name in effort.policies]
    published.sort(key=lambda row: -1.0 if row.value is None else row.value, reverse=True)
    rows = [_row(asked, OURS, seeds, own, effort)]
    rows += [_row(asked, split, seeds, own, effort)] if split else []
    rows += published
    clairvoyant, bound = _clairvoyant(asked, rows), known.value(asked.bound(1))
    return Judged(
        cell,
        sum(asked.able.requests_per_second) / len(asked.able.requests_per_second) * cell.share,
        max((result.requests for result in own.values()), default=0),
        rows,
        split,
        clairvoyant,
        bound,
        _shuffled(asked, [row.policy for row in rows]),
        _claims(asked, rows, clairvoyant, bound),
        _faults(asked, rows, bound),
    )


def _results(asked: Questions, name: str, seeds: Sequence[int]) -> dict[int, Result]:
    found = {seed: asked.known(asked.policy(name, seed)) for seed in seeds}
    return {seed: result for seed, result in found.items() if result is not None and result.value is not None}


def _values(results: Mapping[int, Result]) -> dict[int, float]:
    return {seed: result.value for seed, result in results.items() if result.value is not None}


def _mean_value(results: Mapping[int, Result]) -> float | None:
    return statistics.fmean(_values(results).values()) if results else None


def _row(asked: Questions, name: str, seeds: Sequence[int], own: Mapping[int, Result], effort: Effort) -> Row:
    results = _results(asked, name, seeds)
    first = asked.known(asked.policy(name, 1))
    difference = None if name == OURS else paired(_values(own), _values(results))
    stands = Standing.LEVEL if name == OURS else standing(difference, len(own))
    behind = _results(asked, with_admission(name), seeds) if asked.cell.admission and "static" not in name else {}
    return Row(
        name,
        _mean_value(results),
        len(results),
        first.note if first is not None and first.value is None else "",
        _mean_causes(results),
        _mean(result.moves_per_hour for result in results.values()),
        _mean(result.lost_machine_seconds for result in results.values()),
        _mean_value(behind),
        difference,
        stands,
        _why(own, results) if stands is Standing.SHORT else "",
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _mean_causes(results: Mapping[int, Result]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for result in results.values():
        total.update(result.causes)
    return {cause: share / len(results) for cause, share in total.items()}


def _why(own: Mapping[int, Result], other: Mapping[int, Result]) -> str:
    both = own.keys() & other.keys()
    mine = _mean_causes({seed: own[seed] for seed in both})
    theirs = _mean_causes({seed: other[seed] for seed in both})
    more = {cause: share - theirs.get(cause, 0.0) for cause, share in mine.items()}
    if not more:
        return "unknown"
    cause = max(more, key=lambda name: more[name])
    return f"{cause} ({mine[cause]:.3f} of requests, {theirs.get(cause, 0.0):.3f} there)"


def _clairvoyant(asked: Questions, rows: Sequence[Row]) -> float | None:
    """The best that was found on the first draw by whatever means; None before the search."""
    searched = asked.known.value(asked.clairvoyant(1))
    if searched is None:
        return None
    names = [row.policy for row in rows]
    found = [asked.value(name, 1, twist=twist) for name in names for twist in (AS_IT_IS, Twist(knows=True))]
    return max([searched, *(value for value in found if value is not None)])


def _shuffled(asked: Questions, names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        values = [asked.value(name, seed, Copies.SHUFFLED) for seed in range(1, 6)]
        there = [value for value in values if value is not None]
        if there:
            found[name] = statistics.fmean(there)
    return found


def _claims(asked: Questions, rows: Sequence[Row], clairvoyant: float | None, bound: float | None) -> list[Claim]:
    cell, own, first = asked.cell, rows[0].value, asked.value(OURS, 1)
    best = rows[1].value if len(rows) > 1 and rows[1].policy.startswith("static") else None
    ratio = own / best if own is not None and best else None
    claims = [Claim("best split in hindsight", ratio, 1.0 if cell.changes else OF_SPLIT)]
    if cell.nine or first is None:
        return claims
    if has_clairvoyant(cell):
        claims.append(Claim("clairvoyant", first / clairvoyant if clairvoyant else None, OF_CLAIRVOYANT))
    if clairvoyant is not None and bound and clairvoyant >= OF_CLAIRVOYANT * bound:
        claims.append(Claim("bound", first / bound, OF_BOUND))
    return claims


def _faults(asked: Questions, rows: Sequence[Row], bound: float | None) -> list[str]:
    """What cannot be, if bounds and runs are right."""
    if bound is None:
        return []
    names = [row.policy for row in rows]
    found = {name: asked.value(name, 1, twist=twist) for name in names for twist in (AS_IT_IS, Twist(knows=True))}
    found["clairvoyant"] = asked.known.value(asked.clairvoyant(1))
    above = {name: value for name, value in found.items() if value is not None and value > bound + 1e-9}
    return [f"{name} attained {value:.4f}, above the bound {bound:.4f}" for name, value in above.items()]
