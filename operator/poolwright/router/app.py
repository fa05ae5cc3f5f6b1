"""The router's HTTP face: the OpenAI endpoints, the calls passed to any engine, health, readiness and metrics."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.routing import Route

from poolwright.core import live_work, routing
from poolwright.core.ledger import Ledger
from poolwright.core.routing import NoMachine
from poolwright.machines import Machines
from poolwright.router.config import RouterConfig
from poolwright.router.errors import RequestError, error_body
from poolwright.router.exchange import Exchanges
from poolwright.router.fleet import Fleet
from poolwright.router.metrics import RouterMetrics
from poolwright.router.probe import Probe
from poolwright.router.relay import (
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

_VERSION = version("poolwright")
_INFERENCE = ("/v1/completions", "/v1/chat/completions")
_PASSED_ON = {"/v1/models": "GET", "/tokenize": "POST", "/detokenize": "POST"}


class Router:
    """One router: what it has, and the app that serves it."""

    def __init__(self, config: RouterConfig, machines: Machines, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.ledger = Ledger()
        self.fleet = Fleet(machines, self.ledger, clock)
        self.metrics = RouterMetrics(config.pool, config.pool_namespace, config.router_uid, clock)
        self._clock = clock
        self._relay = Relay(config)
        self.exchanges = Exchanges(config, self.fleet, self.ledger, self.metrics, self._relay, clock)
        self.app = self._build()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. Inference goes straight to its exchange, past middleware and routing (0.1 ms each)."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _INFERENCE:
            await self.exchanges.serve(scope["path"], scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _build(self) -> FastAPI:
        app = FastAPI(title="Poolwright router", version=_VERSION, lifespan=self._lifespan)
        for path in _INFERENCE:
            app.router.routes.append(Route(path, _Inference(self.exchanges, path), methods=["POST"]))
        for path, method in _PASSED_ON.items():
            app.router.routes.append(Route(path, _PassedOn(self, path), methods=[method]))
        app.add_api_route("/health", _ok, methods=["GET"])
        app.add_api_route("/ready", self._ready, methods=["GET"])
        app.add_api_route("/version", _say_version, methods=["GET"])
        app.add_api_route("/metrics", self._metrics, methods=["GET"])
        app.add_api_route(names.ROUTER_WORK_PATH, self._work, methods=["GET"])
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(Exception, _internal_error)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The watch ends after the last stream: a shutdown finishes requests before it forgets machines."""
        async with self._relay:
            interval_seconds = self.config.probe_interval_seconds
            probe = Probe(self._relay, self.fleet, self.ledger, self.exchanges.beside, interval_seconds, self._clock)
            tasks = [asyncio.create_task(self.fleet.follow()), asyncio.create_task(probe.run())]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task

    async def pass_on(self, path: str, scope: Scope, receive: Receive, reply: Reply) -> None:
        """A call that any engine can answer."""
        body = await read_body(receive, scope, self.config.max_body_bytes)
        if body is None:
            return
        tried: set[str] = set()
        reason = ""
        for _ in range(self.config.max_attempts):
            now = self._clock()
            machine = routing.any_machine(self.fleet.machines, self.ledger.loads(now), frozenset(tried), now)
            if isinstance(machine, NoMachine):
                reason = machine.reason
                break
            try:
                response = await self._relay.open(
                    machine, scope["method"], path, body or None, forwarded_headers(scope)
                )
                await reply.answer(await self._relay.read(machine, response))
                return
            except MachineFailed as failure:
                self.ledger.failed(machine.uid, self._clock())
                reason = str(failure)
            except Refused as refused:
                reason = str(refused)
            tried.add(machine.uid)
        raise RequestError(
            503,
            f"No machine can take the request: {reason}.",
            kind="ServiceUnavailableError",
            retry_after_seconds=self.exchanges.retry_after_seconds(),
        )

    async def _ready(self) -> Response:
        """503 until a Ready machine has been seen; afterwards a pool without one is answered request by request."""
        return Response(status_code=200 if self.fleet.ready else 503)

    async def _work(self) -> Response:
        """What this router has outstanding, for the operator between two scrapes."""
        headers = {names.HEADER_ROUTER_UID: self.config.router_uid}
        return Response(live_work.to_json(self.ledger.work()), media_type="application/json", headers=headers)

    async def _metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.metrics.registry), headers={"content-type": content_type})


class _Inference:
    def __init__(self, exchanges: Exchanges, path: str) -> None:
        self._exchanges = exchanges
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchanges.serve(self._path, scope, receive, send)


class _PassedOn:
    def __init__(self, router: Router, path: str) -> None:
        self._router = router
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            await self._router.pass_on(self._path, scope, receive, reply)
        except RequestError as error:
            await reply.error(error)


async def _ok() -> Response:
    return Response()


async def _say_version() -> Response:
    return Response(json.dumps({"version": _VERSION}), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    return Response(
        error_body(error.status_code, str(error.detail), kind),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    return Response(
        error_body(500, "The router failed.", "InternalServerError"), status_code=500, media_type="application/json"
    )
