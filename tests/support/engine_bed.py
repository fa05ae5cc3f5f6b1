"""Engines over the scripted runner for tests: one alone, or several with a hand-off between them on this machine."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from poolwright_engine.handoff.exchange import HandoffConfig, KvExchange
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.scheduling.sequence import FinishReason, Request, SamplingParams, TokenOutput
from poolwright_protocol.roles import Role
from poolwright_protocol.tickets import PromptMachine
from support.scripted_runner import EOS, ScriptedRunner

POOL_KEY = b"k" * 32
_numbers = itertools.count()


@dataclass
class Recorder(Observer):
    """Keeps what it is told."""

    finishes: list[tuple[FinishReason, int, int]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    generated: int = 0
    first_tokens: int = 0
    transferred_tokens: int = 0
    served: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    cached_tokens: int = 0
    lookups: list[tuple[int, int]] = field(default_factory=list)
    preemptions: list[bool] = field(default_factory=list)  # whether swapped
    preemptions_of_requests: list[int] = field(default_factory=list)
    swapped_blocks: list[int] = field(default_factory=lambda: [0, 0])  # in, out
    padded_tokens: int = 0

    def step(self, num_tokens: int, num_prefill_tokens: int, busy_seconds: float) -> None:
        self.step_tokens.append(num_tokens)

    def first_token(self, ttft_seconds: float, prefill_seconds: float) -> None:
        self.first_tokens += 1

    def prompt_tokens(self, count: int, transferred: bool, cached: int = 0) -> None:
        self.cached_tokens += cached
        self.transferred_tokens += count * transferred

    def generation_tokens(self, count: int) -> None:
        self.generated += count

    def finished(
        self, reason: FinishReason, prompt_tokens: int, generation_tokens: int, max_tokens: int, *seconds: float
    ) -> None:
        self.finishes.append((reason, prompt_tokens, generation_tokens))

    def prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self.lookups.append((queried_tokens, hit_tokens))

    def preempted(self, swapped: bool) -> None:
        self.preemptions.append(swapped)

    def request_preemptions(self, count: int) -> None:
        self.preemptions_of_requests.append(count)

    def swapped(self, num_blocks: int, out: bool) -> None:
        self.swapped_blocks[out] += num_blocks

    def padded(self, num_tokens: int) -> None:
        self.padded_tokens += num_tokens

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def prefill_served(self, prompt_tokens: int) -> None:
        self.served += 1

    def kv_sent(self, num_bytes: int, seconds: float) -> None:
        self.sent_bytes += num_bytes

    def kv_received(self, num_bytes: int, seconds: float) -> None:
        self.received_bytes += num_bytes

    def kv_failed(self, side: str, reason: str) -> None:
        self.failures.append((side, str(reason)))


async def until(condition: Callable[[], bool], limit_seconds: float = 20.0) -> None:
    """Returns once it holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(limit_seconds):
        while not condition():  # noqa: ASYNC110 — what is waited for happens on another thread
            await asyncio.sleep(0.003)


@dataclass
class Machine:
    uid: str
    engine: EngineLoop
    runner: Any
    seen: Recorder
    exchange: KvExchange | None = None

    def ticket(self, port: int | None = None, expires_in: float = 60.0, key: bytes = POOL_KEY) -> str:
        """What the router would send with a request that this machine shall prefill."""
        port = port or (self.exchange.port if self.exchange else 1)
        return PromptMachine(self.uid, "127.0.0.1", port, time.time() + expires_in).encode(key)

    async def empty(self, limit_seconds: float = 20.0) -> None:
        """Returns when every block has come home; fails with where they are."""
        pool = self.engine.scheduler.blocks

        def home() -> bool:
            self.engine.post(lambda: None)
            return pool.num_free == pool.total and not list(self.engine.scheduler.alive()) and not self._open_attempts

        try:
            await until(home, limit_seconds)
        except TimeoutError as error:
            states = [f"{s.request_id} {s.state}" for s in self.engine.scheduler.alive()]
            counts = f"{pool.num_owned} owned, {pool.num_fenced} fenced, {self._open_attempts} attempts"
            raise AssertionError(f"{self.uid}: {counts}, {states}") from error

    @property
    def _open_attempts(self) -> int:
        return len(self.exchange._incoming) if self.exchange is not None else 0


def request(
    prompt: Sequence[int],
    max_tokens: int = 8,
    prompt_machine: str | None = None,
    ignore_eos: bool = True,
    **params: Any,
) -> Request:
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
    return Request(f"r{next(_numbers)}", tuple(prompt), sampling, prompt_machine=prompt_machine)


async def outputs(engine: EngineLoop, wanted: Request) -> list[TokenOutput]:
    async with aclosing(engine.generate(wanted)) as stream:
        return [output async for output in stream]


async def tokens(engine: EngineLoop, wanted: Request) -> list[int]:
    """Its output ids, once it ended well."""
    heard = await outputs(engine, wanted)
    assert heard[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH), heard[-1]
    return [token for output in heard for token in output.token_ids]


@asynccontextmanager
async def machine(
    uid: str = "m",
    *,
    runner: Any = None,
    num_blocks: int = 64,
    block_size: int = 4,
    handoff: dict[str, Any] | None = None,
    role: Role | None = None,
    role_epoch: int = 0,
    eos: int = EOS,
    **config: Any,
) -> AsyncIterator[Machine]:
    """`handoff`: overrides of HandoffConfig; None: no hand-off."""
    runner = runner or ScriptedRunner(num_blocks, block_size)
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 8, **config}
    seen = Recorder()
    engine = EngineLoop(
        runner,
        config=LoopConfig(**settings),
        identity=Identity(pod_uid=uid, role=role, role_epoch=role_epoch),
        eos_token_ids=frozenset({eos}),
        observer=seen,
    )
    here = Machine(uid, engine, runner, seen)
    await engine.start()
    try:
        if handoff is not None:
            quick: dict[str, Any] = {
                "pool_key": POOL_KEY,
                "connect_seconds": 5.0,
                "lease_seconds": 5.0,
                "first_token_seconds": 10.0,
                "kv_seconds": 10.0,
                "hold_seconds": 1.0,
                **handoff,
            }
            here.exchange = KvExchange(
                engine,
                HandoffConfig(
                    pod_uid=uid,
                    advertise_host="127.0.0.1",
                    listen_host="127.0.0.1",
                    listen_port=0,
                    **quick,
                ),
            )
            await here.exchange.start()
        yield here
    finally:
        if here.exchange is not None:
            await here.exchange.close()
        await engine.close()
