"""What the router costs: the same streams from a scripted engine, direct and through the router, in one run.

    python bench/router_streams.py [--streams 64] [--requests 512] [--tokens 64] [--gap-milliseconds 0]

Engine, router and client are processes of their own. With a gap of 0 the engine writes as fast as it can, so the ratio
is of throughput; with a gap, as a real engine has, it is of latency.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines
from poolwright.local.processes import free_ports
from poolwright_protocol import names
from poolwright_protocol.roles import Role

HOST = "127.0.0.1"
PROMPT = "Tell me about the harbour, the ships and the tide. " * 8


@dataclass(frozen=True)
class Result:
    seconds: float
    first_token_seconds: list[float]
    gap_seconds: list[float]

    def line(self, name: str, requests: int) -> str:
        first, gaps = self.first_token_seconds, self.gap_seconds
        return (
            f"{name:8} {requests / self.seconds:8.1f} requests/s   first token p50 {_ms(first, 50):7.1f} ms "
            f"p99 {_ms(first, 99):7.1f} ms   gap p50 {_ms(gaps, 50):6.2f} ms p99 {_ms(gaps, 99):6.2f} ms"
        )


def _ms(seconds: list[float], percentile: int) -> float:
    return statistics.quantiles(seconds, n=100)[percentile - 1] * 1000


async def engine(port: int) -> None:
    """One event for each token, as an engine of the pool sends them."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        gap_seconds = float(request.headers.get("x-request-id", "0"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "bench"}
        tokens = body["max_tokens"]
        for count in range(1, tokens + 1):
            choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}
            usage = {"prompt_tokens": 100, "total_tokens": 100 + count, "completion_tokens": count}
            event = {**head, "choices": [choice], "usage": usage}
            await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
            await asyncio.sleep(gap_seconds)
        last = {**head, "choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": tokens}}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    await asyncio.Event().wait()


async def measure(url: str, streams: int, requests: int, tokens: int, gap_seconds: float) -> Result:
    first: list[float] = []
    gaps: list[float] = []
    left = iter(range(requests))
    body = {"model": "bench", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "temperature": 0}

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            asked = last = time.perf_counter()
            events = 0
            headers = {"x-request-id": str(gap_seconds)}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                async for data in response.content.iter_any():
                    now = time.perf_counter()
                    (gaps if events else first).append(now - (last if events else asked))
                    last = now
                    events += data.count(b"\n\n")
            if events != tokens + 1 and events != tokens + 2:  # [DONE], and usage where nobody strips it
                raise RuntimeError(f"{events} events instead of {tokens + 1}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(streams)))
        return Result(time.perf_counter() - begun, first, gaps)


async def answers(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
    raise TimeoutError(f"{url} did not answer")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def compare(options: argparse.Namespace) -> None:
    ports = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machines.json"
        LocalMachines(file).put(
            Machine("bench", "bench", "cpu", HOST, True, Role.MIXED, 1, 0.0, None, 0.0, api_port=ports[0])
        )
        environment = {
            **os.environ,
            names.ENV_POOL: "bench",
            names.ENV_POOL_NAMESPACE: "bench",
            names.ENV_POOL_KEY: "00" * 32,
        }
        upstream = await asyncio.create_subprocess_exec(sys.executable, __file__, "--engine-port", str(ports[0]))
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "poolwright.router", f"--host={HOST}"),
            *(f"--port={ports[1]}", f"--machines-file={file}"),
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        try:
            engine_url, router_url = (f"http://{HOST}:{port}" for port in ports)
            await answers(f"{engine_url}/health")
            await answers(f"{router_url}/ready")
            load = (options.streams, options.requests, options.tokens, options.gap_milliseconds / 1000)
            for url in (engine_url, router_url):  # warm
                await measure(url, options.streams, options.streams, options.tokens, 0)
            direct = await measure(engine_url, *load)
            cpu = cpu_seconds(router.pid)
            routed = await measure(router_url, *load)
            cpu = cpu_seconds(router.pid) - cpu
        finally:
            for process in (router, upstream):
                process.terminate()
                await process.wait()
    print(f"{options.streams} streams, {options.requests} requests of {options.tokens} tokens")
    print(direct.line("direct", options.requests))
    print(routed.line("routed", options.requests))
    events = options.requests * options.tokens
    print(
        f"router CPU {cpu / options.requests * 1000:.2f} ms per request, {cpu / events * 1e6:.1f} µs per token; "
        f"routed / direct = {direct.seconds / routed.seconds:.2f} of the throughput"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Router against direct.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap-milliseconds", type=float, default=0.0)
    parser.add_argument("--engine-port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(engine(options.engine_port) if options.engine_port else compare(options))


if __name__ == "__main__":
    main()
