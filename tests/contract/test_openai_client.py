"""The official client against the engine: what it parses, retries, raises and gives up on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.scheduling.sequence import FinishReason
from support.api_server import MODEL, ApiServer, serving_model, until
from support.scripted_runner import ScriptedRunner
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Bern", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tools"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TOOLS_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_model(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(model: LoadedModel) -> AsyncIterator[ApiServer]:
    async with serving_model(model, max_model_len=512) as server:
        yield server
        await server.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(api: ApiServer) -> AsyncIterator[AsyncOpenAI]:
    async with api.async_client() as client:
        yield client


async def test_a_required_tool_is_called_with_valid_arguments(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "seed": 1, "max_tokens": 300}
    required = await client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
    (choice,) = required.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (made,) = choice.message.tool_calls
    assert made.type == "function"
    assert made.function.name == "weather"
    assert json.loads(made.function.arguments)["city"] in ("Bern", "Oslo")
    named = await client.chat.completions.create(
        **asked, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (made,) = named.choices[0].message.tool_calls or []
    assert made.type == "function"
    assert json.loads(made.function.arguments)["city"] in ("Bern", "Oslo")


async def test_the_streaming_helper_puts_a_tool_call_together(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (made,) = final.choices[0].message.tool_calls or []
    assert json.loads(made.function.arguments)["city"] in ("Bern", "Oslo")


class Answer(BaseModel):
    word: Literal["yes", "no"]
    sure: bool


async def test_a_typed_answer_parses(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model=MODEL, messages=USER, response_format=Answer, seed=3)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Answer)
    assert parsed.word in ("yes", "no")


async def test_three_choices_with_log_probabilities(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=USER, n=3, seed=4, logprobs=True, top_logprobs=2, max_tokens=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


async def test_the_synchronous_client_streams_several_choices(api: ApiServer) -> None:
    def ask() -> tuple[list[str], list[str]]:
        asked: dict[str, Any] = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 6}
        with api.client() as client:
            whole = [choice.text for choice in client.completions.create(**asked).choices]
            texts = [""] * 4
            with client.completions.create(**asked, stream=True) as stream:
                for chunk in stream:
                    texts[chunk.choices[0].index] += chunk.choices[0].text
            return whole, texts

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed


async def test_raw_responses_carry_headers_and_the_same_body(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, max_tokens=2, extra_headers={"x-request-id": "mine"}
    )
    assert (raw.status_code, raw.headers["x-request-id"]) == (200, "mine")
    assert raw.parse().usage is not None
    async with client.completions.with_streaming_response.create(
        model=MODEL, prompt="x", max_tokens=2, stream=True
    ) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_the_model_is_listed_and_found(client: AsyncOpenAI) -> None:
    assert [each.id async for each in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


async def test_what_another_kind_of_model_does_is_refused_by_name(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Embeddings"):
        await client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError, match="Responses"):
        await client.responses.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError, match="Moderations"):
        await client.moderations.create(input="x")
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await client.chat.completions.create(model=MODEL, messages=image)


@pytest.mark.parametrize("path", ["/v1/score", "/score", "/rerank", "/v2/rerank", "/pooling", "/classify"])
async def test_scoring_is_refused_in_the_error_shape(client: AsyncOpenAI, path: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.post(f"..{path}", body={"model": MODEL}, cast_to=object)
    assert isinstance(refused.value.body, dict)
    assert set(refused.value.body) == {"message", "type", "param", "code"}


async def test_a_client_that_times_out_is_aborted_streaming_or_not_running_or_queued(model: LoadedModel) -> None:
    runner = ScriptedRunner(num_blocks=65, block_size=16, step_seconds=0.02)
    async with serving_model(model, runner) as api, api.async_client() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 200, "extra_body": {"ignore_eos": True}}

        async def give_up(stream: bool) -> None:
            answer: Any = await client.completions.create(**asked, stream=stream, timeout=0.3)
            async for _ in answer:
                await asyncio.sleep(0.3)
                await answer.close()
                return

        tasks = [asyncio.create_task(give_up(stream=bool(number % 2))) for number in range(24)]  # 16 of them run
        await until(lambda: api.engine.stats().waiting)
        await asyncio.gather(*tasks, return_exceptions=True)
        await api.until_idle(limit_seconds=10)
        assert api.ended_as(FinishReason.ABORT) == 24


async def test_a_full_queue_is_a_rate_limit_that_says_when_to_come_back(model: LoadedModel) -> None:
    runner = ScriptedRunner(num_blocks=65, block_size=16, step_seconds=0.05)
    async with serving_model(model, runner, max_waiting=4) as api, api.async_client() as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        busy = []
        for _ in range(4):
            busy.append(asyncio.create_task(client.completions.create(prompt=["x"] * 4, **asked)))
            await until(lambda: api.engine.stats().running == 4 * len(busy))
        busy.append(asyncio.create_task(client.completions.create(prompt=["x"] * 4, **asked)))
        await until(lambda: api.engine.stats().waiting == 4)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(prompt="y", stream=stream, **asked)
            assert int(refused.value.response.headers["retry-after"]) >= 1
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await api.until_idle(limit_seconds=10)
