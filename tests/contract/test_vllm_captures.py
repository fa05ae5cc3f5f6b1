"""The same questions to the same model as a live vLLM 0.32 was asked: the same answers, to the last stop and offset.

Log probabilities agree to 1e-3; both computed in float32, with other kernels.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from poolwright_engine.checkpoint.loader import load_model
from support.api_server import ApiServer, events, serving_model

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

VLLM = Path(__file__).parent / "vllm"
TOLERANCE = 1e-3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(smollm2_path: Path, one_torch_thread: None) -> AsyncIterator[ApiServer]:
    async with serving_model(load_model(smollm2_path), max_model_len=512) as server:
        yield server
        await server.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(api: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url, timeout=100) as client:
        yield client


def captured(name: str) -> dict[str, Any]:
    for part in (VLLM / "errors.txt").read_text().split("--- ")[1:]:
        found, body, _ = part.strip().split("\n")
        if found == name:
            answer: dict[str, Any] = json.loads(body)
            return answer
    raise KeyError(name)


def rounded(value: Any) -> Any:
    """Numbers that are not whole within the tolerance of one another become equal."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def same_choice(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if key in found and key != "logprobs":
            assert found[key] == value, key
    for key, value in (expected["logprobs"] or {}).items():
        assert len(found["logprobs"][key]) == len(value), key
        for mine, theirs in zip(found["logprobs"][key], value, strict=True):
            assert mine == rounded(theirs), key


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("stop", {"prompt": "Once upon a time", "stop": "Nova"}),
        ("stop incl", {"prompt": "Once upon a time", "stop": ["Nova"], "include_stop_str_in_output": True}),
        ("logprobs", {"prompt": "Once upon a time", "max_tokens": 2, "logprobs": 2}),
        ("token ids prompt", {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True}),
    ],
)
async def test_a_completion_is_vllms(http: httpx.AsyncClient, name: str, asked: dict[str, Any]) -> None:
    expected = captured(name)
    found = (await http.post("/v1/completions", json={"temperature": 0, **asked})).json()
    same_choice(found["choices"][0], expected["choices"][0])
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == expected["usage"][count]


async def test_an_echo_of_two_prompts_with_log_probabilities_is_vllms(http: httpx.AsyncClient) -> None:
    asked = {
        "prompt": ["Hello", "The sky is"],
        "max_tokens": 3,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    found = (await http.post("/v1/completions", json=asked)).json()
    expected = events((VLLM / "stream_compl.txt").read_text())
    for index, choice in enumerate(found["choices"]):
        parts = [
            event["choices"][0] for event in expected if event["choices"] and event["choices"][0]["index"] == index
        ]
        assert choice["text"] == "".join(part["text"] for part in parts)
        assert choice["finish_reason"] == parts[-1]["finish_reason"]
        assert choice["prompt_token_ids"] == parts[0]["prompt_token_ids"]
        whole = {key: [each for part in parts for each in part["logprobs"][key]] for key in parts[0]["logprobs"]}
        same_choice({"logprobs": choice["logprobs"]}, {"logprobs": whole})
    usage = expected[-1]["usage"]
    assert {key: found["usage"][key] for key in usage} == usage


# The prompt of both captured chats: they have its number of tokens, and its log probabilities.
CHAT = {
    "messages": [{"role": "user", "content": "Say hi"}],
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 2,
}


async def test_a_chat_with_log_probabilities_is_vllms(http: httpx.AsyncClient) -> None:
    expected = captured("chat logprobs")
    found = (await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})).json()
    (mine,), (theirs,) = found["choices"], expected["choices"]
    assert mine["message"] | {"reasoning": None} == theirs["message"]  # which no model here has apart
    assert mine["logprobs"] == rounded(theirs["logprobs"])
    assert (mine["finish_reason"], mine["stop_reason"]) == (theirs["finish_reason"], theirs["stop_reason"])
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == expected["usage"][count]


async def test_a_chat_stream_is_vllms_event_by_event(http: httpx.AsyncClient) -> None:
    asked = {**CHAT, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    found = events((await http.post("/v1/chat/completions", json=asked)).text)
    expected = events((VLLM / "stream_chat.txt").read_text())
    assert [event["choices"] for event in found] == rounded([event["choices"] for event in expected])
    usage = expected[-1]["usage"]
    assert {key: found[-1]["usage"][key] for key in usage} == usage


async def test_several_seeded_choices_are_vllms_in_all_but_the_draws(http: httpx.AsyncClient) -> None:
    """Which token a seed draws hangs on the random numbers, and those are another generator's than vLLM's: its texts
    are not to be had. What must hold of both: two choices, unlike each other, the same when asked again."""
    expected = captured("n=2 seed")
    asked = {"prompt": "Hello", "n": 2, "seed": 1, "temperature": 1, "max_tokens": 5, "ignore_eos": True}
    found, again = [(await http.post("/v1/completions", json=asked)).json() for _ in range(2)]
    assert found["choices"] == again["choices"]
    for answer in (found, expected):
        first, second = (choice.pop("text") for choice in answer["choices"])
        assert first != second
    for mine, theirs in zip(found["choices"], expected["choices"], strict=True):
        assert mine == {key: theirs[key] for key in mine}
        assert theirs.keys() - mine.keys() <= {"routed_experts"}
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == expected["usage"][count]


async def test_its_tokens_are_vllms(http: httpx.AsyncClient) -> None:
    expected = captured("tokenize")
    text = (await http.post("/detokenize", json={"tokens": expected["tokens"]})).json()["prompt"]
    found = (await http.post("/tokenize", json={"prompt": text})).json()
    assert (found["tokens"], found["count"]) == (expected["tokens"], expected["count"])
