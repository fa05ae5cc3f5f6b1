"""What is news in a status, and what it is worth as Events."""

import subprocess
import sys

import pytest

from poolwright.api.models import InferencePool, InferencePoolStatus
from poolwright.controller import status as statuses
from poolwright.controller.ports import ChildrenState
from poolwright.controller.status import Facts
from poolwright.core.decision import (
    Decision,
    MoveRecord,
    ObjectiveReading,
    ObjectiveState,
    Outcome,
    PoolCount,
    Reason,
)
from poolwright.core.reading import MetricsReading, MetricsState
from poolwright.core.spec import Metric
from poolwright_protocol.roles import Role
from support.standing_pool import manifest

NOW = 1_800_000_000.0
POOL = InferencePool.parse(manifest())


def built(
    old: InferencePoolStatus | None = None,
    *,
    ttft_seconds: float = 0.5,
    state: ObjectiveState = ObjectiveState.MET,
    moves: tuple[MoveRecord, ...] = (),
    reason: Reason = Reason.TARGETS_MET,
    problems: tuple[str, ...] = (),
    now: float = NOW,
    held_until: float | None = None,
) -> InferencePoolStatus:
    objective = ObjectiveReading("ttft", Metric.TTFT, state, 1.0, ttft_seconds, 0.91, samples=100)
    decision = Decision(
        reason,
        "because",
        objectives=(objective,),
        pools={role: PoolCount(1, 1) for role in Role},
        evidence=(("arrivals", f"{now:.0f}"),),
    )
    children = ChildrenState(routers_ready=1, routers_desired=1, problems=problems)
    return statuses.build(
        Facts(POOL, (), children, MetricsReading(MetricsState.COMPLETE, 60), decision, moves, old, held_until), now
    )


def move(outcome: Outcome | None = None, started_at: float = NOW - 10) -> MoveRecord:
    ended = None if outcome is None else started_at + 1.25
    return MoveRecord("uid-a", "a", Role.TOKEN, Role.PROMPT, "TTFTMissed", started_at, ended, outcome)


def test_the_same_again_is_no_news() -> None:
    old = built()
    assert built(old, now=NOW + 100) == old
    assert not statuses.may_write(old, built(old, now=NOW + 100))


def test_a_value_is_news_only_past_a_tenth() -> None:
    old = built(ttft_seconds=0.5)
    assert built(old, ttft_seconds=0.549) == old
    new = built(old, ttft_seconds=0.56)
    assert new.objectives[0].observed_milliseconds == 560
    assert statuses.may_write(old, new)
    assert not statuses.must_write(old, new)  # and can wait


def test_drift_is_measured_from_what_was_written() -> None:
    status = built(ttft_seconds=0.5)
    for step in range(1, 30):
        status = built(status, ttft_seconds=0.5 + step * 0.01)
    assert status.objectives[0].observed_milliseconds is not None
    assert abs(status.objectives[0].observed_milliseconds - 790) <= 79


def test_a_move_must_be_written_at_once_and_a_flickering_objective_need_not() -> None:
    old = built()
    assert statuses.must_write(old, built(old, moves=(move(),)))
    assert not statuses.must_write(old, built(old, state=ObjectiveState.MISSED, reason=Reason.DWELLING))
    assert statuses.must_write(old, built(old, problems=("no such image",)))
    assert statuses.must_write(None, old)


def test_transition_times_change_with_the_status_only() -> None:
    old = built()
    new = built(old, problems=("no such image",), now=NOW + 60)
    by_type = {c.type: c for c in new.conditions}
    was = {c.type: c for c in old.conditions}
    assert by_type["Available"].last_transition_time == was["Available"].last_transition_time
    assert by_type["Progressing"].last_transition_time != was["Progressing"].last_transition_time


def test_a_repeated_decision_is_recorded_once_and_the_last_few_are_kept() -> None:
    status = built()
    for step in range(40):
        status = built(status, reason=list(Reason)[step // 2 % 12], now=NOW + step)
    assert len(status.decisions) == 8
    assert all(a.reason != b.reason for a, b in zip(status.decisions, status.decisions[1:], strict=False))


def test_a_hold_comes_back_from_a_status_until_it_has_ended() -> None:
    """A second restart inside the hold that a lost status began must not forget it."""
    assert statuses.recorded_hold(InferencePoolStatus.model_validate(built(held_until=NOW + 40).to_json())) == NOW + 40
    assert statuses.recorded_hold(built(held_until=NOW - 1)) is None
    assert statuses.recorded_hold(built()) is None


def test_moves_come_back_from_a_status_as_they_went_in() -> None:
    moves = (move(Outcome.ROLLED_BACK, NOW - 100), move(Outcome.COMPLETED, NOW - 50), move(None, NOW - 1.5))
    status = InferencePoolStatus.model_validate(built(moves=moves).to_json())
    assert statuses.recorded_moves(status) == moves
    assert statuses.recorded_counts(status) == dict.fromkeys(Role, 1)
    assert status.last_move is not None
    assert status.last_move.summary == "a from Token to Prompt, Completed"


def test_each_thing_that_happened_is_one_event() -> None:
    first = built()
    begun = built(first, moves=(move(),))
    done = built(begun, moves=(move(Outcome.COMPLETED),))
    assert [e.reason for e in statuses.events(first, begun)] == ["MoveBegun"]
    assert [e.reason for e in statuses.events(begun, done)] == ["MoveCompleted"]
    assert statuses.events(done, done) == []
    assert [e.reason for e in statuses.events(first, done)] == ["MoveBegun", "MoveCompleted"]
    missed = built(done, moves=(move(Outcome.COMPLETED),), state=ObjectiveState.MISSED)
    assert [(e.kind, e.reason) for e in statuses.events(done, missed)] == [("Warning", "SLOMissed")]


@pytest.mark.parametrize("raw", [{"conditions": 7}, {"recentMoves": [{}]}, {"unheardOf": 1}])
def test_a_status_that_does_not_parse_is_none(raw: dict[str, object]) -> None:
    assert statuses.parse(raw) is None


def test_the_last_words_of_an_engine_without_its_model_are_understood() -> None:
    command = [sys.executable, "-m", "poolwright_engine", "serve", "--model", "/nowhere/model.gguf"]
    ended = subprocess.run(
        [*command, "--served-model-name", "tiny"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert statuses.MODEL_MISSING.search(ended.stderr), ended.stderr
    assert "/nowhere/model.gguf" in ended.stderr
