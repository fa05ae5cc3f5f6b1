"""What a request can ask of its answers: how many, from which part of the prompt, shaped how, shown with what.

A real server over the real loop and a tiny random model.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from poolwright_engine.checkpoint.loader import LoadedModel
from support.api_server import ApiServer, events, serving_model, tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model) as server:
        yield server
        await server.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=60) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str = COMPLETIONS, **asked: Any) -> dict[str, Any]:
    answer = await http.post(path, json={"max_tokens": 8, "ignore_eos": True, **asked})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def stream(http: httpx.AsyncClient, path: str = COMPLETIONS, **asked: Any) -> list[dict[str, Any]]:
    return events((await http.post(path, json={"max_tokens": 8, "ignore_eos": True, "stream": True, **asked})).text)


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body["choices"]]


# --- how many ----------------------------------------------------------------------------------------------------


async def test_n_is_as_many_requests_with_seed_plus_order(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "temperature": 1, "return_token_ids": True}
    alone = [(await ask(http, **asked, seed=40 + order))["choices"][0]["token_ids"] for order in range(3)]
    together = await ask(http, **asked, seed=40, n=3)
    assert [choice["token_ids"] for choice in together["choices"]] == alone
    assert len({tuple(ids) for ids in alone}) == 3
    assert together["usage"]["prompt_tokens"] == 3
    assert together["usage"]["completion_tokens"] == 24


async def test_without_a_seed_every_choice_is_another(http: httpx.AsyncClient) -> None:
    answer = await ask(http, prompt="abc", temperature=1, n=4, return_token_ids=True)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4


async def test_several_prompts_with_several_choices_come_prompt_after_prompt(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 5, "n": 2, "return_token_ids": True}
    first, second = [(await http.post("/tokenize", json={"prompt": text})).json()["tokens"] for text in ("a", "BC")]
    alone = [await ask(http, prompt=prompt, **asked) for prompt in ("a", second)]
    mixed = await ask(http, prompt=["a", "BC"], **asked)
    assert [choice["index"] for choice in mixed["choices"]] == [0, 1, 2, 3]
    expected = [choice["token_ids"] for body in alone for choice in body["choices"]]
    assert [choice["token_ids"] for choice in mixed["choices"]] == expected
    assert (mixed["usage"]["prompt_tokens"], mixed["usage"]["completion_tokens"]) == (3, 32)
    found: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    ended: dict[int, int] = dict.fromkeys(found, 0)
    for event in await stream(http, prompt=[first, second], **asked):
        (choice,) = event["choices"]
        found[choice["index"]] += choice["token_ids"]
        ended[choice["index"]] += choice["finish_reason"] is not None
    assert list(found.values()) == expected
    assert set(ended.values()) == {1}


async def test_a_chat_of_three_choices_streams_a_role_for_each_first(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 3, "n": 3}
    whole = await ask(http, CHAT, **asked)
    found = await stream(http, CHAT, **asked, stream_options={"include_usage": True})
    assert [event["choices"][0]["index"] for event in found[:3]] == [0, 1, 2]
    assert all(event["choices"][0]["delta"] == {"role": "assistant", "content": ""} for event in found[:3])
    streamed = ["", "", ""]
    for event in found[3:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert streamed == texts(whole)
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
    assert found[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


async def test_best_of_gives_the_likeliest(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "temperature": 1, "seed": 11, "logprobs": 0, "return_token_ids": True}
    every = (await ask(http, **asked, n=5))["choices"]
    likely = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = await ask(http, **asked, n=2, best_of=5)
    assert [choice["token_ids"] for choice in best["choices"]] == [choice["token_ids"] for choice in likely[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 40
    unasked = await ask(http, prompt="abc", temperature=1, seed=11, best_of=5)
    assert unasked["choices"][0]["logprobs"] is None


async def test_a_thousand_prompts_at_once_keep_their_order(http: httpx.AsyncClient) -> None:
    prompts = [chr(65 + at % 5) * (1 + at % 7) for at in range(1000)]
    together = await ask(http, prompt=prompts, temperature=0, max_tokens=2)
    alone = {prompt: texts(await ask(http, prompt=prompt, temperature=0, max_tokens=2))[0] for prompt in set(prompts)}
    assert texts(together) == [alone[prompt] for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == list(range(1000))
    assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert together["usage"]["completion_tokens"] == 2000


# --- usage -------------------------------------------------------------------------------------------------------


async def test_usage_says_how_much_of_the_prompt_was_cached(http: httpx.AsyncClient) -> None:
    prompt = "a prompt of more than two blocks, only here"
    first = await ask(http, prompt=prompt, temperature=0)
    again = await ask(http, prompt=prompt, temperature=0)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert texts(again) == texts(first)
    last = (await stream(http, prompt=prompt, temperature=0, stream_options={"include_usage": True}))[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    salted = await ask(http, prompt=prompt, temperature=0, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert texts(salted) == texts(first)


# --- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "kept"), [(None, "efgh"), ("left", "efgh"), ("right", "abcd")])
async def test_a_prompt_can_be_cut_from_either_side(http: httpx.AsyncClient, side: str | None, kept: str) -> None:
    asked: dict[str, Any] = {
        "truncate_prompt_tokens": 4,
        "truncation_side": side,
        "temperature": 0,
        "return_token_ids": True,
    }
    cut = await ask(http, prompt="abcdefgh", **asked, echo=True)
    same = await ask(http, prompt=kept, temperature=0, return_token_ids=True)
    assert cut["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
    assert cut["choices"][0]["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"]
    assert cut["usage"]["prompt_tokens"] == 4
    assert texts(cut) == [kept + texts(same)[0]]


async def test_a_prompt_too_long_can_be_cut_to_what_fits(http: httpx.AsyncClient) -> None:
    cut = await ask(http, prompt="x" * 400, truncate_prompt_tokens=-1, max_tokens=5)
    assert (cut["usage"]["prompt_tokens"], cut["usage"]["completion_tokens"]) == (255, 1)


async def test_the_answer_is_as_long_as_the_model_still_allows(http: httpx.AsyncClient) -> None:
    answer = await ask(http, prompt="x" * 250, max_tokens=16)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


# --- shapes ------------------------------------------------------------------------------------------------------


async def test_a_bias_can_force_and_forbid_a_token(http: httpx.AsyncClient) -> None:
    forced = await ask(http, prompt="abc", temperature=0, logit_bias={"65": 1000}, return_token_ids=True)
    assert forced["choices"][0]["token_ids"] == [65] * 8
    free = (await ask(http, prompt="abc", temperature=0, return_token_ids=True))["choices"][0]["token_ids"]
    without = await ask(http, prompt="abc", temperature=0, logit_bias={str(free[0]): -100}, return_token_ids=True)
    assert free[0] not in without["choices"][0]["token_ids"]


async def test_penalties_of_the_output_keep_it_from_repeating(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {
        "prompt": "XYZ",
        "temperature": 0,
        "logit_bias": {"65": 100, "66": 90},
        "return_token_ids": True,
    }
    asked["max_tokens"] = 16
    assert (await ask(http, **asked))["choices"][0]["token_ids"] == [65] * 16
    assert 66 in (await ask(http, **asked, frequency_penalty=2))["choices"][0]["token_ids"]
    assert 66 in (await ask(http, **asked, repetition_penalty=1.5))["choices"][0]["token_ids"]


async def test_min_tokens_keeps_the_end_away(http: httpx.AsyncClient, api: ApiServer) -> None:
    (end,) = api.tokenizer.eos_ids
    asked: dict[str, Any] = {"prompt": "abc", "temperature": 0, "logit_bias": {str(end): 100}, "ignore_eos": False}
    assert (await ask(http, **asked))["usage"]["completion_tokens"] == 1
    late = await ask(http, **asked, min_tokens=5)
    assert (late["usage"]["completion_tokens"], late["choices"][0]["finish_reason"]) == (6, "stop")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
GUIDED: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": json.dumps(SCHEMA)},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]


@pytest.mark.parametrize("guide", GUIDED)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_output_follows_a_schema(http: httpx.AsyncClient, path: str, guide: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    answer = await ask(http, path, **asked, **guide, temperature=1, seed=1, ignore_eos=False, max_tokens=100)
    value = json.loads(texts(answer)[0])
    assert set(value) == {"a"}
    assert isinstance(value["a"], int)
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        ({"structured_outputs": {"regex": "a{3}[0-9]b"}}, "a{3}[0-9]b"),
        ({"guided_regex": "a{3}"}, "aaa"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, "x|y"),
    ],
)
async def test_the_output_follows_an_expression(http: httpx.AsyncClient, guide: dict[str, Any], pattern: str) -> None:
    answer = await ask(http, prompt="q", **guide, temperature=1, seed=2, ignore_eos=False, max_tokens=30)
    assert re.fullmatch(pattern, texts(answer)[0])


# --- log probabilities of the prompt -----------------------------------------------------------------------------


async def test_an_echo_shows_the_prompts_log_probabilities_the_same_from_the_cache(http: httpx.AsyncClient) -> None:
    prompt = "thirty-three tokens of a prompt.."
    assert len(prompt) == 33
    asked: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, again = [(await ask(http, **asked))["choices"][0] for _ in range(2)]
    assert first == again
    found = first["logprobs"]
    assert found["tokens"][:33] == list(prompt)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert found["text_offset"] == list(range(34))
    assert first["text"].startswith(prompt)
    shared = (await ask(http, **{**asked, "prompt": prompt[:32] + "!"}))["choices"][0]["logprobs"]
    assert shared["token_logprobs"][1:32] == pytest.approx(found["token_logprobs"][1:32], abs=1e-4)
    (event,) = await stream(http, **asked)
    assert event["choices"][0]["logprobs"] == found
    assert event["choices"][0]["text"] == first["text"]


async def test_an_echo_without_output_gives_the_prompt_alone(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = await ask(http, **asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1]
    (event,) = await stream(http, **asked)
    assert (event["choices"][0]["text"], event["choices"][0]["logprobs"]) == ("abc", choice["logprobs"])


async def test_the_prompts_log_probabilities_can_be_asked_for_by_id(http: httpx.AsyncClient) -> None:
    (choice,) = (await ask(http, prompt="abcd", prompt_logprobs=2, logprobs=2, echo=True))["choices"]
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == 4
    ids = [97, 98, 99, 100]
    for position, entry in enumerate(found[1:], 1):
        token = entry[str(ids_of(choice, position))]
        assert token["logprob"] == pytest.approx(choice["logprobs"]["token_logprobs"][position])
        assert token["decoded_token"] == chr(ids[position])
        assert {each["rank"] for each in entry.values()} >= {1, 2}
        assert 2 <= len(entry) <= 3
    chat = await ask(http, CHAT, messages=[{"role": "user", "content": "hi"}], prompt_logprobs=0)
    assert chat["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def ids_of(choice: dict[str, Any], position: int) -> int:
    """By its decoded text, since a byte-level vocabulary numbers the bytes in an order of its own."""
    entry = choice["prompt_logprobs"][position]
    return next(int(key) for key, each in entry.items() if each["decoded_token"] == "abcd"[position])


async def test_too_many_log_probabilities_are_refused_and_the_server_lives(http: httpx.AsyncClient) -> None:
    for fields in ({"logprobs": 21}, {"prompt_logprobs": 21}, {"logprobs": -1}, {"echo": True, "logprobs": 21}):
        assert (await http.post(COMPLETIONS, json={"prompt": "x", **fields})).status_code == 400
    assert texts(await ask(http, prompt="x"))


async def test_masked_tokens_have_finite_log_probabilities(http: httpx.AsyncClient) -> None:
    answer = await ask(http, prompt="abc", temperature=0, logit_bias={"65": 100}, logprobs=20, min_tokens=4)
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert all(-10000 < value <= 0 for value in top.values())


async def test_log_probabilities_of_tokens_that_come_together_belong_to_each(
    http: httpx.AsyncClient, model: LoadedModel
) -> None:
    """Of guesses that came true several tokens come from one step; the text repeats itself, so that they do."""
    text = "ABCABCABC"
    how: dict[str, Any] = {"temperature": 0, "logit_bias": {"65": 100, "66": 99.9, "67": 99.9}, "max_tokens": 24}
    asked = {"prompt": text, **how}
    chat = {"messages": [{"role": "user", "content": text}], **how, "logprobs": True}
    async with (
        serving_model(model, speculative_ngram_tokens=3) as guessing,
        httpx.AsyncClient(base_url=guessing.url, timeout=60) as quick,
    ):
        for top in (0, 1, 5):
            plain, guessed = [(await ask(each, **asked, logprobs=top))["choices"][0] for each in (http, quick)]
            aligned(guessed["logprobs"], plain["logprobs"])
            parts = [event["choices"][0]["logprobs"] for event in await stream(quick, **asked, logprobs=top)]
            aligned({key: [each for part in parts for each in part[key]] for key in parts[0]}, plain["logprobs"])
            told = [
                (await ask(each, CHAT, **chat, top_logprobs=top))["choices"][0]["logprobs"]["content"]
                for each in (http, quick)
            ]
            for one, other in zip(*told, strict=True):
                assert one["token"] == other["token"]
                assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
                assert len(one["top_logprobs"]) == len(other["top_logprobs"]) == top
        steps = guessing.sample("vllm:iteration_tokens_total_count")
        tokens = guessing.sample("vllm:generation_tokens_total")
        assert steps is not None
        assert tokens is not None
        assert steps < tokens * 0.8  # some came together
        await guessing.until_idle()


def aligned(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tokens"] == expected["tokens"]
    assert found["text_offset"] == expected["text_offset"]
    assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)
    assert [set(top) for top in found["top_logprobs"]] == [set(top) for top in expected["top_logprobs"]]
    assert all(-10000 < value <= 0 for top in found["top_logprobs"] for value in top.values())


async def test_tokens_can_be_shown_as_their_ids(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"temperature": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = (await ask(http, prompt="abc", **asked, logprobs=1))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    messages = [{"role": "user", "content": "hi"}]
    (choice,) = (await ask(http, CHAT, messages=messages, **asked, logprobs=True, top_logprobs=1))["choices"]
    shown = [token["token"] for token in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{i}" for i in choice["token_ids"]]


# --- ids ---------------------------------------------------------------------------------------------------------


async def test_two_requests_of_one_id_are_two(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "temperature": 1, "request_id": "mine"}
    answers = await asyncio.gather(*(ask(http, **asked, seed=seed, return_token_ids=True) for seed in (1, 2)))
    alone = [await ask(http, **asked, seed=seed, return_token_ids=True) for seed in (1, 2)]
    assert [each["choices"] for each in answers] == [each["choices"] for each in alone]
    assert {each["id"] for each in answers} == {"cmpl-mine"}
