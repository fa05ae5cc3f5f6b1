"""Prices from engines to the plan and to routers, with nothing configured; all as before where engines are older."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from poolwright.core.machine import Machine
from poolwright.core.router_note import RouterNote
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.router_server import RouterServer, running_router
from support.scripted_engine import ScriptedEngine, scripted_engines
from support.standing_pool import Load, StandingPool, standing_pool

PROFILE = MachineProfile(StepCost(0.01, 1e-4, 1e-8), StepCost(0.012, 1e-3, 1e-8), 2048, 64, 64, 100_000, 1024)
SLOW = replace(PROFILE, decode=StepCost(0.5, 0.01, 1e-6), mixed=StepCost(0.5, 0.1, 1e-6))
GOOD = Load(4, ttft_seconds=0.2, tbt_seconds=0.02)
SLOW_PROMPTS = Load(4, ttft_seconds=5.0, tbt_seconds=0.02)


async def machines(pool: StandingPool) -> dict[str, Machine]:
    return {machine.name: machine for machine in await pool.bed.machines.list()}


def say(pool: StandingPool, **profiles: MachineProfile | None) -> None:
    for name, profile in profiles.items():
        pool.bed.engine(name).profile = profile


def evidence(pool: StandingPool) -> dict[str, str]:
    return {e["name"]: e["value"] for e in pool.status["decisions"][-1]["evidence"]}


# --- the operator -------------------------------------------------------------------------------------------------


async def test_pools_of_older_engines_have_no_prices_and_no_notes() -> None:
    async with standing_pool(basis="Work") as pool:
        await pool.live(20, GOOD)
        assert all(machine.note is None for machine in (await machines(pool)).values())
        assert "prices" not in evidence(pool)
        assert pool.memory.policy is not None
        assert pool.memory.policy.bounds == {}


async def test_one_engine_that_knows_prices_its_whole_class() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m1=PROFILE)
        await pool.live(30, GOOD)
        for machine in (await machines(pool)).values():
            assert machine.note is not None
            assert machine.note.profile == PROFILE
            assert (machine.note.ttft_seconds, machine.note.tbt_seconds, machine.note.tbt_percentile) == (1.0, 0.1, 90)
        assert evidence(pool)["prices"].startswith("small 1.0")
        assert "pressure" in evidence(pool)


async def test_a_machine_that_disagrees_with_its_class_prices_nothing() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE, m1=SLOW, m2=PROFILE)
        await pool.live(20, GOOD)
        assert {m.note and m.note.profile for m in (await machines(pool)).values()} == {PROFILE}


async def test_what_cannot_be_is_refused_with_a_reason_and_what_was_known_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(20, GOOD)
        split = pool.split
        say(pool, m0=replace(PROFILE, decode=StepCost(-0.01, 1e-4, 1e-8)))
        await pool.live(20, GOOD)
        assert {m.note and m.note.profile for m in (await machines(pool)).values()} == {PROFILE}
        assert pool.split == split
        refused = [r.getMessage() for r in caplog.records if "decode.fixedSeconds" in r.getMessage()]
        assert len(refused) == 1
        assert "machine=m0" in refused[0]


async def test_an_engine_that_says_no_more_keeps_its_price_until_its_machine_goes() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(20, GOOD)
        say(pool, m0=None)
        await pool.live(10, GOOD)
        assert "prices" in evidence(pool) or pool.memory.profiles.of_classes((await machines(pool)).values())
        await pool.bed.delete("m0")
        await pool.live(4, GOOD)
        assert pool.memory.profiles.of_classes((await machines(pool)).values()) == {}


async def test_a_settled_world_with_prices_is_not_written() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE, m1=PROFILE, m2=PROFILE)
        await pool.live(60, GOOD)
        writes = pool.bed.machines.writes
        say(pool, m0=replace(PROFILE, decode=StepCost(0.0101, 1e-4, 1e-8)))  # measured again
        await pool.live(40, GOOD)
        assert pool.bed.machines.writes == writes


async def test_an_edited_target_reaches_routers_at_the_next_look() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(20, GOOD)
        pool.store.edit(lambda spec: spec["slo"]["objectives"][0].update(targetMilliseconds=700))
        await pool.look()
        assert {m.note and m.note.ttft_seconds for m in (await machines(pool)).values()} == {0.7}


async def test_relegation_is_on_until_it_is_switched_off_and_that_reaches_routers_at_the_next_look() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(20, GOOD)
        assert {m.note and m.note.relegates for m in (await machines(pool)).values()} == {True}
        pool.store.edit(lambda spec: spec.setdefault("router", {}).update(relegation="Never"))
        await pool.look()
        assert {m.note and m.note.relegates for m in (await machines(pool)).values()} == {False}


async def test_nobody_is_refused_until_that_is_asked_for_and_routers_hear_of_it_at_the_next_look() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(20, GOOD)
        assert {m.note and m.note.refuses for m in (await machines(pool)).values()} == {False}
        pool.store.edit(lambda spec: spec.setdefault("router", {}).update(refusal="Late"))
        await pool.look()
        assert {m.note and m.note.refuses for m in (await machines(pool)).values()} == {True}


async def test_the_policys_bound_reaches_engine_and_routers() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE, m1=PROFILE, m2=PROFILE)
        await pool.live(40, GOOD)
        bounded = [m for m in (await machines(pool)).values() if m.role in (Role.TOKEN, Role.MIXED)]
        assert bounded
        for machine in bounded:
            told = pool.bed.engine(machine.name).role_state().max_prefill_tokens_per_step
            assert told is not None
            assert machine.note is not None
            assert machine.note.max_prefill_tokens_per_step == told


async def test_the_users_bound_of_a_role_stands() -> None:
    async with standing_pool(basis="Work") as pool:
        pool.store.edit(lambda spec: spec["pools"]["mixed"].update(maxPrefillTokensPerStep=16))
        say(pool, m0=PROFILE, m1=PROFILE, m2=PROFILE)
        await pool.live(20, GOOD)
        for machine in (await machines(pool)).values():
            if machine.role is Role.MIXED:
                assert machine.note is not None
                assert machine.note.max_prefill_tokens_per_step == 16
                assert pool.bed.engine(machine.name).role_state().max_prefill_tokens_per_step == 16


async def test_a_pool_that_goes_by_latency_shows_prices_and_uses_none() -> None:
    async with standing_pool(basis="Work") as pool:
        say(pool, m0=PROFILE)
        await pool.live(30, GOOD)
        assert all(machine.note for machine in (await machines(pool)).values())
        pool.store.edit(lambda spec: spec["rebalance"].update(basis="Latency"))
        await pool.look()
        assert all(machine.note is None for machine in (await machines(pool)).values())
        await pool.live(60, SLOW_PROMPTS)
        assert evidence(pool)["prices"].startswith("not used: small 1.0")
        assert "pressure" not in evidence(pool)
        bounds = [pool.bed.engine(f"m{i}").role_state().max_prefill_tokens_per_step for i in range(3)]
        assert bounds == [None, None, None]


# --- the router ---------------------------------------------------------------------------------------------------

NOTE = RouterNote(PROFILE, ttft_seconds=2.0, tbt_seconds=0.1, tbt_percentile=90.0)
STREAM: dict[str, Any] = {"model": "scripted", "prompt": "one two three " * 40, "stream": True, "max_tokens": 50}


async def _serve_two_at_once(router: RouterServer, engines: dict[str, ScriptedEngine]) -> dict[str, int]:
    """How many of two requests that overlap each machine decoded."""
    for engine in engines.values():
        engine.script.gap_seconds = 0.3
    first = asyncio.create_task(router.http.post("/v1/completions", json=STREAM))
    async with asyncio.timeout(10):
        while not any(engine.running for engine in engines.values()):  # noqa: ASYNC110 - another server's state
            await asyncio.sleep(0.01)
    second = await router.http.post("/v1/completions", json=STREAM)
    assert {second.status_code, (await first).status_code} == {200}
    return {uid: len(engine.requests) for uid, engine in engines.items()}


@pytest.mark.parametrize("priced", [True, False])
async def test_a_router_that_was_told_prices_packs_streams_and_else_spreads_them(priced: bool) -> None:
    note = NOTE if priced else None
    async with scripted_engines(p=Role.PROMPT, t1=Role.TOKEN, t2=Role.TOKEN) as engines:
        fleet = [replace(engine.machine, note=note) for engine in engines.values()]
        async with running_router(fleet) as router:
            served = await _serve_two_at_once(router, engines)
    assert sorted([served["t1"], served["t2"]]) == ([0, 2] if priced else [1, 1])


async def test_one_machine_without_a_note_leaves_all_to_what_is_measured() -> None:
    async with scripted_engines(p=Role.PROMPT, t1=Role.TOKEN, t2=Role.TOKEN) as engines:
        fleet = [replace(e.machine, note=None if e.uid == "t2" else NOTE) for e in engines.values()]
        async with running_router(fleet) as router:
            served = await _serve_two_at_once(router, engines)
    assert (served["t1"], served["t2"]) == (1, 1)


async def test_a_note_that_comes_later_is_followed() -> None:
    async with scripted_engines(p=Role.PROMPT, t1=Role.TOKEN, t2=Role.TOKEN) as engines:
        fleet = [engine.machine for engine in engines.values()]
        async with running_router(fleet) as router:
            for machine in fleet:
                await router.machines.annotate(machine, NOTE)
            served = await _serve_two_at_once(router, engines)
    assert sorted([served["t1"], served["t2"]]) == [0, 2]
