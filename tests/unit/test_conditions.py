"""Conditions follow the conventions of the Kubernetes API."""

import pytest

from poolwright.api.conditions import NOT_OBSERVED, ConditionType, Observed, merge, reasons
from poolwright.api.models import Condition, ConditionStatus

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def _by_type(conditions: list[Condition]) -> dict[str, Condition]:
    return {c.type: c for c in conditions}


def test_every_type_is_there_from_the_first_visit_as_unknown() -> None:
    first = merge([], [], 1, EARLY)
    assert [c.type for c in first] == [t.value for t in ConditionType]
    assert {(c.status.value, c.reason) for c in first} == {("Unknown", NOT_OBSERVED)}


def test_transition_time_changes_only_with_the_status() -> None:
    met = Observed(ConditionType.SLO_MET, ConditionStatus.TRUE, "Met", "both met")
    first = merge([], [met], 1, EARLY)
    same = merge(first, [Observed(ConditionType.SLO_MET, ConditionStatus.TRUE, "Met", "still met")], 2, LATE)
    assert _by_type(same)["SLOMet"].last_transition_time == EARLY
    assert (_by_type(same)["SLOMet"].message, _by_type(same)["SLOMet"].observed_generation) == ("still met", 2)
    missed = merge(same, [Observed(ConditionType.SLO_MET, ConditionStatus.FALSE, "Missed")], 2, LATE)
    assert _by_type(missed)["SLOMet"].last_transition_time == LATE


def test_what_is_not_observed_this_time_stays_as_it_was() -> None:
    first = merge([], [Observed(ConditionType.PAUSED, ConditionStatus.TRUE, "ModePaused")], 1, EARLY)
    assert merge(first, [], 2, LATE) == first


def test_merging_twice_is_merging_once() -> None:
    observed = [Observed(kind, ConditionStatus.UNKNOWN, NOT_OBSERVED, "m") for kind in ConditionType]
    once = merge([], observed, 3, EARLY)
    assert merge(once, observed, 3, LATE) == once


def test_reason_outside_the_closed_list_is_refused() -> None:
    with pytest.raises(ValueError, match="no reason of condition Paused"):
        merge([], [Observed(ConditionType.PAUSED, ConditionStatus.TRUE, "Whatever")], 1, EARLY)


def test_reasons_are_camel_case_words() -> None:
    for kind in ConditionType:
        assert all(reason.isalpha() and reason[0].isupper() for reason in reasons(kind))
