"""Clients who leave, an engine that dies or shuts down, a model still loading: each client is told, nothing leaks."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_engine.scheduling.sequence import FinishReason
from support.api_server import MODEL, ApiServer, events, new_service, serving, serving_model, tiny_model, until
from support.scripted_runner import ScriptedRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def slow_api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    """Each step takes a while, so that there is a middle to leave in."""
    async with serving_model(model, ScriptedRunner(num_blocks=65, block_size=16, step_seconds=0.02)) as server:
        yield server


async def test_a_client_who_leaves_a_stream_is_aborted(slow_api: ApiServer) -> None:
    async with slow_api.async_client() as client:
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert slow_api.engine.stats().running == 1
        await stream.close()
        await slow_api.until_idle(limit_seconds=2)
    assert slow_api.ended_as(FinishReason.ABORT) == 1


async def test_a_client_who_gives_up_waiting_is_aborted(slow_api: ApiServer) -> None:
    async with slow_api.async_client() as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model=MODEL, prompt="x", max_tokens=200, timeout=0.2, extra_body={"ignore_eos": True}
            )
        await slow_api.until_idle(limit_seconds=2)
    assert slow_api.ended_as(FinishReason.ABORT) == 1


async def test_leaving_with_many_prompts_aborts_them_all(slow_api: ApiServer) -> None:
    async with slow_api.async_client() as client:
        stream = await client.completions.create(
            model=MODEL, prompt=["a", "b", "c"], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        await slow_api.until_idle(limit_seconds=2)
    assert slow_api.ended_as(FinishReason.ABORT) == 3


async def test_when_the_engine_dies_every_client_hears_it(model: LoadedModel) -> None:
    runner = ScriptedRunner(num_blocks=65, block_size=16, step_seconds=0.01, fail_at=8)
    async with (
        serving_model(model, runner) as api,
        httpx.AsyncClient(base_url=api.url, timeout=10) as http,
    ):
        asked = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        whole, stream = await asyncio.gather(
            http.post("/v1/completions", json=asked), http.post("/v1/completions", json={**asked, "stream": True})
        )
        assert whole.status_code == 500
        assert whole.json()["error"]["type"] == "InternalServerError"
        told = events(stream.text)
        assert told[-1]["error"]["code"] == 500
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/ready")).status_code == 503
        later = await http.post("/v1/completions", json=asked)
        assert later.status_code == 503
        assert later.headers["retry-after"] == "5"  # a model is loaded first
        assert "retry-after" not in whole.headers  # it may have been what broke the device


async def test_a_drain_lets_finish_what_runs_and_takes_nothing_new(slow_api: ApiServer) -> None:
    async with httpx.AsyncClient(base_url=slow_api.url, timeout=10) as http:
        running = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True})
        )
        await until(lambda: slow_api.engine.stats().running)
        slow_api.service.draining = True
        draining = asyncio.create_task(slow_api.engine.drain(5))
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200
        assert len(events((await running).text)) == 20
        await draining


async def test_what_a_drain_cuts_off_is_told_so(slow_api: ApiServer) -> None:
    async with httpx.AsyncClient(base_url=slow_api.url, timeout=10) as http:
        asked = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        running = asyncio.create_task(http.post("/v1/completions", json={**asked, "stream": True}))
        whole = asyncio.create_task(http.post("/v1/completions", json=asked))
        await until(lambda: slow_api.engine.stats().running == 2)
        await slow_api.engine.drain(0.1)
        told = events((await running).text)
        assert told[-1]["error"]["code"] == 503
        assert (await whole).status_code == 503
        assert (await whole).headers["retry-after"] == "1"


async def test_before_the_model_is_loaded_the_port_says_so() -> None:
    async with (
        serving(new_service()) as api,
        httpx.AsyncClient(base_url=api.url) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/metrics")).status_code == 200
        for answer in (
            await http.post("/v1/completions", json={"prompt": "x"}),
            await http.get("/v1/models"),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == 503
