"""One engine with the small real model, as a user runs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.engine_process import EngineProcess, start_engine

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[EngineProcess]:
    with start_engine(smollm2_path) as engine:
        engine.wait_listening()
        early = httpx.post(f"{engine.url}/v1/completions", json={"prompt": "x"})
        assert early.status_code in (200, 503)
        engine.wait_ready(240)
        yield engine


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_knows_the_capital_of_france(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stream_is_the_same_text(client: OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 12, "temperature": temperature}
    whole = client.chat.completions.create(**asked, seed=1)
    with client.chat.completions.create(**asked, seed=1, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_tokens_and_logprobs_are_what_vllm_captured(client: OpenAI) -> None:
    """The first prompt of tests/contract/vllm/stream_compl.txt."""
    answer = client.completions.create(model="smollm2", prompt="Hello", max_tokens=2, temperature=0, logprobs=1)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["-", "by"]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx([-0.78489, -1.86809], abs=1e-3)


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=24, temperature=0, stop=["France"]
    )
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"


def test_metrics_have_counted(engine: EngineProcess, client: OpenAI) -> None:
    client.completions.create(model="smollm2", prompt="Once", max_tokens=3, temperature=0)
    text = httpx.get(f"{engine.url}/metrics").text
    assert 'vllm:generation_tokens_total{engine="0",model_name="smollm2"}' in text
    assert 'vllm:num_requests_running{engine="0",model_name="smollm2"} 0.0' in text


def test_sigterm_ends_an_idle_engine_at_once(smollm2_path: Path) -> None:
    """Also while the model is loading: nothing was promised yet."""
    with start_engine(smollm2_path) as engine:
        engine.wait_listening()
        assert engine.terminate(limit_seconds=10) == 0
