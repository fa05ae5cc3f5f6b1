"""A prompt computed on one machine and decoded on another: the tokens of one machine alone, whatever goes wrong."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest

from poolwright_engine.handoff.exchange import _first_token_params, parts
from poolwright_engine.scheduling.sequence import FinishReason, Guide, GuideKind, Request, SamplingParams
from poolwright_protocol import handoff as wire
from poolwright_protocol.kv import KVShape
from poolwright_protocol.roles import Role, RolePut
from poolwright_protocol.tickets import Grant, PromptMachine
from support.engine_bed import POOL_KEY, Machine, machine, outputs, request, tokens, until
from support.faulty_wire import Bad, Fault, relay
from support.scripted_runner import SHAPE, ScriptedRunner, expected, next_token

PROMPT = range(1, 30)


@asynccontextmanager
async def pair(
    p: dict[str, Any] | None = None, t: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Machine, Machine]]:
    async with (
        machine("p", **{"handoff": {}, **(p or {})}) as prompt,
        machine("t", **{"handoff": {}, **(t or {})}) as token,
    ):
        yield prompt, token


async def both_empty(*machines: Machine) -> None:
    for one in machines:
        await one.empty()


async def test_tokens_are_those_of_one_machine_and_the_prompt_is_computed_once() -> None:
    async with pair() as (p, t):
        asked = [request(range(1, 1 + n), 7, p.ticket(), seed=n, temperature=n % 2) for n in (1, 4, 5, 17, 40, 60)]
        assert await asyncio.gather(*(tokens(t.engine, one) for one in asked)) == [expected(one) for one in asked]
        await both_empty(p, t)
        assert p.seen.served == 6
        assert t.seen.transferred_tokens == sum(len(one.prompt_ids) for one in asked)
        assert all(row.length == 1 for step in t.runner.steps for row in step.rows)  # no prefill at the token machine
        assert p.seen.sent_bytes == t.seen.received_bytes > 0
        assert p.seen.failures == t.seen.failures == []


async def test_what_ranks_a_request_and_what_keeps_its_cache_apart_hold_where_its_prompt_is_computed() -> None:
    async with pair() as (p, t):
        computed = []
        for salt in ("mine", "yours", "mine"):
            before = sum(row.length for step in p.runner.steps for row in step.rows)
            asked = replace(request(range(1, 33), 2, p.ticket()), cache_salt=salt)
            assert await tokens(t.engine, asked) == expected(asked)
            await both_empty(p, t)
            computed.append(sum(row.length for step in p.runner.steps for row in step.rows) - before)
        assert computed[0] == computed[1] == 32 > computed[2]
        entered: list[Request] = []
        add = p.engine.scheduler.add
        p.engine.scheduler.add = lambda sequence: (entered.append(sequence.request), add(sequence))[1]  # type: ignore[method-assign]
        asked = replace(request(PROMPT, 2, p.ticket()), priority=3, relegated=True)
        assert await tokens(t.engine, asked) == expected(asked)
        assert [(r.priority, r.relegated) for r in entered] == [(3, True)]
        await both_empty(p, t)


async def test_a_long_prompt_is_pushed_chunk_by_chunk_and_layer_by_layer() -> None:
    async with pair({"handoff": {"piece_bytes": 64}}) as (p, t):
        async with relay(t.exchange.port if t.exchange else 0) as between:
            assert t.exchange is not None
            t.exchange.port = between.port
            asked = request(range(1, 70), 4, p.ticket())
            assert await tokens(t.engine, asked) == expected(asked)
        assert len(p.runner.steps) == 5
        await both_empty(p, t)


async def test_two_machines_serve_each_other_both_ways_at_once() -> None:
    async with pair() as (one, other):
        there = [request(range(1, 2 + n), 9, one.ticket(), seed=n) for n in range(8)]
        here = [request(range(9, 12 + n), 9, other.ticket(), seed=n) for n in range(8)]
        heard = await asyncio.gather(*(tokens(other.engine, r) for r in there), *(tokens(one.engine, r) for r in here))
        assert heard == [expected(r) for r in there + here]
        await both_empty(one, other)


async def test_the_first_token_comes_before_any_kv() -> None:
    async with pair() as (p, t):
        assert t.exchange is not None
        never = Fault(Bad.SILENCE, back=False, frame=0)
        async with relay(t.exchange.port, never) as between:
            t.exchange.port = between.port
            asked = request(PROMPT, 5, p.ticket())
            async with aclosing(t.engine.generate(asked)) as stream:
                first = await anext(stream)
                assert list(first.token_ids) == expected(asked)[:1]
                assert t.seen.received_bytes == 0
        await both_empty(p, t)


async def test_a_request_that_ends_with_its_first_token_moves_no_kv_to_its_end() -> None:
    async with pair() as (p, t):
        asked = request(PROMPT, 1, p.ticket())
        assert await tokens(t.engine, asked) == expected(asked)
        await both_empty(p, t)
        assert t.seen.finishes == [(FinishReason.LENGTH, 29, 1)]


async def test_a_token_machine_without_memory_grants_later_and_streams_the_first_token_now() -> None:
    slow = ScriptedRunner(24, 4, step_seconds=0.02)
    async with pair({"handoff": {"hold_seconds": 30}}, {"runner": slow}) as (p, t):
        local = request(range(1, 20), 60)
        running = asyncio.create_task(tokens(t.engine, local))
        await until(lambda: t.seen.first_tokens == 1)
        asked = request(PROMPT, 20, p.ticket())
        async with aclosing(t.engine.generate(asked)) as stream:
            first = await anext(stream)
            assert not running.done()
            rest = [token async for output in stream for token in output.token_ids]
        assert [*first.token_ids, *rest] == expected(asked)
        assert await running == expected(local)
        assert t.seen.transferred_tokens == 29
        await both_empty(p, t)


async def test_a_prompt_machine_gives_up_what_is_never_granted() -> None:
    slow = ScriptedRunner(24, 4, step_seconds=0.02)
    async with pair({"handoff": {"hold_seconds": 0.1}}, {"runner": slow}) as (p, t):
        local = request(range(1, 60), 33)  # leaves no room for the other
        running = asyncio.create_task(tokens(t.engine, local))
        await until(lambda: t.seen.first_tokens == 1)
        asked = request(PROMPT, 20, p.ticket())
        mine = asyncio.create_task(tokens(t.engine, asked))
        await until(lambda: bool(p.seen.failures))
        await p.empty()  # long before the token machine has room
        assert not running.done()
        assert p.seen.failures == [("send", "no_grant")]
        assert await mine == expected(asked)
        assert await running == expected(local)
        await both_empty(p, t)


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_client_that_goes_frees_both_machines(depth: int) -> None:
    runners = [ScriptedRunner(64, 4, step_seconds=0.005) for _ in range(2)]
    async with pair({"runner": runners[0]}, {"runner": runners[1]}) as (p, t):
        for _ in range(5):
            async with aclosing(t.engine.generate(request(range(1, 100), 20, p.ticket()))) as stream:
                for _ in range(depth):
                    await anext(stream)
            await asyncio.sleep(0.01)
        await both_empty(p, t)
        asked = request(PROMPT, 5, p.ticket())
        assert await tokens(t.engine, asked) == expected(asked)


@pytest.mark.parametrize("what", ["forged", "expired", "nobody", "nonsense", "itself"])
async def test_a_ticket_that_leads_nowhere_means_computing_here(what: str) -> None:
    async with pair() as (p, t):
        tickets = {
            "forged": p.ticket(key=b"x" * 32),
            "expired": p.ticket(expires_in=-1),
            "nobody": p.ticket(port=1),
            "nonsense": "nonsense",
            "itself": t.ticket(),
        }
        asked = request(PROMPT, 5, tickets[what])
        assert await tokens(t.engine, asked) == expected(asked)
        assert p.seen.served == 0
        await both_empty(p, t)


@pytest.mark.parametrize("difference", [{"runner": ScriptedRunner(64, 8)}, {"handoff": {"model_fingerprint": "other"}}])
async def test_machines_that_differ_decline_and_give_no_wrong_token(difference: dict[str, Any]) -> None:
    async with pair(difference) as (p, t):
        asked = request(PROMPT, 5, p.ticket())
        assert await tokens(t.engine, asked) == expected(asked)
        assert t.seen.failures == [("receive", "declined")]
        await both_empty(p, t)


async def test_a_prompt_machine_whose_device_breaks_is_replaced_by_this_one() -> None:
    async with pair({"runner": ScriptedRunner(64, 4, fail_at=1)}) as (p, t):
        asked = request(range(1, 60), 5, p.ticket())
        assert await tokens(t.engine, asked) == expected(asked)
        assert not p.engine.healthy
        await t.empty()


async def test_a_token_machine_whose_device_breaks_frees_the_prompt_machine() -> None:
    async with pair(t={"runner": ScriptedRunner(64, 4, fail_at=2)}) as (p, t):
        heard = await outputs(t.engine, request(PROMPT, 20, p.ticket()))
        assert heard[-1].finish_reason is FinishReason.ERROR
        await p.empty()


async def test_a_role_switch_in_mid_stream_changes_no_token() -> None:
    runners = [ScriptedRunner(128, 4, step_seconds=0.003) for _ in range(2)]
    async with pair({"runner": runners[0]}, {"runner": runners[1]}) as (one, other):
        there = [request(range(1, 20 + n), 30, one.ticket(), seed=n) for n in range(4)]
        running = [asyncio.create_task(tokens(other.engine, r)) for r in there]
        await until(lambda: other.seen.first_tokens == 4)
        await one.engine.put_role(RolePut("p", Role.TOKEN, 1))
        await other.engine.put_role(RolePut("t", Role.PROMPT, 1))
        here = [request(range(5, 24 + n), 30, other.ticket(), seed=n) for n in range(4)]
        running += [asyncio.create_task(tokens(one.engine, r)) for r in here]
        assert [await task for task in running] == [expected(r) for r in there + here]
        await both_empty(one, other)


class Peer:
    """A prompt machine played by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, message: wire.Message, payload: bytes = b"") -> None:
        self.writer.write(message.to_bytes(POOL_KEY, payload))

    async def hear(self) -> wire.Message:
        while True:
            prefix = await self.reader.readexactly(wire.PREFIX_BYTES)
            header_bytes, _ = wire.sizes(prefix)
            message = wire.decode(POOL_KEY, prefix, await self.reader.readexactly(header_bytes))
            if not isinstance(message, wire.Heartbeat):
                return message

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def played_prompt_machine() -> AsyncIterator[tuple[str, "asyncio.Queue[Peer]"]]:
    """A ticket that leads to it, and who connects there."""
    callers: asyncio.Queue[Peer] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: callers.put_nowait(Peer(r, w)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield PromptMachine("played", "127.0.0.1", port, time.time() + 60).encode(POOL_KEY), callers
    finally:
        server.close()
        await server.wait_closed()


async def push(
    grant_text: str, asked: Request, attempt: int, num_blocks: int, wrong: str = "", present: str = ""
) -> wire.Received:
    """Write KV as a prompt machine would, all zero, with one thing wrong; `present`: the grant to show, if another."""
    grant = Grant.decode(POOL_KEY, grant_text, 0)
    peer = Peer(*await asyncio.open_connection(grant.host, grant.kv_port))
    try:
        peer.say(wire.PushStart(present or grant_text))
        payload = bytes(SHAPE.bytes_per_block(grant.block_size) * num_blocks)
        area = (0, SHAPE.layers, 0, SHAPE.kv_heads, 0, num_blocks)
        piece = wire.Piece(asked.request_id, attempt, *area, wire.checksum(payload))
        if wrong == "another attempt":
            piece = wire.Piece(asked.request_id, attempt + 1, *area, wire.checksum(payload))
        if wrong == "a block outside the grant":
            piece = wire.Piece(asked.request_id, attempt, *area[:4], 1, num_blocks + 1, wire.checksum(payload))
        if wrong == "half of it":
            half = payload[: len(payload) // num_blocks * (num_blocks // 2)]
            piece = wire.Piece(asked.request_id, attempt, *area[:5], num_blocks // 2, wire.checksum(half))
            payload = half
        if wrong == "a bit":
            payload = payload[:-1] + b"\1"
        peer.say(piece, payload[:-1] if wrong == "too short" else payload)
        if wrong == "twice":
            peer.say(piece, payload)
        entries = {"an empty manifest": (), "twice": (piece.entry, piece.entry)}.get(wrong, (piece.entry,))
        first = next_token(asked.prompt_ids, asked.params, len(asked.prompt_ids))
        first_token_id = first + 1 if wrong == "another first token" else first
        peer.say(wire.Manifest(asked.request_id, attempt, len(asked.prompt_ids), first_token_id, entries))
        answer = await peer.hear()
        assert isinstance(answer, wire.Received)
        return answer
    finally:
        await peer.close()


async def granted(peer: Peer) -> tuple[int, str]:
    asked = await peer.hear()
    assert isinstance(asked, wire.PrefillRequest)
    peer.say(wire.GrantWanted(asked.attempt))
    grant = await peer.hear()
    assert isinstance(grant, wire.GrantGiven)
    return asked.attempt, grant.grant


@pytest.mark.parametrize(
    "wrong",
    [
        "another attempt",
        "a block outside the grant",
        "too short",
        "a bit",
        "twice",
        "half of it",
        "an empty manifest",
        "another first token",
    ],
)
async def test_a_push_that_is_wrong_is_refused_and_computed_here(wrong: str) -> None:
    async with machine("t", handoff={}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket)
        running = asyncio.create_task(tokens(t.engine, asked))
        peer = await callers.get()
        attempt, grant = await granted(peer)
        first = next_token(asked.prompt_ids, asked.params, len(asked.prompt_ids))
        peer.say(wire.FirstToken(attempt, first, []))
        assert not (await push(grant, asked, attempt, 8, wrong)).accepted
        assert await running == expected(asked)
        await peer.close()
        await t.empty()
        assert t.seen.failures == [("receive", "corrupt")]


async def test_a_late_push_of_an_aborted_request_writes_nothing() -> None:
    async with machine("t", handoff={}, num_blocks=14) as t, played_prompt_machine() as (ticket, callers):
        gone = request(PROMPT, 5, ticket)
        async with aclosing(t.engine.generate(gone)) as stream:
            waiting = asyncio.ensure_future(anext(stream))
            peer = await callers.get()
            attempt, grant = await granted(peer)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await t.empty()
        after = request(range(50, 90), 10)  # needs the very blocks of the grant
        async with aclosing(t.engine.generate(after)) as stream:
            heard = [*(await anext(stream)).token_ids]
            answer = await push(grant, gone, attempt, 8)
            assert (answer.accepted, "nothing waits" in answer.reason) == (False, True)
            heard += [token async for output in stream for token in output.token_ids]
        assert heard == expected(after)
        await peer.close()
        await t.empty()


async def test_kv_that_comes_after_the_loop_ended_its_request_is_not_written() -> None:
    """The reader has not noticed yet, so to the event loop the attempt is still good."""
    async with machine("t", handoff={}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket)
        async with aclosing(t.engine.generate(asked)) as stream:
            first = asyncio.ensure_future(anext(stream))
            peer = await callers.get()
            attempt, grant = await granted(peer)
            peer.say(wire.FirstToken(attempt, 1, []))
            await first
            drained = asyncio.create_task(t.engine.drain(0))
            await until(lambda: t.engine.stats().kv_free_blocks == t.engine.stats().kv_total_blocks)
            before = t.runner.contents()
            assert not (await push(grant, asked, attempt, 8)).accepted
            assert t.runner.contents() == before
            await drained
        await peer.close()
        await t.empty()


async def test_a_grant_of_an_earlier_boot_or_another_key_or_past_its_time_is_refused() -> None:
    async with machine("t", handoff={}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket)
        running = asyncio.create_task(tokens(t.engine, asked))
        peer = await callers.get()
        attempt, text = await granted(peer)
        good = Grant.decode(POOL_KEY, text, 0)
        changed = {name: getattr(good, name) for name in good.__dataclass_fields__}
        for difference, reason in (
            ({"receiver_uid": "t/earlier"}, "nothing waits"),
            ({"block_ids": (1, 2, 3)}, "something else"),
            ({"request_id": "other"}, "something else"),
            ({"expires_at": time.time() - 1}, "expired"),
        ):
            answer = await push(Grant(**{**changed, **difference}).encode(POOL_KEY), asked, attempt, 8)
            assert not answer.accepted
            assert reason in answer.reason
        forged = Grant(**changed).encode(b"x" * 32)
        assert "signature" in (await push(text, asked, attempt, 8, present=forged)).reason
        assert not running.done()
        await peer.close()
        assert await running == expected(asked)
        await t.empty()


async def test_a_push_past_the_time_of_its_grant_is_refused() -> None:
    async with machine("t", handoff={}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket)
        running = asyncio.create_task(tokens(t.engine, asked))
        peer = await callers.get()
        attempt, grant = await granted(peer)
        assert t.exchange is not None
        t.exchange._incoming[attempt].expires_at = time.time() - 1  # as after a pause that no renewal outlived
        answer = await push(grant, asked, attempt, 8)
        assert (answer.accepted, "any more" in answer.reason) == (False, True)
        assert await running == expected(asked)
        await peer.close()
        await t.empty()


async def test_a_silent_prompt_machine_is_given_up_after_a_lease() -> None:
    async with machine("t", handoff={"lease_seconds": 0.2}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket)
        began = time.monotonic()
        running = asyncio.create_task(tokens(t.engine, asked))
        peer = await callers.get()
        await granted(peer)
        assert await running == expected(asked)
        assert 0.15 < time.monotonic() - began < 10
        assert t.seen.failures == [("receive", "lost")]
        await peer.close()
        await t.empty()


async def test_a_first_token_that_was_sent_is_kept_when_the_kv_is_lost() -> None:
    async with machine("t", handoff={}) as t, played_prompt_machine() as (ticket, callers):
        asked = request(PROMPT, 5, ticket, seed=3, temperature=1.0)
        running = asyncio.create_task(tokens(t.engine, asked))
        peer = await callers.get()
        attempt, _ = await granted(peer)
        first = next_token(asked.prompt_ids, asked.params, len(asked.prompt_ids))
        peer.say(wire.FirstToken(attempt, first, []))
        await until(lambda: t.seen.first_tokens == 1)
        await peer.close()
        assert await running == expected(asked)
        await t.empty()


async def test_strangers_on_the_kv_port_are_shown_the_door() -> None:
    async with machine("t", handoff={"lease_seconds": 0.3}) as t:
        assert t.exchange is not None
        stranger = wire.Heartbeat(1).to_bytes(b"y" * 32)
        for words in (b"GET / HTTP/1.1\r\n" + b"x" * 60, stranger, b"\xff" * 100, wire.Heartbeat(1).to_bytes(POOL_KEY)):
            peer = Peer(*await asyncio.open_connection("127.0.0.1", t.exchange.port))
            peer.writer.write(words)
            assert await peer.reader.read() == b""
            await peer.close()
        assert await tokens(t.engine, request([1]))


@pytest.mark.parametrize("limit", [1, 100, 5000, 1 << 20])
def test_parts_cover_every_layer_and_block_once(limit: int) -> None:
    shape, blocks = KVShape(layers=5, kv_heads=2, head_size=4, dtype_bytes=2), range(3, 20)
    cells = [(x, y) for layers, some in parts(shape, 16, blocks, limit) for x in layers for y in some]
    assert sorted(cells) == [(x, y) for x in range(5) for y in blocks]


def test_all_that_shapes_the_first_token_travels() -> None:
    params = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((8, -100.0),),
        allowed_token_ids=(8, 9),
        guide=Guide(GuideKind.REGEX, "[a-z]+"),
        logprobs=3,
    )
    told = _first_token_params(json.loads(json.dumps(asdict(params))))
    assert told == replace(params, max_tokens=1)
    with pytest.raises(wire.HandoffError, match="sampling"):
        _first_token_params({**asdict(params), "guide": {"kind": "magic", "text": ""}})
