"""The next step of one machine towards its role: put, wait, finish, roll back. Pure; the mover does what it says.

A role is put and then verified from the engine's own answer: a 200 alone proves nothing. Every step is level: called
again after a crash at any point, it continues from what machine and engine say now.
"""

from dataclasses import dataclass
from enum import StrEnum

from poolwright.core.decision import MOVE_DEADLINE_SECONDS
from poolwright.core.machine import Machine, MachinePatch, finish, roll_back
from poolwright_protocol.roles import RolePut, RoleState


class StepKind(StrEnum):
    """Settled: engine and label agree. Put: send `put`, then ask again. Wait: ask again soon. Finish, RollBack: apply
    `patch`. Lost: the machine is going; record it."""

    SETTLED = "Settled"
    PUT = "Put"
    WAIT = "Wait"
    FINISH = "Finish"
    ROLL_BACK = "RollBack"
    LOST = "Lost"


@dataclass(frozen=True, slots=True)
class Step:
    kind: StepKind
    message: str
    put: RolePut | None = None
    patch: MachinePatch | None = None


def next_step(
    machine: Machine,
    state: RoleState | None,
    now: float,
    *,
    max_prefill_tokens_per_step: int | None = None,
    deadline_seconds: float = MOVE_DEADLINE_SECONDS,
) -> Step:
    """`state` is the engine's answer to `GET /admin/role`, None where it gave none (or belongs to another pod)."""
    wanted = machine.effective_role
    if machine.deleting:
        return Step(StepKind.LOST if machine.move else StepKind.SETTLED, "the machine is being deleted")
    if wanted is None:
        return Step(StepKind.SETTLED, "no role yet: the next decision gives it one")
    put = RolePut(machine.uid, wanted, machine.role_epoch, max_prefill_tokens_per_step)
    if state is not None and state.pod_uid != machine.uid:
        state = None  # the address belongs to another machine now
    agrees = state is not None and state.role is wanted and state.epoch == machine.role_epoch

    if machine.move is None:
        if state is None:
            return Step(StepKind.WAIT, "the engine does not answer")
        if agrees and state.max_prefill_tokens_per_step == max_prefill_tokens_per_step:
            return Step(StepKind.SETTLED, "engine and label agree")
        if state.epoch > machine.role_epoch:
            return Step(StepKind.WAIT, "the engine is at a newer epoch: another writer won, read again")
        return Step(StepKind.PUT, f"the engine is {state.role.value}, the label says {wanted.value}", put=put)

    if agrees and state is not None and state.steps_since_switch >= 1:
        # Verified, even where late: nothing is gained by undoing what has happened.
        return Step(StepKind.FINISH, f"verified as {wanted.value}", patch=finish(machine, now))
    if now >= machine.move.deadline and machine.move.from_role is not None and not machine.move.rolling_back:
        return Step(
            StepKind.ROLL_BACK,
            f"not {wanted.value} by the deadline: back to {machine.move.from_role.value}",
            patch=roll_back(machine, now, deadline_seconds),
        )
    # A birth or a roll-back past its deadline has nowhere else to go: keep putting until it answers or is deleted.
    if agrees:
        return Step(StepKind.WAIT, "switched; waiting for a step boundary")
    if state is not None and state.epoch > machine.role_epoch:
        return Step(StepKind.WAIT, "the engine is at a newer epoch: another writer won, read again")
    return Step(StepKind.PUT, f"put {wanted.value} at epoch {machine.role_epoch}", put=put)
