"""The operator process: Lease first, then watches and the queue, until a signal or the loss of the Lease.

Owns start, stop and exit code; what is done for a pool is reconcile's. The probes answer from the start. Tasks of ours
begin before kopf does, because kopf cancels what was born after it when it ends.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress

import kopf

from poolwright.controller import handlers, probes
from poolwright.controller.lease import Lease, LeaseLost
from poolwright.controller.options import Options, own_namespace, parse
from poolwright.controller.queue import KeyedQueue
from poolwright.controller.reconcile import Memory, reconcile
from poolwright.controller.world import Key, Settings, Worlds
from poolwright.kube import ApiError, KubeClient
from poolwright.kube.resources import POOLS
from poolwright.machines import Conflict, Unavailable
from poolwright_protocol import names

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 10.0
_CONFLICT_RETRY_SECONDS = 0.2
_CRD_POLL_SECONDS = 2.0


class Operator:
    """One process's work while it leads. `reconcile_one` is what the queue runs."""

    def __init__(self, client: KubeClient, options: Options, identity: str, metrics: probes.OperatorMetrics) -> None:
        settings = Settings(options.images, options.root_secret, options.prometheus, event_instance=identity)
        self._worlds = Worlds(client, settings)
        self._metrics = metrics
        self._memories: dict[Key, tuple[str, Memory]] = {}  # with the pool's uid: a namesake starts anew
        self.queue: KeyedQueue[Key] = KeyedQueue(self.reconcile_one)

    async def reconcile_one(self, key: Key) -> float | None:
        result = "failed"
        try:
            with self._metrics.reconcile_seconds.time():
                requeue_after = await self._reconcile(key)
            result = "done"
            return requeue_after
        except Conflict as error:
            result = "conflict"
            log.info("Another writer was first; looking again pool=%s/%s error=%s", *key, error)
            return _CONFLICT_RETRY_SECONDS
        finally:
            self._metrics.reconciles.labels(result).inc()

    async def _reconcile(self, key: Key) -> float | None:
        found = await self._worlds.of(key)
        if found is None:
            self._memories.pop(key, None)
            return None
        uid, world = found
        known_uid, memory = self._memories.get(key, ("", Memory()))
        if known_uid != uid:
            memory = Memory()
            self._memories[key] = (uid, memory)
        return await reconcile(world, memory, time.time())

    async def close(self) -> None:
        await self.queue.shutdown(_SHUTDOWN_SECONDS)
        await self._worlds.close()


async def run(options: Options) -> int:
    """The exit code: 0 after a signal, 1 when the Lease was lost or the watches broke."""
    pod_name, pod_uid = os.environ.get(names.ENV_POD_NAME), os.environ.get(names.ENV_POD_UID)
    identity = f"{pod_name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = probes.OperatorMetrics()
    async with await KubeClient.connect(
        options.kubeconfig, options.context, user_agent="poolwright-operator"
    ) as client:
        lease = Lease(
            client,
            options.lease_namespace,
            options.lease_name,
            identity,
            duration_seconds=options.lease_duration_seconds,
            renew_deadline_seconds=options.lease_duration_seconds * 2 / 3,
            retry_seconds=min(2.0, options.lease_duration_seconds / 5),
            pod=(pod_name, pod_uid) if pod_name and pod_uid and options.lease_namespace == own_namespace() else None,
        )
        operator = Operator(client, options, identity, metrics)
        leading = False

        def health() -> probes.Health:
            return probes.Health(operator.queue.oldest_overdue_seconds, leading, lease.contacted)

        runner, port = await probes.serve(options.probe_host, options.probe_port, metrics, health)
        log.info("Started identity=%s api_server=%s probe_port=%d", identity, client.server, port)
        try:
            if not await _unless(stop, lease.acquire()):
                return 0
            leading = True
            try:
                return await _lead(client, options, operator, identity, lease, stop)
            finally:
                leading = False
                await operator.close()
                await lease.release()
        finally:
            await runner.cleanup()


async def _lead(
    client: KubeClient, options: Options, operator: Operator, identity: str, lease: Lease, stop: asyncio.Event
) -> int:
    holding = asyncio.create_task(lease.hold(), name="hold the Lease")
    stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
    serving = asyncio.create_task(_wait_for_crd(client), name="wait for the CRD")
    kopf_stop = asyncio.Event()
    try:
        await asyncio.wait({holding, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not stopping.done() and not holding.done():
            serving.result()
            kopf_ready = asyncio.Event()
            serving = asyncio.create_task(_watch(options, operator, identity, kopf_ready, kopf_stop), name="kopf")
            ready = asyncio.create_task(kopf_ready.wait())
            await asyncio.wait({holding, stopping, serving, ready}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            # Kopf takes the signals for itself; taken back, the queue ends its work before the watches go.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await asyncio.wait({holding, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        return _why_ended(holding, stopping, serving)
    finally:
        await operator.queue.shutdown(_SHUTDOWN_SECONDS)
        kopf_stop.set()
        if not serving.done():
            with suppress(asyncio.CancelledError, TimeoutError, Exception):
                await asyncio.wait_for(serving, _SHUTDOWN_SECONDS)
        for task in (holding, stopping):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _why_ended(holding: "asyncio.Task[None]", stopping: "asyncio.Task[bool]", serving: "asyncio.Task[None]") -> int:
    if holding.done() and (error := holding.exception()) is not None:
        log.error("Stopping: %s", error if isinstance(error, LeaseLost) else repr(error))
        return 1
    if stopping.done():
        log.info("Stopping after a signal")
        return 0
    error = serving.exception() if not serving.cancelled() else None
    # Kopf also returns quietly on a signal that came before its handlers were replaced.
    if error is None:
        log.info("Stopping: the watches ended")
        return 0
    log.error("Stopping: the watches broke error=%r", error)
    return 1


async def _wait_for_crd(client: KubeClient) -> None:
    told = False
    while True:
        try:
            if await client.serves(POOLS):
                return
            if not told:
                log.warning("Waiting for the CRD of %s.%s", names.PLURAL, names.GROUP)
                told = True
        except (ApiError, Unavailable) as error:
            log.warning("The API server did not say what it serves error=%s", error)
        await asyncio.sleep(_CRD_POLL_SECONDS)


async def _watch(
    options: Options, operator: Operator, identity: str, ready: asyncio.Event, stop: asyncio.Event
) -> None:
    async def connect() -> KubeClient:
        return await KubeClient.connect(options.kubeconfig, options.context, user_agent="poolwright-operator")

    await kopf.operator(
        registry=handlers.build_registry(operator.queue.add, connect),
        settings=handlers.build_settings(),
        standalone=True,
        identity=identity,  # type: ignore[arg-type]  # else kopf makes one of the user's name: a container has none
        clusterwide=not options.namespaces,
        namespaces=list(options.namespaces),
        ready_flag=ready,
        stop_flag=stop,
    )


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Whether the work ended before the stop."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    handlers.quiet_logs()
    try:
        return asyncio.run(run(options))
    except Unavailable as error:
        log.error("The operator did not start: %s", error)
        return 1
