"""The real pool as child processes: engines of the bench, and the router that users run, over one file of machines.

Owns their commands, ports and ends. Knows neither the load nor the simulator.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from poolwright.core.machine import Machine
from poolwright.core.router_note import RouterNote
from poolwright.local.machines import LocalMachines
from poolwright.local.model import ensure_demo_model
from poolwright.local.processes import Process, free_ports, program
from poolwright_protocol import names
from poolwright_protocol.roles import Role

HOST = "127.0.0.1"
MODEL = "bench"
ROOT = Path(__file__).resolve().parents[2]
_READY_SECONDS = 120.0
_STOP_SECONDS = 40.0
_COMMAND_SECONDS = 300.0
_POOL = {
    names.ENV_POOL: "bench",
    names.ENV_POOL_NAMESPACE: "bench",
    names.ENV_POOL_KEY: bytes(range(32)).hex(),
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


def url_of(machine: Machine) -> str:
    return f"http://{HOST}:{machine.api_port}"


@asynccontextmanager
async def engines(
    roles: Sequence[Role], own: Sequence[str], options: Sequence[str], folder: Path, note: RouterNote | None = None
) -> AsyncIterator[list[Machine]]:
    """One for each role, by the names that the simulator gives them, ready. `own`: words for `bench…engine`; `options`:
    for the engine; `note`: what a controller would tell routers of each. Raises RuntimeError with the log's last line
    where one does not become ready."""
    model = ensure_demo_model()
    async with AsyncExitStack() as stack:
        started = []
        for number, role in enumerate(roles):
            uid = f"m{number}"
            ports = free_ports(3)
            command = [
                *(sys.executable, "-m", "bench.policy_agreement.engine", *own, "serve", str(model)),
                *("--served-model-name", MODEL, "--host", HOST, "--log-level", "warning"),
                *(f"--port={ports[0]}", f"--admin-port={ports[1]}", f"--kv-port={ports[2]}", *options),
            ]
            who = {
                names.ENV_POD_UID: uid,
                names.ENV_POD_IP: HOST,
                names.ENV_ROLE: role.value,
                names.ENV_ROLE_EPOCH: "1",
            }
            process = await stack.enter_async_context(_running(command, _POOL | who, folder / f"{uid}.log"))
            machine = Machine(
                name=uid,
                uid=uid,
                machine_class="bench",
                host=HOST,
                ready=True,
                role=role,
                role_epoch=1,
                role_since=0.0,
                move=None,
                created_at=0.0,
                api_port=ports[0],
                admin_port=ports[1],
                kv_port=ports[2],
                note=note,
            )
            started.append((process, machine))
        await asyncio.gather(*(_ready(process, url_of(machine)) for process, machine in started))
        yield [machine for _, machine in started]


@asynccontextmanager
async def router(machines: Sequence[Machine], folder: Path) -> AsyncIterator[str]:
    """Its URL. A new one knows nothing of what was sent before."""
    port = free_ports(1)[0]
    file = folder / f"machines-{port}.json"
    records = LocalMachines(file)
    for machine in machines:
        records.put(machine)
    command = [program("poolwright"), "router", f"--host={HOST}", f"--port={port}", f"--machines-file={file}"]
    async with _running(command, _POOL, folder / f"router-{port}.log") as process:
        url = f"http://{HOST}:{port}"
        await _ready(process, url)
        yield url


async def run_engine(words: Sequence[str], log: Path) -> None:
    """A command of the bench's engine, to its end. Raises RuntimeError where it fails."""
    process = await Process.start([sys.executable, "-m", "bench.policy_agreement.engine", *words], _POOL, log)
    await process.wait(_COMMAND_SECONDS)
    if process.exit_code:
        raise RuntimeError(f"{words[0]} ended with {process.exit_code}: {process.last_line()}")


@asynccontextmanager
async def _running(command: Sequence[str], environment: dict[str, str], log: Path) -> AsyncIterator[Process]:
    process = await Process.start(command, environment, log)
    try:
        yield process
    finally:
        process.terminate()
        await process.wait(_STOP_SECONDS)


async def _ready(process: Process, url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.exit_code is None:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready: {process.last_line()}")


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of all cores' time between two `cpu_ticks`, the share that any process of the machine had."""
    spent = after[0] - before[0]
    return (after[1] - before[1]) / spent if spent else 0.0


def cpu_ticks() -> tuple[int, int]:
    """All, and those that were not idle; both 0 where the system does not tell."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(fields), sum(fields) - fields[3] - fields[4]


@asynccontextmanager
async def on_core(core: int | None) -> AsyncIterator[None]:
    """This process on one core alone; None: as it was."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
