"""Refusal by the router, where it is asked for: who is told to come back, when, and that nobody is otherwise."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from poolwright.core.router_note import RouterNote
from poolwright_protocol import names
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.router_server import RouterServer, running_router
from support.scripted_engine import ScriptedEngine, scripted_engines

PROMPT_SECONDS = 0.1
TOKENS = 100
PROFILE = MachineProfile(StepCost(1e-4, 1e-5, 0.0), StepCost(0.0, PROMPT_SECONDS / TOKENS, 0.0), 2048, 64, 64)
NOTE = RouterNote(PROFILE, ttft_seconds=0.3, tbt_seconds=0.5, tbt_percentile=90.0, refuses=True)
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 4}


def asked(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Like no other in its beginning, so that no cache spares the line anything."""
    return ASKED | {"prompt": [number] * tokens}


@asynccontextmanager
async def split_pool(note: RouterNote) -> AsyncIterator[tuple[RouterServer, ScriptedEngine]]:
    """Prompts take what they are said to, and the router has seen that."""
    async with scripted_engines(p=Role.PROMPT, t=Role.TOKEN) as engines:
        script = engines["t"].script
        script.prompt_tokens, script.first_token_seconds = TOKENS, PROMPT_SECONDS
        async with running_router([replace(engine.machine, note=note) for engine in engines.values()]) as router:
            for number in range(20):
                await router.http.post("/v1/completions", json=asked(1000 + number))
            engines["t"].requests.clear()
            yield router, engines["t"]


async def a_line(router: RouterServer, engine: ScriptedEngine, count: int = 12) -> list[httpx.Response]:
    """So many at once, none of which is served before all were sent or refused."""
    gate = engine.script.first_token = asyncio.Event()
    ended: list[httpx.Response] = []

    async def ask(number: int) -> None:
        ended.append(await router.http.post("/v1/completions", json=asked(number) | {"stream": number % 2 == 0}))

    sent = [asyncio.create_task(ask(number)) for number in range(count)]
    async with asyncio.timeout(20):
        while len(engine.requests) + len(ended) < count:  # noqa: ASYNC110 - another server's state
            await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(*sent)
    return ended


async def test_the_late_are_refused_and_told_why_and_when_to_come_back() -> None:
    async with split_pool(NOTE) as (router, engine):
        answers = await a_line(router, engine)
        metrics = await router.metrics()
        engine.script.first_token = None
        refused = [answer for answer in answers if answer.status_code == 503]
        await asyncio.sleep(int(refused[0].headers["retry-after"]))
        again = await router.http.post("/v1/completions", json=asked(1))
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(served) + len(refused) == len(answers)
    assert 3 <= len(refused) < len(answers)  # twelve take 1.2 s one after another, of which a fourth is in time
    assert len(engine.requests) == len(served) + 1
    for answer in refused:
        assert answer.headers[names.HEADER_REFUSED] == "TTFTLate"
        assert 1 <= int(answer.headers["retry-after"]) <= 3
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert error["message"].startswith("The first token is predicted after ")
    assert not any(names.HEADER_REFUSED in answer.headers or "retry-after" in answer.headers for answer in served)
    assert metrics.of(f"{names.ROUTER_REFUSED}_total", reason="TTFTLate") == len(refused)
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code="503") == len(refused)
    assert metrics[f"{names.ROUTER_ARRIVALS}_total"] == 20 + len(answers)  # offered, whether or not it was taken
    assert metrics[f"{names.ROUTER_TTFT}_count"] == 20 + len(served)
    assert again.status_code == 200


async def test_a_prompt_that_is_too_long_in_any_case_is_refused_without_a_time() -> None:
    async with split_pool(NOTE) as (router, engine):
        answer = await router.http.post("/v1/completions", json=asked(1, 2000))
        assert not engine.requests
    assert (answer.status_code, answer.headers[names.HEADER_REFUSED]) == (422, "PromptTooLong")
    assert "retry-after" not in answer.headers
    assert answer.json()["error"]["message"].startswith("The prompt alone takes ")


@pytest.mark.parametrize(
    "note",
    [replace(NOTE, refuses=False, relegates=True), replace(NOTE, ttft_seconds=None)],
    ids=["not asked for", "no target for first tokens"],
)
async def test_nobody_is_refused_otherwise(note: RouterNote) -> None:
    async with split_pool(note) as (router, engine):
        answers = await a_line(router, engine)
        metrics = await router.metrics()
    assert {answer.status_code for answer in answers} == {200}
    assert metrics.of(f"{names.ROUTER_REFUSED}_total", reason="TTFTLate") == 0


async def test_where_no_machine_is_ready_the_wait_is_that_of_the_last_start() -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        unready = [replace(engine.machine, ready=False) for engine in engines.values()]
        async with running_router() as router:
            router.machines.put(unready[0])
            await asyncio.sleep(2.5)
            router.machines.put(replace(unready[0], ready=True))
            await router.until_ready()
            router.machines.put(unready[0])
            router.machines.put(unready[1])
            async with asyncio.timeout(5):
                while (  # noqa: ASYNC110 - another server's state
                    answer := await router.http.post("/v1/completions", json=asked(1))
                ).status_code != 503:
                    await asyncio.sleep(0.01)
    assert answer.headers["retry-after"] == "3"
    assert "none of the 2 machines of the pool is Ready" in answer.json()["error"]["message"]
