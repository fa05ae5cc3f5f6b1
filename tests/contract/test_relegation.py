"""Relegation from the router to the engines: who is told, engines by a header and clients too, and who never is."""

import asyncio
import logging
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
NOTE = RouterNote(PROFILE, ttft_seconds=0.3, tbt_seconds=0.5, tbt_percentile=90.0, relegates=True)
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 4}


def asked(number: int) -> dict[str, Any]:
    """Like no other in its beginning, so that no cache spares the line anything."""
    return ASKED | {"prompt": [number] * TOKENS}


@asynccontextmanager
async def split_pool(note: RouterNote | None) -> AsyncIterator[tuple[RouterServer, ScriptedEngine]]:
    """Prompts take what they are said to."""
    async with scripted_engines(p=Role.PROMPT, t=Role.TOKEN) as engines:
        script = engines["t"].script
        script.prompt_tokens, script.first_token_seconds = TOKENS, PROMPT_SECONDS
        async with running_router([replace(engine.machine, note=note) for engine in engines.values()]) as router:
            yield router, engines["t"]


async def a_line(router: RouterServer, engine: ScriptedEngine, count: int = 12) -> list[httpx.Response]:
    """After the router has seen how long first tokens take: so many at once, none of which is served before all are
    there."""
    for number in range(20):
        await router.http.post("/v1/completions", json=asked(1000 + number))
    engine.requests.clear()
    engine.script.first_token = asyncio.Event()
    bodies = [asked(number) | {"stream": number % 2 == 0} for number in range(count)]
    sent = [asyncio.create_task(router.http.post("/v1/completions", json=body)) for body in bodies]
    async with asyncio.timeout(20):
        while len(engine.requests) < count:  # noqa: ASYNC110 - another server's state
            await asyncio.sleep(0.01)
    engine.script.first_token.set()
    return [await one for one in sent]


async def test_the_late_go_behind_and_engine_client_log_and_metric_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "poolwright.router.exchange")
    async with split_pool(NOTE) as (router, engine):
        answers = await a_line(router, engine)
        metrics = await router.metrics()
    assert {answer.status_code for answer in answers} == {200}
    told = [answer.headers.get(names.HEADER_RELEGATED) for answer in answers]
    behind = sum(reason is not None for reason in told)
    assert 3 <= behind < len(answers)  # twelve take 1.2 s one after another, of which a fourth is in time
    assert set(told) == {None, "TTFTLate"}
    for request in engine.requests:
        assert request.headers.get(names.HEADER_RELEGATED) in (None, "1")
        assert names.HEADER_PROMPT_MACHINE in request.headers
    assert sum(names.HEADER_RELEGATED in request.headers for request in engine.requests) == behind
    assert metrics.of(f"{names.ROUTER_RELEGATED}_total", reason="TTFTLate") == behind
    assert metrics.of(f"{names.ROUTER_RELEGATED}_total", reason="PromptTooLong") == 0
    assert 0 < metrics[names.ROUTER_RELEGATION_THRESHOLD] < float("inf")
    lines = [record.getMessage() for record in caplog.records if "behind all others" in record.getMessage()]
    assert len(lines) == 1
    assert "reason=TTFTLate" in lines[0]


@pytest.mark.parametrize(
    "note",
    [
        None,
        replace(NOTE, relegates=False),
        replace(NOTE, tbt_seconds=None),
    ],
    ids=["no prices", "switched off", "no target for gaps"],
)
async def test_where_something_is_not_known_or_not_wanted_nobody_is_told(note: RouterNote | None) -> None:
    async with split_pool(note) as (router, engine):
        answers = await a_line(router, engine)
        metrics = await router.metrics()
    assert {(answer.status_code, answer.headers.get(names.HEADER_RELEGATED)) for answer in answers} == {(200, None)}
    assert not any(names.HEADER_RELEGATED in request.headers for request in engine.requests)
    assert metrics.of(f"{names.ROUTER_RELEGATED}_total", reason="TTFTLate") == 0
    assert metrics[names.ROUTER_RELEGATION_THRESHOLD] == float("inf")


async def test_a_client_that_says_so_itself_changes_nothing() -> None:
    async with split_pool(NOTE) as (router, engine):
        answer = await router.http.post("/v1/completions", json=asked(1), headers={names.HEADER_RELEGATED: "1"})
    assert names.HEADER_RELEGATED not in answer.headers
    assert names.HEADER_RELEGATED not in engine.requests[0].headers
