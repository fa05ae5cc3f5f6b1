"""Rows with the places they begin at, for tests that drive a runner by hand."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from poolwright_engine.scheduling.runner import Row, Step


class Placed(NamedTuple):
    start: int
    row: Row

    def replaced(self, **fields: Any) -> "Placed":
        """With other fields of the row."""
        return Placed(self.start, self.row._replace(**fields))


def placed(slot: int, start: int, *fields: Any, **named: Any) -> Placed:
    """`fields` and `named`: the row's, from its length on."""
    return Placed(start, Row(slot, *fields, **named))


def step_of(number: int, rows: Iterable[Placed]) -> Step:
    each = tuple(rows)
    return Step(number, tuple(one.row for one in each), tuple(one.start for one in each))
