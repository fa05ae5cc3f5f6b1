"""`KvExchange`: prompts computed on one machine and decoded on another, over TCP. Every machine does both parts.

A token machine T asks a prompt machine P; messages are in `poolwright_protocol.handoff`. What holds at all times:

- T queues the request without memory. P asks for memory when it has scheduled the prompt in memory of its own, so T's
  memory never waits for P's. Meanwhile P computes; ungranted prompts hold at most a stated share of its blocks, and
  only for `hold_seconds` after their first token. Nobody waits for a peer's memory while holding what that peer needs.
- P sends the first token as soon as it is sampled, and T's client has it before any KV.
- Only a manifest that names every piece completes a transfer.
- Any failure ends in T computing the request itself, tokens already sent included. An attempt that failed is gone: all
  KV passes through T's loop, which writes only for an attempt that still waits for it, so a late push hits nothing.
- Silence for a lease, on either side, is a failure; closing the control connection is a cancel.

It owns sockets, leases and attempts; it knows no scheduling and no text.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from poolwright_engine.loop.engine import Refused
from poolwright_engine.loop.engine_loop import EngineDead, EngineLoop
from poolwright_engine.scheduling.runner import Handle
from poolwright_engine.scheduling.sequence import (
    Guide,
    GuideKind,
    Request,
    SamplingParams,
    Sequence,
    SequenceState,
    TokenLogprobs,
    TokenOutput,
)
from poolwright_protocol import handoff as wire
from poolwright_protocol.kv import KVShape, blocks_for
from poolwright_protocol.tickets import Grant, PromptMachine, TicketError

_log = logging.getLogger(__name__)

_STREAM_LIMIT_BYTES = 1 << 20
_FLUSH_SECONDS = 1.0
_GONE = (OSError, asyncio.IncompleteReadError)


class FailureReason(StrEnum):
    TICKET = "ticket"  # the router's header is forged, malformed or expired
    UNREACHABLE = "unreachable"
    DECLINED = "declined"  # the prompt machine will not do it
    LOST = "lost"  # a connection ended or fell silent
    LATE = "late"  # patience ended
    CORRUPT = "corrupt"  # a checksum, a manifest or a message is wrong
    NO_GRANT = "no_grant"  # sending: the token machine had no memory for it in time
    REFUSED = "refused"  # sending: the token machine would not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """`lease_seconds`: silence that means death; heartbeats come six times as often. Patience of a token machine:
    `first_token_seconds` until the first token, then `kv_seconds` until the KV is complete."""

    pool_key: bytes = field(repr=False)
    pod_uid: str
    advertise_host: str  # what peers connect to
    listen_host: str = "0.0.0.0"
    listen_port: int = 9000  # 0: any
    model_fingerprint: str = ""  # equal on every machine of the pool, e.g. a hash of the model's configuration
    connect_seconds: float = 2.0
    lease_seconds: float = 10.0
    first_token_seconds: float = 120.0
    kv_seconds: float = 30.0
    hold_seconds: float = 5.0
    piece_bytes: int = 4 << 20
    max_unwritten_bytes: int = 256 << 20  # KV received and not yet in the cache, all transfers together


class _Failed(Exception):
    def __init__(self, reason: FailureReason, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason.value)
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes

    def write(self, message: wire.Message, payload: bytes = b"") -> None:
        """A closed connection swallows it; whoever reads there learns of the end."""
        if not self.writer.is_closing():
            self.writer.write(message.to_bytes(self.key, payload))

    async def send(self, message: wire.Message, payload: bytes = b"") -> None:
        self.writer.write(message.to_bytes(self.key, payload))
        await self.writer.drain()

    async def receive(self, limit_seconds: float) -> tuple[wire.Message, bytes]:
        """Raises HandoffError, TimeoutError, OSError or IncompleteReadError."""
        async with asyncio.timeout(limit_seconds):
            prefix = await self.reader.readexactly(wire.PREFIX_BYTES)
            header_bytes, payload_bytes = wire.sizes(prefix)
            message = wire.decode(self.key, prefix, await self.reader.readexactly(header_bytes))
            return message, await self.reader.readexactly(payload_bytes)

    def hang_up(self) -> None:
        self.writer.close()

    async def closed(self) -> None:
        """Gives what was written a moment to leave; a peer that does not read cannot hold the connection open."""
        self.writer.close()
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self.writer.wait_closed()
        except (TimeoutError, *_GONE):
            pass
        finally:
            self.writer.transport.abort()


@dataclass(slots=True, eq=False)
class _Incoming:
    """T's side of one attempt. `settled`: KV is complete, or the attempt is over; nothing is written any more."""

    sequence: Sequence
    attempt: int
    connection: _Connection | None = None
    push: _Connection | None = None
    block_ids: tuple[int, ...] = ()
    expires_at: float = 0.0
    first_token_id: int | None = None
    first_token_known: asyncio.Event = field(default_factory=asyncio.Event)
    settled: bool = False
    push_failure: _Failed | None = None


