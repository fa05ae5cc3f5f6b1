"""Covering arrays: few rows in which every two values of different dimensions meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_cases(dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    cases = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [case for case in cases if allowed(case)]


def pairwise(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Greedy: each row is the allowed case with the most pairs that have not met. The same rows every time."""
    cases = all_cases(dimensions, allowed)
    pairs = {id(case): pairs_of(case) for case in cases}
    left = set().union(*pairs.values())
    rows = []
    while left:
        best = max(cases, key=lambda case: len(pairs[id(case)] & left))
        rows.append(best)
        left -= pairs[id(best)]
    return rows
