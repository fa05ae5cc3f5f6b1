"""The engine's API as the official client sees it, and as a live vLLM answered the same questions.

A real server over the real loop; the model is tiny and random, so its words mean nothing and are the same every time.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_protocol import names
from support.api_server import MACHINE_UID, MODEL, ApiServer, events, serving_model, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all: starting one takes longer than asking it

VLLM = Path(__file__).parent / "vllm"
# Of vLLM's own features, which this engine does not have.
VLLM_ONLY = {"kv_transfer_params", "ec_transfer_params", "metrics", "routed_experts", "reasoning"}
# Given there only by a server that was started to.
OURS_ALWAYS = {"prompt_tokens_details"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model) as server:
        yield server
        await server.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[AsyncOpenAI]:
    async with api.async_client() as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=30) as client:
        yield client


def vllm_cases() -> dict[str, tuple[int, dict[str, Any]]]:
    """Status and body by name."""
    cases = {}
    for part in (VLLM / "errors.txt").read_text().split("--- ")[1:]:
        name, body, status = part.strip().split("\n")
        cases[name] = (int(status.strip("[]")), json.loads(body))
    return cases


def vllm_events(file: str) -> list[dict[str, Any]]:
    return events((VLLM / file).read_text())


def shape(value: Any) -> Any:
    """Keys and nesting, without what is vLLM's own; what kind a value is, not which."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in VLLM_ONLY | OURS_ALWAYS}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


# --- answers -----------------------------------------------------------------------------------------------------


async def test_a_completion_says_what_was_generated_and_what_it_cost(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=5, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


async def test_chat_applies_the_models_template(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, temperature=0
    )
    same = await client.completions.create(model=MODEL, prompt="user: hi\nassistant: ", max_tokens=4, temperature=0)
    assert chat.choices[0].message.content == same.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage is not None
    assert same.usage is not None
    assert chat.usage.prompt_tokens == same.usage.prompt_tokens
    tokens = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert tokens["count"] == chat.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_stream_carries_the_same_text_as_one_answer(client: AsyncOpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "once", "max_tokens": 40, "temperature": temperature, "seed": 7}
    whole = await client.completions.create(**asked)
    parts = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    assert len({part.id for part in parts}) == 1


async def test_one_chunk_for_each_token_even_without_text(client: AsyncOpenAI) -> None:
    """Random bytes are seldom text, so many chunks are empty."""
    stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=30, temperature=1, seed=1, stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert len(texts) == 30
    assert "" in texts


async def test_the_same_seed_gives_the_same_text_and_another_another(client: AsyncOpenAI) -> None:
    async def drawn(seed: int | None) -> str:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=30, temperature=1, seed=seed)
        return answer.choices[0].text

    assert await drawn(1) == await drawn(1)
    assert len({await drawn(seed) for seed in (1, 2, -(2**63), 2**63 - 1, None, None)}) == 6


async def test_many_at_once_get_what_each_gets_alone(client: AsyncOpenAI) -> None:
    async def ask(prompt: str) -> str:
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
        return answer.choices[0].text

    prompts = [chr(97 + i) * (i + 1) for i in range(12)]
    alone = [await ask(prompt) for prompt in prompts]
    assert list(await asyncio.gather(*(ask(prompt) for prompt in prompts))) == alone


async def test_the_synchronous_client_streams_too(api: ApiServer) -> None:
    def ask() -> tuple[str, str]:
        messages: Any = [{"role": "user", "content": "hi"}]
        with api.client() as client:
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
            with client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=6, temperature=0, stream=True
            ) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", text

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed


async def test_several_prompts_are_as_many_choices_in_their_order(client: AsyncOpenAI) -> None:
    prompts = ["a", "bb", "ccc"]
    alone = [await client.completions.create(model=MODEL, prompt=p, max_tokens=4, temperature=0) for p in prompts]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 4, "temperature": 0}
    together = await client.completions.create(**asked)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (6, 12)
    texts = ["", "", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in together.choices]


