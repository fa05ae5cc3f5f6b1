"""Programs of Poolwright as child processes of a test, each with its output in a file and its end awaited."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx


@asynccontextmanager
async def running(
    module: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m module`; asked to stop at the end, then killed."""
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=output,
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.wait(), 10)
            except TimeoutError:
                child.kill()
        await child.wait()


async def until_ready(url: str, child: asyncio.subprocess.Process, log: Path, limit_seconds: float = 60) -> None:
    """`url`/ready answers 200. Fails at once, with the log, if the child ends before."""
    async with httpx.AsyncClient() as client:
        for _ in range(int(limit_seconds / 0.05)):
            if child.returncode is not None:
                raise AssertionError(f"it ended with {child.returncode}: {_said(log)}")
            try:
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError(f"not Ready after {limit_seconds} s: {_said(log)}")


def _said(log: Path) -> str:
    return log.read_text(errors="replace")
