"""Engines as processes, one for each machine of a small pool, for a router that a test runs itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from poolwright.core.machine import Machine
from poolwright.local.processes import free_ports
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.processes import running, until_ready
from support.router_server import POOL_KEY

MODEL = "model"


@asynccontextmanager
async def engine_processes(
    model: Path, folder: Path, *options: str, **roles: Role
) -> AsyncIterator[tuple[list[Machine], dict[str, str]]]:
    """Machines by uid, and where each answers."""
    machines: list[Machine] = []
    urls: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        children = []
        for uid, role in roles.items():
            api_port, admin_port, kv_port = free_ports(3)
            environment = {
                names.ENV_ROLE: role.value,
                names.ENV_ROLE_EPOCH: "1",
                names.ENV_POD_UID: uid,
                names.ENV_POOL: "chat",
                names.ENV_POOL_NAMESPACE: "llm",
                names.ENV_POOL_KEY: POOL_KEY.hex(),
            }
            arguments = [
                "serve",
                f"--model={model}",
                f"--served-model-name={MODEL}",
                "--host=127.0.0.1",
                f"--port={api_port}",
                f"--admin-port={admin_port}",
                f"--kv-port={kv_port}",
                "--cpu-threads=1",
                "--kv-cache-mebibytes=128",
                *options,
            ]
            log = folder / f"{uid}.log"
            child = await stack.enter_async_context(
                running("poolwright_engine", *arguments, log=log, environment=environment)
            )
            urls[uid] = f"http://127.0.0.1:{api_port}"
            children.append((urls[uid], child, log))
            machine = Machine(uid, uid, "cpu", "127.0.0.1", True, role, 1, 0.0, None, 0.0)
            machines.append(replace(machine, api_port=api_port, admin_port=admin_port, kv_port=kv_port))
        await asyncio.gather(*(until_ready(*child, limit_seconds=200) for child in children))
        yield machines, urls
