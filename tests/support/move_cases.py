"""The move of a machine, as claims over any `MachinesBed`: a test module with a fixture `machines_bed` imports all.

Time is injected: one second passes for each pass of an operator.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from poolwright.controller.admin_client import HttpEngineAdmin
from poolwright.controller.mover import Mover, Progress, Result
from poolwright.core.machine import Machine, MachinePatch
from poolwright.core.router_note import RouterNote
from poolwright.machines import Machines
from poolwright_protocol.roles import Role, RolePut, RoleState
from support.machines_bed import MachinesBed

START = 1_800_000_000.0
DEADLINE_SECONDS = 30.0
# Of a whole move: begin, ask, put, ask, finish.
STEPS = range(5)

__all__ = [
    "test_a_busy_engine_is_waited_for_until_a_step_boundary",
    "test_a_killed_engine_that_stays_dead_is_rolled_back_and_settles_when_it_returns",
    "test_a_label_changed_by_hand_is_repaired",
    "test_a_label_removed_by_hand_is_repaired",
    "test_a_machine_being_given_an_ip_of_another_pod_is_never_finished",
    "test_a_move_ends_with_record_and_engine_agreed",
    "test_a_move_goes_on_when_its_epoch_was_set_back_by_hand",
    "test_a_newborn_machine_gets_its_first_role_without_a_deadline",
    "test_a_settled_machine_is_not_written",
    "test_an_engine_killed_between_any_two_steps_loses_nothing",
    "test_an_engine_restarted_at_rest_keeps_its_role",
    "test_an_operator_dead_between_any_two_steps_loses_nothing",
    "test_past_the_deadline_it_goes_back_at_a_higher_epoch",
    "test_the_move_of_a_deleted_machine_is_let_go",
    "test_two_operators_at_once_make_one_move",
    "test_two_operators_make_the_same_move_together",
]


class Died(Exception):
    """The operator was killed."""


Hook = Callable[[], Awaitable[None]]


@dataclass
class Interrupted:
    """Machines and engines as one operator sees them, with something happening before or after its n-th action."""

    machines: Machines
    engines: HttpEngineAdmin
    at: int | None = None
    before: Hook | None = None
    after: Hook | None = None
    actions: list[str] = field(default_factory=list)

    async def patch(self, patch: MachinePatch) -> Machine:
        async with self._action("patch"):
            return await self.machines.patch(patch)

    async def annotate(self, machine: Machine, note: RouterNote | None) -> None:
        await self.machines.annotate(machine, note)

    async def put_role(self, machine: Machine, put: RolePut) -> RoleState:
        async with self._action("put"):
            return await self.engines.put_role(machine, put)

    async def get_role(self, machine: Machine) -> RoleState:
        async with self._action("ask"):
            return await self.engines.get_role(machine)

    async def list(self) -> tuple[Machine, ...]:
        return await self.machines.list()

    def watch(self) -> AsyncIterator[tuple[Machine, ...]]:
        return self.machines.watch()

    def _action(self, what: str) -> "_Action":
        self.actions.append(what)
        return _Action(self, len(self.actions) - 1 == self.at)


@dataclass
class _Action:
    owner: Interrupted
    here: bool

    async def __aenter__(self) -> None:
        if self.here and self.owner.before:
            await self.owner.before()

    async def __aexit__(self, *_: object) -> None:
        if self.here and self.owner.after:
            await self.owner.after()


class Operator:
    """One controller, reduced to one wish: this machine into that pool. Reads, begins where it must, advances."""

    def __init__(self, bed: MachinesBed, engines: HttpEngineAdmin) -> None:
        self.bed = bed
        self.world = Interrupted(bed.machines, engines)
        self.mover = Mover(self.world, self.world, DEADLINE_SECONDS)
        self.now = START

    async def begin(self, name: str, to_role: Role) -> Progress:
        return await self.mover.begin(await self.bed.get(name), to_role, self.now, "TTFTMissed")

    async def once(self, name: str) -> Progress:
        self.now += 1
        return await self.mover.advance(await self.bed.get(name), self.now)

    async def settle(self, name: str) -> Machine:
        for _ in range(12):
            if (await self.once(name)).result is Result.SETTLED:
                return await self.bed.get(name)
        raise AssertionError(f"{name} did not settle: {await self.bed.get(name)}")

    async def move(self, name: str, to_role: Role) -> Machine:
        machine = await self.bed.get(name)
        if machine.move is None and machine.role is not to_role:
            await self.begin(name, to_role)
        return await self.settle(name)


@pytest.fixture
async def engines(machines_bed: MachinesBed) -> AsyncIterator[HttpEngineAdmin]:
    async with HttpEngineAdmin(machines_bed.pool_key, timeout_seconds=5) as client:
        yield client


def agreed(bed: MachinesBed, machine: Machine) -> bool:
    state = bed.engine(machine.name).role_state()
    return (machine.role, machine.role_epoch, machine.uid) == (state.role, state.epoch, state.pod_uid)


# ----------------------------------------------------------------------------------------------------- the plain move


async def test_a_move_ends_with_record_and_engine_agreed(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    begun = await operator.begin("a", Role.PROMPT)
    assert begun.result is Result.BEGUN
    machine = await machines_bed.get("a")
    assert (machine.role, machine.role_epoch, machine.role_since) == (None, 5, None)
    assert machine.move is not None
    assert (machine.move.from_role, machine.move.to_role) == (Role.TOKEN, Role.PROMPT)
    assert (machine.move.started_at, machine.move.deadline) == (START, START + DEADLINE_SECONDS)
    assert (await operator.once("a")).result is Result.FINISHED
    machine = await machines_bed.get("a")
    assert (machine.role, machine.role_epoch, machine.role_since) == (Role.PROMPT, 5, operator.now)
    assert machine.move is None
    assert agreed(machines_bed, machine)
    assert operator.world.actions == ["patch", "ask", "put", "ask", "patch"]


async def test_a_newborn_machine_gets_its_first_role_without_a_deadline(
    machines_bed: MachinesBed, engines: HttpEngineAdmin
) -> None:
    machine = await machines_bed.add("a", None, 0)
    machines_bed.set_loading("a", True)
    operator = Operator(machines_bed, engines)
    assert (await operator.once("a")).result is Result.UNBORN
    await operator.begin("a", Role.TOKEN)
    operator.now += 100 * DEADLINE_SECONDS
    waiting = await operator.once("a")
    assert waiting.result is Result.WAITING
    assert "loading" in waiting.detail
    machines_bed.set_loading("a", False)
    machine = await operator.settle("a")
    assert (machine.role, machine.role_epoch) == (Role.TOKEN, 1)
    assert agreed(machines_bed, machine)


async def test_a_settled_machine_is_not_written(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    before = await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    for _ in range(3):
        assert (await operator.once("a")).result is Result.SETTLED
    assert operator.world.actions == ["ask"] * 3
    assert await machines_bed.get("a") == before


async def test_a_busy_engine_is_waited_for_until_a_step_boundary(
    machines_bed: MachinesBed, engines: HttpEngineAdmin
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    machines_bed.engine("a").busy = True
    operator = Operator(machines_bed, engines)
    await operator.begin("a", Role.PROMPT)
    for _ in range(3):
        waiting = await operator.once("a")
        assert waiting.result is Result.WAITING
        assert "step boundary" in waiting.detail
        assert (await machines_bed.get("a")).role is None
    machines_bed.engine("a").end_step()
    assert agreed(machines_bed, await operator.settle("a"))


# -------------------------------------------------------------------------------------------------------- the operator


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_operator_dead_between_any_two_steps_loses_nothing(
    machines_bed: MachinesBed, engines: HttpEngineAdmin, step: int, when: str
) -> None:
    async def die() -> None:
        raise Died

    await machines_bed.add("a", Role.TOKEN, 4)
    first = Operator(machines_bed, engines)
    first.world.at = step
    setattr(first.world, when, die)
    with pytest.raises(Died):
        await first.move("a", Role.PROMPT)
    second = Operator(machines_bed, engines)
    second.now = first.now + 2
    machine = await second.move("a", Role.PROMPT)
    assert (machine.role, machine.role_epoch, machine.move) == (Role.PROMPT, 5, None)
    assert agreed(machines_bed, machine)


async def test_two_operators_at_once_make_one_move(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    one, other = Operator(machines_bed, engines), Operator(machines_bed, engines)
    seen = await machines_bed.get("a")
    begun = await asyncio.gather(
        one.mover.begin(seen, Role.PROMPT, START, "one"), other.mover.begin(seen, Role.MIXED, START, "other")
    )
    assert sorted(p.result for p in begun) == [Result.BEGUN, Result.OUTRUN]
    wanted = (await machines_bed.get("a")).effective_role
    await asyncio.gather(one.settle("a"), other.settle("a"))
    machine = await machines_bed.get("a")
    assert (machine.role, machine.role_epoch, machine.move) == (wanted, 5, None)
    assert agreed(machines_bed, machine)


@pytest.mark.parametrize("step", STEPS)
async def test_two_operators_make_the_same_move_together(
    machines_bed: MachinesBed, engines: HttpEngineAdmin, step: int
) -> None:
    """At each step of one, the other does the whole move and begins and ends one more."""
    await machines_bed.add("a", Role.TOKEN, 4)
    slow, fast = Operator(machines_bed, engines), Operator(machines_bed, engines)

    async def overtake() -> None:
        await fast.move("a", Role.PROMPT)
        await fast.move("a", Role.MIXED)

    slow.world.at, slow.world.before = step, overtake
    await slow.begin("a", Role.PROMPT)
    if step > 0:
        await slow.once("a")
    await slow.settle("a")
    machine = await machines_bed.get("a")
    assert (machine.role, machine.role_epoch, machine.move) == (Role.MIXED, 6, None)
    assert agreed(machines_bed, machine)


# ---------------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_killed_between_any_two_steps_loses_nothing(
    machines_bed: MachinesBed, engines: HttpEngineAdmin, step: int, when: str
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    operator.world.at = step
    setattr(operator.world, when, lambda: machines_bed.restart_engine("a"))
    machine = await operator.move("a", Role.PROMPT)
    assert (machine.role, machine.role_epoch, machine.move) == (Role.PROMPT, 5, None)
    assert agreed(machines_bed, machine)


@pytest.mark.parametrize("step", STEPS)
async def test_a_killed_engine_that_stays_dead_is_rolled_back_and_settles_when_it_returns(
    machines_bed: MachinesBed, engines: HttpEngineAdmin, step: int
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    operator.world.at = step
    operator.world.before = lambda: machines_bed.kill_engine("a")
    await operator.begin("a", Role.PROMPT)
    await operator.once("a")
    if step == STEPS[-1]:  # verified before it died, so it is finished, and a restart reads the new role
        assert (await machines_bed.get("a")).role is Role.PROMPT
    else:
        assert (await operator.once("a")).result is Result.WAITING
        operator.now += DEADLINE_SECONDS
        assert (await operator.once("a")).result is Result.ROLLING_BACK
        assert (await operator.once("a")).result is Result.WAITING
    await machines_bed.restart_engine("a")
    machine = await operator.settle("a")
    expected = (Role.PROMPT, 5) if step == STEPS[-1] else (Role.TOKEN, 6)
    assert (machine.role, machine.role_epoch, machine.move) == (*expected, None)
    assert agreed(machines_bed, machine)


async def test_an_engine_restarted_at_rest_keeps_its_role(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    before = await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await machines_bed.kill_engine("a")
    assert (await operator.once("a")).result is Result.UNCHECKED
    await machines_bed.restart_engine("a")
    assert (await operator.once("a")).result is Result.SETTLED
    assert await machines_bed.get("a") == before
    assert agreed(machines_bed, before)


async def test_past_the_deadline_it_goes_back_at_a_higher_epoch(
    machines_bed: MachinesBed, engines: HttpEngineAdmin
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    machines_bed.engine("a").busy = True
    await operator.begin("a", Role.PROMPT)
    await operator.once("a")
    operator.now += DEADLINE_SECONDS
    back = await operator.once("a")
    assert back.result is Result.ROLLING_BACK
    assert back.machine.move is not None
    assert (back.machine.role, back.machine.role_epoch, back.machine.move.rolling_back) == (None, 6, True)
    assert back.machine.effective_role is Role.TOKEN
    machines_bed.engine("a").end_step()
    done = await operator.once("a")
    assert done.result is Result.FINISHED
    machine = await operator.settle("a")
    assert (machine.role, machine.role_epoch, machine.role_since) == (Role.TOKEN, 6, operator.now - 1)
    assert agreed(machines_bed, machine)


# ------------------------------------------------------------------------------------------- the world around a machine


async def test_a_machine_being_given_an_ip_of_another_pod_is_never_finished(
    machines_bed: MachinesBed, engines: HttpEngineAdmin
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await operator.begin("a", Role.PROMPT)
    stranger = await machines_bed.give_address_away("a")
    state = stranger.role_state()
    theirs = (state.role, state.epoch, state.boot_id)
    for _ in range(3):
        waiting = await operator.once("a")
        assert waiting.result is Result.WAITING
        assert "another machine" in waiting.detail or stranger.pod_uid in waiting.detail
    operator.now += DEADLINE_SECONDS
    assert (await operator.once("a")).result is Result.ROLLING_BACK
    assert (await operator.once("a")).result is Result.WAITING
    machine = await machines_bed.get("a")
    assert machine.role is None
    assert machine.move is not None
    state = stranger.role_state()
    assert (state.role, state.epoch, state.boot_id) == theirs
    await machines_bed.restart_engine("a")
    assert agreed(machines_bed, await operator.settle("a"))


@pytest.mark.parametrize("to_role", [Role.PROMPT, Role.MIXED])
async def test_a_label_changed_by_hand_is_repaired(
    machines_bed: MachinesBed, engines: HttpEngineAdmin, to_role: Role
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await machines_bed.edit_by_hand("a", to_role)
    repaired = await operator.once("a")
    assert repaired.result is Result.REPAIRED
    assert to_role.title_case in repaired.detail
    machine = await operator.settle("a")
    assert (machine.role, machine.role_epoch, machine.role_since, machine.move) == (Role.TOKEN, 4, 0.0, None)
    assert agreed(machines_bed, machine)


async def test_a_label_removed_by_hand_is_repaired(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await machines_bed.edit_by_hand("a", None)
    assert (await operator.once("a")).result is Result.REPAIRED
    machine = await operator.settle("a")
    assert (machine.role, machine.role_epoch) == (Role.TOKEN, 4)
    assert agreed(machines_bed, machine)


async def test_a_move_goes_on_when_its_epoch_was_set_back_by_hand(
    machines_bed: MachinesBed, engines: HttpEngineAdmin
) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await operator.begin("a", Role.PROMPT)
    await machines_bed.edit_by_hand("a", None, epoch=2)
    machine = await operator.settle("a")
    assert (machine.role, machine.move) == (Role.PROMPT, None)
    assert machine.role_epoch > 4
    assert agreed(machines_bed, machine)


async def test_the_move_of_a_deleted_machine_is_let_go(machines_bed: MachinesBed, engines: HttpEngineAdmin) -> None:
    await machines_bed.add("a", Role.TOKEN, 4)
    operator = Operator(machines_bed, engines)
    await operator.begin("a", Role.PROMPT)
    seen = await machines_bed.get("a")
    await machines_bed.delete("a")
    operator.now += 1
    gone = await operator.mover.advance(seen, operator.now)
    assert gone.result is Result.WAITING
    late = await operator.mover.advance(seen, operator.now + DEADLINE_SECONDS)
    assert late.result is Result.OUTRUN
    assert await machines_bed.machines.list() == ()
