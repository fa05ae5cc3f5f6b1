"""The fit of costs: exact where the costs are lines, the best there is where they are not, and never negative."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from poolwright_protocol.least_squares import cost_weights

SECONDS = st.floats(1e-4, 10.0)
ROWS = st.lists(st.tuples(st.tuples(st.just(1.0), *[st.floats(0.0, 1e6)] * 3), SECONDS), min_size=1, max_size=30)


def error(rows: list[tuple[tuple[float, ...], float]], weights: tuple[float, ...]) -> float:
    return sum((float(np.dot(features, weights)) / seconds - 1) ** 2 for features, seconds in rows)


def test_costs_that_are_lines_are_found_again() -> None:
    true = (0.01, 2e-4, 3e-8)
    features = [(1.0, float(tokens), float(tokens * context)) for tokens in (1, 8, 64, 512) for context in (16, 1024)]
    found = cost_weights([(row, float(np.dot(row, true))) for row in features])
    assert found == pytest.approx(true, rel=1e-9)


def test_a_feature_that_says_nothing_and_one_that_repeats_another_get_no_weight_of_their_own() -> None:
    rows = [((1.0, 0.0, x, 2 * x), 1.0 + x) for x in (1.0, 2.0, 5.0)]
    fixed, nothing, once, twice = cost_weights(rows)
    assert nothing == 0.0
    assert (fixed, once + 2 * twice) == pytest.approx((1.0, 1.0))


@settings(max_examples=100, deadline=None)
@given(rows=ROWS)
def test_no_weight_is_negative_and_none_would_fit_better(rows: list[tuple[tuple[float, ...], float]]) -> None:
    found = cost_weights(rows)
    assert min(found) >= 0
    scaled = np.array([features for features, _ in rows]) / np.array([[seconds] for _, seconds in rows])
    largest = np.where(scaled.max(axis=0) > 0, scaled.max(axis=0), 1.0)
    peers = nnls(scaled / largest, np.ones(len(rows)))[0] / largest
    assert error(rows, found) <= error(rows, tuple(peers)) + 1e-6


def test_nothing_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="no step"):
        cost_weights([])
