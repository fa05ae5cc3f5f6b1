"""Streams over a device that says what it is told: where text ends, what is held back, tool calls, silence, failure.

Each answer is asked for as a stream and at once, and is the same.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.scheduling.sequence import FinishReason
from support.api_server import MODEL, ApiServer, events, serving_model, until
from support.saying_runner import SayingRunner
from support.tiny_llama import write_tiny_llama

TOOLS_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🏔"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TOOLS_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_model(folder)


class Speaker:
    """A server whose model says `text`, to whatever it is asked."""

    def __init__(self, api: ApiServer, runner: SayingRunner, http: httpx.AsyncClient) -> None:
        self.api = api
        self.runner = runner
        self.http = http

    async def say(self, text: str, path: str, asked: dict[str, Any]) -> None:
        tokens = {"messages": asked["messages"]} if "messages" in asked else {"prompt": asked["prompt"]}
        tokens |= {
            key: asked[key] for key in ("tools", "continue_final_message", "add_generation_prompt") if key in asked
        }
        self.runner.prompt_tokens = (await self.http.post("/tokenize", json=tokens)).json()["count"]
        self.runner.said = self.api.tokenizer.encode(text)

    async def both(self, text: str, path: str, **asked: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The choice of the whole answer, and those of the stream's events."""
        asked = {"max_tokens": 200, **asked}
        await self.say(text, path, asked)
        whole = (await self.http.post(path, json=asked)).json()
        streamed = events((await self.http.post(path, json={**asked, "stream": True})).text)
        return whole["choices"][0], [event["choices"][0] for event in streamed]

    async def completion(self, text: str, **asked: Any) -> tuple[str, str | None, Any, list[str]]:
        """Text, why and where it ended, and the text of each event."""
        whole, streamed = await self.both(text, "/v1/completions", prompt="x", **asked)
        texts = [choice["text"] for choice in streamed]
        assert "".join(texts) == whole["text"]
        assert [choice["finish_reason"] for choice in streamed[:-1]] == [None] * (len(streamed) - 1)
        assert streamed[-1]["finish_reason"] == whole["finish_reason"]
        assert streamed[-1]["stop_reason"] == whole["stop_reason"]
        return whole["text"], whole["finish_reason"], whole["stop_reason"], texts


@pytest.fixture
async def speaker(model: LoadedModel) -> AsyncIterator[Speaker]:
    (end,) = model.tokenizer.eos_ids
    runner = SayingRunner(vocab_size=320, end=end)
    async with (
        serving_model(model, runner, max_model_len=768) as api,
        httpx.AsyncClient(base_url=api.url, timeout=30) as http,
    ):
        yield Speaker(api, runner, http)
        runner.gate.set()
        if api.engine.healthy:
            await api.until_idle()


# --- where text ends ---------------------------------------------------------------------------------------------


async def test_a_stop_string_over_many_tokens_never_leaks(speaker: Speaker) -> None:
    assert await speaker.completion("abDEFGHIJkl", stop="DEFGHIJ") == (
        "ab", "stop", "DEFGHIJ", ["a", "b", *[""] * 7]
    )  # fmt: skip
    kept = await speaker.completion("abDEFGHIJkl", stop="DEFGHIJ", include_stop_str_in_output=True)
    assert kept[:3] == ("abDEFGHIJ", "stop", "DEFGHIJ")


async def test_what_only_began_as_a_stop_string_is_sent_in_full(speaker: Speaker) -> None:
    assert (await speaker.completion("DEFGX", stop=["DEFGHIJ"]))[:3] == ("DEFGX", "stop", None)
    assert (await speaker.completion("almost DEFG", stop="DEFGHIJ"))[0] == "almost DEFG"


async def test_the_stop_string_that_ends_first_wins_whatever_the_order(speaker: Speaker) -> None:
    for stops in (["abc", "b"], ["b", "abc"]):
        assert (await speaker.completion("xabcy", stop=stops))[:3] == ("xa", "stop", "b")


async def test_stop_strings_of_wide_characters(speaker: Speaker) -> None:
    for stops in (["never", "京🦆"], ["川東", "🦆🦆", "京🦆川!", "京🦆"]):
        assert (await speaker.completion("東京🦆川", stop=stops))[:3] == ("東", "stop", "京🦆")


async def test_the_first_token_may_complete_a_stop_string_and_the_prompt_never_does(speaker: Speaker) -> None:
    assert (await speaker.completion("\n\nafter", stop="\n"))[:3] == ("", "stop", "\n")
    whole, _ = await speaker.both("b", "/v1/completions", prompt="a", stop="ab")
    assert (whole["text"], whole["stop_reason"]) == ("b", None)


async def test_a_stop_string_before_min_tokens_does_not_count(speaker: Speaker) -> None:
    assert (await speaker.completion("a.b.c", stop=".", min_tokens=3))[:3] == ("a.b", "stop", ".")
    assert (await speaker.completion("a.b.c", stop="b.", min_tokens=3))[:3] == ("a.", "stop", "b.")


