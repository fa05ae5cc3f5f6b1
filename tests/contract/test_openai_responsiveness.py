"""A huge prompt does not hold up the streams of others: its text is worked on beside the event loop."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from poolwright_engine.api.prompts import Prompts
from poolwright_engine.text.tokenizer import Tokenizer
from support.tiny_llama import write_byte_tokenizer

MEGABYTE = "word and 日本 " * 70_000
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Prompts(Tokenizer.from_folder(Path(folder)), 320, max_model_len=2_000_000, max_chars_per_token=8)


@pytest.mark.parametrize("times", [1, 3])
async def test_the_event_loop_turns_while_a_megabyte_is_tokenized(prompts: Prompts, times: int) -> None:
    """On the event loop each would be one gap as long as the work of one."""
    gaps: list[float] = []

    async def turn() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    assert len(MEGABYTE.encode()) > 10**6
    turning = asyncio.create_task(turn())
    started = time.perf_counter()
    made = await asyncio.gather(*(prompts.tokenized(MEGABYTE, False) for _ in range(times)))
    seconds = time.perf_counter() - started
    turning.cancel()
    assert all(len(ids) == len(MEGABYTE.encode()) for ids in made)
    assert max(gaps) < seconds / times / 3
    assert len(gaps) > 20
