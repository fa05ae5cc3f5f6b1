"""A step's rows are sampled by as many threads as there are, and no token depends on that."""

from collections.abc import Iterator

import numpy as np
import pytest

from poolwright_engine.cpu.seats import RowTokens, Seats
from poolwright_engine.scheduling.runner import Row, Seat
from poolwright_engine.scheduling.sequence import SamplingParams

ROWS, VOCAB_SIZE, STEPS = 24, 500, 4


def rows_of(step: int) -> list[Row]:
    rows = []
    for slot in range(ROWS):
        params = SamplingParams(
            max_tokens=9, temperature=(0.0, 0.9)[slot % 2], seed=slot, frequency_penalty=(0.0, 0.5)[slot % 3 == 0]
        )
        seat = Seat((1, 2, 3), ()) if step == 0 and params.needs_history else None
        length = 3 if step == 0 else 1
        ids = (1, 2, 3) if step == 0 else ()
        rows.append(Row(slot, length, ids, (1,), True, params, use_last_sampled=step > 0, seat=seat))
    return rows


def run(seats: Seats) -> list[list[RowTokens]]:
    found = []
    for step in range(STEPS):
        logits = np.random.default_rng(step).standard_normal((ROWS, VOCAB_SIZE)).astype(np.float32)
        rows = rows_of(step)
        for row in rows:
            seats.take(row)
        found.append(seats.sample(rows, [step * 2 + row.length for row in rows], logits))
    return found


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[RowTokens]]]:
    seats = Seats(ROWS, VOCAB_SIZE, frozenset(), None, threads=1)
    yield run(seats)
    seats.close()


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_share_rows_and_change_no_token(expected: list[list[RowTokens]], threads: int) -> None:
    seats = Seats(ROWS, VOCAB_SIZE, frozenset(), None, threads)
    try:
        assert run(seats) == expected
        assert seats.last_sampled == [row.token_ids[-1] for row in expected[-1]]
    finally:
        seats.close()


def test_every_row_has_its_token(expected: list[list[RowTokens]]) -> None:
    for step in expected:
        assert len(step) == ROWS
        assert all(len(row.token_ids) == 1 and row.error is None for row in step)
    assert len({row.token_ids for row in expected[0][1::2]}) > 6