class _Cells:
    """Which (layer, kv head, block) of a transfer have come. Each may come once."""

    def __init__(self, layers: int, heads: int, blocks: int) -> None:
        self._heads, self._blocks = heads, blocks
        self._cells = bytearray(layers * heads * blocks)

    def take(self, layers: range, heads: range, blocks: range) -> bool:
        """False, changing nothing, when one of them has come before."""
        spans = [
            slice(start + blocks.start, start + blocks.stop)
            for layer in layers
            for head in heads
            for start in [(layer * self._heads + head) * self._blocks]
        ]
        if any(any(self._cells[span]) for span in spans):
            return False
        for span in spans:
            self._cells[span] = b"\1" * len(blocks)
        return True

    @property
    def complete(self) -> bool:
        return 0 not in self._cells


class _ByteBudget:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Waits for room; one that is larger than the limit goes alone."""
        while self._used and self._used + num_bytes > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._used += num_bytes

    def give(self, num_bytes: int) -> None:
        self._used -= num_bytes
        self._freed.set()


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a prompt's KV on its way out of the cache."""

    layers: range
    heads: range
    blocks: range  # of the prompt, from 0
    handle: Handle[bytes]


def parts(shape: KVShape, block_size: int, blocks: range, limit_bytes: int) -> Iterator[tuple[range, range]]:
    """Cut these blocks into (layers, blocks) of about `limit_bytes`: whole layers as far as they fit."""
    layer_block_bytes = shape.bytes_per_block(block_size) // shape.layers
    blocks_per_part = max(1, min(len(blocks), limit_bytes // layer_block_bytes))
    layers_per_part = max(1, limit_bytes // (layer_block_bytes * blocks_per_part))
    for layer in range(0, shape.layers, layers_per_part):
        for block in range(blocks.start, blocks.stop, blocks_per_part):
            yield (
                range(layer, min(layer + layers_per_part, shape.layers)),
                range(block, min(block + blocks_per_part, blocks.stop)),
            )


class _PeerPrompt:
    """P's side of one attempt: a tenant of the loop whose reader is another machine."""

    def __init__(self, exchange: "KvExchange", sequence: Sequence, attempt: int) -> None:
        self.sequence = sequence
        self.attempt = attempt
        self.news: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.parts: asyncio.Queue[_Part | None] = asyncio.Queue()  # None: that was all
        self.grant_text = ""
        self.granted = asyncio.Event()
        self.first_token_id: int | None = None
        self.first_token_known = asyncio.Event()
        self.manifest_sent = False
        self._exchange = exchange
        self._engine = exchange.engine
        self._may_read = False  # of the loop's thread, as are the next two
        self._blocks_read = 0
        self._num_blocks = blocks_for(sequence.num_prompt, exchange.engine.runner.block_size)

    # On the event loop.

    def deliver(self, output: TokenOutput) -> None:
        if output.token_ids and self.first_token_id is None:
            self.first_token_id = output.token_ids[0]
            self.first_token_known.set()
            logprobs = [_logprobs_to_json(entry) for entry in output.logprobs[:1]]
            self.news.put_nowait(wire.FirstToken(self.attempt, self.first_token_id, logprobs))
        elif not output.token_ids:
            self.news.put_nowait(wire.Declined(self.attempt, output.error or "the prompt machine gave it up"))

    def grant(self, text: str, now: float) -> None:
        """A grant, or its renewal. Raises TicketError, or HandoffError for one that is not for this prompt."""
        grant = Grant.decode(self._exchange.config.pool_key, text, now)
        mine = (self.sequence.request_id, self.attempt, self._engine.runner.block_size, self._num_blocks)
        if (grant.request_id, grant.attempt, grant.block_size, len(grant.block_ids)) != mine:
            raise wire.HandoffError("the grant is for something else")
        self.grant_text = text
        if not self.granted.is_set():
            self.granted.set()
            self._engine.post(self._begin_reading)

    # On the loop's thread.

    def admitted(self) -> None:
        self._engine.tell(lambda: self.news.put_nowait(wire.GrantWanted(self.attempt)))

    def submitted(self) -> None:
        if self._may_read:
            self._read_computed()

    def _begin_reading(self) -> None:
        self._may_read = True
        self.sequence.ungranted = False
        self._read_computed()

    def _read_computed(self) -> None:
        """Reads are queued behind the steps submitted so far: every block those complete may go."""
        sequence, runner = self.sequence, self._engine.runner
        if not sequence.block_ids:
            return
        done = sequence.num_computed >= sequence.num_prompt
        stop = self._num_blocks if done else sequence.num_computed // runner.block_size
        blocks = range(self._blocks_read, stop)
        if not blocks:
            return
        self._blocks_read = stop
        heads = range(runner.kv_shape.kv_heads)
        news: list[_Part | None] = [
            _Part(layers, heads, some, runner.read_blocks(layers, heads, sequence.block_ids[some.start : some.stop]))
            for layers, some in parts(runner.kv_shape, runner.block_size, blocks, self._exchange.config.piece_bytes)
        ]
        if done:
            news.append(None)

        def hand_over() -> None:
            for part in news:
                self.parts.put_nowait(part)

        self._engine.tell(hand_over)


class KvExchange:
    def __init__(self, engine: EngineLoop, config: HandoffConfig) -> None:
        self.engine = engine
        self.config = config
        self.port = config.listen_port
        # A container that restarts in place keeps its pod uid; its grants of before must not hold.
        self._receiver_uid = f"{config.pod_uid}/{engine.boot_id}"
        self._attempts = itertools.count(1)
        self._incoming: dict[int, _Incoming] = {}
        self._fetches: dict[Sequence, asyncio.Task[None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._unwritten = _ByteBudget(config.max_unwritten_bytes)
        self._server: asyncio.Server | None = None
        self._closing = False
        self._waiters = ThreadPoolExecutor(4, thread_name_prefix="kv-read")

    async def start(self) -> None:
        """Raises OSError where the port is taken."""
        self._server = await asyncio.start_server(
            self._accept, self.config.listen_host, self.config.listen_port, limit=_STREAM_LIMIT_BYTES
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.engine.attach(self)

    async def close(self) -> None:
        """Attempts of this machine's own clients go back to the loop; peers see their connections end."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        while tasks := [*self._fetches.values(), *self._serving]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        await asyncio.to_thread(self._waiters.shutdown)

    # T: have a prompt computed elsewhere.

    def fetch(self, sequence: Sequence) -> None:
        incoming = _Incoming(sequence, next(self._attempts))
        self._incoming[incoming.attempt] = incoming
        self._fetches[sequence] = asyncio.create_task(self._fetch(incoming))

    def cancel(self, sequence: Sequence) -> None:
        task = self._fetches.pop(sequence, None)
        if task is not None:
            task.cancel()

    async def _fetch(self, incoming: _Incoming) -> None:
        failure: _Failed | None = None
        try:
            await self._converse(incoming)
        except _Failed as error:
            failure = incoming.push_failure or error
        finally:
            fell_back = not incoming.settled
            incoming.settled = True
            del self._incoming[incoming.attempt]
            self._fetches.pop(incoming.sequence, None)
            if incoming.push is not None:
                incoming.push.hang_up()
            if fell_back:
                # Also after a cancel, where the sequence has ended or soon will: then this does nothing.
                self.engine.post(lambda: self.engine.compute_here(incoming.sequence))
        if failure is not None and fell_back:
            self.engine.observer.kv_failed("receive", failure.reason)
            _log.info("Hand-off failed, computing here, request=%s %s", incoming.sequence.request_id, failure)

    async def _converse(self, incoming: _Incoming) -> None:
        """Returns when there is nothing more to hear: KV complete, or the request ended. Raises _Failed."""
        request = incoming.sequence.request
        try:
            ticket = PromptMachine.decode(self.config.pool_key, request.prompt_machine or "", time.time())
        except TicketError as error:
            raise _Failed(FailureReason.TICKET, str(error)) from error
        if ticket.machine_uid == self.config.pod_uid:
            return
        try:
            async with (
                asyncio.timeout(self.config.first_token_seconds) as patience,
                self._connected(ticket.host, ticket.kv_port) as connection,
            ):
                incoming.connection = connection
                await connection.send(self._prefill_request(incoming))
                async with self._beating(lambda: self._beat(incoming, connection)):
                    await self._listen(incoming, connection, patience)
        except wire.HandoffError as error:
            raise _Failed(FailureReason.CORRUPT, str(error)) from error
        except TimeoutError as error:
            late = patience.expired()
            raise _Failed(FailureReason.LATE if late else FailureReason.LOST, "no word in time") from error
        except _GONE as error:
            raise _Failed(FailureReason.LOST, str(error)) from error

    async def _listen(self, incoming: _Incoming, connection: _Connection, patience: asyncio.Timeout) -> None:
        sequence, attempt = incoming.sequence, incoming.attempt
        while True:
            message, _ = await connection.receive(self.config.lease_seconds)
            match message:
                case wire.GrantWanted(attempt=a) if a == attempt:
                    self.engine.post(lambda: self._ask_memory(incoming))
                case wire.FirstToken(attempt=a) if a == attempt and incoming.first_token_id is None:
                    if not 0 <= message.token_id < self.engine.runner.vocab_size:
                        raise wire.HandoffError(f"token {message.token_id} is not in the vocabulary")
                    logprobs = _logprobs_from_json(message.logprobs)
                    incoming.first_token_id = message.token_id
                    patience.reschedule(asyncio.get_running_loop().time() + self.config.kv_seconds)
                    output = self.engine.first_token(sequence, message.token_id, logprobs)
                    incoming.first_token_known.set()
                    if output.finish_reason is not None:
                        incoming.settled = True
                        return
                case wire.Heartbeat():
                    pass
                case wire.Declined(reason=reason):
                    raise _Failed(FailureReason.DECLINED, reason)
                case _:
                    raise wire.HandoffError(f"{type(message).__name__} out of turn")

    def _prefill_request(self, incoming: _Incoming) -> wire.PrefillRequest:
        request, runner = incoming.sequence.request, self.engine.runner
        return wire.PrefillRequest(
            version=wire.PROTOCOL_VERSION,
            request_id=request.request_id,
            attempt=incoming.attempt,
            receiver_uid=self._receiver_uid,
            prompt_ids=request.prompt_ids,
            sampling=asdict(request.params),
            shape=_shape(runner.kv_shape),
            block_size=runner.block_size,
            model_fingerprint=self.config.model_fingerprint,
            priority=request.priority,
            relegated=request.relegated,
            cache_salt=request.cache_salt,
        )

    def _ask_memory(self, incoming: _Incoming) -> None:
        """On the loop's thread."""

        def granted(block_ids: tuple[int, ...]) -> None:
            self.engine.tell(lambda: self._granted(incoming, block_ids))

        self.engine.ask_memory(incoming.sequence, granted)

    def _granted(self, incoming: _Incoming, block_ids: tuple[int, ...]) -> None:
        incoming.block_ids = block_ids
        if incoming.connection is not None and not incoming.settled:
            incoming.connection.write(self._grant(incoming))

    def _beat(self, incoming: _Incoming, connection: _Connection) -> None:
        if incoming.block_ids and not incoming.settled:
            connection.write(self._grant(incoming))
        else:
            connection.write(wire.Heartbeat(incoming.attempt))

    def _grant(self, incoming: _Incoming) -> wire.GrantGiven:
        incoming.expires_at = time.time() + self.config.lease_seconds
        grant = Grant(
            request_id=incoming.sequence.request_id,
            attempt=incoming.attempt,
            receiver_uid=self._receiver_uid,
            host=self.config.advertise_host,
            kv_port=self.port,
            block_ids=incoming.block_ids,
            block_size=self.engine.runner.block_size,
            expires_at=incoming.expires_at,
        )
        return wire.GrantGiven(incoming.attempt, grant.encode(self.config.pool_key))

    async def _take_push(self, connection: _Connection, start: wire.PushStart) -> None:
        """A prompt machine connected to write KV. Whatever it gets wrong fails the attempt, if it has one."""
        incoming: _Incoming | None = None
        try:
            incoming = self._incoming_of(start)
            incoming.push = connection
            await self._receive_kv(incoming, connection)
        except (_Failed, wire.HandoffError, TimeoutError, EngineDead, *_GONE) as error:
            failure = error if isinstance(error, _Failed) else _Failed(_reason_of(error), str(error))
            connection.write(wire.Received(incoming.attempt if incoming else 0, False, str(failure)))
            if incoming is not None and not incoming.settled:
                incoming.push_failure = failure
                if incoming.connection is not None:
                    incoming.connection.hang_up()

    def _incoming_of(self, start: wire.PushStart) -> _Incoming:
        """Raises _Failed for a grant that is not, or no longer, good."""
        try:
            grant = Grant.decode(self.config.pool_key, start.grant, time.time())
        except TicketError as error:
            raise _Failed(FailureReason.REFUSED, str(error)) from error
        incoming = self._incoming.get(grant.attempt)
        if grant.receiver_uid != self._receiver_uid or incoming is None or incoming.settled:
            raise _Failed(FailureReason.REFUSED, "nothing waits for this attempt")
        if grant.request_id != incoming.sequence.request_id or grant.block_ids != incoming.block_ids:
            raise _Failed(FailureReason.REFUSED, "the grant is for something else")
        if incoming.push is not None:
            raise _Failed(FailureReason.REFUSED, "this attempt is being written already")
        return incoming

    async def _receive_kv(self, incoming: _Incoming, connection: _Connection) -> None:
        shape, began = self.engine.runner.kv_shape, time.monotonic()
        cells = _Cells(shape.layers, shape.kv_heads, len(incoming.block_ids))
        entries: list[tuple[int, ...]] = []
        num_bytes = 0
        while True:
            message, payload = await connection.receive(self.config.lease_seconds)
            if incoming.settled or incoming.expires_at < time.time():
                raise _Failed(FailureReason.REFUSED, "nothing waits for this attempt any more")
            match message:
                case wire.Piece():
                    await self._take_piece(incoming, message, payload, cells)
                    entries.append(message.entry)
                    num_bytes += len(payload)
                case wire.Manifest():
                    await self._take_manifest(incoming, message, entries, cells)
                    self.engine.observer.kv_received(num_bytes, time.monotonic() - began)
                    await connection.send(wire.Received(incoming.attempt, True, ""))
                    return
                case _:
                    raise wire.HandoffError(f"{type(message).__name__} out of turn")

    async def _take_piece(self, incoming: _Incoming, piece: wire.Piece, payload: bytes, cells: _Cells) -> None:
        shape, num_blocks = self.engine.runner.kv_shape, len(incoming.block_ids)
        layers = range(piece.layer_start, piece.layer_stop)
        heads = range(piece.head_start, piece.head_stop)
        blocks = range(piece.block_start, piece.block_stop)
        for name, part, limit in (
            ("layers", layers, shape.layers),
            ("kv heads", heads, shape.kv_heads),
            ("blocks", blocks, num_blocks),
        ):
            if not 0 <= part.start < part.stop <= limit:
                raise wire.HandoffError(f"{name} [{part.start}, {part.stop}) are outside [0, {limit})")
        if (piece.request_id, piece.attempt) != (incoming.sequence.request_id, incoming.attempt):
            raise wire.HandoffError("a piece of another attempt")
        cell_bytes = 2 * shape.head_size * shape.dtype_bytes * self.engine.runner.block_size
        if len(payload) != cell_bytes * len(layers) * len(heads) * len(blocks):
            raise wire.HandoffError(f"a piece of {len(payload)} bytes has the wrong size")
        if wire.checksum(payload) != piece.checksum:
            raise wire.HandoffError("a checksum does not match")
        if not cells.take(layers, heads, blocks):
            raise wire.HandoffError("a piece came twice")
        await self._unwritten.take(len(payload))

        def give_back() -> None:
            self.engine.tell(lambda: self._unwritten.give(len(payload)))

        def write() -> None:
            # The loop's thread also ends sequences: this is the one place where a late write is told from a good one.
            if incoming.sequence.state is SequenceState.REMOTE and incoming.sequence.block_ids:
                block_ids = incoming.block_ids[blocks.start : blocks.stop]
                self.engine.write_kv(layers, heads, block_ids, payload, give_back)
            else:
                give_back()

        if incoming.settled or not self.engine.post(write):
            self._unwritten.give(len(payload))
            raise _Failed(FailureReason.REFUSED, "nothing waits for this attempt any more")

    async def _take_manifest(
        self, incoming: _Incoming, manifest: wire.Manifest, entries: list[tuple[int, ...]], cells: _Cells
    ) -> None:
        sequence = incoming.sequence
        if (manifest.request_id, manifest.attempt) != (sequence.request_id, incoming.attempt):
            raise wire.HandoffError("a manifest of another attempt")
        if manifest.num_tokens != sequence.num_prompt or manifest.pieces != tuple(entries) or not cells.complete:
            raise wire.HandoffError("the manifest does not name all of the KV, each piece once and as it came")
        # It was sent before, on the other connection.
        async with asyncio.timeout(self.config.lease_seconds):
            await incoming.first_token_known.wait()
        if manifest.first_token_id != incoming.first_token_id:
            raise wire.HandoffError("the manifest names another first token")
        filled = False

        def fill() -> None:
            nonlocal filled
            if sequence.state is SequenceState.REMOTE and sequence.block_ids:
                self.engine.scheduler.filled(sequence)
                filled = True

        if not incoming.settled:
            # From here on the attempt cannot fail: a lost control connection changes nothing.
            incoming.settled = True
            await self.engine.call(fill)
        if not filled:
            raise _Failed(FailureReason.REFUSED, "nothing waits for this attempt any more")

    # P: compute a prompt for another machine.

    async def _serve_prefill(self, connection: _Connection, asked: wire.PrefillRequest) -> None:
        try:
            job = self._enter(asked)
        except (Refused, wire.HandoffError) as refusal:
            await connection.send(wire.Declined(asked.attempt, str(refusal)))
            return
        try:
            async with self._beating(lambda: connection.write(wire.Heartbeat(job.attempt))):
                await self._work(job, connection)
        except _Failed as failure:
            self.engine.observer.kv_failed("send", failure.reason)
            _log.info("Hand-off gave up sending, request=%s %s", asked.request_id, failure)
            connection.write(wire.Declined(job.attempt, str(failure)))
        finally:
            self.engine.leave_peer(job)

    def _enter(self, asked: wire.PrefillRequest) -> _PeerPrompt:
        runner = self.engine.runner
        theirs = (asked.version, asked.shape, asked.block_size, asked.model_fingerprint)
        ours = (wire.PROTOCOL_VERSION, _shape(runner.kv_shape), runner.block_size, self.config.model_fingerprint)
        if theirs != ours:
            raise wire.HandoffError(f"machines differ in (version, KV shape, block size, model): {theirs}, {ours}")
        request = Request(
            asked.request_id,
            asked.prompt_ids,
            _first_token_params(asked.sampling),
            priority=asked.priority,
            relegated=asked.relegated,
            cache_salt=asked.cache_salt,
        )
        job = _PeerPrompt(self, Sequence(request, for_peer=True), asked.attempt)
        self.engine.enter_peer(job)
        return job

    async def _work(self, job: _PeerPrompt, connection: _Connection) -> None:
        """Returns when the KV was accepted, or nobody wants it. Raises _Failed."""
        hearing = asyncio.create_task(self._hear(job, connection))
        telling = asyncio.create_task(self._tell_news(job, connection))
        pushing = asyncio.create_task(self._push(job))
        tasks = (hearing, telling, pushing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not pushing.done() and job.manifest_sent:
                # The token machine may close at once when it has all; its answer is on the other connection.
                await asyncio.wait((pushing,), timeout=self.config.connect_seconds)
            for task in (pushing, telling, hearing):
                if task.done():
                    task.result()
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, job: _PeerPrompt, connection: _Connection) -> None:
        """Returns when the token machine wants it no more."""
        while True:
            try:
                message, _ = await connection.receive(self.config.lease_seconds)
            except _GONE:
                return
            except TimeoutError as error:
                raise _Failed(FailureReason.LOST, "no heartbeat") from error
            except wire.HandoffError as error:
                raise _Failed(FailureReason.CORRUPT, str(error)) from error
            match message:
                case wire.GrantGiven(grant=text):
                    try:
                        job.grant(text, time.time())
                    except (TicketError, wire.HandoffError) as error:
                        raise _Failed(FailureReason.CORRUPT, str(error)) from error
                case wire.Heartbeat():
                    pass
                case _:
                    raise _Failed(FailureReason.CORRUPT, f"{type(message).__name__} out of turn")

    async def _tell_news(self, job: _PeerPrompt, connection: _Connection) -> None:
        while True:
            news = await job.news.get()
            if isinstance(news, wire.Declined):
                raise _Failed(FailureReason.DECLINED, news.reason)
            connection.write(news)
            if isinstance(news, wire.FirstToken):
                try:
                    async with asyncio.timeout(self.config.hold_seconds):
                        await job.granted.wait()
                except TimeoutError as error:
                    raise _Failed(FailureReason.NO_GRANT, "the token machine had no memory in time") from error

    async def _push(self, job: _PeerPrompt) -> None:
        await job.granted.wait()
        grant = Grant.decode(self.config.pool_key, job.grant_text, 0)
        began, num_bytes = time.monotonic(), 0
        entries: list[tuple[int, ...]] = []
        try:
            async with self._connected(grant.host, grant.kv_port) as connection:
                await connection.send(wire.PushStart(job.grant_text))
                while (part := await job.parts.get()) is not None:
                    data = await asyncio.get_running_loop().run_in_executor(self._waiters, part.handle.result)
                    piece = _piece(job, part, data)
                    # A receiver that takes nothing for a lease is gone.
                    async with asyncio.timeout(self.config.lease_seconds):
                        await connection.send(piece, data)
                    entries.append(piece.entry)
                    num_bytes += len(data)
                await job.first_token_known.wait()
                await connection.send(_manifest(job, entries))
                job.manifest_sent = True
                answer, _ = await connection.receive(self.config.lease_seconds)
        except wire.HandoffError as error:
            raise _Failed(FailureReason.CORRUPT, str(error)) from error
        except (TimeoutError, *_GONE) as error:
            raise _Failed(FailureReason.LOST, str(error)) from error
        if not isinstance(answer, wire.Received) or not answer.accepted:
            raise _Failed(FailureReason.REFUSED, getattr(answer, "reason", "not an answer"))
        self.engine.observer.kv_sent(num_bytes, time.monotonic() - began)

    # Both.

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._start(self._serve(_Connection(reader, writer, self.config.pool_key)))
        # A task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: writer.transport.abort())
        if self._closing:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    async def _serve(self, connection: _Connection) -> None:
        try:
            message, _ = await connection.receive(self.config.lease_seconds)
            match message:
                case wire.PrefillRequest():
                    await self._serve_prefill(connection, message)
                case wire.PushStart():
                    await self._take_push(connection, message)
                case _:
                    raise wire.HandoffError(f"{type(message).__name__} out of turn")
        except wire.HandoffError as error:
            _log.warning("Refused a KV connection, error=%s", error)
        except (TimeoutError, *_GONE) as error:
            _log.info("A KV connection ended early, error=%s", error)
        finally:
            await connection.closed()

    @asynccontextmanager
    async def _connected(self, host: str, port: int) -> AsyncIterator[_Connection]:
        """Raises _Failed when nobody is there."""
        try:
            async with asyncio.timeout(self.config.connect_seconds):
                reader, writer = await asyncio.open_connection(host, port, limit=_STREAM_LIMIT_BYTES)
        except (OSError, TimeoutError) as error:
            raise _Failed(FailureReason.UNREACHABLE, f"{host}:{port}: {error}") from error
        connection = _Connection(reader, writer, self.config.pool_key)
        try:
            yield connection
        finally:
            await connection.closed()

    @asynccontextmanager
    async def _beating(self, beat: Callable[[], None]) -> AsyncIterator[None]:
        async def go_on() -> None:
            while True:
                await asyncio.sleep(self.config.lease_seconds / 6)
                beat()

        task = asyncio.create_task(go_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _reason_of(error: BaseException) -> FailureReason:
    return FailureReason.CORRUPT if isinstance(error, wire.HandoffError) else FailureReason.LOST


def _shape(shape: KVShape) -> tuple[int, ...]:
    return (shape.layers, shape.kv_heads, shape.head_size, shape.dtype_bytes)


def _piece(job: _PeerPrompt, part: _Part, data: bytes) -> wire.Piece:
    return wire.Piece(
        request_id=job.sequence.request_id,
        attempt=job.attempt,
        layer_start=part.layers.start,
        layer_stop=part.layers.stop,
        head_start=part.heads.start,
        head_stop=part.heads.stop,
        block_start=part.blocks.start,
        block_stop=part.blocks.stop,
        checksum=wire.checksum(data),
    )


def _manifest(job: _PeerPrompt, entries: list[tuple[int, ...]]) -> wire.Manifest:
    if job.first_token_id is None:
        raise _Failed(FailureReason.CORRUPT, "no first token")
    sequence = job.sequence
    return wire.Manifest(sequence.request_id, job.attempt, sequence.num_prompt, job.first_token_id, tuple(entries))


def _first_token_params(sampling: dict[str, Any]) -> SamplingParams:
    """What samples the first token; whether it is the last is the token machine's business. Raises HandoffError."""
    try:
        logprobs, guide, allowed = sampling["logprobs"], sampling["guide"], sampling.get("allowed_token_ids")
        return SamplingParams(
            max_tokens=1,
            temperature=float(sampling["temperature"]),
            top_p=float(sampling["top_p"]),
            top_k=int(sampling["top_k"]),
            min_p=float(sampling["min_p"]),
            seed=int(sampling["seed"]),
            stop_token_ids=tuple(int(token) for token in sampling["stop_token_ids"]),
            ignore_eos=bool(sampling["ignore_eos"]),
            min_tokens=int(sampling["min_tokens"]),
            presence_penalty=float(sampling["presence_penalty"]),
            frequency_penalty=float(sampling["frequency_penalty"]),
            repetition_penalty=float(sampling["repetition_penalty"]),
            logit_bias=tuple((int(token), float(bias)) for token, bias in sampling["logit_bias"]),
            allowed_token_ids=None if allowed is None else tuple(int(token) for token in allowed),
            guide=None if guide is None else Guide(GuideKind(guide["kind"]), str(guide["text"])),
            logprobs=None if logprobs is None else int(logprobs),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise wire.HandoffError(f"sampling: {error}") from error


def _logprobs_to_json(entry: TokenLogprobs) -> list[Any]:
    return [entry.token_id, entry.logprob, [list(pair) for pair in entry.top], entry.rank]


def _logprobs_from_json(raw: list[Any]) -> TokenLogprobs | None:
    if not raw:
        return None
    try:
        token_id, logprob, top, rank = raw[0]
        return TokenLogprobs(int(token_id), float(logprob), tuple((int(t), float(p)) for t, p in top), int(rank))
    except (TypeError, ValueError) as error:
        raise wire.HandoffError(f"logprobs: {error}") from error
