"""The move of one machine: begin, switch, verify, finish; its roll-back; and the repair of what was changed by hand.

Owns the doing over `Machines` and `EngineAdmin`; what to do next is `core.move`'s, which machine goes where is
`core.decide`'s. Remembers nothing: each step follows from the machine's own record and the engine's own answer, so any
operator takes up any move after any crash, and of two that try the same step one wins and the other reads again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from poolwright.controller.ports import EngineAdmin, EngineRefused, EngineUnreachable
from poolwright.core import move as moves
from poolwright.core.decision import MOVE_DEADLINE_SECONDS
from poolwright.core.machine import Machine, MachinePatch, begin
from poolwright.core.move import StepKind
from poolwright.machines import Conflict, Machines
from poolwright_protocol.roles import Role, RolePut, RoleState

_MAX_PARALLEL = 16
_MAX_STEPS = 4  # of one machine in one call: put, ask, finish, and one more


class Result(StrEnum):
    """What one call did, or found."""

    UNBORN = "unborn"  # no role was ever given to it
    BEGUN = "begun"
    WAITING = "waiting"  # a move goes on; `detail` says what it waits for
    FINISHED = "finished"
    ROLLING_BACK = "rolling back"  # the deadline passed: on its way back since this call
    SETTLED = "settled"  # engine and label agree
    REPAIRED = "repaired"  # engine and record had come apart, and agree again
    UNCHECKED = "unchecked"  # the engine of a machine that is not moving gave no answer
    OUTRUN = "outrun"  # another writer won: read again
    LEAVING = "leaving"  # being deleted: let go


@dataclass(frozen=True, slots=True)
class Progress:
    """`before` is what was read, `machine` what is known now, `engine` what the engine last said."""

    result: Result
    before: Machine
    machine: Machine
    detail: str = ""
    engine: RoleState | None = None


class Mover:
    def __init__(
        self,
        machines: Machines,
        engines: EngineAdmin,
        deadline_seconds: float = MOVE_DEADLINE_SECONDS,
        bounds: Mapping[Role, int | None] | None = None,
        machine_bounds: Mapping[str, int] | None = None,
    ) -> None:
        """`bounds`: `maxPrefillTokensPerStep` of each role, sent with the role; None leaves the engine its own.
        `machine_bounds`: the policy's, by uid, where the role has none."""
        self._machines = machines
        self._engines = engines
        self._deadline_seconds = deadline_seconds
        self._bounds = dict(bounds or {})
        self._machine_bounds = dict(machine_bounds or {})

    async def begin(self, machine: Machine, to_role: Role, now: float, reason: str) -> Progress:
        """The first step of a move and of a birth alike. Raises Unavailable."""
        return await self._patch(Result.BEGUN, machine, begin(machine, to_role, now, self._deadline_seconds, reason))

    async def advance_all(self, machines: Sequence[Machine], now: float) -> list[Progress]:
        """`advance` for each, side by side: one machine that does not answer holds up no other. Raises Unavailable."""
        slots = asyncio.Semaphore(_MAX_PARALLEL)

        async def one(machine: Machine) -> Progress:
            async with slots:
                return await self.advance(machine, now)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(machine)) for machine in machines]
        return [task.result() for task in tasks]

    async def advance(self, machine: Machine, now: float) -> Progress:
        """The next steps of this machine, as far as they go now."""
        if machine.deleting:
            return Progress(Result.LEAVING, machine, machine)
        if machine.effective_role is None and machine.role_epoch == 0:
            return Progress(Result.UNBORN, machine, machine)
        told: RoleState | None = None
        strayed = False  # its engine was seen in another role or epoch: telling it again is a repair, and news
        bound = self._bounds.get(machine.effective_role) if machine.effective_role else None
        if bound is None:
            bound = self._machine_bounds.get(machine.uid)
        for _ in range(_MAX_STEPS):
            state, problem = await self._ask(machine)
            if state is not None:
                if told is not None and told.boot_id != state.boot_id:
                    return _rest(machine, "the engine restarted after it was told", state)
                if patch := _apart(machine, state):
                    return await self._mend(machine, patch, state)
            step = moves.next_step(
                machine, state, now, max_prefill_tokens_per_step=bound, deadline_seconds=self._deadline_seconds
            )
            if step.kind is StepKind.PUT and step.put:
                strayed |= state is None or (state.role, state.epoch) != (step.put.role, step.put.epoch)
                answer = await self._tell(machine, step.put)
                if isinstance(answer, RoleState):
                    told = answer
                    continue
                if isinstance(answer, EngineRefused) and answer.status == 409 and state is not None:
                    return await self._mend(machine, _contradicted(machine, state), state)
                return _rest(machine, str(answer), state)
            if step.kind is StepKind.FINISH and step.patch:
                return replace(await self._patch(Result.FINISHED, machine, step.patch), engine=state)
            if step.kind is StepKind.ROLL_BACK and step.patch:
                back = await self._patch(Result.ROLLING_BACK, machine, step.patch)
                return replace(back, detail="; ".join(filter(None, (step.message, problem, back.detail))), engine=state)
            if step.kind is StepKind.SETTLED:
                result = Result.REPAIRED if strayed else Result.SETTLED
                detail = "its engine was told its role again" if strayed else ""
                return Progress(result, machine, machine, detail, state)
            return _rest(machine, problem or step.message, state)
        return _rest(machine, "the engine does not keep what it is told", told)

    async def _ask(self, machine: Machine) -> tuple[RoleState | None, str]:
        try:
            return await self._engines.get_role(machine), ""
        except (EngineUnreachable, EngineRefused) as error:
            return None, str(error)

    async def _tell(self, machine: Machine, put: RolePut) -> RoleState | EngineRefused | EngineUnreachable:
        try:
            return await self._engines.put_role(machine, put)
        except (EngineUnreachable, EngineRefused) as error:
            return error

    async def _mend(self, machine: Machine, patch: MachinePatch, state: RoleState) -> Progress:
        """Bring record and engine together. A record that was merely read too early fails the test of its epoch."""
        if machine.move is not None:
            done = await self._patch(Result.WAITING, machine, patch)
            said = f"its epoch was raised to {patch.epoch}: the engine is {state.role.title_case} at {state.epoch}"
        else:
            done = await self._patch(Result.REPAIRED, machine, patch)
            was = machine.role.title_case if machine.role else "no role"
            said = f"its record said {was} at epoch {machine.role_epoch}, its engine {state.role.title_case}"
        return replace(done, engine=state, detail=done.detail or said)

    async def _patch(self, result: Result, machine: Machine, patch: MachinePatch) -> Progress:
        try:
            return Progress(result, machine, await self._machines.patch(patch))
        except Conflict as error:
            return Progress(Result.OUTRUN, machine, machine, str(error))


def _rest(machine: Machine, why: str, state: RoleState | None) -> Progress:
    return Progress(Result.WAITING if machine.move else Result.UNCHECKED, machine, machine, why, state)


def _apart(machine: Machine, state: RoleState) -> MachinePatch | None:
    """Where record and engine differ in a way that telling the engine again cannot mend: the epoch was set back, or the
    label removed, by hand. Only operators raise an engine's epoch, so what it was told is the record."""
    label_gone = machine.move is None and machine.role is None and state.epoch == machine.role_epoch
    return _contradicted(machine, state) if label_gone or state.epoch > machine.role_epoch else None


def _contradicted(machine: Machine, state: RoleState) -> MachinePatch:
    """The engine was told another role at this epoch or a later one. A move goes on above that epoch; a machine at rest
    takes its engine's role for its own: its label was changed by hand."""
    if machine.move is not None:
        epoch = max(state.epoch, machine.role_epoch) + 1
        return MachinePatch(machine.name, machine.uid, machine.role_epoch, epoch, None, None, machine.move)
    epoch = max(state.epoch, machine.role_epoch)
    return MachinePatch(machine.name, machine.uid, machine.role_epoch, epoch, state.role, machine.role_since, None)
