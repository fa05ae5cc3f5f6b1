"""What routers are told of a machine: whole or not at all, and only when it is news."""

import json
from dataclasses import replace
from typing import Any

import pytest

from poolwright.core.machine import Machine
from poolwright.core.router_note import RouterNote
from poolwright.core.routing import Targets
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost

PROFILE = MachineProfile(StepCost(0.02, 1e-4, 1e-8), StepCost(0.03, 2e-4, 2e-8), 2048, 256, 64, 90_000, 1024)
NOTE = RouterNote(PROFILE, ttft_seconds=1.0, tbt_seconds=0.06, tbt_percentile=90.0, max_prefill_tokens_per_step=512)
BEHIND = replace(NOTE, relegates=True)


def test_it_comes_back_as_it_was_written_also_with_the_machine() -> None:
    for note in (NOTE, BEHIND):
        assert RouterNote.from_json(note.to_json()) == note
    bare = RouterNote(PROFILE)
    assert RouterNote.from_json(bare.to_json()) == bare
    assert "null" not in bare.to_json()
    machine = Machine("m", "u", "h100", "10.0.0.1", True, Role.TOKEN, 1, 0.0, None, 0.0, note=NOTE)
    row = json.loads(json.dumps(machine.to_row()))
    assert Machine.from_row(row) == machine
    del row["note"]  # a record that an older controller wrote
    assert Machine.from_row(row) == replace(machine, note=None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profile": None}, "profile"),
        ({"profile": {"decode": {}}}, "profile"),
        ({"tbtSeconds": 0}, "tbtSeconds"),
        ({"ttftSeconds": float("nan")}, "ttftSeconds"),
        ({"tbtPercentile": 101}, "tbtPercentile"),
        ({"maxPrefillTokensPerStep": 0}, "maxPrefillTokensPerStep"),
        ({"maxPrefillTokensPerStep": True}, "maxPrefillTokensPerStep"),
        ({"relegates": 1}, "relegates"),
        ({"refuses": "yes"}, "refuses"),
    ],
)
def test_a_broken_note_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterNote.from_json(json.dumps(json.loads(NOTE.to_json()) | changes))
    for text in ("", "[]", "7"):
        with pytest.raises(ValueError, match=r"Expecting value|not a note"):
            RouterNote.from_json(text)


def test_a_few_percent_are_no_news_and_a_quarter_is() -> None:
    def with_prompt_cost(seconds: float) -> RouterNote:
        return replace(NOTE, profile=replace(PROFILE, mixed=StepCost(0.03, seconds, 2e-8)))

    assert NOTE.is_news_after(None)
    assert not NOTE.is_news_after(NOTE)
    assert not with_prompt_cost(2.1e-4).is_news_after(NOTE)
    assert with_prompt_cost(2.6e-4).is_news_after(NOTE)
    assert with_prompt_cost(1.2e-4).is_news_after(NOTE)
    assert not replace(NOTE, profile=replace(PROFILE, kv_capacity_tokens=91_000)).is_news_after(NOTE)
    assert replace(NOTE, profile=replace(PROFILE, kv_capacity_tokens=50_000)).is_news_after(NOTE)


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft_seconds": 0.9},
        {"tbt_seconds": None},
        {"tbt_percentile": 99.0},
        {"max_prefill_tokens_per_step": 448},
        {"relegates": True},
        {"refuses": True},
        {"profile": replace(PROFILE, max_tokens_per_step=4096)},
    ],
)
def test_what_somebody_chose_is_always_news(changes: dict[str, Any]) -> None:
    assert replace(NOTE, **changes).is_news_after(NOTE)


def test_targets_need_both_objectives() -> None:
    assert Targets.of(replace(NOTE, tbt_seconds=None), 100) is None
    assert Targets.of(replace(NOTE, ttft_seconds=None), 100) is None
    assert Targets.of(NOTE, 100) == Targets(1.0, 0.06, every_gap=False)


def test_the_second_token_counts_where_few_gaps_may_be_late_or_answers_are_short() -> None:
    for percentile, output_tokens, counts in ((99, 500, True), (90, 500, False), (90, 5, True), (50, 2, True)):
        targets = Targets.of(replace(NOTE, tbt_percentile=float(percentile)), output_tokens)
        assert targets is not None
        assert targets.every_gap is counts
