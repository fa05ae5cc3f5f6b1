"""Prompt, token and mixed engines, each a process, behind the router: the same words as one engine alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from poolwright.core.routing import LOCAL_PROMPT_TOKENS
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.engine_processes import MODEL, engine_processes
from support.router_server import RouterServer, running_router
from support.tiny_llama import write_tiny_llama

LONG = (
    "You are the night watchman of a harbour town. Write down, in the order in which they happened, the arrivals of "
    "the three ships, what each of them carried, and which of the captains refused to pay the toll. "
)
PROMPTS = ["The capital of France is", LONG, LONG * 3, "def fibonacci(n):\n    "]


@dataclass
class Pool:
    router: RouterServer
    urls: dict[Role, str]

    async def prefills_served(self) -> float:
        """By the prompt machine, for others."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.urls[Role.PROMPT]}/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(s.value for s in samples if s.name == "poolwright_engine_prefills_served_total")


@asynccontextmanager
async def running_pool(model: Path, folder: Path) -> AsyncIterator[Pool]:
    """One machine of each role."""
    async with (
        engine_processes(model, folder, **{role.value: role for role in Role}) as (machines, urls),
        running_router(machines) as router,
    ):
        yield Pool(router, {role: urls[role.value] for role in Role})


async def the_text_is_that_of_one_engine_alone(pool: Pool, prompts: list[str], mixed_is_there: Sequence[bool]) -> None:
    """With the mixed machine in the pool, or without, so that every long prompt is split."""
    async with httpx.AsyncClient(base_url=pool.urls[Role.MIXED], timeout=120) as alone, pool.router.openai() as client:
        for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 11}):
            asked: list[dict[str, Any]] = [
                {"model": MODEL, "prompt": prompt, "max_tokens": 12, **how} for prompt in prompts
            ]
            own = [(await alone.post("/v1/completions", json=one)).json()["choices"][0]["text"] for one in asked]
            for mixed_is_ready in mixed_is_there:
                pool.router.machines.observe("mixed", ready=mixed_is_ready)
                answers = await asyncio.gather(*(client.completions.create(**one, timeout=120) for one in asked))
                assert [answer.choices[0].text for answer in answers] == own
    long = sum(len(prompt) > 4 * LOCAL_PROMPT_TOKENS for prompt in prompts)
    assert await pool.prefills_served() >= 2 * long
    metrics = await pool.router.metrics()
    asked_of_router = 2 * len(mixed_is_there) * len(prompts)
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code="200") == asked_of_router
    assert metrics[f"{names.ROUTER_TTFT}_count"] == asked_of_router


@pytest.mark.timeout(300)
async def test_split_text_of_a_tiny_model_is_the_text_of_one_engine_alone(tmp_path: Path) -> None:
    async with running_pool(write_tiny_llama(tmp_path / "tiny"), tmp_path) as pool:
        await the_text_is_that_of_one_engine_alone(pool, ["abc", LONG[:150], LONG[20:190]], (True, False))


@pytest.mark.model
@pytest.mark.long  # the tiny model says the same above; the real one is split by a router in tests/e2e
@pytest.mark.timeout(600)
async def test_split_text_of_a_real_model_is_the_text_of_one_engine_alone(smollm2_path: Path, tmp_path: Path) -> None:
    async with running_pool(smollm2_path, tmp_path) as pool:
        await the_text_is_that_of_one_engine_alone(pool, PROMPTS, (False,))