async def test_engine_work_ends_at_the_stop_string(speaker: Speaker) -> None:
    await speaker.completion("a.bcdefghij" * 10, stop=".")
    await speaker.api.until_idle()
    assert speaker.api.ended_as(FinishReason.STOP) == 2
    assert speaker.api.ended_as(FinishReason.ABORT) == 0


# --- characters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["👩‍👩‍👧 family", "日本語と한국어", "naïve café", "🏳️‍🌈" * 5])
async def test_no_event_holds_half_a_character(speaker: Speaker, text: str) -> None:
    whole, _, _, texts = await speaker.completion(text)
    assert whole == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in texts)
    assert len(texts) == len(text.encode()) + 1  # an event for each token and one for the end


async def test_the_length_may_end_in_the_middle_of_a_character(speaker: Speaker) -> None:
    for length in range(1, 8):
        text, reason, _, _ = await speaker.completion("ok👋!", max_tokens=length)
        assert (text, reason) == ("ok👋!"[: {1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 3, 7: 4}[length]], "length")


async def test_log_probabilities_show_a_character_with_the_last_of_its_bytes(speaker: Speaker) -> None:
    whole, streamed = await speaker.both(
        "a€b", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True, max_tokens=5
    )
    content = whole["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "", "", "€", "b"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "a€b"
    assert [choice["logprobs"]["content"][0] for choice in streamed[1:]] == content
    whole, _ = await speaker.both("a€b", "/v1/completions", prompt="x", logprobs=0, max_tokens=5)
    assert whole["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


# --- tool calls --------------------------------------------------------------------------------------------------


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """A stream's content and calls; each call's id and name come once."""
    content, calls = "", list[dict[str, Any]]()
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["type"] == "function"
                assert part["id"]
                calls.append({"name": part["function"]["name"], "arguments": "", "id": part["id"]})
            else:
                assert "id" not in part
                assert "name" not in part["function"]
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content, calls


async def call(speaker: Speaker, text: str, **asked: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    messages = [{"role": "user", "content": "weather?"}]
    return await speaker.both(text, "/v1/chat/completions", messages=messages, tools=[WEATHER], **asked)


async def test_calls_are_read_from_the_text_with_an_index_each(speaker: Speaker) -> None:
    whole, streamed = await call(speaker, CALLS)
    content, calls = joined(streamed)
    assert content == whole["message"]["content"] == "I look.\n"
    assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [
        ("weather", {"city": "Zürich 🏔"}),
        ("time", {}),
    ]
    assert [each["function"] for each in whole["message"]["tool_calls"]] == [
        {"name": each["name"], "arguments": each["arguments"]} for each in calls
    ]
    assert len({each["id"] for each in calls}) == 2
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "tool_calls"
    assert streamed[0]["delta"] == {"role": "assistant", "content": ""}


async def test_a_call_alone_has_no_content(speaker: Speaker) -> None:
    whole, _ = await call(speaker, CALLS.removeprefix("I look.\n"))
    assert whole["message"]["content"] is None


async def test_without_parallel_calls_only_the_first_is_given(speaker: Speaker) -> None:
    whole, streamed = await call(speaker, CALLS, parallel_tool_calls=False)
    assert [each["function"]["name"] for each in whole["message"]["tool_calls"]] == ["weather"]
    assert [each["name"] for each in joined(streamed)[1]] == ["weather"]


async def test_a_call_cut_by_the_length_is_no_failure(speaker: Speaker) -> None:
    whole, streamed = await call(speaker, CALLS, max_tokens=70)
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "length"
    arguments = whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert '{"city": "Zürich 🏔"}'.startswith(arguments)
    assert joined(streamed)[1][0]["arguments"] == arguments != ""


async def test_text_without_calls_stays_text(speaker: Speaker) -> None:
    whole, streamed = await call(speaker, "1 < 2 and <tool is no tag")
    assert whole["message"]["content"] == joined(streamed)[0] == "1 < 2 and <tool is no tag"
    assert "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == "stop"


async def test_tools_that_may_not_be_called_are_not_looked_for(speaker: Speaker) -> None:
    whole, _ = await call(speaker, CALLS, tool_choice="none")
    assert whole["message"]["content"] == CALLS


async def test_a_named_tool_gets_the_whole_output_as_its_arguments(speaker: Speaker) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    whole, streamed = await call(speaker, '{"city": "Bern"}', tool_choice=choice)
    assert [each["function"] for each in whole["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Bern"}'}
    ]
    assert joined(streamed)[1][0]["arguments"] == '{"city": "Bern"}'
    assert whole["finish_reason"] == "stop"


async def test_a_required_call_is_read_from_the_list_that_its_guide_makes(speaker: Speaker) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "weather", "parameters": {}}]'
    whole, streamed = await call(speaker, text, tool_choice="required")
    assert [(each["name"], json.loads(each["arguments"])) for each in joined(streamed)[1]] == [
        ("weather", {"city": "Bern"}),
        ("weather", {}),
    ]
    assert whole["finish_reason"] == "tool_calls"


async def test_the_template_sees_tools_earlier_calls_and_results(speaker: Speaker) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather"}, {"type": "text", "text": "now"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    asked: dict[str, Any] = {"messages": messages, "tools": [WEATHER], "max_tokens": 1, "return_prompt_text": True}
    await speaker.say("ok", "/v1/chat/completions", asked)
    prompt = (await speaker.http.post("/v1/chat/completions", json=asked)).json()["prompt_text"]
    assert prompt.startswith(
        "user: weather\nnow\n"
        'assistant: <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>\n'
        "tool: rain\n"
    )
    assert '"name": "weather", "description": null' in prompt


async def test_the_final_message_can_be_continued_and_echoed(speaker: Speaker) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two,"}]
    asked: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    }
    whole, streamed = await speaker.both(" three", "/v1/chat/completions", **asked, return_prompt_text=True)
    assert whole["message"] == {**whole["message"], "role": "assistant", "content": "one, two, three"}
    assert joined(streamed)[0] == "one, two, three"
    answer = await speaker.http.post(
        "/v1/chat/completions", json={**asked, "max_tokens": 1, "return_prompt_text": True}
    )
    assert answer.json()["prompt_text"].endswith("assistant: one, two,")


