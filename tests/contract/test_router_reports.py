"""What went wrong for users of other autoscalers, as they reported it in public, where router and engine meet.

Each test names the id under which the report is listed among us; what is right is said by the test.
"""

import asyncio
from pathlib import Path

import pytest

from poolwright.core.machine import Machine
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.api_server import MACHINE_UID, MODEL, serving_model, tiny_model
from support.router_server import running_router
from support.scripted_engine import scripted_engines

STREAMS, TOKENS = 12, 100


async def test_as_21_who_loses_its_memory_and_goes_on_has_one_first_token_and_each_gap_once(tmp_path: Path) -> None:
    """Twelve streams come to three times the engine's memory, so that some wait for it in the middle of their answer:
    by the router's clock and by the engine's own."""
    async with serving_model(tiny_model(tmp_path / "tiny")) as api:
        port = int(api.url.rsplit(":", 1)[1])
        machine = Machine("pod-1", MACHINE_UID, "cpu", "127.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0, api_port=port)
        async with running_router([machine]) as router:

            async def ask(number: int) -> int:
                body = {"model": MODEL, "prompt": f"{number:03}" * 33, "max_tokens": TOKENS, "ignore_eos": True}
                answer = await router.http.post("/v1/completions", json=body, timeout=90)
                assert answer.status_code == 200
                return int(answer.json()["usage"]["completion_tokens"])

            assert await asyncio.gather(*map(ask, range(STREAMS))) == [TOKENS] * STREAMS
            seen = await router.metrics()
        await api.until_idle()

        def engine(name: str) -> float:
            value = api.sample(f"vllm:{name}")
            assert value is not None
            return value

        assert engine("num_preemptions_total") > 0
        assert engine("time_to_first_token_seconds_count") == STREAMS
        assert engine("inter_token_latency_seconds_count") == STREAMS * (TOKENS - 1)
        parts = engine("time_to_first_token_seconds_sum") + engine("inter_token_latency_seconds_sum")
        assert engine("e2e_request_latency_seconds_sum") == pytest.approx(parts, rel=0.05)
    assert seen[f"{names.ROUTER_TTFT}_count"] == STREAMS
    assert seen[f"{names.ROUTER_TBT}_count"] == STREAMS * (TOKENS - 1)


async def test_as_25_a_router_without_a_machine_says_when_to_return_and_then_serves() -> None:
    body = {"model": "scripted", "prompt": "wake up"}
    async with scripted_engines(prompt=Role.PROMPT, token=Role.TOKEN) as engines, running_router() as router:
        answer = await router.http.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        for engine in engines.values():
            router.machines.put(engine.machine)
        await router.until_ready()
        await asyncio.sleep(int(answer.headers["retry-after"]))
        assert (await router.http.post("/v1/completions", json=body)).status_code == 200
        assert (await router.metrics()).of(f"{names.ROUTER_REQUESTS}_total", code="503") == 1
