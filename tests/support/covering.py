"""Covering arrays: few rows in which every two values of different dimensions meet, or every value occurs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Values = frozenset[tuple[str, Any]]


def pairs_of(case: Case) -> set[Values]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def values_of(case: Case) -> set[Values]:
    return {frozenset([value]) for value in case.items()}


def all_cases(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    cases = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [case for case in cases if allowed(case)]


def pairwise(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    return _rows(all_cases(dimensions, allowed), pairs_of)


def each_value(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    return _rows(all_cases(dimensions, allowed), values_of)


def _rows(cases: Sequence[Case], parts_of: Callable[[Case], set[Values]]) -> list[Case]:
    """Greedy: each row is the case with the most parts that no row has yet, of several that with the most new pairs.
    The same rows every time."""
    parts = {id(case): parts_of(case) for case in cases}
    pairs = {id(case): pairs_of(case) for case in cases}
    left, met = set().union(*parts.values()), set[Values]()
    rows = []
    while left:
        best = max(cases, key=lambda case: (len(parts[id(case)] & left), len(pairs[id(case)] - met)))
        rows.append(best)
        left -= parts[id(best)]
        met |= pairs[id(best)]
    return rows
