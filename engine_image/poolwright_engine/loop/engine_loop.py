"""`EngineLoop`: one thread that schedules, submits one step ahead, and hands tokens to the event loop.

It owns the scheduler, the runner and the role; it knows no HTTP, no text and no sockets. Other threads reach its state
only by `post`: a command runs between two steps, in order. What it says, it says on the event loop that started it.

    engine = EngineLoop(runner, config=LoopConfig(...), identity=Identity(...), eos_token_ids=..., observer=...)
    exchange = KvExchange(engine, HandoffConfig(...))   # handoff/; without it no prompt is computed elsewhere
    await engine.start()
    await exchange.start()                              # listens on the KV port; then `exchange.port`
    ...
    await engine.drain(limit_seconds)
    await exchange.close()
    await engine.close()                                # joins the thread and closes the runner
"""

import asyncio
import concurrent.futures
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from poolwright_engine.loop.engine import EngineStats, Heartbeat, Refused, RoleRefused
from poolwright_engine.loop.observer import Observer
from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.runner import Handle, ModelRunner, Step, StepResult
from poolwright_engine.scheduling.scheduler import Decision, Scheduler, work_of
from poolwright_engine.scheduling.scheduler_config import SchedulerConfig
from poolwright_engine.scheduling.sequence import (
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    TokenLogprobs,
    TokenOutput,
)
from poolwright_engine.scheduling.step_times import StepTimes
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role, RolePut, RoleState

T = TypeVar("T")

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1
_RESTART_SECONDS = 5  # the process ends; another in its place first loads a model
_CHECK_SECONDS = 5.0  # at least so long between two looks at the books
_FIT_SECONDS = 5.0  # at least so long between two fits of what steps take
_ABORTED = TokenOutput(finish_reason=FinishReason.ABORT, error="the engine is shutting down")


class EngineDead(Exception):
    """The loop has ended; what was asked of it will not be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig(SchedulerConfig):
    max_waiting: int = 1024  # requests that are not running yet; more are refused with 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`role` None: started without POOLWRIGHT_ROLE; acts as mixed and takes any role at an epoch ≥ `role_epoch`."""

    pod_uid: str
    role: Role | None = None
    role_epoch: int = 0


class Tenant(Protocol):
    """Whoever has a sequence here: a client, or a peer whose prompt is computed here."""

    sequence: Sequence

    def deliver(self, output: TokenOutput) -> None:
        """On the event loop. After an output with a finish reason, the sequence has left the scheduler's queues."""
        ...


class PeerTenant(Tenant, Protocol):
    """Both are called on the loop's thread."""

    def admitted(self) -> None:
        """It has memory now: ask the token machine for its own."""
        ...

    def submitted(self) -> None:
        """A step that computes a part of it has been submitted."""
        ...


class Exchange(Protocol):
    """The hand-off, as far as the loop knows it. On the event loop."""

    def fetch(self, sequence: Sequence) -> None:
        """Have a REMOTE sequence's prompt computed elsewhere; any failure ends in `EngineLoop.compute_here`."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants it any more."""
        ...


@dataclass(slots=True, eq=False)
class _Client:
    sequence: Sequence
    outputs: asyncio.Queue[TokenOutput] = field(default_factory=asyncio.Queue)
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float = 0.0
    ended: bool = False

    def deliver(self, output: TokenOutput) -> None:
        self.outputs.put_nowait(output)


@dataclass(frozen=True, slots=True)
class _Flight:
    step: Step
    num_prefill_tokens: int
    handle: Handle[StepResult]


@dataclass(frozen=True, slots=True)
class _Write:
    """KV on its way into the cache, or to host memory. `after`: the newest step submitted before it."""

    after: int
    handle: Handle[None]
    done: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    running: int
    parked: int
    free_blocks: int
    waiting_prompt_tokens: int
    step: Step | None = None  # the oldest that was not read
    owes: bool = False  # a step is in flight, or somebody runs or waits here


