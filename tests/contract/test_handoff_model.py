"""The real small model split over two machines says what one mixed machine says, in both directions and across a switch
of roles in mid-stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.scheduling.sequence import Request
from poolwright_protocol.roles import Role, RolePut
from support.engine_bed import Machine, machine, request, tokens, until

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker who had never",
    "def fibonacci(n):\n    ",
    "A list of ten reasons why bread is better than cake, with examples from history and from my own kitchen:\n1." * 3,
)
OUTPUT = 24

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@asynccontextmanager
async def real(loaded: LoadedModel, uid: str, handoff: bool = True) -> AsyncIterator[Machine]:
    """Machines share the weights; each has a cache of its own."""
    runner = CpuRunner(loaded.model, num_blocks=64, block_size=16, max_num_seqs=8, cpu_threads=1)
    settings = {"max_model_len": 512, "max_num_batched_tokens": 64}
    async with machine(uid, runner=runner, handoff={"lease_seconds": 60} if handoff else None, **settings) as here:
        yield here


def asked(loaded: LoadedModel, prompt_machine: Machine | None) -> list[Request]:
    """Half greedy, half drawn."""
    ticket = prompt_machine.ticket() if prompt_machine else None
    return [
        request(loaded.tokenizer.encode(text), OUTPUT, ticket, temperature=0.7 * (i % 2), seed=i)
        for i, text in enumerate(TEXTS)
    ]


async def test_two_machines_say_what_one_says(loaded: LoadedModel) -> None:
    async with real(loaded, "m", handoff=False) as mixed:
        alone = [await tokens(mixed.engine, one) for one in asked(loaded, None)]
    async with real(loaded, "a") as a, real(loaded, "b") as b:
        forth = [asyncio.create_task(tokens(b.engine, one)) for one in asked(loaded, a)]
        await until(lambda: b.seen.generated > 3 * len(TEXTS), 120)  # decoding what came from the other
        await a.engine.put_role(RolePut("a", Role.TOKEN, 1))
        await b.engine.put_role(RolePut("b", Role.PROMPT, 1))
        back = [asyncio.create_task(tokens(a.engine, one)) for one in asked(loaded, b)]
        assert [await one for one in forth] == alone
        assert [await one for one in back] == alone
        for one in (a, b):
            assert one.seen.failures == []
            assert one.seen.served == len(TEXTS)
            assert one.seen.sent_bytes > 0
            assert one.engine.role_state().foreign_requests == 0
            await one.empty()
