"""The next step of a machine follows from its record and its engine's answer alone."""

from dataclasses import replace

import pytest

from poolwright.core import machine as machines
from poolwright.core.decision import MOVE_DEADLINE_SECONDS
from poolwright.core.machine import Machine
from poolwright.core.move import StepKind, next_step
from poolwright_protocol.roles import Role, RoleState
from support.pool_world import START, M, P, pool

IN_TIME, LATE = START + 5, START + MOVE_DEADLINE_SECONDS + 1


def _moving() -> Machine:
    """Mixed to prompt, begun at START; epoch 2."""
    (machine,) = pool(M)
    return machines.apply(machine, machines.begin(machine, P, START, MOVE_DEADLINE_SECONDS, "TTFTMissed"))


def _born() -> Machine:
    (machine,) = pool(None)
    return machines.apply(machine, machines.begin(machine, P, START, MOVE_DEADLINE_SECONDS, "birth"))


def _says(role: Role, epoch: int, steps: int = 1, uid: str = "u0") -> RoleState:
    return RoleState(uid, "boot", role, epoch, steps)


def test_role_is_put_at_the_epoch_of_the_move() -> None:
    step = next_step(_moving(), _says(M, 1), IN_TIME)
    assert step.kind is StepKind.PUT
    assert step.put is not None
    assert (step.put.pod_uid, step.put.role, step.put.epoch) == ("u0", P, 2)


def test_engine_that_does_not_answer_is_put_to_again() -> None:
    assert next_step(_moving(), None, IN_TIME).kind is StepKind.PUT


def test_switch_alone_proves_nothing_until_a_step_boundary_passed() -> None:
    assert next_step(_moving(), _says(P, 2, steps=0), IN_TIME).kind is StepKind.WAIT


def test_verified_move_is_finished_with_label_and_date() -> None:
    step = next_step(_moving(), _says(P, 2), IN_TIME)
    assert step.kind is StepKind.FINISH
    assert step.patch is not None
    done = machines.apply(_moving(), step.patch)
    assert (done.role, done.role_since, done.move, done.role_epoch) == (P, IN_TIME, None, 2)


def test_right_role_at_an_old_epoch_is_not_verified() -> None:
    """A container that restarted with what its environment said."""
    assert next_step(_moving(), _says(P, 1), IN_TIME).kind is StepKind.PUT


def test_answer_of_another_pod_is_no_answer() -> None:
    assert next_step(_moving(), _says(P, 2, uid="other"), IN_TIME).kind is StepKind.PUT


def test_past_the_deadline_the_same_path_runs_back() -> None:
    step = next_step(_moving(), _says(M, 1), LATE)
    assert step.kind is StepKind.ROLL_BACK
    assert step.patch is not None
    back = machines.apply(_moving(), step.patch)
    assert back.move is not None
    assert (back.move.to_role, back.role_epoch, back.move.rolling_back) == (M, 3, True)
    put = next_step(back, _says(P, 2), LATE + 1)
    assert put.put is not None
    assert (put.put.role, put.put.epoch) == (M, 3)
    assert next_step(back, _says(M, 3), LATE + 1).kind is StepKind.FINISH


def test_late_but_verified_is_finished() -> None:
    assert next_step(_moving(), _says(P, 2), LATE).kind is StepKind.FINISH


def test_roll_back_has_nowhere_else_to_go() -> None:
    step = next_step(_moving(), None, LATE)
    assert step.patch is not None
    back = machines.apply(_moving(), step.patch)
    assert next_step(back, None, LATE + 10 * MOVE_DEADLINE_SECONDS).kind is StepKind.PUT


def test_birth_never_rolls_back() -> None:
    assert next_step(_born(), None, LATE).kind is StepKind.PUT


def test_newer_epoch_on_the_engine_means_read_again() -> None:
    assert next_step(_moving(), _says(M, 9), IN_TIME).kind is StepKind.WAIT
    assert next_step(pool(P)[0], _says(M, 9), IN_TIME).kind is StepKind.WAIT


def test_machine_that_is_deleted_in_its_move_is_lost() -> None:
    assert next_step(replace(_moving(), deleting=True), _says(P, 2), IN_TIME).kind is StepKind.LOST


def test_settled_machine_stays_settled_and_a_differing_engine_is_told_again() -> None:
    (machine,) = pool(P)
    assert next_step(machine, _says(P, 1), IN_TIME).kind is StepKind.SETTLED
    assert next_step(machine, _says(M, 0), IN_TIME).kind is StepKind.PUT
    assert next_step(machine, None, IN_TIME).kind is StepKind.WAIT


def test_changed_bound_is_put_to_a_settled_machine() -> None:
    (machine,) = pool(M)
    step = next_step(machine, _says(M, 1), IN_TIME, max_prefill_tokens_per_step=64)
    assert step.put is not None
    assert step.put.max_prefill_tokens_per_step == 64


@pytest.mark.parametrize("late", [IN_TIME, LATE])
def test_machine_without_a_role_waits_for_a_decision(late: float) -> None:
    assert next_step(pool(None)[0], None, late).kind is StepKind.SETTLED