class EngineLoop:
    def __init__(
        self,
        runner: ModelRunner,
        *,
        config: LoopConfig,
        identity: Identity,
        eos_token_ids: frozenset[int],
        observer: Observer | None = None,
        step_times: StepTimes | None = None,
    ) -> None:
        """`step_times`: what is known of them at the start."""
        self.max_model_len = config.max_model_len
        self.runner = runner
        self.scheduler = Scheduler(
            config,
            BlockPool(
                runner.num_blocks,
                runner.block_size,
                runner.num_host_blocks,
                runner.kv_shape.bytes_per_block(runner.block_size),
            ),
            eos_token_ids,
        )
        self.observer = observer or Observer()
        self.identity = identity
        self.boot_id = secrets.token_hex(8)
        self.gave_up: str | None = None
        self._config = config
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

        # Of the event loop.
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._exchange: Exchange | None = None
        self._live: set[Tenant] = set()
        self._draining = False
        self._emptied = asyncio.Event()

        # Shared, under the condition's lock.
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._dead: str | None = None
        self._calls: set[concurrent.futures.Future[None]] = set()

        # Of the loop's thread.
        self._tenants: dict[Sequence, Tenant] = {}
        self._peers: dict[Sequence, PeerTenant] = {}
        self._grant_waiters: dict[Sequence, Callable[[tuple[int, ...]], None]] = {}
        self._outbox: list[tuple[Tenant, TokenOutput]] = []
        self._pending: deque[_Flight] = deque()
        self._checked_seconds = 0.0
        self._writes: deque[_Write] = deque()
        self._step_number = 0
        self._steps_read = 0
        self._role = identity.role or Role.MIXED
        self._role_put = identity.role  # None: no role was PUT at this epoch
        self._epoch = identity.role_epoch
        self._prefill_bound: int | None = None
        self._boundaries = 0
        self._switched_seconds = 0.0
        self._foreign: set[Sequence] = set()
        self._drained_seconds: float | None = None
        self._step_times = step_times or StepTimes()
        self._fitted_seconds = time.monotonic()
        self._profile = self._fit_profile()

        # Written by the loop's thread as whole values, read by any.
        self._snapshot = _Snapshot(0, 0, self.scheduler.blocks.num_free, 0)
        self._role_state = self._describe_role()

    # On the event loop: what the server asks.

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    def attach(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        client = self._enter_client(request)
        try:
            while True:
                output = await client.outputs.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._leave_client(client)

    async def put_role(self, put: RolePut) -> RoleState:
        state: concurrent.futures.Future[RoleState] = concurrent.futures.Future()

        def switch() -> None:
            try:
                self._put_role(put)
                self._role_state = self._describe_role()  # whoever asks after the answer sees the switch
                state.set_result(self._role_state)
            except RoleRefused as refusal:
                state.set_exception(refusal)

        try:
            await self.call(switch)
        except EngineDead as error:
            raise RoleRefused(503, str(error)) from error
        return state.result()

    def role_state(self) -> RoleState:
        return self._role_state

    def stats(self) -> EngineStats:
        """`waiting` are those that do not run yet, hand-offs included; `oldest_waiting_seconds` is the age of the
        oldest without a first token; `waiting_prompt_tokens` are those still to be computed here."""
        snapshot, total = self._snapshot, self.scheduler.blocks.total
        clients = [tenant for tenant in list(self._live) if isinstance(tenant, _Client)]
        arrivals = [c.sequence.request.arrival_seconds for c in clients if c.first_token_seconds is None]
        return EngineStats(
            running=snapshot.running,
            waiting=self._num_waiting,
            kv_usage=1 - snapshot.free_blocks / total,
            kv_free_blocks=snapshot.free_blocks,
            kv_total_blocks=total,
            waiting_prompt_tokens=snapshot.waiting_prompt_tokens,
            oldest_waiting_seconds=max(0.0, time.monotonic() - min(arrivals)) if arrivals else 0.0,
            deferred=min(self._num_waiting, sum(c.sequence.state is SequenceState.REMOTE for c in clients)),
        )

    @property
    def healthy(self) -> bool:
        return self._dead is None

    def heartbeat(self) -> Heartbeat:
        """From any thread, also while the loop's hangs."""
        snapshot = self._snapshot
        step = None if snapshot.step is None else _described(snapshot.step)
        return Heartbeat(self._steps_read, snapshot.owes or bool(self._inbox), step)

    def give_up(self, reason: str) -> None:
        """The loop's thread hangs in a call and cannot be reached: tell everyone, without it. The process must end."""
        if self._dead is None:
            self._dead = self.gave_up = f"the engine failed: {reason}"
            self._everyone(TokenOutput(finish_reason=FinishReason.ERROR, error=self._dead))

    async def drain(self, limit_seconds: float) -> None:
        self._draining = True
        try:
            await asyncio.wait_for(self._until_empty(), limit_seconds)
        except TimeoutError:
            self.post(self._abort_all)
            # Their readers need a moment to take the last word.
            try:
                await asyncio.wait_for(self._until_empty(), 1.0)
            except TimeoutError:
                _log.warning("Drain left readers that do not read, tenants=%d", len(self._live))

    async def close(self) -> None:
        """Ends the thread after the steps in flight. Who is still here gets an abort."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # On the event loop: what the hand-off asks.

    def enter_peer(self, tenant: PeerTenant) -> None:
        """Queue a prompt that another machine wants computed. Raises Refused."""
        self._admit(tenant)

        def add() -> None:
            self._peers[tenant.sequence] = tenant
            self._add(tenant)

        self._post_new(tenant, add)

    def leave_peer(self, tenant: PeerTenant) -> None:
        """Sent, or no longer wanted: what it holds is freed once no step may write it."""
        self._left(tenant)
        self.post(lambda: self._release(tenant.sequence))

    def first_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """A REMOTE sequence's first token came. Its client has it at once, not at the next boundary."""
        output = self.scheduler.output(sequence.request, 1, token_id, logprobs)
        client = next((t for t in self._live if t.sequence is sequence and isinstance(t, _Client)), None)
        if client is not None:
            self._observe_tokens(client, output, transferred=True)
            client.deliver(output)

        def accept() -> None:
            if sequence.state is SequenceState.REMOTE:
                known = self.scheduler.accept(sequence, token_id, now=time.monotonic())
                if known.finish_reason is not None:
                    self._forget(sequence)

        self.post(accept)
        return output

    def post(self, command: Callable[[], None]) -> bool:
        """Run it on the loop's thread between two steps. From any thread. False: the loop has ended."""
        with self._condition:
            if self._dead is not None or self._stopping:
                return False
            self._inbox.append(command)
            self._condition.notify()
            return True

    async def call(self, command: Callable[[], None]) -> None:
        """`post`, and wait until it has run. Raises EngineDead."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            command()
            with self._condition:
                self._calls.discard(done)
            done.set_result(None)

        with self._condition:
            self._calls.add(done)
        if not self.post(run):
            with self._condition:
                self._calls.discard(done)
            raise EngineDead(self._dead or "the engine is shutting down")
        await asyncio.wrap_future(done)

    def tell(self, callback: Callable[[], None]) -> None:
        """From any thread: run it on the event loop."""
        if self._event_loop is None:
            raise RuntimeError("the loop has not been started")
        try:
            self._event_loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The event loop is closed: nobody is left to hear.
            _log.debug("Nobody heard a callback after the event loop was closed")

    # On the loop's thread: what the hand-off does there, by `post`.

    def ask_memory(self, sequence: Sequence, granted: Callable[[tuple[int, ...]], None]) -> None:
        """Queue a REMOTE sequence for memory; `granted` gets the blocks of its prompt, on the loop's thread."""
        if sequence.state is SequenceState.REMOTE and sequence not in self._grant_waiters and not sequence.block_ids:
            self._grant_waiters[sequence] = granted
            self.scheduler.add(sequence)

    def write_kv(
        self, layers: range, kv_heads: range, block_ids: tuple[int, ...], data: bytes, done: Callable[[], None]
    ) -> None:
        handle = self.runner.write_blocks(layers, kv_heads, block_ids, data)
        self._writes.append(_Write(self._step_number - 1, handle, done))

    def compute_here(self, sequence: Sequence) -> None:
        self._grant_waiters.pop(sequence, None)
        if sequence.state is SequenceState.REMOTE:
            self.scheduler.compute_here(sequence)

    # Parts of the event loop's side.

    @property
    def _num_waiting(self) -> int:
        return max(0, len(self._live) - self._snapshot.running - self._snapshot.parked)

    def _admit(self, tenant: Tenant) -> None:
        request = tenant.sequence.request
        if self._dead is not None or self._stopping:
            raise self._ended()
        if self._draining:
            raise self._refusal("draining", 503, "the engine is draining", _RETRY_SECONDS)
        never = self.scheduler.why_never(request)
        if never is not None:
            raise self._refusal("too_long", 400, never)
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.runner.vocab_size:
            raise self._refusal("invalid", 400, f"a token id is outside [0, {self.runner.vocab_size})")
        if self._num_waiting >= self._config.max_waiting:
            message = f"{self._num_waiting} requests are waiting, which is the limit"
            raise self._refusal("queue_full", 429, message, _RETRY_SECONDS)

    def _ended(self) -> Refused:
        return self._refusal("dead", 503, self._dead or "the engine is shutting down", _RESTART_SECONDS)

    def _refusal(self, reason: str, status: int, message: str, retry_after_seconds: int | None = None) -> Refused:
        self.observer.refused(reason)
        return Refused(status, message, retry_after_seconds)

    def _enter_client(self, request: Request) -> _Client:
        sequence = Sequence(request)
        client = _Client(sequence)
        self._admit(client)
        # The prompt's log probabilities are made where its tokens are, and no message carries them.
        wants_prompt_logprobs = request.params.prompt_logprobs is not None
        remote = self._exchange is not None and request.prompt_machine is not None and not wants_prompt_logprobs
        if remote:
            sequence.state = SequenceState.REMOTE
        self._post_new(client, lambda: self._add(client))
        if remote and self._exchange is not None:
            self._exchange.fetch(sequence)
        return client

    def _post_new(self, tenant: Tenant, add: Callable[[], None]) -> None:
        self._live.add(tenant)
        if not self.post(add):
            self._left(tenant)
            raise self._ended()

    def _leave_client(self, client: _Client) -> None:
        self._left(client)
        if self._exchange is not None and client.sequence.request.prompt_machine is not None:
            self._exchange.cancel(client.sequence)

        def release() -> None:
            self._observe_end(client, FinishReason.ABORT)
            self._release(client.sequence)

        if not self.post(release):
            self._observe_end(client, FinishReason.ABORT)

    def _left(self, tenant: Tenant) -> None:
        self._live.discard(tenant)
        if not self._live:
            self._emptied.set()

    async def _until_empty(self) -> None:
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def _observe_tokens(self, client: _Client, output: TokenOutput, transferred: bool = False) -> None:
        """Before the output is delivered, on whichever thread makes it: a client's tokens come from one at a time."""
        now = time.monotonic()
        request = client.sequence.request
        if output.token_ids:
            if client.first_token_seconds is None:
                if client.scheduled_seconds is None:
                    client.scheduled_seconds = now
                    self.observer.request_scheduled(now - request.arrival_seconds)
                client.first_token_seconds = now
                self.observer.first_token(now - request.arrival_seconds, now - client.scheduled_seconds)
                self.observer.prompt_tokens(len(request.prompt_ids), transferred, output.num_cached_tokens or 0)
            else:
                self.observer.inter_token(now - client.last_token_seconds)
                for _ in output.token_ids[1:]:
                    self.observer.inter_token(0.0)  # guesses that came true came together
            client.last_token_seconds = now
            self.observer.generation_tokens(len(output.token_ids))
        if output.finish_reason is not None:
            self._observe_end(client, output.finish_reason, len(output.token_ids))

    def _observe_end(self, client: _Client, reason: FinishReason, just_now: int = 0) -> None:
        """Once; later calls say nothing."""
        if client.ended:
            return
        client.ended = True
        now, request = time.monotonic(), client.sequence.request
        self.observer.request_preemptions(client.sequence.num_preemptions)
        generated = len(client.sequence.output_ids)
        if client.first_token_seconds is not None and generated == 0:
            generated = just_now  # a first token from elsewhere, which the scheduler has yet to hear of
        self.observer.finished(
            reason,
            len(request.prompt_ids),
            generated,
            request.params.max_tokens,
            now - request.arrival_seconds,
            now - client.scheduled_seconds if client.scheduled_seconds is not None else 0.0,
            now - client.first_token_seconds if client.first_token_seconds is not None else 0.0,
        )

    def _everyone(self, output: TokenOutput) -> None:
        for tenant in list(self._live):
            if isinstance(tenant, _Client) and output.finish_reason is not None:
                self._observe_end(tenant, output.finish_reason)
            tenant.deliver(output)

    # The loop's thread.

    def _run(self) -> None:
        last_word = _ABORTED
        try:
            while not self._stopping:
                self._iterate()
            while self._pending:
                self._pending.popleft().handle.result()
        except Exception as error:
            _log.exception("The engine loop failed")
            self._dead = f"the engine failed: {type(error).__name__}: {error}"
            last_word = TokenOutput(finish_reason=FinishReason.ERROR, error=self._dead)
        finally:
            self._bury(last_word)
            self.runner.close()

    def _bury(self, last_word: TokenOutput) -> None:
        with self._condition:
            self._stopping = True
            self._inbox.clear()
            calls, self._calls = self._calls, set()
        for call in calls:
            call.set_exception(EngineDead(last_word.error or "the engine has ended"))
        self._flush()
        self.tell(lambda: self._everyone(last_word))

    def _iterate(self) -> None:
        """One step boundary: hear, schedule, submit; then read the step before."""
        self._take_commands()
        decision = self.scheduler.schedule(self._step_number, self._prefill_bound, time.monotonic())
        self._act(decision)
        self._boundaries += 1
        self._publish()
        self._flush()
        if len(self._pending) >= self._config.steps_in_flight or (self._pending and decision.step is None):
            flight = self._pending.popleft()
            result = flight.handle.result()
            self._take_commands()  # an abort that came during the step wins over its output
            self._settle_writes()
            self._read(flight, result)
            self._flush()
        elif not self._pending:
            self._settle_writes()
            self._check_books()
            self._publish()
            with self._condition:
                if not self._inbox and not self._stopping:
                    wake = decision.wake_seconds
                    self._condition.wait(None if wake is None else max(0.0, wake - time.monotonic()))

    def _take_commands(self) -> None:
        with self._condition:
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()

    def _act(self, decision: Decision) -> None:
        now = time.monotonic()
        for sequence in decision.granted:
            waiter = self._grant_waiters.pop(sequence)
            waiter(tuple(sequence.block_ids[: -(-sequence.num_prompt // self.runner.block_size)]))
        for sequence in decision.preempted:
            self.observer.preempted(bool(sequence.host_block_ids))
        for sequence in decision.admitted:
            if sequence.num_preemptions == 0 and self._config.enable_prefix_caching:
                self.observer.prefix_lookup(sequence.num_prompt, sequence.num_cached or 0)
            tenant = self._tenants[sequence]
            if isinstance(tenant, _Client) and tenant.scheduled_seconds is None:
                tenant.scheduled_seconds = now
                self.observer.request_scheduled(now - sequence.request.arrival_seconds)
        for sequence in decision.asking:
            self._peers[sequence].admitted()
        for swap in decision.swaps_out:
            self._swapped(self.runner.swap_out(swap.block_ids, swap.host_block_ids), len(swap.block_ids), out=True)
        for swap in decision.swaps_in:
            self._swapped(self.runner.swap_in(swap.host_block_ids, swap.block_ids), len(swap.block_ids), out=False)
        if decision.step is not None:
            handle = self.runner.submit(decision.step)
            self._pending.append(_Flight(decision.step, decision.num_prefill_tokens, handle))
            self._step_number += 1
            if decision.padded_tokens:
                self.observer.padded(decision.padded_tokens)
            for sequence in decision.computing:
                if sequence.for_peer:
                    self._peers[sequence].submitted()

    def _swapped(self, handle: Handle[None], num_blocks: int, out: bool) -> None:
        self._writes.append(_Write(self._step_number - 1, handle))
        self.observer.swapped(num_blocks, out)

    def _read(self, flight: _Flight, result: StepResult) -> None:
        self._steps_read += 1
        for sequence, output in self.scheduler.update(result, time.monotonic()):
            tenant = self._tenants[sequence]
            if isinstance(tenant, _Client):
                self._observe_tokens(tenant, output)
            elif output.token_ids:
                self.observer.prefill_served(sequence.num_prompt)
            self._outbox.append((tenant, output))
            if sequence.state is SequenceState.FINISHED:
                self._forget(sequence)
        work = work_of(flight.step, flight.num_prefill_tokens > 0)
        self.observer.step(work.tokens, flight.num_prefill_tokens, result.busy_seconds)
        self._step_times.observe(work, result.busy_seconds)
        now = time.monotonic()
        if now >= self._fitted_seconds + _FIT_SECONDS:
            self._fitted_seconds = now
            self._profile = self._fit_profile()

    def _fit_profile(self) -> MachineProfile | None:
        """None while neither kind of step is known: then there is nothing to say of this machine's work."""
        decode, mixed = self._step_times.decode, self._step_times.mixed
        if mixed is not None:
            self.scheduler.prompt_overhead_tokens = mixed.overhead_tokens
        if decode is None and mixed is None:
            return None
        blocks = self.scheduler.blocks
        return MachineProfile(
            decode=decode,
            mixed=mixed,
            max_tokens_per_step=self._config.step_tokens,
            max_sequences=self._config.max_num_seqs,
            tile_tokens=self._config.tile_tokens,
            kv_capacity_tokens=blocks.total * blocks.block_size,
            kv_bytes_per_token=self.runner.kv_shape.bytes_per_token,
        )

    def _settle_writes(self) -> None:
        """Those behind no step still in flight have ended; a failure among them is the device's."""
        oldest = self._pending[0].step.number if self._pending else self._step_number
        while self._writes and self._writes[0].after < oldest:
            write = self._writes.popleft()
            write.handle.result()
            if write.done is not None:
                write.done()

    def _check_books(self) -> None:
        """Nothing runs, so there is time for it. What does not balance ends the engine: its answers may be wrong."""
        now = time.monotonic()
        if now >= self._checked_seconds + _CHECK_SECONDS:
            self._checked_seconds = now
            self.scheduler.check()

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self.tell(lambda: _deliver(outbox))

    def _publish(self) -> None:
        scheduler = self.scheduler
        uncomputed = sum(s.num_prompt for s in scheduler.waiting if s.state is SequenceState.WAITING)
        uncomputed += sum(max(0, s.num_prompt - s.num_computed) for s in scheduler.running if s.is_prefilling)
        owes = bool(self._pending or scheduler.running or scheduler.waiting)
        self._snapshot = _Snapshot(
            len(scheduler.running),
            len(scheduler.parked),
            scheduler.blocks.num_free,
            uncomputed,
            self._pending[0].step if self._pending else None,
            owes,
        )
        self._role_state = self._describe_role()

    def _add(self, tenant: Tenant) -> None:
        self._tenants[tenant.sequence] = tenant
        if tenant.sequence.state is SequenceState.WAITING:
            self.scheduler.add(tenant.sequence)

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._tenants.pop(sequence, None)
        self._peers.pop(sequence, None)
        self._grant_waiters.pop(sequence, None)
        if sequence in self._foreign:
            self._foreign.remove(sequence)
            if not self._foreign:
                self._drained_seconds = time.monotonic() - self._switched_seconds

    def _abort_all(self) -> None:
        for sequence, tenant in list(self._tenants.items()):
            self.scheduler.release(sequence)
            if isinstance(tenant, _Client):
                self._observe_end(tenant, FinishReason.ABORT)
            self._outbox.append((tenant, _ABORTED))
            self._forget(sequence)

    # The role.

    def _put_role(self, put: RolePut) -> None:
        if put.pod_uid != self.identity.pod_uid:
            raise RoleRefused(421, f"this is machine {self.identity.pod_uid}, not {put.pod_uid}")
        if put.epoch < self._epoch:
            raise RoleRefused(409, f"epoch {put.epoch} is older than {self._epoch}")
        if put.epoch == self._epoch and self._role_put not in (None, put.role):
            raise RoleRefused(409, f"epoch {put.epoch} already has role {self._role_put}")
        self._prefill_bound = put.max_prefill_tokens_per_step
        if put.epoch == self._epoch and self._role_put is put.role:
            return
        if put.role is not self._role:
            self._switched_seconds = time.monotonic()
            self._foreign = set(self._tenants)
            self._drained_seconds = None if self._foreign else 0.0
        self._role = self._role_put = put.role
        self._epoch = put.epoch
        self._boundaries = 0

    def _describe_role(self) -> RoleState:
        return RoleState(
            pod_uid=self.identity.pod_uid,
            boot_id=self.boot_id,
            role=self._role,
            epoch=self._epoch,
            steps_since_switch=self._boundaries,
            foreign_requests=len(self._foreign),
            drained_seconds=self._drained_seconds,
            max_prefill_tokens_per_step=self._prefill_bound,
            step_profile=self._profile,
        )


def _described(step: Step) -> str:
    rows, longest = len(step.rows), max(step.contexts)
    return f"step {step.number}: tokens={step.num_tokens} rows={rows} longest_context={longest}"


def _deliver(outbox: list[tuple[Tenant, TokenOutput]]) -> None:
    for tenant, output in outbox:
        tenant.deliver(output)
