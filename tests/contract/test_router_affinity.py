"""Prompts that begin alike, through the real router: to the machine that holds their beginning, unless that is busy."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from poolwright.core.router_note import RouterNote
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost
from support.engine_processes import MODEL, engine_processes
from support.router_server import RouterServer, running_router
from support.scripted_engine import ScriptedEngine, scripted_engines
from support.tiny_llama import write_tiny_llama

PROFILE = MachineProfile(StepCost(1e-4, 1e-5, 0.0), StepCost(0.0, 1e-3, 0.0), 2048, 64, 64)
NOTE = RouterNote(PROFILE, ttft_seconds=2.0, tbt_seconds=0.5, tbt_percentile=90.0)
STORIES = [f"Story {number}: " + "there was a pool of machines, and it was never empty. " * 12 for number in range(3)]


async def _ask(router: RouterServer, prompt: str, **options: Any) -> str:
    """The machine that answered."""
    asked = {"model": "scripted", "prompt": prompt, "max_tokens": 4, **options}
    answer = await router.http.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    return str(answer.json()["id"]).removeprefix("answer-of-")


async def _all_at_once(router: RouterServer, engines: dict[str, ScriptedEngine], story: str, count: int) -> list[str]:
    """Where they go, none of which has a token before the last has been sent."""
    gate = asyncio.Event()
    for engine in engines.values():
        engine.script.first_token = gate
    asked = []
    for number in range(count):
        asked.append(asyncio.create_task(_ask(router, f"{story} {number} and then the end.")))
        async with asyncio.timeout(10):
            while sum(engine.running for engine in engines.values()) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    gate.set()
    return [await one for one in asked]


@pytest.mark.parametrize("note", [None, NOTE], ids=["measured", "priced"])
async def test_who_holds_a_beginning_is_asked_again_until_its_line_outweighs_the_recompute(
    note: RouterNote | None,
) -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        for engine in engines.values():
            engine.script.prompt_tokens = 170  # about as many as the text looks like
        async with running_router([replace(engine.machine, note=note) for engine in engines.values()]) as router:
            holders = [await _ask(router, story) for story in STORIES]
            for turn in range(3):
                assert [await _ask(router, f"{story} Turn {turn}.") for story in STORIES] == holders
            went = await _all_at_once(router, engines, STORIES[0], 12)
    if note is None:
        assert set(holders) == {"a", "b"}  # where work has a price, idle machines are filled one after another
    assert went[:2] == [holders[0]] * 2
    assert 3 <= went.count(holders[0]) <= 9


async def _cached_tokens(urls: dict[str, str]) -> float:
    """Of prompts, found in the caches of all engines."""
    total = 0.0
    async with httpx.AsyncClient() as client:
        for url in urls.values():
            families = text_string_to_metric_families((await client.get(f"{url}/metrics")).text)
            total += sum(s.value for f in families for s in f.samples if s.name == "vllm:prefix_cache_hits_total")
    return total


@pytest.mark.timeout(300)
async def test_two_real_engines_find_in_their_caches_what_the_router_sent_them_again(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    async with engine_processes(model, tmp_path, a=Role.MIXED, b=Role.MIXED) as (machines, urls):
        async with running_router(machines) as router:
            for turn in range(4):
                for number in range(3):
                    story = f"{number} " + "abc def " * 18 + "x" * 110
                    asked = {"model": MODEL, "prompt": f"{story}{turn}", "max_tokens": 2, "temperature": 0}
                    assert (await router.http.post("/v1/completions", json=asked)).status_code == 200
        cached = await _cached_tokens(urls)
    assert cached > 3 * 3 * 200  # of each story, every time but the first
