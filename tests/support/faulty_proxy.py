"""An HTTP proxy before a real API server that breaks on command: expired watches, throttling, dropped connections.

What passes through is the real server's; only the failure is made, because a real one cannot be had on demand.
"""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

_GONE = {
    "type": "ERROR",
    "object": {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": "Expired",
        "code": 410,
        "message": "too old",
    },
}


@dataclass
class FaultyProxy:
    url: str = ""
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)  # (method, path, query)
    watches_to_expire: int = 0  # the next watches answer 200 and then say 410 inside the stream
    requests_to_throttle: int = 0  # the next requests are answered 429 with Retry-After
    _watching: set[web.StreamResponse] = field(default_factory=set)

    def lists(self, plural: str) -> int:
        return sum(
            1
            for method, path, query in self.requests
            if method == "GET" and path.endswith(plural) and "watch" not in query
        )

    def kubeconfig(self, folder: Path) -> str:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "faulty", "cluster": {"server": self.url}}],
            "users": [{"name": "faulty", "user": {}}],
            "contexts": [{"name": "faulty", "context": {"cluster": "faulty", "user": "faulty"}}],
            "current-context": "faulty",
        }
        path = folder / "faulty.kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    async def expire_watches(self) -> None:
        """Every open watch ends as on a server whose history was compacted."""
        for stream in list(self._watching):
            await stream.write(json.dumps(_GONE).encode() + b"\n")

    def drop_watches(self) -> None:
        """Every open watch loses its connection in the middle."""
        for stream in list(self._watching):
            transport = stream._req.transport if stream._req is not None else None
            if transport is not None:
                transport.abort()


@asynccontextmanager
async def faulty_proxy(server: str, certificate: Path, key: Path, authority: Path) -> AsyncIterator[FaultyProxy]:
    proxy = FaultyProxy()
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0)) as upstream:

        async def forward(request: web.Request) -> web.StreamResponse:
            proxy.requests.append((request.method, request.path, dict(request.query)))
            if proxy.requests_to_throttle > 0:
                proxy.requests_to_throttle -= 1
                return web.json_response(
                    {"reason": "TooManyRequests", "message": "(re)initializing"},
                    status=429,
                    headers={"Retry-After": "1"},
                )
            headers = {
                k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept", "user-agent")
            }
            body: Any = await request.read()
            async with upstream.request(request.method, server + request.path_qs, data=body, headers=headers) as answer:
                stream = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await stream.prepare(request)
                watching = "watch" in request.query
                if watching and proxy.watches_to_expire > 0:
                    proxy.watches_to_expire -= 1
                    await stream.write(json.dumps(_GONE).encode() + b"\n")
                    return stream
                if watching:
                    proxy._watching.add(stream)
                try:
                    async for chunk in answer.content.iter_any():
                        await stream.write(chunk)
                finally:
                    proxy._watching.discard(stream)
                return stream

        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()
