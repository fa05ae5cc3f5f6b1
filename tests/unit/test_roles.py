"""A role is switched at a step boundary, by test-and-set on the epoch, and waits for nothing."""

import asyncio

import pytest

from poolwright_engine.loop.engine import RoleRefused
from poolwright_protocol.roles import Role, RolePut, RoleState
from support.engine_bed import Machine, machine, request, tokens, until
from support.scripted_runner import ScriptedRunner, expected


def put(role: Role, epoch: int, uid: str = "m", bound: int | None = None) -> RolePut:
    return RolePut(uid, role, epoch, bound)


async def verified(here: Machine) -> RoleState:
    await until(lambda: here.engine.role_state().steps_since_switch >= 1)
    return here.engine.role_state()


async def test_an_idle_engine_passes_a_boundary_at_once() -> None:
    async with machine() as here:
        await asyncio.sleep(0.02)
        answered = await here.engine.put_role(put(Role.PROMPT, 1))
        assert (answered.role, answered.epoch) == (Role.PROMPT, 1)
        state = await verified(here)
        assert (state.pod_uid, state.boot_id) == ("m", here.engine.boot_id)
        assert (state.role, state.epoch, state.foreign_requests, state.drained_seconds) == (Role.PROMPT, 1, 0, 0.0)


async def test_an_engine_born_without_a_role_takes_any_at_its_own_epoch_once() -> None:
    async with machine(role_epoch=3) as here:
        assert here.engine.role_state().role is Role.MIXED
        with pytest.raises(RoleRefused) as refusal:
            await here.engine.put_role(put(Role.TOKEN, 2))
        assert refusal.value.status == 409
        await here.engine.put_role(put(Role.TOKEN, 3))
        with pytest.raises(RoleRefused) as refusal:
            await here.engine.put_role(put(Role.MIXED, 3))
        assert refusal.value.status == 409
        assert (await verified(here)).role is Role.TOKEN


async def test_an_engine_born_with_a_role_refuses_another_at_that_epoch() -> None:
    async with machine(role=Role.TOKEN, role_epoch=4) as here:
        with pytest.raises(RoleRefused):
            await here.engine.put_role(put(Role.PROMPT, 4))
        assert (await here.engine.put_role(put(Role.TOKEN, 4))).role is Role.TOKEN
        assert (await here.engine.put_role(put(Role.PROMPT, 5))).role is Role.PROMPT


async def test_another_pod_uid_is_misdirected() -> None:
    async with machine() as here:
        with pytest.raises(RoleRefused) as refusal:
            await here.engine.put_role(put(Role.PROMPT, 9, uid="other"))
        assert refusal.value.status == 421
        assert here.engine.role_state().epoch == 0


async def test_a_repeat_changes_only_the_bound() -> None:
    async with machine() as here:
        await here.engine.put_role(put(Role.MIXED, 1, bound=8))
        before = await verified(here)
        state = await here.engine.put_role(put(Role.MIXED, 1, bound=4))
        assert state.max_prefill_tokens_per_step == 4
        assert state.steps_since_switch >= before.steps_since_switch
        asked = request(range(1, 40), 3)
        assert await tokens(here.engine, asked) == expected(asked)
        assert max(here.seen.step_tokens) <= 4


async def test_a_switch_in_mid_stream_changes_no_token_and_reports_the_drain() -> None:
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.01)) as here:
        asked = [request(range(1, 30), 60), request([4, 5], 50)]
        running = [asyncio.create_task(tokens(here.engine, one)) for one in asked]
        await until(lambda: here.seen.first_tokens == 2)
        await here.engine.put_role(put(Role.PROMPT, 1))
        state = await verified(here)
        assert state.foreign_requests == 2
        assert state.drained_seconds is None
        newer = request([8, 9], 90)
        late = asyncio.create_task(tokens(here.engine, newer))
        assert [await one for one in running] == [expected(one) for one in asked]
        await until(lambda: here.engine.role_state().foreign_requests == 0)
        assert not late.done()
        drained = here.engine.role_state().drained_seconds
        assert drained is not None
        assert drained > 0
        assert await late == expected(newer)


async def test_a_raised_epoch_with_the_same_role_makes_nothing_foreign() -> None:
    async with machine(role=Role.TOKEN, role_epoch=1, runner=ScriptedRunner(64, 4, step_seconds=0.005)) as here:
        running = asyncio.create_task(tokens(here.engine, request([4, 5], 60)))
        await until(lambda: here.seen.first_tokens == 1)
        await here.engine.put_role(put(Role.TOKEN, 2))
        assert (await verified(here)).foreign_requests == 0
        await running


async def test_a_dead_engine_takes_no_role() -> None:
    async with machine(runner=ScriptedRunner(64, 4, fail_at=0)) as here:
        with pytest.raises(AssertionError):
            await tokens(here.engine, request([1]))
        with pytest.raises(RoleRefused) as refusal:
            await here.engine.put_role(put(Role.TOKEN, 1))
        assert refusal.value.status == 503
