"""One inference request, from its arrival at the router to its outcome: choose, send, retry, relay, measure.

Retries happen only before the first event of an engine, on another machine, a bounded number of times.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from poolwright.core import routing
from poolwright.core.ledger import Entry, Ledger
from poolwright.core.machine import Machine
from poolwright.core.relegation import Judged, Relegation
from poolwright.core.routing import IDLE, Choice, Load, NoMachine, RoutingRequest, Targets, is_live
from poolwright.router import events, inference
from poolwright.router.assemble import Assembly
from poolwright.router.beside import Beside
from poolwright.router.comeback import Comeback
from poolwright.router.config import RouterConfig
from poolwright.router.errors import RequestError
from poolwright.router.events import Kind
from poolwright.router.experience import Experience
from poolwright.router.fleet import Fleet
from poolwright.router.inference import Inference
from poolwright.router.meter import Meter
from poolwright.router.metrics import RouterMetrics, Waiting
from poolwright.router.prefixes import Prefixes
from poolwright.router.refusal import Refusal, Refusals
from poolwright.router.relay import (
    JSON,
    Answer,
    MachineFailed,
    Receive,
    Refused,
    Relay,
    Reply,
    Scope,
    Send,
    forwarded_headers,
    read_body,
)
from poolwright_protocol import names
from poolwright_protocol.tickets import PromptMachine

log = logging.getLogger(__name__)

CLIENT_LEFT = 499
_BROKEN = 502
_LOGGED = 200  # characters of a refusal
_LOG_SECONDS = 60.0  # between two lines on requests that are relegated, of which there may be many
_TAIL_SECONDS = 0.25  # between [DONE] and the end of an engine's response


class Lifetime:
    """Until when a request may run; ended from outside with the code that says why."""

    def __init__(self) -> None:
        self.scope = asyncio.timeout(None)
        self.code = 0

    def end(self, code: int) -> None:
        if not self.code:
            self.code = code
            self.scope.reschedule(asyncio.get_running_loop().time())


class Exchanges:
    """All inference requests of one router."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        ledger: Ledger,
        metrics: RouterMetrics,
        relay: Relay,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._ledger = ledger
        self._metrics = metrics
        self._relay = relay
        self._clock = clock
        self._experience = Experience()
        self._relegation = Relegation()
        self._refusals = Refusals(self._relegation)
        self._comeback = Comeback()
        self._prefixes = Prefixes()
        self.beside = Beside()
        self._logged_at = -math.inf
        metrics.relegation_threshold = self._threshold
        self._lifetimes: set[Lifetime] = set()

    def end_all(self) -> None:
        """The time for finishing is over: what still runs ends with an error that says so."""
        for lifetime in list(self._lifetimes):
            lifetime.end(503)

    async def serve(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        waiting = Waiting(self._clock())
        self._metrics.arrivals += 1
        reply = Reply(send)
        code = 500
        try:
            if len(self._metrics.in_flight) >= self._config.max_in_flight_requests:
                raise _unavailable(
                    f"{self._config.max_in_flight_requests} requests are in flight already.",
                    self._comeback.turn(self._clock()),
                )
            self._metrics.in_flight[waiting] = None
            code = await self._admitted(path, scope, receive, reply, waiting)
            if code in (200, CLIENT_LEFT):
                self._comeback.ended(self._clock())
        except RequestError as error:
            if not error.counted:  # of those there may be many
                log.info("Refused a request status=%d path=%s message=%r", error.status, path, str(error)[:_LOGGED])
            code = await reply.error(error)
        except Exception:
            log.exception("A request failed path=%s", path)
            await reply.broken(code, "The router failed.")
        finally:
            self._metrics.in_flight.pop(waiting, None)
            self._metrics.finished(code)

    async def _admitted(self, path: str, scope: Scope, receive: Receive, reply: Reply, waiting: Waiting) -> int:
        try:
            async with asyncio.timeout(self._config.body_timeout_seconds):
                raw = await read_body(receive, scope, self._config.max_body_bytes)
        except TimeoutError:
            raise RequestError(408, "The body did not arrive in time.") from None
        if raw is None:
            return CLIENT_LEFT
        request = inference.parse(raw)
        self._metrics.prompt_tokens.estimated(request.prompt_tokens)
        lifetime = Lifetime()
        self._lifetimes.add(lifetime)
        try:
            async with lifetime.scope:
                watcher = asyncio.create_task(_end_when_client_leaves(receive, lifetime, reply))
                try:
                    return await self._routed(path, request, forwarded_headers(scope), reply, waiting)
                finally:
                    watcher.cancel()
        except TimeoutError:
            if lifetime.code != CLIENT_LEFT:
                await reply.broken(lifetime.code, "The router is shutting down.")
            return lifetime.code
        finally:
            self._lifetimes.discard(lifetime)

    async def _routed(
        self, path: str, request: Inference, headers: dict[str, str], reply: Reply, waiting: Waiting
    ) -> int:
        tried: set[str] = set()
        refusal: Answer | None = None
        reason = ""
        judged: Judged | None = None
        for _ in range(self._config.max_attempts):
            self._prefixes.follow(self._fleet.machines)
            held = self._prefixes.held(request.prefix)
            wanted, targets = self._wanted(request, tried, held)
            now = self._clock()
            context_tokens = wanted.prompt_tokens + wanted.output_tokens / 2
            loads = self.beside.added(self._ledger.loads(now), now, context_tokens)
            choice = routing.choose(wanted, self._fleet.machines, loads, now, targets)
            if isinstance(choice, NoMachine):
                reason = choice.reason
                break
            if judged is None:
                judged = self._judge(wanted, loads, now, targets, choice, reply)
            machine, relegated = choice.token, judged.reason is not None
            computes = choice.prompt or choice.token
            cached = wanted.cached_tokens.get(computes.uid, 0)
            entry = self._ledger.begin(choice, wanted.prompt_tokens, now, cached, wanted.output_tokens, relegated)
            self._prefixes.record(request.prefix, {computes, machine})
            self.beside.sent(machine.uid)
            share = held.get(machine.uid, 0.0) if computes is machine else 0.0
            try:
                return await self._attempt(path, request, headers, reply, waiting, choice, entry, judged, share)
            except MachineFailed as failure:
                self._ledger.failed(machine.uid, self._clock())
                reason = str(failure)
            except Refused as refused:
                self._ledger.answered(machine.uid)
                refusal = refused.answer
            finally:
                entry.close()
                self.beside.ended(machine.uid)
            tried.add(machine.uid)
            judged.tried_again()
        if refusal is not None:
            return await reply.answer(refusal)
        raise _unavailable(f"No machine can take the request: {reason}.", self.retry_after_seconds())

    def retry_after_seconds(self) -> int:
        """Where no machine took a request: until one that failed is tried again, or one that is starting is Ready."""
        now = self._clock()
        loads = self._ledger.loads(now)
        pauses = [loads.get(m.uid, IDLE).avoid_until - now for m in self._fleet.machines if is_live(m)]
        return self._comeback.turn(now, min(pauses) if pauses else self._fleet.ready_in_seconds(now))

    def _wanted(
        self, request: Inference, tried: set[str], held: Mapping[str, float]
    ) -> tuple[RoutingRequest, Targets | None]:
        """What is expected of a request matters only to prices: without them a prompt is as long as it looks."""
        output_tokens = self._experience.answer_tokens(request.most_tokens)
        targets = self._fleet.targets(output_tokens)
        if targets is None:
            prompt_tokens, output_tokens = request.prompt_tokens, 0.0
        else:
            prompt_tokens = self._experience.prompt_tokens(request.prompt_tokens)
        wanted = RoutingRequest(
            prompt_tokens,
            frozenset(tried),
            self._config.local_prompt_tokens,
            self._prefixes.cached_tokens(held, prompt_tokens),
            output_tokens,
        )
        return wanted, targets

    def _judge(
        self,
        request: RoutingRequest,
        loads: Mapping[str, Load],
        now: float,
        targets: Targets | None,
        choice: Choice,
        reply: Reply,
    ) -> Judged:
        """Whether it goes behind all others, for as long as this router has it. Raises RequestError where it may not
        go on at all."""
        relegates, machines = self._fleet.relegates, self._fleet.machines
        if targets is None or not (relegates or self._fleet.refuses):
            return Judged()
        judged = self._relegation.judge(request, machines, loads, now, targets, choice)
        if self._fleet.refuses:
            refusal = self._refusals.judge(request, machines, loads, now, targets, judged, relegates)
            if refusal is not None:
                raise self._refused(refusal, now, reply)
            if not relegates:
                judged.reason = None
        if judged.reason is not None:
            self._metrics.relegated[judged.reason] += 1
            reply.say(names.HEADER_RELEGATED, judged.reason.value)
            if now >= self._logged_at + _LOG_SECONDS:
                self._logged_at = now
                log.info(
                    "Served a request behind all others, as others are counted for a minute: its first token would be "
                    "late reason=%s predicted_seconds=%.2f target_seconds=%.2f",
                    judged.reason.value,
                    judged.predicted_seconds,
                    targets.ttft_seconds,
                )
        return judged

    def _refused(self, refusal: Refusal, now: float, reply: Reply) -> RequestError:
        self._metrics.refused[refusal.reason] += 1
        reply.say(names.HEADER_REFUSED, refusal.reason.value)
        if refusal.retry_seconds is None:
            return RequestError(422, str(refusal), counted=True)
        return _unavailable(str(refusal), self._comeback.turn(now, refusal.retry_seconds, refusal.pace_seconds))

    def _threshold(self) -> float:
        told = (self._fleet.relegates or self._fleet.refuses) and self._fleet.targets(1.0) is not None
        return self._relegation.threshold(self._clock()) if told else math.inf

    async def _attempt(
        self,
        path: str,
        request: Inference,
        headers: dict[str, str],
        reply: Reply,
        waiting: Waiting,
        choice: Choice,
        entry: Entry,
        judged: Judged,
        share: float,
    ) -> int:
        """The code of the outcome. Raises MachineFailed or Refused while nothing has reached the client. `share`: of
        the prompt, what the machine that answers should find in its cache."""
        if judged.reason is not None:
            headers = {**headers, names.HEADER_RELEGATED: "1"}
        if choice.prompt is not None:
            headers = {**headers, names.HEADER_PROMPT_MACHINE: self._ticket(choice.prompt)}
        machine = choice.token
        response = await self._relay.open(machine, "POST", path, request.body, headers)
        try:
            self._ledger.answered(machine.uid)
            meter = Meter(self._metrics, waiting, entry, judged, request.prompt_tokens, request.choices)
            if response.status != 200 or response.content_type != "text/event-stream":
                answer = await self._relay.read(machine, response)
                if answer.status == 200:
                    meter.whole(_usage_of(answer.body))
                return await reply.answer(answer)
            reply.name(response)
            code = await self._stream(machine, response, request, reply, meter)
            self._prefixes.found(share, meter.cached_tokens, meter.prompt_tokens)
            return code
        finally:
            response.close()  # gives the connection back after its end, and cuts it before

    async def _stream(
        self, machine: Machine, response: aiohttp.ClientResponse, request: Inference, reply: Reply, meter: Meter
    ) -> int:
        view = _View(request, meter)
        broken = "its stream ended early"
        try:
            while not view.ended() and (data := await response.content.readany()):
                out = view.feed(data, self._clock())
                if view.failure and not reply.streaming:
                    if view.failure.status == 503 and not meter.begun:
                        raise Refused(view.failure)
                    return await reply.answer(view.failure)
                if view.ended() and reply.streaming and response.content.at_eof():
                    await reply.end_events(out)
                elif out and request.stream:
                    await reply.event_bytes(out)
                if view.failure:
                    await reply.end_events()
                    return view.failure.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            broken = str(error) or type(error).__name__
        if not view.ended():
            if not view.begun:
                raise MachineFailed(f"machine {machine.name}: {broken}")
            self._ledger.failed(machine.uid, self._clock())
            return await reply.broken(_BROKEN, f"The engine broke off: {broken}.")
        meter.finish()
        self._experience.add(request.prompt_tokens, meter.prompt_tokens, meter.answer_tokens)
        if not response.content.at_eof():
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with asyncio.timeout(_TAIL_SECONDS):  # at its end the connection can be kept
                    await response.content.readany()
        if request.stream:
            await reply.end_events()
        else:
            await reply.whole(200, view.assembly.body())
        return 200

    def _ticket(self, prompt: Machine) -> str:
        assert prompt.host is not None
        expires_at = time.time() + self._config.prompt_ticket_seconds
        return PromptMachine(prompt.uid, prompt.host, prompt.kv_port, expires_at).encode(self._config.pool_key)


class _View:
    """An engine's stream as the client asked to see it."""

    def __init__(self, request: Inference, meter: Meter) -> None:
        self._request = request
        self._meter = meter
        self._splitter = events.Splitter()
        self._whole = request.choices > 1 or not request.stream
        self.assembly = Assembly(request.must_call)
        self.begun = False
        self._done = False
        self.failure: Answer | None = None  # an error that the engine reported in the stream

    def ended(self) -> bool:
        """[DONE] has been seen."""
        return self._done

    def feed(self, data: bytes, now: float) -> bytes:
        """What of this the client gets. Raises ValueError for what is no event stream."""
        out: list[bytes] = []
        for raw in self._splitter.feed(data):
            event = events.read(raw, self._whole)
            self.begun = True
            shown = event.raw if self._request.continuous_usage else event.bare
            if event.kind is Kind.TOKENS:
                if event.usage:
                    self._meter.tokens(event.choice, event.usage, now)
            elif event.kind is Kind.USAGE:
                self._meter.total(event.usage or {})
                shown = event.raw if self._request.include_usage else b""
            elif event.kind is Kind.DONE:
                self._done = True
            elif event.kind is Kind.ERROR:
                self.failure = _failure(event)
            if shown:
                out += (shown, b"\n\n")
            if not self._request.stream and event.fields and event.kind in (Kind.TOKENS, Kind.USAGE):
                self.assembly.add(event.fields)
            if self._done or self.failure:
                break
        return b"".join(out)


def _unavailable(message: str, retry_after_seconds: int) -> RequestError:
    return RequestError(
        503, message, kind="ServiceUnavailableError", retry_after_seconds=retry_after_seconds, counted=True
    )


def _usage_of(body: bytes) -> dict[str, Any]:
    """Empty where it says none."""
    with suppress(ValueError):
        fields = json.loads(body)
        usage = fields.get("usage") if isinstance(fields, dict) else None
        if isinstance(usage, dict):
            return usage
    return {}


def _failure(event: events.Event) -> Answer:
    """The error that an engine reported in its stream, as the answer it would have been before the stream."""
    error = (event.fields or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return Answer(status, [JSON], json.dumps({"error": error}).encode())


async def _end_when_client_leaves(receive: Receive, lifetime: Lifetime, reply: Reply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not reply.ended:  # the server reports the end of an answer as a disconnect too
        lifetime.end(CLIENT_LEFT)
