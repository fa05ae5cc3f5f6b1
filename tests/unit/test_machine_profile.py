"""What an engine says of its machine: optional, and refused with a reason where it cannot be."""

import json
import math
from typing import Any

import pytest

from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role, RoleState
from poolwright_protocol.step_time import StepCost

PROFILE = MachineProfile(
    decode=StepCost(0.02, 1e-4, 1e-8),
    mixed=StepCost(0.03, 2e-4, 2e-8),
    max_tokens_per_step=2048,
    max_sequences=256,
    tile_tokens=64,
    kv_capacity_tokens=100_000,
    kv_bytes_per_token=131_072,
)
STATE = RoleState("uid", "boot", Role.TOKEN, 3, 1, step_profile=PROFILE)
COST = {"fixedSeconds": 0.02, "tokenSeconds": 1e-4, "kvTokenSeconds": 1e-8}


def body(**changes: Any) -> dict[str, Any]:
    return {**PROFILE.to_json(), **changes}


def test_it_comes_back_as_it_was_said() -> None:
    assert MachineProfile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE
    assert RoleState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_what_is_not_known_is_absent_and_never_zero() -> None:
    little = MachineProfile(PROFILE.decode, None, 2048, 256, 64)
    said = little.to_json()
    assert said.keys() == {"decode", "maxTokensPerStep", "maxSequences", "tileTokens"}
    assert MachineProfile.from_json(said) == little
    assert MachineProfile.from_json({**said, "mixed": None, "kvCapacityTokens": None}) == little
    assert "stepProfile" not in RoleState("uid", "boot", Role.TOKEN, 3, 1).to_json()


def test_an_older_engine_says_nothing_and_a_newer_one_may_say_more() -> None:
    older = RoleState.from_json({"podUid": "u", "bootId": "b", "role": "mixed", "epoch": 1, "stepsSinceSwitch": 2})
    assert (older.step_profile, older.step_profile_problem) == (None, "")
    newer = STATE.to_json() | {"mood": "good", "stepProfile": body(decode={**COST, "more": 1}, weather="rain")}
    assert RoleState.from_json(newer) == STATE


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"decode": {**COST, "tokenSeconds": math.nan}}, "decode.tokenSeconds"),
        ({"decode": {**COST, "fixedSeconds": math.inf}}, "decode.fixedSeconds"),
        ({"mixed": {**COST, "fixedSeconds": -0.01}}, "mixed.fixedSeconds"),
        ({"mixed": {**COST, "kvTokenSeconds": "1e-8"}}, "mixed.kvTokenSeconds"),
        ({"mixed": {**COST, "kvTokenSeconds": 10**400}}, "mixed.kvTokenSeconds"),
        ({"decode": {**COST, "tokenSeconds": True}}, "decode.tokenSeconds"),
        ({"decode": {"fixedSeconds": 0.02}}, "decode.tokenSeconds"),
        (
            {"decode": {"fixedSeconds": 0, "tokenSeconds": 0.0, "kvTokenSeconds": 0}},
            "decode: a step that takes no time",
        ),
        ({"decode": 0.02}, "decode"),
        ({"maxTokensPerStep": 0}, "maxTokensPerStep"),
        ({"maxTokensPerStep": None}, "maxTokensPerStep"),
        ({"maxSequences": 2.0}, "maxSequences"),
        ({"tileTokens": True}, "tileTokens"),
        ({"kvCapacityTokens": 0}, "kvCapacityTokens"),
        ({"kvBytesPerToken": 2**64}, "kvBytesPerToken"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_the_role_stands(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        MachineProfile.from_json(body(**changes))
    state = RoleState.from_json(STATE.to_json() | {"stepProfile": body(**changes)})
    assert state.step_profile is None
    assert f"stepProfile: {field}" in state.step_profile_problem
    assert (state.role, state.epoch, state.steps_since_switch) == (Role.TOKEN, 3, 1)
    assert "stepProfileProblem" not in state.to_json()


@pytest.mark.parametrize("said", [[], "fast", 7, True])
def test_a_profile_of_another_type_is_refused(said: object) -> None:
    state = RoleState.from_json(STATE.to_json() | {"stepProfile": said})
    assert state.step_profile is None
    assert "expected a JSON object" in state.step_profile_problem
