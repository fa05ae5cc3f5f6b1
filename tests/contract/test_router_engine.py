"""The router in front of the real engine: what a client gets through it is what the engine itself would have said."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from poolwright.core.machine import Machine
from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_protocol.roles import Role
from support.api_server import MACHINE_UID, MODEL, ApiServer, serving_model, tiny_model
from support.router_server import RouterServer, running_router

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "abc", "max_tokens": 8, "temperature": 0},
    "seeded": {"prompt": "abc", "max_tokens": 12, "temperature": 1, "seed": 5},
    "log probabilities": {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 2},
    "log probabilities of the sampled alone": {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 0},
    "several prompts": {"prompt": ["abc", "de", "f"], "max_tokens": 6, "temperature": 1, "seed": 3},
    "token ids": {"prompt": [97, 98, 99], "max_tokens": 4, "temperature": 0, "return_token_ids": True},
    "echo": {"prompt": "abc", "max_tokens": 4, "temperature": 0, "echo": True},
    "a stop token": {"prompt": "abc", "max_tokens": 40, "temperature": 1, "seed": 1, "stop_token_ids": list(range(50))},
    "a stop string": {"prompt": "abc", "max_tokens": 60, "temperature": 1, "seed": 2, "stop": list("aei ")},
    "one token": {"prompt": "abc", "max_tokens": 1, "temperature": 0},
    "several choices": {"prompt": ["abc", "de"], "max_tokens": 6, "temperature": 1, "seed": 3, "n": 2},
    "a guide": {"prompt": "abc", "seed": 3, "structured_outputs": {"choice": ["yes", "no"]}},
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 8, "temperature": 0},
    "seeded": {"max_tokens": 12, "temperature": 1, "seed": 5},
    "log probabilities": {"max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3},
    "log probabilities without alternatives": {"max_tokens": 5, "temperature": 0, "logprobs": True},
    "token ids": {"max_tokens": 4, "temperature": 0, "return_token_ids": True},
    "several choices": {"max_tokens": 6, "temperature": 1, "seed": 3, "n": 3},
    "a stop string": {"max_tokens": 60, "temperature": 1, "seed": 2, "stop": list("aei ")},
}
REFUSED: dict[str, dict[str, Any]] = {
    "another model": {"model": "nope", "prompt": "a"},
    "no prompt": {},
    "an empty prompt": {"prompt": ""},
    "too long an answer": {"prompt": "a", "max_tokens": 10**6},
    "too long a prompt": {"prompt": "a" * 5000},
    "a negative temperature": {"prompt": "a", "temperature": -1},
    "what the engine lacks": {"prompt": "a", "bad_words": ["b"]},
    "options without a stream": {"prompt": "a", "stream_options": {"include_usage": True}},
    "a wrong type": {"prompt": "a", "max_tokens": "many"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model) as api:
        yield api
        await api.until_idle()


@pytest.fixture
async def router(engine: ApiServer) -> AsyncIterator[RouterServer]:
    port = int(engine.url.rsplit(":", 1)[1])
    machine = Machine("pod-1", MACHINE_UID, "cpu", "127.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0, api_port=port)
    async with running_router([machine]) as router:
        yield router


@pytest.fixture
async def direct(engine: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


def timeless(body: dict[str, Any]) -> dict[str, Any]:
    """Without what a second answer to the same request says otherwise: its name, its time, and what was cached."""
    kept = {key: value for key, value in body.items() if key not in ("id", "created")}
    if kept.get("usage"):
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key != "prompt_tokens_details"}
    return kept


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_completion_is_the_engines_own(
    asked: dict[str, Any], router: RouterServer, direct: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, **asked}
    own = await direct.post("/v1/completions", json=body)
    routed = await router.http.post("/v1/completions", json=body)
    assert own.status_code == routed.status_code == 200
    assert timeless(routed.json()) == timeless(own.json())


@pytest.mark.parametrize("asked", CHATS.values(), ids=CHATS)
async def test_a_chat_completion_is_the_engines_own(
    asked: dict[str, Any], router: RouterServer, direct: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **asked}
    own = await direct.post("/v1/chat/completions", json=body)
    routed = await router.http.post("/v1/chat/completions", json=body)
    assert own.status_code == routed.status_code == 200
    assert timeless(routed.json()) == timeless(own.json())


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("asked", [ASKED["seeded"], ASKED["log probabilities"], ASKED["several prompts"]])
async def test_a_stream_is_the_engines_own(
    asked: dict[str, Any], options: dict[str, bool] | None, router: RouterServer, direct: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, **asked, "stream": True, "stream_options": options}

    async def events(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        *lines, done, rest = (await client.post("/v1/completions", json=body)).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        made = [timeless(json.loads(line.removeprefix("data: "))) for line in lines]
        return sorted(made, key=lambda event: event["choices"][0]["index"] if event["choices"] else 99)

    assert await events(router.http) == await events(direct)


@pytest.mark.parametrize("asked", REFUSED.values(), ids=REFUSED)
async def test_a_refusal_is_the_engines_own(
    asked: dict[str, Any], router: RouterServer, direct: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, **asked}
    own = await direct.post("/v1/completions", json=body)
    routed = await router.http.post("/v1/completions", json=body)
    assert (routed.status_code, routed.json()) == (own.status_code, own.json())
    assert 400 <= own.status_code < 500


async def test_models_tokens_and_text_are_the_engines_own(router: RouterServer, direct: httpx.AsyncClient) -> None:
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "abc"}),
        ("POST", "/detokenize", {"tokens": [97, 98]}),
        ("POST", "/detokenize", {"tokens": "no"}),
    ):
        own = await direct.request(method, path, json=body)
        routed = await router.http.request(method, path, json=body)
        assert (routed.status_code, routed.json()) == (own.status_code, own.json())


async def test_a_client_that_leaves_frees_what_the_engine_held(router: RouterServer, engine: ApiServer) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    asked = [asyncio.create_task(router.http.post("/v1/completions", json=body)) for _ in range(3)]
    for _ in range(500):
        if engine.engine.stats().running:
            break
        await asyncio.sleep(0.002)
    assert engine.engine.stats().running
    for task in asked:
        task.cancel()
    await engine.until_idle()
