"""The engine's API on a real port, inside the test's process: real loop, real runner, a tiny random model."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI, OpenAI

from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.server import Served, Service, create_app
from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.loop.engine import Engine
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import ModelRunner
from poolwright_engine.scheduling.sequence import FinishReason
from poolwright_engine.text.tokenizer import Tokenizer
from support.tiny_llama import write_tiny_llama

MODEL = "tiny"
MACHINE_UID = "uid-1"


@dataclass(frozen=True, slots=True)
class ApiServer:
    url: str
    service: Service

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    @property
    def engine(self) -> Engine:
        return self.service.loaded().engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.loaded().tokenizer

    def ended_as(self, reason: FinishReason) -> float:
        """Requests so far that ended for this reason."""
        return self.sample("vllm:request_success_total", finished_reason=reason.value) or 0.0

    def sample(self, name: str, **labels: str) -> float | None:
        """Value of one of vLLM's series."""
        labels = {"model_name": MODEL, "engine": "0", **labels}
        return self.service.metrics.registry.get_sample_value(name, labels)

    async def until_idle(self, limit_seconds: float = 5.0) -> None:
        """Nobody runs and every block is free again."""

        def idle() -> bool:
            stats = self.engine.stats()
            return not stats.running and not stats.waiting and stats.kv_free_blocks == stats.kv_total_blocks

        await until(idle, limit_seconds)


async def until(condition: Callable[[], object], limit_seconds: float = 5.0) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(limit_seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def new_service() -> Service:
    return Service(MODEL, MODEL, MACHINE_UID, EngineMetrics(MODEL, "chat", "default", MACHINE_UID))


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[ApiServer]:
    """The API of a service, loaded or not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(create_app(service), log_level="error", lifespan="off", timeout_graceful_shutdown=2)
        )
        task = asyncio.create_task(server._serve([listener]))
        try:
            await until(lambda: server.started)
            yield ApiServer(f"http://127.0.0.1:{listener.getsockname()[1]}", service)
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def serving_model(
    loaded: LoadedModel, runner: ModelRunner | None = None, max_model_len: int = 256, **options: Any
) -> AsyncIterator[ApiServer]:
    """The API over the real loop. `runner` given: that one steps instead of the model. `options` of LoopConfig."""
    service = new_service()
    tokenizer = loaded.tokenizer
    guides = Guides(tokenizer, loaded.config.vocab_size)
    engine = EngineLoop(
        runner
        or CpuRunner(
            loaded.model,
            num_blocks=65,
            block_size=16,
            max_num_seqs=16,
            cpu_threads=1,
            eos_token_ids=tokenizer.eos_ids,
            guides=guides,
        ),
        config=LoopConfig(max_model_len=max_model_len, max_num_batched_tokens=64, max_num_seqs=16, **options),
        identity=Identity(pod_uid=MACHINE_UID),
        eos_token_ids=tokenizer.eos_ids,
        observer=service.metrics,
    )
    await engine.start()
    service.metrics.attach(engine.stats, engine.role_state, {"block_size": "16"})
    vocab_size = engine.runner.vocab_size
    service.served = Served(engine, tokenizer, vocab_size, max_chars_per_token=8, guides=guides)
    service.ready = True
    try:
        async with serving(service) as api:
            yield api
    finally:
        await engine.close()


def tiny_model(folder: Path, batch_invariant: bool = False) -> LoadedModel:
    return load_model(write_tiny_llama(folder), batch_invariant=batch_invariant)


def events(text: str) -> list[dict[str, Any]]:
    """Parsed events of a stream that ended as it should; comments are skipped, as parsers do."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
