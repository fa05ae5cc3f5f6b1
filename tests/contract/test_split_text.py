"""A text split over two machines, one of which says its first token, ends where it would on one machine alone: asked
for at the token machine, and through the router."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from poolwright.core.machine import Machine as Seen
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.server import Served, Service
from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.sampling.guide import Guides
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.api_server import MODEL, events, serving, tiny_model
from support.engine_bed import Machine, machine
from support.router_server import POOL_KEY, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

TAIL = "and so it went on and on, until it came to the very end: DEF\n"
# What the model is made to say, by a guide; how the client wants it ended; what it then reads, and why it ended.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, str, str | None]]] = {
    "over many tokens": ("DEFGHIJ", {"stop": "DEFGHIJ"}, ("", "stop", "DEFGHIJ")),
    "only begun": ("DEFGX", {"stop": "DEFGHIJ"}, ("DEFGX", "stop", None)),
    "a blank line": ("one\n\ntwo", {"stop": ["\n\n"]}, ("one", "stop", "\n\n")),
    "a blank line, kept": (
        "one\n\ntwo",
        {"stop": ["\n\n"], "include_stop_str_in_output": True},
        ("one\n\n", "stop", "\n\n"),
    ),
    "met by the first token": (".rest", {"stop": "."}, ("", "stop", ".")),
    "begun by the first token": ("\n\nrest", {"stop": "\n\n"}, ("", "stop", "\n\n")),
    "half of it in the prompt": ("\nGHIJ", {"stop": ["\n\n", "DEF\n"]}, ("\nGHIJ", "stop", None)),
    "in the prompt alone": ("words", {"stop": ["it went on", "end: DEF"]}, ("words", "stop", None)),
    "wide characters": ("東京🦆川", {"stop": ["never", "京🦆"]}, ("東", "stop", "京🦆")),
    "cut by the length": ("DEFGHIJ", {"stop": "DEFGHIJ", "max_tokens": 3}, ("DEF", "length", None)),
}
ANYWHERE = Seen("", "", "cpu", "127.0.0.1", True, Role.MIXED, 1, 0.0, None, 0.0)


@dataclass(frozen=True)
class Split:
    prompt: Machine
    token: Machine
    alone: httpx.AsyncClient  # a machine that does all itself
    split: httpx.AsyncClient  # the token machine, told of the prompt machine
    routed: httpx.AsyncClient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def served(model: LoadedModel, uid: str) -> AsyncIterator[tuple[Machine, str]]:
    tokenizer, vocab_size = model.tokenizer, model.config.vocab_size
    guides = Guides(tokenizer, vocab_size)
    runner = CpuRunner(
        model.model, 65, block_size=16, max_num_seqs=8, cpu_threads=1, eos_token_ids=tokenizer.eos_ids, guides=guides
    )
    (end,) = tokenizer.eos_ids
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 64, "eos": end}
    async with machine(uid, runner=runner, handoff={"pool_key": POOL_KEY}, **settings) as here:
        service = Service(MODEL, MODEL, uid, EngineMetrics(MODEL, "chat", "llm", uid))
        service.served = Served(here.engine, tokenizer, vocab_size, max_chars_per_token=8, guides=guides)
        service.ready = True
        async with serving(service) as api:
            yield here, api.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: LoadedModel) -> AsyncIterator[Split]:
    async with AsyncExitStack() as stack:
        seen, machines, urls = [], {}, {}
        for role in (Role.PROMPT, Role.TOKEN):
            here, url = await stack.enter_async_context(served(model, role.value))
            machines[role], urls[role] = here, url
            assert here.exchange is not None
            api_port, kv_port = int(url.rsplit(":", 1)[1]), here.exchange.port
            at = replace(ANYWHERE, name=role.value, uid=role.value, role=role, api_port=api_port, kv_port=kv_port)
            seen.append(at)
        router = await stack.enter_async_context(running_router(seen, local_prompt_tokens=4))
        ticket = {names.HEADER_PROMPT_MACHINE: machines[Role.PROMPT].ticket(key=POOL_KEY)}
        alone, split = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, timeout=60))
            for url, headers in ((urls[Role.PROMPT], {}), (urls[Role.TOKEN], ticket))
        ]
        yield Split(machines[Role.PROMPT], machines[Role.TOKEN], alone, split, router.http)
        for here in machines.values():
            await here.empty()


async def read(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, str, str | None, int]:
    """Text, why and where it ended, and after how many tokens: the same streamed and at once."""
    body = (await client.post("/v1/completions", json=asked)).json()
    (choice,) = body["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *streamed, last = events((await client.post("/v1/completions", json=asked | options)).text)
    end = streamed[-1]["choices"][0]
    found = choice["text"], choice["finish_reason"], choice["stop_reason"], body["usage"]["completion_tokens"]
    assert found == (
        "".join(event["choices"][0]["text"] for event in streamed),
        end["finish_reason"],
        end["stop_reason"],
        last["usage"]["completion_tokens"],
    )
    return found


@pytest.mark.parametrize("case", CASES)
async def test_a_split_text_ends_where_a_whole_one_does(pool: Split, case: str) -> None:
    said, options, expected = CASES[case]
    asked = {"prompt": TAIL, "temperature": 0, "max_tokens": 40, "structured_outputs": {"choice": [said]}, **options}
    prefills = pool.prompt.seen.served
    alone = await read(pool.alone, asked)
    assert alone[:3] == expected
    assert pool.prompt.seen.served == prefills
    assert await read(pool.split, asked) == alone
    assert await read(pool.routed, asked) == alone
    assert pool.prompt.seen.served == prefills + 4  # each of the four was split
    for here in (pool.prompt, pool.token):
        await here.empty()  # nobody went on behind the stop


async def test_work_ends_at_the_stop_on_both_machines(pool: Split) -> None:
    before = pool.token.seen.generated
    asked = {"prompt": TAIL, "temperature": 0, "max_tokens": 150, "structured_outputs": {"choice": ["a." + "b" * 140]}}
    assert await read(pool.routed, {**asked, "stop": "."}) == ("a", "stop", ".", 2)
    for here in (pool.prompt, pool.token):
        await here.empty()
    assert pool.token.seen.generated - before < 2 * 40  # of 2 x 142: a few steps were ahead of the stop


@pytest.mark.parametrize("header", [None, "1"])
async def test_both_machines_of_a_pair_know_who_is_behind_all_others(pool: Split, header: str | None) -> None:
    entered: dict[str, list[bool]] = {}
    for here in (pool.prompt, pool.token):
        heard = entered[here.uid] = []
        enter = here.engine._add
        here.engine._add = lambda tenant, heard=heard, enter=enter: (  # type: ignore[method-assign,misc]
            heard.append(tenant.sequence.request.relegated),
            enter(tenant),
        )[1]
    try:
        prompt = TAIL + str(header)
        headers = {names.HEADER_RELEGATED: header} if header else {}
        asked = {"prompt": prompt, "temperature": 0, "max_tokens": 2}
        assert (await pool.split.post("/v1/completions", json=asked, headers=headers)).status_code == 200
    finally:
        for here in (pool.prompt, pool.token):
            del here.engine._add
    assert entered == {pool.prompt.uid: [header == "1"], pool.token.uid: [header == "1"]}
