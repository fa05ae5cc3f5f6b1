"""Least squares of relative errors with no negative weight: how measured times become costs of work.

Pure Python, so that engine and simulator fit alike: for a few features, and as many rows as somebody measures.
"""

import itertools
import math
from collections.abc import Sequence

_DEPENDENT = 1e-10  # what is left of a column, relative to it, that others make up

Vector = Sequence[float]


def cost_weights(rows: Sequence[tuple[Vector, float]]) -> tuple[float, ...]:
    """The weights, none below 0, that make the sum over rows of (weights · features / seconds - 1)² least: more work
    never costs less. The least is the free solution on those features that have a weight, so all sets of them are
    tried. Raises ValueError for no rows."""
    if not rows:
        raise ValueError("there is no step to fit")
    columns = [[features[index] / seconds for features, seconds in rows] for index in range(len(rows[0][0]))]
    largest = [max(map(abs, column)) for column in columns]
    scaled = [[x / most for x in column] if most else column for column, most in zip(columns, largest, strict=True)]
    best, least = [0.0] * len(columns), float(len(rows))
    for count in range(1, len(columns) + 1):
        for used in itertools.combinations(range(len(columns)), count):
            found = _solved([scaled[index] for index in used])
            if found is not None and found[1] < least and min(found[0]) >= 0:
                least = found[1]
                best = [0.0] * len(columns)
                for index, weight in zip(used, found[0], strict=True):
                    best[index] = weight / largest[index]
    return tuple(best)


def _solved(columns: Sequence[list[float]]) -> tuple[list[float], float] | None:
    """Weights that bring the sum of the columns nearest to 1 in every row, and the squared distance; None where one
    column is made of others. By modified Gram-Schmidt, the ones as a column more."""
    size = len(columns)
    work = [*columns, [1.0] * len(columns[0])]
    upper = [[0.0] * (size + 1) for _ in range(size)]
    for i in range(size):
        length = math.sqrt(_product(work[i], work[i]))
        if length <= _DEPENDENT * math.sqrt(_product(columns[i], columns[i])):
            return None
        unit = [x / length for x in work[i]]
        upper[i][i] = length
        for j in range(i + 1, size + 1):
            upper[i][j] = along = _product(unit, work[j])
            work[j] = [x - along * u for x, u in zip(work[j], unit, strict=True)]
    weights = [0.0] * size
    for i in reversed(range(size)):
        weights[i] = (upper[i][size] - _product(upper[i][i + 1 : size], weights[i + 1 :])) / upper[i][i]
    return weights, _product(work[size], work[size])


def _product(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