# --- silence and failure -----------------------------------------------------------------------------------------


async def test_a_silent_stream_is_kept_alive_by_comments_that_parsers_skip(speaker: Speaker) -> None:
    speaker.api.service.keep_alive_seconds = 0.05
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 3}
    await speaker.say("abc", "/v1/completions", asked)
    speaker.runner.gate.clear()
    async with speaker.api.async_client() as client:
        asking = asyncio.create_task(client.completions.create(**asked, stream=True))
        lines: list[str] = []
        async with speaker.http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    speaker.runner.gate.set()
        texts = [chunk.choices[0].text async for chunk in await asking]
    assert texts == ["a", "b", "c"]
    assert lines[:2] == [": keep-alive", ""]
    assert [line for line in lines if line.startswith("data")][-1] == "data: [DONE]"
    assert all(line in ("", ":", ": keep-alive") or line.startswith("data: ") for line in lines)


async def test_a_parser_that_strips_each_chunk_loses_no_event_to_a_comment(speaker: Speaker) -> None:
    """As `vllm bench serve` of vLLM 0.32 does (benchmarks/lib/endpoint_request_func.py): it strips what the network
    brings, splits at blank lines, and takes what is left where that is a whole event."""
    speaker.api.service.keep_alive_seconds = 0.02
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "stream": True}
    await speaker.say("abc", "/v1/completions", asked)
    speaker.runner.gate.clear()
    found: list[str] = []
    rest = ""
    async with speaker.http.stream("POST", "/v1/completions", json=asked) as answer:
        async for part in answer.aiter_raw():
            *whole, rest = (rest + part.strip().decode()).split("\n\n")
            found += whole
            if rest.startswith("data: ") and (rest == "data: [DONE]" or rest.endswith("}")):
                found.append(rest)
                rest = ""
            speaker.runner.gate.set()
    assert found[0].startswith(": keep-alive")
    told = [json.loads(one.removeprefix("data: ")) for one in found if one.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in told] == ["a", "b", "c"]
    assert (found[-1], rest) == ("data: [DONE]", "")


async def test_a_stream_that_is_not_silent_has_no_comments(speaker: Speaker) -> None:
    speaker.api.service.keep_alive_seconds = 5
    asked: dict[str, Any] = {"prompt": "x", "stream": True}
    await speaker.say("abc", "/v1/completions", asked)
    assert ": keep-alive" not in (await speaker.http.post("/v1/completions", json=asked)).text


async def test_leaving_a_silent_stream_aborts_it(speaker: Speaker) -> None:
    speaker.api.service.keep_alive_seconds = 0.02
    speaker.runner.gate.clear()
    async with speaker.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert await anext(aiter(answer.aiter_lines())) == ": keep-alive"
    await until(lambda: speaker.api.ended_as(FinishReason.ABORT) == 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_failure_in_the_middle_is_an_event_and_then_the_end(speaker: Speaker, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 9, "n": 2}
    asked |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    await speaker.say("abcdefghi", path, asked)
    speaker.runner.fail_at_token = 4
    found = events((await speaker.http.post(path, json={**asked, "stream": True})).text)
    assert (found[-1]["error"]["code"], found[-1]["error"]["type"]) == (500, "InternalServerError")
    assert all("choices" in event for event in found[:-1])
    assert (await speaker.http.post(path, json=asked)).status_code == 503  # it does not come back


async def test_a_failure_after_a_comment_is_an_event_too(speaker: Speaker) -> None:
    speaker.api.service.keep_alive_seconds = 0.02
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "stream": True}
    await speaker.say("abc", "/v1/completions", asked)
    speaker.runner.fail_at_token = 0
    speaker.runner.gate.clear()
    async with speaker.http.stream("POST", "/v1/completions", json=asked) as answer:
        text = ""
        async for part in answer.aiter_text():
            text += part
            speaker.runner.gate.set()
    assert text.startswith(": keep-alive\n\n")
    assert [event["error"]["code"] for event in events(text)] == [500]
