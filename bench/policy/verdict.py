"""What a cell's results say: each policy against ours, draw by draw, and by how much ours falls short where it does.

Numbers and words only; it runs nothing and lays out nothing.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from bench.policy.cells import Cell
from bench.policy.contenders import OURS, SHIPPED, is_split
from bench.policy.known import Known
from bench.policy.runs import Result, Search
from bench.policy.schedule import (
    FAR_BEHIND,
    FAR_BEHIND_IN_PART,
    Effort,
    Questions,
    claims_clairvoyant,
    questions,
    with_admission,
)

from poolwright.sim.traces import Copies

CONFIDENCE = 95.0
RESAMPLES = 10_000
SHUFFLED_DRAWS = 5
# What is to be shown: shares of the best split in hindsight, of clairvoyant, and of the bound.
OF_SPLIT, OF_CLAIRVOYANT, OF_BOUND = 0.98, 0.95, 0.9


class Standing(StrEnum):
    """Of ours beside another. ONE_DRAW: far ahead in the first draw, and not drawn again. IN_PART: far ahead in the
    first part of it, and not run to its end. OPEN: not drawn yet. FAILED: the other one's run ended without a result,
    so that nothing is known of it."""

    AHEAD = "ahead"
    LEVEL = "level"
    SHORT = "short"
    ONE_DRAW = "far ahead, one draw"
    IN_PART = "far ahead in part"
    OPEN = "open"
    FAILED = "failed"


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
    in_part: float | None = None  # in the first part of the first draw, where that is all that is known of it


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is to be shown of ours in this cell: `ratio` to be at least `least`, or `above` it. None: not
    known. `why`: where it is missed, what ours loses its requests to."""

    name: str
    ratio: float | None
    least: float
    above: bool = False
    why: str = ""

    @property
    def holds(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.ratio > self.least if self.above else self.ratio >= self.least


@dataclass(frozen=True, slots=True)
class Shuffled:
    """One policy where copies have each other's lengths. `difference`: of ours less it, by draw."""

    value: float
    draws: int
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Judged:
    cell: Cell
    requests_per_second: float
    requests: int
    # Ours first, then as it is shipped, the best split in hindsight, and the published ones from the best.
    rows: Sequence[Row]
    split: str
    clairvoyant: float | None
    bound: float | None
    shuffled: Mapping[str, Shuffled]
    claims: Sequence[Claim]
    faults: Sequence[str]
    crashes: Sequence[str]

    @property
    def ours(self) -> Row:
        return self.rows[0]

    @property
    def verdict(self) -> str:
        if self.ours.value is None:
            return "ours was not run" + (f": {self.ours.note}" if self.ours.note else "")
        others = [row for row in self.rows[1:] if row.policy not in SHIPPED]
        short = [row for row in others if row.standing is Standing.SHORT and row.difference is not None]
        open_ = [row for row in others if row.standing is Standing.OPEN]
        failed = [row.policy for row in others if row.standing is Standing.FAILED]
        said = [f"not drawn yet: {len(open_)}"] if open_ else []
        said += [f"without a result: {', '.join(failed)}"] if failed else []
        if not short:
            return "; ".join(["at least as good as all" + (" that has a result" if said else ""), *said])
        worst = min(short, key=lambda row: row.difference.mean if row.difference else 0.0)
        assert worst.difference is not None
        behind = f"short of {worst.policy} by {-worst.difference.mean:.3f}{_interval(worst.difference)}: {worst.why}"
        more = [f"and of {len(short) - 1} more by less"] if len(short) > 1 else []
        return "; ".join([behind, *more, *said])

    @property
    def is_good(self) -> bool:
        """At least as good as every other, all of which were drawn and have a result."""
        rows = [row for row in self.rows if row.policy not in SHIPPED]
        done = {Standing.AHEAD, Standing.LEVEL, Standing.ONE_DRAW, Standing.IN_PART}
        return self.ours.value is not None and all(row.standing in done for row in rows)


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
    # Whoever is known in part alone comes after the others.
    published.sort(key=lambda row: (row.value if row.value is not None else -1.0, row.in_part or 0.0), reverse=True)
    rows = [_row(asked, name, seeds, own, effort) for name in (OURS, *SHIPPED)]
    rows += [_row(asked, split, seeds, own, effort)] if split else []
    rows += published
    clairvoyant, bound = _clairvoyant(asked), known.value(asked.bound(1))
    return Judged(
        cell,
        sum(asked.able.requests_per_second) / len(asked.able.requests_per_second) * cell.share,
        max((result.requests for result in own.values()), default=0),
        rows,
        split,
        clairvoyant,
        bound,
        _shuffled(asked, [row.policy for row in rows]),
        _claims(asked, rows, split, clairvoyant, bound),
        _faults(asked, seeds),
        [f"{row.policy}: {row.note}" for row in rows if _crashed(asked, row.policy, seeds)],
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
    behind_in_part = asked.behind_in_part(name) if effort.in_part and not results else None
    if behind_in_part is not None and behind_in_part > FAR_BEHIND_IN_PART:
        stands = Standing.IN_PART
    notes = _without_value(asked, name, seeds)
    if notes and name != OURS:
        stands = Standing.FAILED
    behind = {} if is_split(name) else _results(asked, with_admission(name), seeds)
    return Row(
        name,
        _mean_value(results),
        len(results),
        notes[0] if notes else first.note if first is not None and first.own_machines else "",
        _mean_causes(results),
        _mean(result.moves_per_hour for result in results.values()),
        _mean(result.lost_machine_seconds for result in results.values()),
        _mean_value(behind),
        difference,
        stands,
        _why(own, results) if stands is Standing.SHORT else "",
        asked.known.value(asked.part(name)) if behind_in_part is not None else None,
    )


def _without_value(asked: Questions, name: str, seeds: Sequence[int]) -> list[str]:
    found = [asked.known(run) for run in (*(asked.policy(name, seed) for seed in seeds), asked.part(name))]
    return [result.note or "no result" for result in found if result is not None and result.value is None]


def _crashed(asked: Questions, name: str, seeds: Sequence[int]) -> bool:
    found = [asked.known(run) for run in (*(asked.policy(name, seed) for seed in seeds), asked.part(name))]
    return any(result is not None and result.crashed for result in found)


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


def _clairvoyant(asked: Questions) -> float | None:
    """The best that was found on the first draw by whatever means; None before the search."""
    searched = [asked.known.value(asked.clairvoyant(1, search)) for search in Search]
    if all(value is None for value in searched):
        return None
    return max(result.value for result in asked.bounded(1).values() if result.value is not None)


def _shuffled(asked: Questions, names: Sequence[str]) -> dict[str, Shuffled]:
    values: dict[str, dict[int, float]] = {}
    for name in names:
        for seed in range(1, SHUFFLED_DRAWS + 1):
            value = asked.value(name, seed, Copies.SHUFFLED)
            if value is not None:
                values.setdefault(name, {})[seed] = value
    own = values.get(OURS, {})
    return {
        name: Shuffled(statistics.fmean(found.values()), len(found), None if name == OURS else paired(own, found))
        for name, found in values.items()
    }


def _claims(
    asked: Questions, rows: Sequence[Row], split: str, clairvoyant: float | None, bound: float | None
) -> list[Claim]:
    cell, own, first = asked.cell, rows[0].value, asked.known(asked.policy(OURS, 1))
    best = next((row.value for row in rows if row.policy == split), None)
    ratio = own / best if own is not None and best else None
    name = "best split in hindsight"
    claims = [_claim(name, ratio, 1.0 if cell.changes else OF_SPLIT, rows[0].causes, above=cell.changes)]
    if cell.nine or first is None or first.value is None:
        return claims
    if claims_clairvoyant(cell):
        claims.append(
            _claim("clairvoyant", first.value / clairvoyant if clairvoyant else None, OF_CLAIRVOYANT, first.causes)
        )
    if clairvoyant is not None and bound and clairvoyant >= OF_CLAIRVOYANT * bound:
        claims.append(_claim("bound", first.value / bound, OF_BOUND, first.causes))
    return claims


def _claim(name: str, ratio: float | None, least: float, causes: Mapping[str, float], above: bool = False) -> Claim:
    claim = Claim(name, ratio, least, above)
    if claim.holds is not False or not causes:
        return claim
    cause = max(causes, key=lambda cause: causes[cause])
    return replace(claim, why=f"mostly {cause}, {causes[cause]:.3f} of requests")


def _faults(asked: Questions, seeds: Sequence[int]) -> list[str]:
    """What cannot be, if bounds and runs are right: of every draw, whatever has a result."""
    faults = []
    for copies in Copies:
        for seed in seeds:
            bound = asked.known.value(asked.bound(seed, copies))
            if bound is None:
                continue
            for name, result in asked.bounded(seed, copies).items():
                if result.value is not None and result.value > bound + 1e-9:
                    where = f"draw {seed}, {copies.value}"
                    faults.append(f"{name} attained {result.value:.4f} in {where}, above the bound {bound:.4f}")
    return faults
