"""Huge prompts, one or many, do not hold up the streams of others: text is worked on beside the event loop."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolwright_engine.api.openai_api import CompletionRequest, Conversation
from poolwright_engine.api.prompts import Prompt, Prompts
from poolwright_engine.text.tokenizer import Tokenizer
from support.api_server import serving_model, tiny_model, until
from support.scripted_runner import ScriptedRunner
from support.tiny_llama import write_byte_tokenizer

MEGABYTE = "word and 日本 " * 70_000
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class Watched(Tokenizer):
    """Notes whether what was asked of it was asked on the event loop's thread."""

    on_event_loop: list[bool]

    def _note(self) -> None:
        self.on_event_loop.append(threading.current_thread() is threading.main_thread())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._note()
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self._note()
        return super().decode(token_ids, skip_special_tokens)

    def token_symbol(self, token_id: int) -> str:
        self._note()
        return super().token_symbol(token_id)

    def render_chat(self, *arguments: Any, **variables: Any) -> str:
        self._note()
        return super().render_chat(*arguments, **variables)


async def longest_gaps(work: asyncio.Future[Any]) -> tuple[list[float], float]:
    """Between two turns of the event loop while it lasts, and how long it lasted."""
    gaps: list[float] = []
    started = last = time.perf_counter()
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps, last - started


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Prompts(Tokenizer.from_folder(Path(folder)), 320, max_model_len=2_000_000, max_chars_per_token=8)


@pytest.mark.parametrize("times", [1, 3])
async def test_the_event_loop_turns_while_a_megabyte_is_tokenized(prompts: Prompts, times: int) -> None:
    """On the event loop each would be one gap as long as the work of one."""
    assert len(MEGABYTE.encode()) > 10**6
    work = asyncio.gather(*(prompts.tokenized(MEGABYTE, False) for _ in range(times)))
    gaps, seconds = await longest_gaps(work)
    assert all(len(ids) == len(MEGABYTE.encode()) for ids in await work)
    assert max(gaps) < seconds / times / 3
    assert len(gaps) > 20


async def test_a_thousand_prompts_hold_up_neither_a_stream_nor_health(tmp_path: Path) -> None:
    """Each is short enough to be tokenized on the spot; all of them together are four megabytes."""
    runner = ScriptedRunner(num_blocks=600, block_size=16, step_seconds=0.002)
    asked = {"prompt": ["".join(f"{i + j:08d}" for j in range(500)) for i in range(1024)], "max_tokens": 9000}
    assert {len(prompt) for prompt in asked["prompt"]} == {4000}
    async with (
        serving_model(tiny_model(tmp_path / "tiny"), runner, max_model_len=8000) as api,
        httpx.AsyncClient(base_url=api.url, timeout=60) as http,
    ):
        body, heard, answers = json.dumps(asked), 0, []

        async def stream() -> None:
            nonlocal heard
            endless = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=endless) as response:
                async for line in response.aiter_lines():
                    heard += line.startswith("data: ")

        async def health() -> None:
            while True:
                answers.append((await http.get("/health")).status_code)

        beside = [asyncio.create_task(stream()), asyncio.create_task(health())]
        await until(lambda: heard > 3)
        heard, before = 0, len(answers)
        headers = {"content-type": "application/json"}
        work = asyncio.ensure_future(http.post("/v1/completions", content=body, headers=headers))
        gaps, seconds = await longest_gaps(work)
        meanwhile = heard, len(answers) - before
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        refused = await work
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")  # once it was tokenized
        assert max(gaps) < seconds / 3
        assert min(meanwhile) > 20
        await api.until_idle()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    write_byte_tokenizer(tmp_path)
    template = "{{ tools | tojson }}{{ messages | tojson }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Watched.from_folder(tmp_path)
    assert isinstance(tokenizer, Watched)
    tokenizer.on_event_loop = []
    return tokenizer


def conversation(**fields: Any) -> Conversation:
    message = {"role": "user", "content": "hi", **fields.pop("message", {})}
    return Conversation.model_validate({"messages": [message], **fields})


def tool(properties: int) -> dict[str, Any]:
    schema = {f"p{i}": {"type": "string"} for i in range(properties)}
    return {"function": {"name": "f", "parameters": {"type": "object", "properties": schema}}}


def call(length: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"x": "y" * length})}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


WORK: dict[str, tuple[Callable[[Prompts, int], Any], int, int]] = {
    "prompts": (lambda p, n: p.of_completion(CompletionRequest(prompt=["abcd"] * n)), 10, 1000),
    "echo": (lambda p, n: p.texts_of([Prompt((65,) * 8, None)] * n), 10, 1000),
    "symbols": (lambda p, n: p.symbols([65] * n), 100, 5000),
    "message": (lambda p, n: p.tokenized_chat(conversation(message={"content": "x" * n})), 100, 5000),
    "tools": (lambda p, n: p.tokenized_chat(conversation(tools=[tool(n)])), 5, 500),
    "tool calls": (lambda p, n: p.tokenized_chat(conversation(message=call(n))), 100, 5000),
    "an earlier thought": (
        lambda p, n: p.tokenized_chat(conversation(message={"role": "assistant", "reasoning": "x" * n})), 100, 5000
    ),
    "documents": (lambda p, n: p.tokenized_chat(conversation(documents=[{"text": "x" * n}])), 100, 5000),
    "variables": (lambda p, n: p.tokenized_chat(conversation(chat_template_kwargs={"a": [1] * n})), 10, 5000),
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
async def test_only_what_is_small_altogether_is_done_on_the_event_loop(watched: Watched, name: str) -> None:
    work, few, many = WORK[name]
    prompts = Prompts(watched, 320, max_model_len=1_000_000, max_chars_per_token=8)
    await work(prompts, few)
    assert watched.on_event_loop
    assert all(watched.on_event_loop)
    watched.on_event_loop.clear()
    await work(prompts, many)
    assert watched.on_event_loop
    assert not watched.on_event_loop[0]  # the first is the one that sees all of it
    if name in ("prompts", "echo", "symbols"):
        assert not any(watched.on_event_loop)