async def test_a_prompt_may_be_token_ids_and_ids_can_be_asked_back(http: httpx.AsyncClient, api: ApiServer) -> None:
    asked = {"prompt": [65, 66, 67], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    choice = (await http.post("/v1/completions", json=asked)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [65, 66, 67]
    assert len(choice["token_ids"]) == 4
    streamed = events((await http.post("/v1/completions", json={**asked, "stream": True})).text)
    assert [chunk["choices"][0]["token_ids"] for chunk in streamed] == [[i] for i in choice["token_ids"]]
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in streamed] == [[65, 66, 67], None, None, None]


async def test_echo_puts_the_prompt_before_the_answer(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "héllo", "max_tokens": 3, "temperature": 0}
    plain = await client.completions.create(**asked)
    echoed = await client.completions.create(**asked, echo=True)
    assert echoed.choices[0].text == "héllo" + plain.choices[0].text
    streamed = [chunk async for chunk in await client.completions.create(**asked, echo=True, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text


# --- ends --------------------------------------------------------------------------------------------------------


async def test_a_stop_string_is_cut_off_and_named(http: httpx.AsyncClient, api: ApiServer) -> None:
    asked: dict[str, Any] = {"prompt": "once", "max_tokens": 60, "temperature": 1, "seed": 3}
    full = (await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
    stop = full[len(full) // 2 : len(full) // 2 + 2]
    before = full[: full.find(stop)]
    answer = (await http.post("/v1/completions", json={**asked, "stop": ["never", stop]})).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    assert answer["usage"]["completion_tokens"] < 60
    kept = await http.post("/v1/completions", json={**asked, "stop": stop, "include_stop_str_in_output": True})
    assert kept.json()["choices"][0]["text"] == before + stop
    streamed = events((await http.post("/v1/completions", json={**asked, "stop": stop, "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == before
    last = streamed[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    await api.until_idle()  # the engine was told to stop too


async def test_a_stop_token_ends_the_text_and_is_named(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    ids = (await http.post("/v1/completions", json=asked)).json()["choices"][0]["token_ids"]
    answer = (await http.post("/v1/completions", json={**asked, "stop_token_ids": [ids[5]]})).json()
    choice = answer["choices"][0]
    cut = ids.index(ids[5]) + 1
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", ids[5], ids[:cut])
    assert answer["usage"]["completion_tokens"] == cut
    before = (await http.post("/v1/completions", json={**asked, "max_tokens": cut - 1})).json() if cut > 1 else None
    assert choice["text"] == (before["choices"][0]["text"] if before else "")


async def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_model(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


async def test_usage_comes_only_when_asked_for_and_last(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}
    silent: list[dict[str, Any]] = [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
    for options in silent:
        chunks = [chunk async for chunk in await client.completions.create(**asked, **options)]
        assert all(chunk.choices and not chunk.usage for chunk in chunks)
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream_options={"include_usage": True})]
    assert [bool(chunk.choices) for chunk in chunks] == [True, True, True, False]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 3)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_continuous_usage_counts_every_token(http: httpx.AsyncClient, path: str) -> None:
    asked = {
        "prompt": "abc",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    asked.pop("messages" if path == "/v1/completions" else "prompt")
    found = [event["usage"]["completion_tokens"] for event in events((await http.post(path, json=asked)).text)]
    assert found == ([0, 1, 2, 3, 4, 4] if "chat" in path else [1, 2, 3, 4, 4])


# --- log probabilities -------------------------------------------------------------------------------------------


async def test_completion_logprobs_belong_to_their_tokens(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = await client.completions.create(**asked)
    found = whole.choices[0].logprobs
    assert found is not None
    assert len(found.tokens or []) == len(found.token_logprobs or []) == len(found.text_offset or []) == 6
    for token, logprob, top in zip(
        found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], strict=True
    ):
        assert logprob is not None
        assert max(top.values()) == logprob <= 0  # greedy: the sampled one is the likeliest
        assert token in top
    streamed = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [part.tokens[0] for part in parts if part and part.tokens] == found.tokens
    assert [part.text_offset[0] for part in parts if part and part.text_offset] == found.text_offset


async def test_logprobs_of_zero_give_the_sampled_token_alone(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=2, temperature=0, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs or []] == [1, 1]
    without = await client.completions.create(model=MODEL, prompt="abc", max_tokens=2, temperature=0)
    assert without.choices[0].logprobs is None


@pytest.mark.parametrize(("top", "expected"), [(None, 0), (0, 0), (1, 1), (5, 5), (20, 20)])
async def test_chat_logprobs_hold_as_many_alternatives_as_asked(
    client: AsyncOpenAI, top: int | None, expected: int
) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        temperature=1,
        seed=1,
        logprobs=True,
        top_logprobs=top,
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [len(token.top_logprobs) for token in found.content] == [expected] * 3


# --- as vLLM -----------------------------------------------------------------------------------------------------


REFUSED_AS_VLLM = {
    "bad model": {"model": "nope", "prompt": "x"},
    "too long": {"model": "tiny", "prompt": "x", "max_tokens": 99999},
    "neg temp": {"model": "tiny", "prompt": "x", "temperature": -1},
    "missing prompt": {"model": "tiny"},
    "max_tokens 0": {"model": "tiny", "prompt": "x", "max_tokens": 0},
    "stream_options without stream": {"model": "tiny", "prompt": "x", "stream_options": {"include_usage": True}},
    "top_k": {"model": "tiny", "prompt": "x", "top_p": 2},
}


@pytest.mark.parametrize("case", REFUSED_AS_VLLM)
async def test_refusals_are_worded_as_vllms(http: httpx.AsyncClient, case: str) -> None:
    status, body = vllm_cases()[case]
    answer = await http.post("/v1/completions", json=REFUSED_AS_VLLM[case])
    assert answer.status_code == status
    as_here = json.dumps(body).replace("smollm2", MODEL).replace("max_model_len=2048", "max_model_len=256")
    assert answer.json() == json.loads(as_here)


async def test_malformed_json_is_refused_as_vllm_does(http: httpx.AsyncClient) -> None:
    status, body = vllm_cases()["bad json"]
    answer = await http.post("/v1/completions", content=b'{"model":}', headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()) == (status, body)


@pytest.mark.parametrize(
    ("case", "path", "asked"),
    [
        ("logprobs", "/v1/completions", {"prompt": "abcd", "max_tokens": 2, "logprobs": 1, "temperature": 0}),
        (
            "chat logprobs",
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 2,
                "logprobs": True,
                "top_logprobs": 2,
                "temperature": 0,
            },
        ),
        ("token ids prompt", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True}),
        ("tokenize", "/tokenize", {"prompt": "ab"}),
    ],
)
async def test_answers_have_vllms_shape(http: httpx.AsyncClient, case: str, path: str, asked: dict[str, Any]) -> None:
    found, expected = (await http.post(path, json={**asked, "ignore_eos": True})).json(), vllm_cases()[case][1]
    if case == "logprobs":  # keyed by the texts of tokens
        for body in (found, expected):
            tops = body["choices"][0]["logprobs"].pop("top_logprobs")
            assert all(1 <= len(top) <= 2 for top in tops)
    if case == "chat logprobs":  # as long as the token's text
        for token in [t for b in (found, expected) for t in b["choices"][0]["logprobs"]["content"]]:
            for each in (token, *token["top_logprobs"]):
                assert bytes(each.pop("bytes")).endswith(each["token"].encode()) or "\ufffd" in each["token"]
    assert shape(found) == shape(expected)


async def test_a_chat_stream_has_vllms_shape(http: httpx.AsyncClient) -> None:
    expected = vllm_events("stream_chat.txt")
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    for body in found[:-1]:  # a stream without usage has it there: this one's always does
        body.pop("system_fingerprint", None)
    for body in (*found, *expected):
        for choice in body["choices"]:
            for token in (choice["logprobs"] or {}).get("content", []):
                for each in (token, *token["top_logprobs"]):
                    each.pop("bytes")
    assert [shape(body) for body in found] == [shape(body) for body in expected]
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_a_completion_stream_has_vllms_shape(http: httpx.AsyncClient) -> None:
    asked = {
        "model": MODEL,
        "prompt": ["ab", "cd"],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found = events((await http.post("/v1/completions", json=asked)).text)
    for body in found[:-1]:
        body.pop("system_fingerprint", None)
    expected = vllm_events("stream_compl.txt")
    assert {tuple(sorted(body)) for body in found} == {tuple(sorted(body)) for body in expected}
    assert {tuple(sorted(body["choices"][0])) for body in found[:-1]} == {
        tuple(sorted(body["choices"][0])) for body in expected[:-1]
    }
    assert shape(found[-1]) == shape(expected[-1])


async def test_models_lists_the_one_model_and_its_length(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert [one.id async for one in client.models.list()] == [MODEL]
    found, expected = (await http.get("/v1/models")).json(), json.loads((VLLM / "models.json").read_text())
    assert shape(found) == shape(expected)
    assert found["data"][0]["max_model_len"] == 256


# --- refusals ----------------------------------------------------------------------------------------------------


NOT_IMPLEMENTED = {
    "bad_words": ["no"],
    "logprob_token_ids": [5],
    "suffix": "end",
    "use_beam_search": True,
    "structural_tag": "{}",
    "kv_transfer_params": {"do_remote_decode": True},
    "prompt_embeds": "AAAA",
    "thinking_token_budget": 5,
}
ASKS_FOR_NOTHING = {
    "n": 1,
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "logprobs": None,
    "stop": None,
    "stream_options": None,
    "truncate_prompt_tokens": None,
    "spaces_between_special_tokens": True,
    "priority": 0,
    "cache_salt": None,
    "user": "someone",
    "metadata": {"a": "b"},
    "store": False,
    "a_field_of_next_year": [1],
}


@pytest.mark.parametrize("name", NOT_IMPLEMENTED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_not_implemented_is_refused_by_name(http: httpx.AsyncClient, path: str, name: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = await http.post(path, json={**asked, name: NOT_IMPLEMENTED[name]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", name, 400)
    assert f"`{name}`" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_defaults_and_unknown_fields_are_accepted(http: httpx.AsyncClient, path: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = await http.post(path, json={**asked, **ASKS_FOR_NOTHING, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def chat_of(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}


TOOL = {"type": "function", "function": {"name": "f"}}
MISTAKES: list[tuple[str, Any, str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [""]}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {"prompt": [320]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 100, "n": 11}, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": 10000}, "n"),
    ("/v1/completions", {"prompt": "x", "n": 0}, "n"),
    ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, "n"),
    ("/v1/completions", {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
    ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
    ("/v1/completions", {"prompt": "x" * 257, "max_tokens": 16}, "input_tokens"),
    ("/v1/completions", {"prompt": "x" * 256, "max_tokens": 16}, "max_tokens"),
    ("/v1/completions", {"prompt": [65] * 100000}, "input_tokens"),
    ("/v1/completions", {"prompt": "x" * 5000}, "input_text"),
    ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
    ("/v1/completions", {"prompt": "x", "logprobs": -2}, "logprobs"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "x", "stop": ""}, "stop"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 5}, "stop"),
    ("/v1/completions", {"prompt": "x", "temperature": 2.5}, "temperature"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
    ("/v1/completions", {"prompt": "x", "frequency_penalty": -2.5}, "frequency_penalty"),
    ("/v1/completions", {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ("/v1/completions", {"prompt": "x", "min_p": 1.5}, "min_p"),
    ("/v1/completions", {"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [5, 320]}, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
    ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0}, "prompt"),
    ("/v1/completions", {"prompt": "x", "truncation_side": "middle"}, "body.truncation_side"),
    ("/v1/completions", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    ("/v1/completions", {"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
    ("/v1/completions", {"prompt": "x", "request_id": "i" * 1000000}, "request_id"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "xml"}}, "body.response_format.type"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    ("/v1/completions", {"prompt": "x", "response_format": "json"}, "body.response_format"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "guided_json": "{"}, "guided_json"),
    ("/v1/completions", {"prompt": "x", "tools": [TOOL]}, "tools"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "top_k": -2}, "top_k"),
    ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p"),
    ("/v1/completions", {"prompt": "x", "top_p": 1.1}, "top_p"),
    ("/v1/completions", {"prompt": "x", "temperature": -0.1}, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "body.temperature"),
    ("/v1/completions", {"prompt": "x", "seed": 2**70}, "body.seed"),
    ("/v1/completions", ["prompt"], "body"),
    ("/v1/chat/completions", {}, "body.messages"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "foo", "content": "x"}]}, "body.messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        "top_logprobs",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "input_tokens"),
    (*chat_of(tools=[]), "tools"),
    (*chat_of(tools=[TOOL]), "tools"),  # this model's template has none
    (*chat_of(tool_choice="required"), "tool_choice"),
    (*chat_of(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (*chat_of(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (*chat_of(chat_template="{{ messages }}"), "chat_template"),
    (*chat_of(max_completion_tokens=0), "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "tokens"),
]


@pytest.mark.parametrize(("path", "asked", "param"), MISTAKES)
async def test_a_clients_mistake_is_a_400_that_names_the_field(
    http: httpx.AsyncClient, path: str, asked: Any, param: str
) -> None:
    streamed = [] if not isinstance(asked, dict) or "best_of" in asked else [{**asked, "stream": True}]
    for body in [asked, *streamed]:
        # json.dumps escapes what is no character; httpx's own encoder would not
        answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["code"] == 400
        assert error["message"]
    assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "arguments", "status"),
    [
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/nowhere", {}, 404),
        ("POST", "/v1/completions", {"content": b"{}"}, 415),
        ("POST", "/v1/completions", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ("POST", "/v1/completions", {"content": b"\xff", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/v1/completions", {"content": b"[" * 100000, "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/v1/completions", {"content": b"x" * (50 * 10**6)}, 413),
        ("POST", "/v1/completions", {"json": {"prompt": "x", "max_tokens": "many"}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "x", "stream": True, "max_tokens": 9999}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "x", "model": "nope\n" * 1000}}, 404),
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "foo", "content": "x"}]}}, 400),
        ("POST", "/v1/embeddings", {"json": {}}, 404),
        ("POST", "/v1/completions", {"json": {"prompt": "x"}, "headers": {names.HEADER_MACHINE_UID: "uid-2"}}, 421),
    ],
)
async def test_what_is_refused_has_an_error_body_and_one_line_in_the_log(
    http: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    arguments: dict[str, Any],
    status: int,
) -> None:
    with caplog.at_level("INFO"):
        answer = await http.request(method, path, **arguments)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith(("poolwright", "uvicorn"))]
    assert line.startswith(f"Refused a request status={status} method={method} path='{path}' ")
    assert f"request_id={answer.headers['x-request-id']} " in line
    assert len(line) < 1000
    assert "\n" not in line


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": {"kept": "secret"}},
        {"prompt": "x", "max_tokens": "secret"},
        {"prompt": "x", "request_id": "secret secret"},
    ],
)
async def test_what_a_client_sent_is_in_its_answer_and_not_in_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    with caplog.at_level("INFO"):
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith(("poolwright", "uvicorn"))]
    assert "secret" not in line
    assert f"param='{answer.json()['error']['param']}'" in line
    if isinstance(body["prompt"], str):
        assert "secret" in answer.json()["error"]["message"]


async def test_too_many_stop_strings_are_refused_in_one_clause(http: httpx.AsyncClient) -> None:
    error = (await http.post("/v1/completions", json={"prompt": "x", "stop": ["a"] * 5})).json()["error"]
    assert error["message"] == "stop may hold at most 4 strings, got 5. (parameter=stop)"


async def test_what_can_be_answered_is_not_in_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies = [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "both", "tool_calls": [call]}],
    ]
    with caplog.at_level("INFO"):
        for messages in bodies:
            answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
    assert not [one for one in caplog.records if one.name.startswith(("poolwright", "uvicorn"))]


async def test_the_client_raises_its_own_kinds_of_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.completions.create(model=MODEL, prompt="x", temperature=-1)


# --- machines, ids, health ---------------------------------------------------------------------------------------


async def test_a_request_for_another_machine_is_misdirected(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    right = await http.post("/v1/completions", json=asked, headers={names.HEADER_MACHINE_UID: MACHINE_UID})
    wrong = await http.post("/v1/completions", json=asked, headers={names.HEADER_MACHINE_UID: "uid-2"})
    assert (right.status_code, wrong.status_code) == (200, 421)
    assert wrong.json()["error"]["code"] == 421


async def test_two_clients_may_give_the_same_request_id(http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    asked = {"prompt": "x", "max_tokens": 20}
    answers = await asyncio.gather(
        *(http.post("/v1/completions", json=asked, headers={"x-request-id": "id"}) for _ in range(2))
    )
    assert [answer.headers["x-request-id"] for answer in answers] == ["id", "id"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    for length in (300, 2**20):
        too_long = await http.post("/v1/completions", json=asked, headers={"x-request-id": "i" * length})
        assert too_long.status_code == 200
        assert len(too_long.headers["x-request-id"]) == 32
    raw = await client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1)
    assert raw.headers["x-request-id"]
    assert raw.parse().id.startswith("cmpl-")


async def test_tokens_and_text_are_each_others_reverse(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 256
    assert (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "héllo"}


async def test_small_endpoints_answer(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = await http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.get("/version")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}
