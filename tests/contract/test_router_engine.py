"""The router in front of the real engine: what a client gets through it is what the engine itself would have said."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel

from poolwright.core.machine import Machine
from poolwright_engine.api.openai_api import ChatCompletionRequest, CompletionRequest
from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.api_server import MACHINE_UID, MODEL, ApiServer, serving_model, tiny_model
from support.router_server import RouterServer, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Of each option that the engine reads, a value that it accepts and that says something: what the engine accepts the
# router passes on. A new option of the engine needs a line here.
SHARED: dict[str, dict[str, Any]] = {
    "model": {"temperature": 0},
    "stream": {"stream": "no", "temperature": 0},
    "stream_options": {"stream_options": None, "temperature": 0},
    "n": {"n": "2", "seed": 3},
    "best_of": {"best_of": 3, "seed": 3},
    "temperature": {"temperature": "0.5", "seed": 1},
    "top_p": {"top_p": 0.5, "seed": 1},
    "top_k": {"top_k": 5, "seed": 1},
    "min_p": {"min_p": 0.1, "seed": 1},
    "presence_penalty": {"presence_penalty": 2, "temperature": 0},
    "frequency_penalty": {"frequency_penalty": 2, "temperature": 0},
    "repetition_penalty": {"repetition_penalty": 2, "temperature": 0},
    "logit_bias": {"logit_bias": {"65": 100}, "temperature": 0},
    "allowed_token_ids": {"allowed_token_ids": [65, 70, 90], "seed": 1},
    "seed": {"seed": -5},
    "stop": {"stop": list("aei "), "max_tokens": 60, "seed": 2},
    "stop_token_ids": {"stop_token_ids": list(range(50)), "max_tokens": 40, "seed": 1},
    "ignore_eos": {"ignore_eos": True, "seed": 1},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": list("aei "), "seed": 2},
    "min_tokens": {"min_tokens": 5, "seed": 1},
    "skip_special_tokens": {"skip_special_tokens": False, "seed": 1},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False, "temperature": 0},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2, "temperature": 0},
    "truncation_side": {"truncation_side": "right", "truncate_prompt_tokens": 2, "temperature": 0},
    "prompt_logprobs": {"prompt_logprobs": 2, "temperature": 0},
    "prompt_logprobs of the sampled alone": {"prompt_logprobs": 0, "temperature": 0},
    "response_format": {"response_format": {"type": "json_object"}, "seed": 1},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 3},
    "guided_json": {"guided_json": {"type": "integer"}, "seed": 1},
    "guided_regex": {"guided_regex": "a+b", "seed": 1},
    "guided_choice": {"guided_choice": ["yes", "no"], "seed": 1},
    "guided_grammar": {"guided_grammar": 'start: "x" | "y"', "seed": 1},
    "priority": {"priority": -3, "temperature": 0},
    "cache_salt": {"cache_salt": "mine", "temperature": 0},
    "request_id": {"request_id": "mine", "temperature": 0},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "temperature": 0},
    "return_token_ids": {"return_token_ids": True, "temperature": 0},
    "everything that only a whole answer has": {"best_of": 4, "n": 2, "prompt_logprobs": 1, "seed": 4},
}
ASKED: dict[str, dict[str, Any]] = {
    **SHARED,
    "prompt": {"prompt": ["abc", "de", "f"], "seed": 3},
    "prompt of ids": {"prompt": [97, 98, 99], "temperature": 0},
    "prompt and choices": {"prompt": ["abc", "de"], "seed": 3, "n": 2},
    "max_tokens": {"max_tokens": 1, "temperature": 0},
    "logprobs": {"logprobs": 2, "temperature": 0},
    "logprobs of the sampled alone": {"logprobs": 0, "temperature": 0},
    "echo": {"echo": True, "logprobs": 1, "temperature": 0},
    "add_special_tokens": {"add_special_tokens": False, "temperature": 0},
}
CHATS: dict[str, dict[str, Any]] = {
    **SHARED,
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": 0},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none", "temperature": 0},
    "tool_choice": {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "seed": 1,
        "max_tokens": 100,
    },
    "parallel_tool_calls": {"parallel_tool_calls": False, "temperature": 0},
    "add_generation_prompt": {"add_generation_prompt": False, "temperature": 0},
    "continue_final_message": {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
        "temperature": 0,
    },
    "echo": {"echo": True, "temperature": 0},
    "add_special_tokens": {"add_special_tokens": True, "temperature": 0},
    "documents": {"documents": [{"text": "x"}], "temperature": 0},
    "chat_template": {"chat_template": None, "temperature": 0},
    "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}, "temperature": 0},
    "reasoning_effort": {"reasoning_effort": "low", "temperature": 0},
    "max_tokens": {"max_tokens": 1, "temperature": 0},
    "max_completion_tokens": {"max_completion_tokens": 2, "temperature": 0},
    "logprobs": {"logprobs": True, "temperature": 0},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3, "temperature": 0},
    "return_prompt_text": {"return_prompt_text": True, "return_token_ids": True, "temperature": 0},
}
REFUSED: dict[str, dict[str, Any]] = {
    "another model": {"model": "nope", "prompt": "a"},
    "no prompt": {},
    "an empty prompt": {"prompt": ""},
    "too long an answer": {"prompt": "a", "max_tokens": 10**6},
    "too long a prompt": {"prompt": "a" * 5000},
    "a negative temperature": {"prompt": "a", "temperature": -1},
    "what the engine lacks": {"prompt": "a", "suffix": "b"},
    "options without a stream": {"prompt": "a", "stream_options": {"include_usage": True}},
    "a wrong type": {"prompt": "a", "max_tokens": "many"},
    "a stream of a wrong type": {"prompt": "a", "stream": "perhaps"},
    "options of a wrong type": {"prompt": "a", "stream": True, "stream_options": 3},
    "a count of a wrong type": {"prompt": "a", "n": [2]},
    "a stream of the best": {"prompt": "a", "stream": True, "best_of": 2},
    "a stream with log probabilities of the prompt": {"prompt": "a", "stream": True, "prompt_logprobs": 1},
    "the best of too few": {"prompt": "a", "n": 3, "best_of": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A prompt asked for twice is cached the second time, which must not change a bit of what is compared."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), batch_invariant=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(with_tools(model)) as api:
        yield api
        await api.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(engine: ApiServer) -> AsyncIterator[RouterServer]:
    async with running_router([machine_of(engine)]) as router:
        yield router


def machine_of(engine: ApiServer) -> Machine:
    port = int(engine.url.rsplit(":", 1)[1])
    return Machine("pod-1", MACHINE_UID, "cpu", "127.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0, api_port=port)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def direct(engine: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=30) as client:
        yield client


def timeless(body: dict[str, Any]) -> dict[str, Any]:
    """Without what a second answer to the same request says otherwise: names, its time, and what was cached."""
    kept = {key: value for key, value in body.items() if key not in ("id", "created")}
    for choice in kept.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id")
    if kept.get("usage"):
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key != "prompt_tokens_details"}
    return kept


def with_tools(model: LoadedModel) -> LoadedModel:
    """The tiny model's template has none."""
    template = f"{model.tokenizer.chat_template}{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}"
    return replace(model, tokenizer=model.tokenizer.with_chat_template(template))


