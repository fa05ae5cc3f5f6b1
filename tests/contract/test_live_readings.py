"""What routers know of machines between two scrapes: told to the operator, which moves a machine by it at once."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from poolwright.controller.live import RouterWork
from poolwright.core.reading import LiveReading, MachineWork
from poolwright.core.router_note import RouterNote
from poolwright_protocol import names
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.router_server import LABELS, running_router
from support.scripted_engine import scripted_engines
from support.standing_pool import Load, StandingPool, standing_pool

PROFILE = MachineProfile(StepCost(0.01, 1e-4, 1e-8), StepCost(0.012, 1e-3, 1e-8), 2048, 64, 64, 100_000, 1024)
NOTE = RouterNote(PROFILE, ttft_seconds=2.0, tbt_seconds=0.1, tbt_percentile=90.0)
UID = LABELS[names.METRIC_ROUTER_UID]
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 4}


async def test_a_router_says_what_each_of_its_machines_has_to_do_until_it_is_done() -> None:
    async with scripted_engines(p=Role.PROMPT, t=Role.TOKEN) as engines:
        gate = engines["t"].script.first_token = asyncio.Event()
        live = RouterWork()
        async with running_router([replace(engine.machine, note=NOTE) for engine in engines.values()]) as router:
            bodies = [ASKED | {"prompt": list(range(start, start + 100))} for start in range(3)]
            asked = [asyncio.create_task(router.http.post("/v1/completions", json=body)) for body in bodies]
            async with asyncio.timeout(10):
                while engines["t"].running < 3:  # noqa: ASYNC110 - another server's state
                    await asyncio.sleep(0.01)
            busy = await live.read({UID: router.url}, 5.0)
            both = await live.read({UID: router.url, "gone": "http://127.0.0.1:9"}, 5.0)
            other = await live.read({"another": router.url}, 5.0)
            nobody = await live.read({}, 5.0)
            gate.set()
            await asyncio.gather(*asked)
            idle = await live.read({UID: router.url}, 6.0)
        await live.close()
    assert busy is not None
    assert busy.read_at == 5.0
    assert (busy.work["p"].prompt_tokens, busy.work["p"].streams) == (300, 0)
    assert (busy.work["t"].prompt_tokens, busy.work["t"].streams) == (0, 3)
    assert busy.work["t"].context_tokens >= 300
    assert (both, other, nobody) == (None, None, None)
    assert idle is not None
    assert set(idle.work.values()) == {MachineWork()}


class Said:
    """Routers that say so much."""

    def __init__(self, work: Mapping[str, MachineWork]) -> None:
        self.work = work
        self.asked = 0

    async def read(self, router_urls: Mapping[str, str], now: float) -> LiveReading | None:
        self.asked += 1
        return LiveReading(now, self.work)


async def _settled(pool: StandingPool) -> dict[str, Role]:
    for name in ("m0", "m1", "m2", "m3"):
        pool.bed.engine(name).profile = PROFILE
    await pool.live(100, Load(4, ttft_seconds=0.2, tbt_seconds=0.02))
    return {m.uid: m.role for m in await pool.bed.machines.list() if m.role is not None}


@pytest.mark.parametrize("asked", [True, False])
async def test_prompts_that_pile_up_between_two_plans_get_a_machine_where_routers_are_asked(asked: bool) -> None:
    async with standing_pool(4, basis="Work", intervalSeconds=600, dwellSeconds=5) as pool:
        roles = await _settled(pool)
        prompts = pool.split[Role.PROMPT]
        behind = MachineWork(prompt_tokens=20_000, prompt_pairs=1e6)
        said = Said({uid: behind for uid, role in roles.items() if role is not Role.TOKEN})
        if asked:
            pool.world = replace(pool.world, live=said)
        await pool.look()
        await pool.live(60, Load(4, ttft_seconds=0.2, tbt_seconds=0.02))
        if asked:
            assert said.asked >= 10  # more often than plans are made
            assert pool.split[Role.PROMPT] > prompts
            assert "PromptBacklog" in {move["reason"] for move in pool.status["recentMoves"]}
        else:
            assert pool.split[Role.PROMPT] == prompts


async def test_routers_are_not_asked_where_prices_do_not_count() -> None:
    async with standing_pool(4) as pool:
        said = Said({})
        pool.world = replace(pool.world, live=said)
        await _settled(pool)
    assert said.asked == 0


async def test_a_settled_world_that_is_asked_often_is_not_written() -> None:
    async with standing_pool(4, basis="Work") as pool:
        await _settled(pool)
        pool.world = replace(pool.world, live=Said({}))
        await pool.live(20, Load(4, ttft_seconds=0.2, tbt_seconds=0.02))
        machines = pool.bed.machines.writes
        await pool.live(40, Load(4, ttft_seconds=0.2, tbt_seconds=0.02))
        assert pool.bed.machines.writes == machines


@pytest.mark.parametrize("note", [None, NOTE], ids=["measured", "priced"])
async def test_a_router_sees_what_another_sent_to_a_machine(note: RouterNote | None) -> None:
    """It would fill the same machine, which looks as free to it as the other one."""
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        machines = [replace(engine.machine, note=note) for engine in engines.values()]
        gate = engines["a"].script.first_token = asyncio.Event()
        body = ASKED | {"prompt": list(range(1500))}
        async with (
            running_router(machines[:1]) as first,
            running_router(machines, probe_interval_seconds=0.05) as second,
        ):
            asked = [asyncio.create_task(first.http.post("/v1/completions", json=body)) for _ in range(70)]
            async with asyncio.timeout(20):
                while engines["a"].running < len(asked):  # noqa: ASYNC110 - another server's state
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # some looks
            answer = await second.http.post("/v1/completions", json=body)
            gate.set()
            await asyncio.gather(*asked)
    assert answer.json()["id"] == "answer-of-b"
