"""The router as a process of its own: what it needs, how it follows a file of machines, how it ends and comes back."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolwright.local.machines import LocalMachines
from poolwright.local.processes import free_ports
from poolwright.router.main import main
from poolwright_protocol import names
from poolwright_protocol.roles import Role
from support.processes import running, until_ready
from support.scripted_engine import scripted_engines

ENVIRONMENT = {names.ENV_POOL: "chat", names.ENV_POOL_NAMESPACE: "llm", names.ENV_POOL_KEY: "ab" * 32}
COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": "say hello", "stream": True}


async def test_a_router_drains_at_sigterm_and_its_successor_serves_at_once(tmp_path: Path) -> None:
    file, log = tmp_path / "machines.json", tmp_path / "router.log"
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    arguments = ["--host=127.0.0.1", f"--port={port}", f"--machines-file={file}"]
    machines = LocalMachines(file)
    async with scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines, httpx.AsyncClient(timeout=30) as client:
        machines.put(engines["a"].machine)
        engines["a"].script.gap_seconds = 0.3
        async with running("poolwright.router", *arguments, log=log, environment=ENVIRONMENT) as first:
            await until_ready(url, first, log)
            async with client.stream("POST", f"{url}/v1/completions", json=COMPLETION) as response:
                lines = response.aiter_lines()
                await anext(lines)
                first.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert await asyncio.wait_for(first.wait(), 10) == 0
        machines.remove("pod-a")
        machines.put(engines["b"].machine)
        async with running("poolwright.router", *arguments, log=log, environment=ENVIRONMENT) as second:
            await until_ready(url, second, log)
            async with asyncio.timeout(1):
                answer = await client.post(f"{url}/v1/completions", json={**COMPLETION, "stream": False})
            assert answer.json()["id"] == "answer-of-b"


async def test_a_router_keeps_its_machines_while_their_source_is_away(tmp_path: Path) -> None:
    file, log = tmp_path / "machines.json", tmp_path / "router.log"
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    arguments = ["--host=127.0.0.1", f"--port={port}", f"--machines-file={file}"]
    file.write_text("[]")
    async with (
        scripted_engines(a=Role.MIXED, b=Role.MIXED) as engines,
        running("poolwright.router", *arguments, log=log, environment=ENVIRONMENT) as router,
        httpx.AsyncClient(timeout=30) as client,
    ):

        async def answered_by() -> str:
            return str((await client.post(f"{url}/v1/completions", json={**COMPLETION, "stream": False})).json()["id"])

        LocalMachines(file).put(engines["a"].machine)
        await until_ready(url, router, log)
        for broken in ("not json", json.dumps([{"name": "half a machine"}]), None):
            file.write_text(broken) if broken is not None else file.unlink()
            await asyncio.sleep(0.3)
            assert await answered_by() == "answer-of-a"
        LocalMachines(file).put(engines["b"].machine)
        for _ in range(100):
            if await answered_by() == "answer-of-b":
                return
            await asyncio.sleep(0.05)
        pytest.fail("the file came back, and the router did not see it")


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "POOLWRIGHT_POOL, POOLWRIGHT_POOL_NAMESPACE, POOLWRIGHT_POOL_KEY"),
        ({**ENVIRONMENT, names.ENV_POOL_KEY: "short"}, "POOLWRIGHT_POOL_KEY"),
    ],
)
def test_a_router_without_its_environment_says_what_it_lacks(
    environment: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port=0"], environment) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
