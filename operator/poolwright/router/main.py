"""Runs a router: `python -m poolwright.router` over the pods of a pool or over a file; `serve` in another process."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from uuid import uuid4

import uvicorn

from poolwright import arguments as given
from poolwright.kube import KubeClient, KubeMachines
from poolwright.machines import Machines, Unavailable
from poolwright.router.app import Router
from poolwright.router.config import RouterConfig
from poolwright.router.sources import FileMachines
from poolwright_protocol import keys, names

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0  # for the errors of streams that outlived the drain


class _Server(uvicorn.Server):
    """Stops when told to, not by signals: the process may hold more than a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        drain_seconds = router.config.drain_seconds
        super().__init__(
            uvicorn.Config(
                router,
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                backlog=2048,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(drain_seconds + _LAST_WORDS_SECONDS) + 1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new; streams may finish within the drain; what is left then ends with an error that says so."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._router.config.drain_seconds, self._router.exchanges.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


async def serve(config: RouterConfig, machines: Machines, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve on a bound socket until `stop`, then drain. Raises RuntimeError if it cannot start."""
    server = _Server(Router(config, machines))

    async def stopped() -> None:
        await stop.wait()
        server.should_exit = True

    waiter = asyncio.create_task(stopped())
    try:
        await server.serve(sockets=[listener])
    finally:
        waiter.cancel()
    if not server.started:
        raise RuntimeError("the router did not start")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = _config(options, environment)
        if options.machines_file is not None:
            FileMachines(options.machines_file).check()
        listener = listen(options.host, options.port)
    except OSError as error:
        print(f"poolwright router: cannot listen on {options.host}:{options.port}: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, Unavailable) as error:
        print(f"poolwright router: {error}", file=sys.stderr)
        return 2
    try:
        _run(_until_signal(options, config, listener))
    except Unavailable as error:
        print(f"poolwright router: {error}", file=sys.stderr)
        return 2
    finally:
        listener.close()
    return 0


def _run(work: Coroutine[object, object, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _until_signal(options: argparse.Namespace, config: RouterConfig, listener: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _machines(options, config) as machines:
        log.info("Listening address=%s:%d router_uid=%s", *listener.getsockname()[:2], config.router_uid)
        await serve(config, machines, listener, stop)
    log.info("Stopped")


@asynccontextmanager
async def _machines(options: argparse.Namespace, config: RouterConfig) -> AsyncIterator[Machines]:
    if options.machines_file is not None:
        yield FileMachines(options.machines_file)
        return
    async with await KubeClient.connect(user_agent="poolwright-router") as client:
        yield KubeMachines(client, config.pool_namespace, config.pool)


def _config(options: argparse.Namespace, environment: Mapping[str, str]) -> RouterConfig:
    """Raises ValueError that names what is missing or wrong."""
    missing = [
        name for name in (names.ENV_POOL, names.ENV_POOL_NAMESPACE, names.ENV_POOL_KEY) if name not in environment
    ]
    if missing:
        raise ValueError(f"the environment lacks {', '.join(missing)}")
    try:
        pool_key = keys.parse_key(environment[names.ENV_POOL_KEY])
    except ValueError as error:
        raise ValueError(f"{names.ENV_POOL_KEY}: {error}") from None
    return RouterConfig(
        pool=environment[names.ENV_POOL],
        pool_namespace=environment[names.ENV_POOL_NAMESPACE],
        pool_key=pool_key,
        router_uid=environment.get(names.ENV_POD_UID) or str(uuid4()),
        max_in_flight_requests=options.max_in_flight_requests,
        local_prompt_tokens=options.local_prompt_tokens,
        drain_seconds=options.drain_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = given.Parser(
        prog="poolwright router",
        description="Route OpenAI requests to the machines of one pool. "
        f"{names.ENV_POOL}, {names.ENV_POOL_NAMESPACE} and {names.ENV_POOL_KEY} come from the environment.",
    )
    defaults = RouterConfig("", "", b"")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument(
        "--port",
        type=given.port,
        default=names.ROUTER_PORT,
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--machines-file",
        type=given.readable_file,
        metavar="FILE",
        help="machines from this JSON file (default: the pods of the pool, from Kubernetes)",
    )
    parser.add_argument(
        "--max-in-flight-requests",
        type=given.count,
        metavar="COUNT",
        default=defaults.max_in_flight_requests,
        help="requests under way at most; one more is answered 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--local-prompt-tokens",
        type=given.tokens,
        metavar="TOKENS",
        default=defaults.local_prompt_tokens,
        help="prompts up to this long may be computed on the token machine (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=given.seconds,
        metavar="SECONDS",
        default=defaults.drain_seconds,
        help="what streams in flight at a shutdown have to end (default: %(default)s)",
    )
    return parser
