"""An engine process from start to end: ports up at once, the model loaded behind them, drained at SIGTERM.

Owns the order of things and the exit code. API, admin and KV share one asyncio loop; the engine steps in its own
thread, and the watchdog looks on from a third.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import uvicorn
from starlette.types import ASGIApp

from poolwright_engine.api.admin import create_admin_app
from poolwright_engine.api.api_keys import ApiKeys
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.server import Served, Service, create_app
from poolwright_engine.handoff.exchange import FailureReason
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.process.last_words import EXIT_ENGINE_DIED, fail
from poolwright_engine.process.ports import cannot_listen, listener
from poolwright_engine.process.source import size
from poolwright_engine.process.watchdog import Watchdog, end_process

if TYPE_CHECKING:
    from poolwright_engine.process.assembly import Parts

log = logging.getLogger(__name__)
T = TypeVar("T")

_WATCH_SECONDS = 0.2
_LAST_WORDS_SECONDS = 2.0  # for answers already made to reach their clients
_NOT_ENDED = "the engine did not end within its shutdown timeout"
_END_SECONDS = 8.0  # past a drain's limit: its own grace, last words, and closing what is open
# Longer than any router's idle pool keeps a connection, so that the router is the one to close it.
_KEEP_ALIVE_SECONDS = 75


async def serve(config: EngineConfig) -> int:
    """Runs until SIGTERM or SIGINT (0; 128 + n where a second signal n cut it short), or until the engine dies or makes
    no progress (1). Raises ConfigError."""
    stopping = _Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.signalled, number)
    metrics = EngineMetrics(
        config.served_model_name,
        config.pool,
        config.pool_namespace,
        config.pod_uid,
        [reason.value for reason in FailureReason],
    )
    service = Service(
        config.served_model_name,
        config.model,
        config.pod_uid,
        metrics,
        keep_alive_seconds=config.sse_keep_alive_seconds,
        aliases=config.served_model_names[1:],
    )
    app: ASGIApp = create_app(service)
    if config.api_keys:
        app = ApiKeys(app, config.api_keys)
    admin_app = create_admin_app(lambda: service.served.engine if service.served else None, config.pool_key)
    async with (
        _listening(app, config.host, config.port, "--port") as port,
        _listening(admin_app, config.host, config.admin_port, "--admin-port") as admin_port,
    ):
        log.info("Listening host=%s port=%d admin_port=%d uid=%s", config.host, port, admin_port, config.pod_uid)
        log.info("Loading the model name=%s", config.model)
        parts = await _loaded(config, stopping)
        return await _serve_model(config, parts, service, stopping, port)


class _Stopping:
    """Signals so far: the first asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.exit_code = 0

    def signalled(self, number: int) -> None:
        if self.first.is_set():
            self.exit_code = 128 + number
            self.second.set()
        self.first.set()


async def _loaded(config: EngineConfig, stopping: _Stopping) -> "Parts":
    def load() -> "Parts":
        from poolwright_engine.process import assembly  # brings torch: seconds, and not on the event loop

        return assembly.load(config)

    loading = _in_thread(load)
    await _first_of(loading, stopping.first.wait())
    if not loading.done():
        log.info("Stopped while the model was loading")
        logging.shutdown()
        os._exit(0)  # nothing was served, and a thread inside torch cannot be interrupted
    return loading.result()


def _facts(config: EngineConfig, parts: "Parts", port: int) -> dict[str, object]:
    """What somebody who just started it wants to know."""
    from torch import get_num_threads  # late, as all that brings torch

    plan, runner = parts.plan, parts.runner
    kv_tokens = (runner.num_blocks - 1) * runner.block_size
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
    facts = {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{port}/v1",
        "kv_cache_tokens": kv_tokens,
        "kv_cache": size(kv_tokens * runner.kv_shape.bytes_per_token).replace(" ", ""),
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_step_seconds": plan.max_step_seconds,
        "dtype": parts.dtype,
        "cpu_threads": config.cpu_threads or get_num_threads(),
    }
    return {name: value for name, value in facts.items() if value is not None}


