"""The router over engines that follow a script: what a client gets, whatever the engines do."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from poolwright_protocol import names
from poolwright_protocol.roles import Role
from poolwright_protocol.tickets import PromptMachine
from support.router_server import POOL_KEY, RouterServer, running_router
from support.scripted_engine import scripted_engines

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "say hello to the world"}]}
COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": "say hello to the world, and then say it again" * 4}


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it did not come true in 5 s")


async def _lines(router: RouterServer, body: dict[str, Any], path: str = "/v1/completions") -> list[str]:
    response = await router.http.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


# --- what the official client sees -------------------------------------------------------------------------------


async def test_the_openai_client_streams_and_does_not_stream_the_same_text() -> None:
    async with (
        scripted_engines(mixed=Role.MIXED) as engines,
        running_router([engines["mixed"].machine]) as router,
        router.openai() as client,
    ):
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = (await client.completions.create(**COMPLETION)).choices[0].text
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.content == "Hello world" == text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 4, 11)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_the_synchronous_openai_client_works() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:

        def talk() -> tuple[str | None, str]:
            with router.sync_openai() as client:
                whole = client.chat.completions.create(**CHAT).choices[0].message.content
                with client.chat.completions.create(**CHAT, stream=True) as stream:
                    return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(talk) == ("Hello world", "Hello world")


@pytest.mark.parametrize(
    ("options", "in_chunks", "at_the_end"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
async def test_a_client_sees_only_the_usage_it_asked_for(
    options: dict[str, bool] | None, in_chunks: bool, at_the_end: bool
) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        lines = await _lines(router, {**COMPLETION, "stream": True, "stream_options": options})
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    chunks = [event for event in events if event["choices"]]
    assert len(chunks) == 4
    assert all(("usage" in chunk) is in_chunks for chunk in chunks)
    assert [event["usage"]["completion_tokens"] for event in events if not event["choices"]] == [4] * at_the_end


async def test_text_that_looks_like_usage_is_left_alone() -> None:
    tokens = ['","usage":{"completion_tokens":9}', '"choices":[]', "\n\ndata: [DONE]\n\n", "ü\u2028😀"]
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.tokens = tokens
        async with router.openai() as client:
            whole = (await client.completions.create(**COMPLETION)).choices[0].text
            stream = await client.completions.create(**COMPLETION, stream=True)
            assert whole == "".join([chunk.choices[0].text async for chunk in stream]) == "".join(tokens)
        assert (await router.metrics())[f"{names.ROUTER_OUTPUT_TOKENS}_total"] == 8


# --- what the engine is sent -------------------------------------------------------------------------------------


async def test_a_split_request_names_its_prompt_machine_in_a_signed_header() -> None:
    async with scripted_engines(prompt=Role.PROMPT, token=Role.TOKEN) as engines:
        machines = [engine.machine for engine in engines.values()]
        async with running_router(machines) as router:
            forged = {"x-poolwright-prompt-machine": "forged", "X-Poolwright-Machine-Uid": "forged"}
            response = await router.http.post("/v1/completions", json=COMPLETION, headers=forged)
    assert response.status_code == 200
    assert engines["prompt"].requests == []
    sent = engines["token"].requests[0].headers
    ticket = PromptMachine.decode(POOL_KEY, sent[names.HEADER_PROMPT_MACHINE], time.time())
    assert (ticket.machine_uid, ticket.host, ticket.kv_port) == ("prompt", "127.0.0.1", 9000)
    assert ticket.expires_at > time.time()
    assert sent.getall(names.HEADER_MACHINE_UID) == ["token"]


async def test_a_mixed_machine_is_sent_no_prompt_machine_and_no_client_header_of_ours() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        headers = {"x-poolwright-prompt-machine": "forged", "x-poolwright-new": "1", "x-request-id": "mine"}
        await router.http.post("/v1/completions", json=COMPLETION, headers=headers)
    sent = engines["mixed"].requests[0].headers
    assert [name for name in sent if name.lower().startswith("x-poolwright-")] == [names.HEADER_MACHINE_UID]
    assert sent["x-request-id"] == "mine"


async def test_the_engine_always_streams_and_counts_and_unknown_fields_pass() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        await router.http.post("/v1/completions", json={**COMPLETION, "stop": ["x"], "new_field": {"a": [1.5, None]}})
    body = engines["mixed"].bodies[0]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["stop"], body["new_field"]) == (["x"], {"a": [1.5, None]})


async def test_a_seed_is_drawn_only_where_noise_is_drawn_and_none_is_given() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        for extra in ({}, {"temperature": 0.7}, {"temperature": 0}, {"seed": 5}, {"seed": None}, {}):
            await router.http.post("/v1/completions", json={**COMPLETION, **extra})
    seeds = [body.get("seed") for body in engines["mixed"].bodies]
    assert [isinstance(seed, int) for seed in seeds] == [True, True, False, True, True, True]
    assert seeds[3] == 5
    assert len({seeds[0], seeds[1], seeds[4], seeds[5]}) == 4


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "headers"), [(404, {}), (400, {}), (429, {"retry-after": "7"}), (500, {}), (503, {"retry-after": "3"})]
)
async def test_an_engines_error_reaches_the_client_unchanged(
    status: int, headers: dict[str, str], stream: bool
) -> None:
    body = {"error": {"message": "as the engine says", "type": "SomeError", "param": "model", "code": status}}
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.answer = (status, body, headers)
        response = await router.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        metrics = await router.metrics()
    assert (response.status_code, response.json()) == (status, body)
    assert response.headers.get("retry-after") == headers.get("retry-after")
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code=str(status)) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":', "body.10"),
        (b"", "body.0"),
        (b"[1]", "body"),
        (b'{"temperature": NaN}', "body"),
        (b'{"model": "\xff"}', "body"),
        (b"[" * 100_000, "body"),
    ],
)
async def test_a_body_that_is_no_request_gets_a_400_in_openais_shape(body: bytes, param: str) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        response = await router.http.post("/v1/chat/completions", content=body)
        assert engines["mixed"].requests == []
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (400, param)
    assert error["message"]


async def test_what_the_router_refuses_itself_is_one_line_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        with caplog.at_level("INFO", "poolwright.router"):
            await router.http.post("/v1/completions", content=b'{"prompt":')
    lines = [one.getMessage() for one in caplog.records if one.name == "poolwright.router.exchange"]
    assert len(lines) == 1
    assert lines[0].startswith("Refused a request status=400 path=/v1/completions message='JSON decode error")


async def test_a_body_over_the_limit_gets_a_413_with_and_without_its_length() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with running_router(max_body_bytes=1000) as router:
        for content in (b" " * 1001, pieces()):
            response = await router.http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == 413


async def test_unknown_paths_and_methods_get_openai_shaped_errors() -> None:
    async with running_router() as router:
        missing = await router.http.get("/v1/nothing")
        wrong = await router.http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)


async def test_requests_over_the_bound_are_refused_at_once_and_told_when_to_come_back() -> None:
    async with (
        scripted_engines(mixed=Role.MIXED) as engines,
        running_router([engines["mixed"].machine], max_in_flight_requests=2) as router,
    ):
        engines["mixed"].script.first_token_seconds = 1.0
        running = [asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION)) for _ in range(2)]
        await _until(lambda: engines["mixed"].running == 2)
        response = await router.http.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "2 requests are in flight" in response.json()["error"]["message"]
        assert [(await task).status_code for task in running] == [200, 200]
        metrics = await router.metrics()
    assert metrics[f"{names.ROUTER_ARRIVALS}_total"] == 3


# --- machines that fail ------------------------------------------------------------------------------------------


async def test_a_machine_that_cannot_be_reached_costs_the_client_nothing() -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        machines = [engine.machine for engine in engines.values()]
        await engines["a"].stop()
        async with running_router(machines) as router:
            for _ in range(6):
                assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
            metrics = await router.metrics()
    assert len(engines["b"].requests) == 6
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code="200") == 6


@pytest.mark.parametrize("break_after", [None, 0], ids=["before the head", "between head and first event"])
async def test_a_machine_that_dies_before_its_first_event_is_replaced(break_after: int | None) -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        engines["a"].script.break_after = break_after
        engines["a"].script.refuse_connections = break_after is None
        async with running_router([engine.machine for engine in engines.values()]) as router:
            for _ in range(2):
                response = await router.http.post("/v1/completions", json=COMPLETION)
                assert response.json()["choices"][0]["text"] == "Hello world"
    assert engines["a"].requests
    assert len(engines["b"].requests) == 2


async def test_an_address_that_belongs_to_another_machine_now_is_passed_over() -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        machines = [engine.machine for engine in engines.values()]
        engines["a"].uid = "another pod got the address"
        async with running_router(machines) as router:
            answers = [(await router.http.post("/v1/completions", json=COMPLETION)).json() for _ in range(4)]
    assert {answer["id"] for answer in answers} == {"answer-of-b"}
    assert engines["a"].running == 0


async def test_a_machine_that_takes_nothing_now_is_passed_over_and_used_again_at_once() -> None:
    busy = (503, {"error": {"message": "busy", "type": "ServiceUnavailable", "param": None, "code": 503}}, {})
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        engines["a"].script.answer = busy
        async with running_router([engine.machine for engine in engines.values()]) as router:
            for _ in range(6):
                assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
            engines["a"].script.answer = None
            refused = len(engines["a"].requests)
            answers = [(await router.http.post("/v1/completions", json=COMPLETION)).json() for _ in range(4)]
    assert refused
    assert "answer-of-a" in {answer["id"] for answer in answers}


async def test_retries_are_bounded_and_the_last_resort_is_a_503() -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED, c=Role.MIXED, d=Role.MIXED) as engines:
        machines = [engine.machine for engine in engines.values()]
        for engine in engines.values():
            engine.uid = "someone else"
        async with running_router(machines, max_attempts=3) as router:
            response = await router.http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert sum(len(engine.requests) for engine in engines.values()) == 3


@pytest.mark.parametrize("how", ["cut", "error event"])
async def test_a_stream_that_breaks_ends_in_an_error_event_and_counts_as_failed(how: str) -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        for engine in engines.values():
            engine.script.break_after = 2 if how == "cut" else None
            engine.script.error_after = 2 if how == "error event" else None
        async with running_router([engine.machine for engine in engines.values()]) as router:
            lines = await _lines(router, {**COMPLETION, "stream": True})
            async with router.openai() as client:
                stream = await client.chat.completions.create(**CHAT, stream=True)
                with pytest.raises(openai.APIError):
                    [chunk async for chunk in stream]
            whole = await router.http.post("/v1/completions", json=COMPLETION)
            metrics = await router.metrics()
    events = [json.loads(line) for line in lines]
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["Hel", "lo"]
    code = 502 if how == "cut" else 500
    assert events[-1]["error"]["code"] == code
    assert (whole.status_code, whole.json()["error"]["code"]) == (code, code)
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code=str(code)) == 3
    assert sum(len(engine.requests) for engine in engines.values()) == 3  # no retry after the first byte


async def test_an_engine_killed_in_the_middle_of_a_stream_ends_it_cleanly() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.gap_seconds = 30.0
        async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            lines = response.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "Hel"
            await engines["mixed"].stop()
            rest = [line async for line in lines if line]
    assert len(rest) == 1
    assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == 502


async def test_a_prompt_machine_that_died_is_found_out_though_no_request_goes_to_it() -> None:
    async with scripted_engines(prompt=Role.PROMPT, token=Role.TOKEN) as engines:
        machines = [engine.machine for engine in engines.values()]
        async with running_router(machines, probe_interval_seconds=0.05) as router:
            await router.http.post("/v1/completions", json=COMPLETION)
            await engines["prompt"].stop()
            async with asyncio.timeout(10):
                while True:
                    await router.http.post("/v1/completions", json=COMPLETION)
                    if names.HEADER_PROMPT_MACHINE not in engines["token"].requests[-1].headers:
                        break
                    await asyncio.sleep(0.02)
    assert names.HEADER_PROMPT_MACHINE in engines["token"].requests[0].headers


# --- clients that leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_work_upstream(stream: bool) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.first_token_seconds = 30.0
        asked = asyncio.create_task(router.http.post("/v1/completions", json={**COMPLETION, "stream": stream}))
        await _until(lambda: engines["mixed"].running == 1)
        assert (await router.metrics())[names.ROUTER_IN_FLIGHT] == 1
        asked.cancel()
        await _until(lambda: engines["mixed"].aborted == 1)
        metrics = await router.metrics()
    assert metrics[names.ROUTER_IN_FLIGHT] == 0
    assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code="499") == 1


async def test_the_openai_client_may_close_a_stream_early() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.gap_seconds = 0.05
        engines["mixed"].script.tokens = ["x"] * 1000
        async with router.openai() as client:
            stream = await client.chat.completions.create(**CHAT, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await _until(lambda: engines["mixed"].aborted == 1)
    assert engines["mixed"].running == 0


# --- measuring ---------------------------------------------------------------------------------------------------


async def test_every_series_exists_at_zero_before_the_first_request() -> None:
    async with running_router() as router:
        metrics = await router.metrics()
    for histogram in (names.ROUTER_TTFT, names.ROUTER_TBT, names.ROUTER_TPOT, names.ROUTER_SECOND_TOKEN):
        assert metrics[f"{histogram}_count"] == 0
        assert metrics.of(f"{histogram}_bucket", le="+Inf") == 0
    for counter in (names.ROUTER_ARRIVALS, names.ROUTER_PROMPT_TOKENS, names.ROUTER_OUTPUT_TOKENS):
        assert metrics[f"{counter}_total"] == 0
    for reason in ("TTFTLate", "PromptTooLong"):
        assert metrics.of(f"{names.ROUTER_RELEGATED}_total", reason=reason) == 0
    for code in ("200", "499", "502", "503"):
        assert metrics.of(f"{names.ROUTER_REQUESTS}_total", code=code) == 0
    assert metrics[names.ROUTER_IN_FLIGHT] == metrics[names.ROUTER_OLDEST_WAITING] == 0
    assert metrics[names.ROUTER_INFO] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_latencies_are_measured_whether_or_not_the_client_streams(stream: bool) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.first_token_seconds = 0.3
        engines["mixed"].script.gap_seconds = 0.1
        asked_at = time.monotonic()
        await router.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        took = time.monotonic() - asked_at
        metrics = await router.metrics()
    assert metrics[f"{names.ROUTER_TTFT}_count"] == 1
    assert 0.3 <= metrics[f"{names.ROUTER_TTFT}_sum"] < took - 0.2
    assert metrics[f"{names.ROUTER_TBT}_count"] == 3
    assert 0.29 <= metrics[f"{names.ROUTER_TBT}_sum"] < took - 0.2
    assert metrics[f"{names.ROUTER_TPOT}_count"] == metrics[f"{names.ROUTER_SECOND_TOKEN}_count"] == 1
    assert metrics[f"{names.ROUTER_TPOT}_sum"] == pytest.approx(metrics[f"{names.ROUTER_TBT}_sum"] / 3)
    assert metrics[f"{names.ROUTER_OUTPUT_TOKENS}_total"] == 4
    assert metrics[f"{names.ROUTER_PROMPT_TOKENS}_total"] == len(COMPLETION["prompt"]) // 4  # over 7: owed to the next


async def test_an_event_with_several_tokens_counts_its_gap_once_and_zeros_for_the_rest() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.tokens = list("abcdefghi")
        engines["mixed"].script.tokens_per_event = 3
        engines["mixed"].script.gap_seconds = 0.1
        await router.http.post("/v1/completions", json=COMPLETION)
        metrics = await router.metrics()
    assert metrics[f"{names.ROUTER_TBT}_count"] == 8
    assert metrics.of(f"{names.ROUTER_TBT}_bucket", le="0.001") == 6
    assert metrics[f"{names.ROUTER_TBT}_sum"] >= 0.19


async def test_a_request_without_a_token_is_seen_waiting() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        first_token = engines["mixed"].script.first_token = asyncio.Event()
        engines["mixed"].script.gap_seconds = 30.0
        asked_at = time.monotonic()
        asked = asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION))
        await _until(lambda: engines["mixed"].running == 1)
        await asyncio.sleep(0.1)
        waiting = await router.metrics()
        assert waiting[f"{names.ROUTER_ARRIVALS}_total"] == 1  # counted on arrival
        assert 0.1 <= waiting[names.ROUTER_OLDEST_WAITING] <= time.monotonic() - asked_at
        first_token.set()
        for _ in range(500):
            streaming = await router.metrics()
            if streaming[names.ROUTER_OLDEST_WAITING] == 0:
                break
            await asyncio.sleep(0.01)
        assert (streaming[names.ROUTER_IN_FLIGHT], streaming[names.ROUTER_OLDEST_WAITING]) == (1, 0)
        asked.cancel()


# --- machines that come, go and move -----------------------------------------------------------------------------


async def test_a_router_without_machines_says_why_and_serves_within_a_second_of_the_first() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router() as router:
        assert (await router.http.get("/health")).status_code == 200
        assert (await router.http.get("/ready")).status_code == 503
        refused = await router.http.post("/v1/completions", json=COMPLETION)
        assert refused.status_code == 503
        assert "no machine" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        router.machines.put(engines["mixed"].machine)
        async with asyncio.timeout(1):
            await router.until_ready()
            assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_stream_goes_on_where_it_is_while_its_machine_moves_and_goes() -> None:
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines:
        a = engines["a"]
        a.script.tokens, a.script.gap_seconds = ["x"] * 20, 0.02
        async with running_router([a.machine]) as router:
            asked = asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION))
            await _until(lambda: a.running == 1)
            router.machines.put(engines["b"].machine)
            router.machines.observe("pod-a", role=Role.PROMPT)
            router.machines.observe("pod-a", ready=False)
            router.machines.remove("pod-a")
            await asyncio.sleep(0.05)
            other = await router.http.post("/v1/completions", json=COMPLETION)
            response = await asked
    assert response.json()["choices"][0]["text"] == "x" * 20
    assert other.json()["id"] == "answer-of-b"


async def test_the_models_and_the_tokenizer_are_any_engines() -> None:
    async with scripted_engines(prompt=Role.PROMPT, token=Role.TOKEN) as engines:
        machines = [engine.machine for engine in engines.values()]
        await engines["prompt"].stop()
        async with running_router(machines) as router:
            async with router.openai() as client:
                assert [model.id async for model in client.models.list()] == ["scripted"]
            tokens = await router.http.post("/tokenize", json={"prompt": "ab"})
            assert tokens.json() == {"count": 2, "tokens": [97, 98]}
            assert "version" in (await router.http.get("/version")).json()
            assert (await router.metrics())[f"{names.ROUTER_ARRIVALS}_total"] == 0


# --- the end -----------------------------------------------------------------------------------------------------


async def test_a_shutdown_finishes_its_streams_and_takes_no_new_ones() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.gap_seconds = 0.1
        asked = [asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION)) for _ in range(3)]
        await _until(lambda: engines["mixed"].running == 3)
        router.stop.set()
        assert [(await task).json()["choices"][0]["text"] for task in asked] == ["Hello world"] * 3
        await router.task
        async with httpx.AsyncClient() as late:
            with pytest.raises(httpx.ConnectError):
                await late.post(f"{router.url}/v1/completions", json=COMPLETION)


async def test_what_outlives_the_drain_ends_with_an_error_that_says_so() -> None:
    async with (
        scripted_engines(mixed=Role.MIXED) as engines,
        running_router([engines["mixed"].machine], drain_seconds=0.3) as router,
    ):
        engines["mixed"].script.gap_seconds = 30.0
        streaming = asyncio.create_task(_lines(router, {**COMPLETION, "stream": True}))
        whole = asyncio.create_task(router.http.post("/v1/completions", json=COMPLETION))
        await _until(lambda: engines["mixed"].running == 2)
        await asyncio.sleep(0.05)
        router.stop.set()
        last = json.loads((await streaming)[-1])
        assert (last["error"]["code"], (await whole).status_code) == (503, 503)
        await router.task
        await _until(lambda: engines["mixed"].aborted == 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_larger_than_any_buffer_counts_as_served(stream: bool) -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.tokens = ["x" * 5_000_000] * 2
        response = await router.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert len(response.content) > 10_000_000
        assert (await router.metrics()).of(f"{names.ROUTER_REQUESTS}_total", code="200") == 1


async def test_slow_readers_do_not_stall_others() -> None:
    async with scripted_engines(mixed=Role.MIXED) as engines, running_router([engines["mixed"].machine]) as router:
        engines["mixed"].script.tokens = ["x" * 2000] * 2000
        async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as slow:
            await anext(slow.aiter_raw())
            engines["mixed"].script.tokens = ["quick"]
            async with asyncio.timeout(2):
                assert (await router.http.post("/v1/completions", json=COMPLETION)).status_code == 200