@pytest.mark.parametrize(("cases", "request_type"), [(ASKED, CompletionRequest), (CHATS, ChatCompletionRequest)])
async def test_there_is_a_case_for_every_option_that_the_engine_reads(
    cases: dict[str, dict[str, Any]], request_type: type[BaseModel]
) -> None:
    assert set(request_type.model_fields) <= set(cases)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_completion_is_the_engines_own(
    asked: dict[str, Any], router: RouterServer, direct: httpx.AsyncClient
) -> None:
    await both(router, direct, "/v1/completions", {"model": MODEL, "prompt": "abc", "max_tokens": 6, **asked})


@pytest.mark.parametrize("asked", CHATS.values(), ids=CHATS)
async def test_a_chat_completion_is_the_engines_own(
    asked: dict[str, Any], router: RouterServer, direct: httpx.AsyncClient
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    await both(router, direct, "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 6, **asked})


async def both(router: RouterServer, direct: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """The same answer, and the router counts it."""
    counter = f"{names.ROUTER_OUTPUT_TOKENS}_total"
    before = (await router.metrics())[counter]
    own = await direct.post(path, json=body)
    routed = await router.http.post(path, json=body)
    assert (own.status_code, routed.status_code) == (200, 200), own.text
    assert timeless(routed.json()) == timeless(own.json())
    assert (await router.metrics())[counter] - before == own.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("asked", [ASKED["seed"], ASKED["logprobs"], ASKED["prompt"], ASKED["n"]])
async def test_a_stream_is_the_engines_own(
    asked: dict[str, Any], options: dict[str, bool] | None, router: RouterServer, direct: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 6, **asked, "stream": True, "stream_options": options}

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


async def test_one_id_given_twice_through_two_routers_names_two_independent_answers(
    router: RouterServer, engine: ApiServer, direct: httpx.AsyncClient
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "ignore_eos": True}
    asked |= {"request_id": "mine", "return_token_ids": True}
    async with running_router([machine_of(engine)]) as other:

        async def ask(client: httpx.AsyncClient, seed: int, **how: Any) -> httpx.Response:
            return await client.post(
                "/v1/completions", json={**asked, "seed": seed, **how}, headers={"x-request-id": "mine"}
            )

        answers = await asyncio.gather(ask(router.http, 1), ask(other.http, 2))
        streamed = await ask(other.http, 1, stream=True)
        alone = [await ask(direct, seed) for seed in (1, 2)]
        assert [one.json()["choices"] for one in answers] == [one.json()["choices"] for one in alone]
        assert [one.headers["x-request-id"] for one in (*answers, streamed)] == ["mine"] * 3
        for length in (2000, 2**20):
            long = await other.http.post(
                "/v1/completions", json={**asked, "max_tokens": 1}, headers={"x-request-id": "i" * length}
            )
            assert long.status_code == 200
            assert len(long.headers["x-request-id"]) == 32