async def _serve_model(config: EngineConfig, parts: "Parts", service: Service, stopping: _Stopping, port: int) -> int:
    from poolwright_engine.process import assembly

    gc.collect()
    gc.freeze()  # the model's objects stay; later collections need not walk them
    gc.set_threshold(10_000)  # a step of many rows makes hundreds of objects, none of them in a cycle
    engine = assembly.engine_loop(config, parts, service.metrics)
    exchange = assembly.kv_exchange(config, parts, engine)
    event_loop = asyncio.get_running_loop()

    def on_stall(stalled: bool) -> None:
        service.ready = not stalled

    def give_up(reason: str) -> None:
        event_loop.call_soon_threadsafe(engine.give_up, reason)

    watchdog = Watchdog(engine.heartbeat, config.stall_seconds, config.stall_exit_seconds, on_stall, give_up)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(watchdog)
        stack.push_async_callback(engine.close)
        await engine.start()
        stack.push_async_callback(exchange.close)
        try:
            await exchange.start()
        except OSError as error:
            raise cannot_listen("--kv-port", config.host, config.kv_port, error) from error
        service.metrics.attach(
            engine.stats,
            engine.role_state,
            {
                "block_size": str(config.block_size),
                "num_gpu_blocks": str(parts.runner.num_blocks),
                "cache_dtype": config.kv_dtype(parts.dtype),
                "enable_prefix_caching": str(config.enable_prefix_caching),
            },
        )
        service.served = Served(
            engine,
            parts.tokenizer,
            parts.vocab_size,
            parts.max_chars_per_token,
            parts.guides,
            parts.sampling_defaults,
        )
        service.ready = True
        log.info("Ready model=%s max_model_len=%d kv_port=%d", service.model_name, parts.max_model_len, exchange.port)
        log.info("Serving %s", " ".join(f"{name}={value}" for name, value in _facts(config, parts, port).items()))
        await _first_of(stopping.first.wait(), _until(lambda: not engine.healthy, _WATCH_SECONDS))
        if not engine.healthy:
            await _answered(service)
            if engine.gave_up is not None:
                end_process(engine.gave_up)  # its thread hangs in a call, so nothing may wait for it
            return fail("the engine's loop died; its error is in the log", EXIT_ENGINE_DIED)
        service.draining = True
        log.info("Draining limit_seconds=%g", config.shutdown_timeout_seconds)
        watchdog.end_within(config.shutdown_timeout_seconds + _END_SECONDS, _NOT_ENDED)
        draining = asyncio.ensure_future(engine.drain(config.shutdown_timeout_seconds))
        await _first_of(draining, stopping.second.wait())
        if not draining.done():
            log.info("Cut off what still runs")
            watchdog.end_within(_END_SECONDS, _NOT_ENDED)
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await engine.drain(0)
        await _answered(service)
        if service.in_flight:  # the loop's thread hangs, or a client does not read
            engine.give_up(_NOT_ENDED)
            await _answered(service)
        log.info("Drained")
        return stopping.exit_code


async def _until(condition: Callable[[], object], every_seconds: float) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(every_seconds)


async def _answered(service: Service) -> None:
    """Until the last words have left, but not for ever: a client may read slowly."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await _until(lambda: not service.in_flight, 0.02)


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Futures given are left alone; coroutines that did not come first are cancelled."""
    own = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(own, awaitables, strict=True):
            if task is not given:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Unlike `asyncio.to_thread`, the end of the process does not wait for it."""
    event_loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = event_loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the event loop is gone
            event_loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business: several servers share it."""
        yield


@contextlib.asynccontextmanager
async def _listening(app: ASGIApp, host: str, port: int, option: str) -> AsyncIterator[int]:
    """Serves while the context lasts; gives the port. Raises ConfigError where it cannot listen."""
    own = listener(option, host, port)
    server = _Server(
        uvicorn.Config(
            app,
            access_log=False,
            lifespan="off",
            log_config=None,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
        )
    )
    with own:
        task = asyncio.create_task(server.serve(sockets=[own]))
        try:
            await _until(lambda: server.started or task.done(), 0.005)
            yield own.getsockname()[1]
        finally:
            server.should_exit = True
            await task
