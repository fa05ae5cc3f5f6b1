"""A real HTTP server that speaks an engine's API contract from a script: for failures that a sound engine never shows.

One server-sent event for each scripted token, usage in each, 421 for another machine's uid.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from poolwright.core.machine import Machine
from poolwright_protocol import names
from poolwright_protocol.roles import Role


@dataclass
class Script:
    """What the engine does with each request; change it at any time."""

    tokens: list[str] = field(default_factory=lambda: ["Hel", "lo", " wor", "ld"])
    first_token_seconds: float = 0.0
    first_token: asyncio.Event | None = None  # waits for it
    gap_seconds: float = 0.0
    tokens_per_event: int = 1
    prompt_tokens: int = 7
    answer: tuple[int, dict[str, Any], dict[str, str]] | None = None  # status, body, headers: instead of a stream
    break_after: int | None = None  # events, then the connection dies; 0: the head alone goes out
    error_after: int | None = None  # events, then an error event
    refuse_connections: bool = False  # dies before the head


class ScriptedEngine:
    def __init__(self, uid: str, role: Role | None, script: Script | None = None) -> None:
        self.uid = uid
        self.role = role
        self.script = script or Script()
        self.requests: list[web.Request] = []
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.aborted = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def machine(self) -> Machine:
        return Machine(
            name=f"pod-{self.uid}",
            uid=self.uid,
            machine_class="cpu",
            host="127.0.0.1",
            ready=True,
            role=self.role,
            role_epoch=1,
            role_since=0.0,
            move=None,
            created_at=0.0,
            api_port=self.port,
        )

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/load", self._load)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def _misdirected(self, request: web.Request) -> web.Response | None:
        asked = request.headers.get(names.HEADER_MACHINE_UID)
        if asked in (None, self.uid):
            return None
        return web.json_response({"error": {"message": "not me", "type": "", "param": None, "code": 421}}, status=421)

    async def _models(self, request: web.Request) -> web.Response:
        return self._misdirected(request) or web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return self._misdirected(request) or web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        return self._misdirected(request) or web.json_response({"server_load": self.running})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"count": len(body["prompt"]), "tokens": [ord(c) for c in body["prompt"]]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.json())
        if misdirected := self._misdirected(request):
            return misdirected
        script = replace(self.script)
        if script.refuse_connections:
            self._cut(request)
        if script.answer:
            status, body, headers = script.answer
            return web.json_response(body, status=status, headers=headers)
        self.running += 1
        try:
            return await self._stream(request, script)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(script.first_token_seconds)
        if script.first_token:
            await script.first_token.wait()
        if chat and script.break_after != 0:
            await response.write(self._event(chat, {"role": "assistant", "content": ""}, script, 0, None))
        sent = 0
        events = 0
        while sent < len(script.tokens):
            if events == script.break_after:
                self._cut(request)
            if events == script.error_after:
                error = {"message": "the step failed", "type": "InternalServerError", "param": None, "code": 500}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
                return response
            if events:
                await asyncio.sleep(script.gap_seconds)
            tokens = script.tokens[sent : sent + script.tokens_per_event]
            sent += len(tokens)
            events += 1
            finish = "stop" if sent == len(script.tokens) else None
            news = {"content": "".join(tokens)} if chat else "".join(tokens)
            await response.write(self._event(chat, news, script, sent, finish))
        usage = {"choices": [], "usage": self._usage(script, sent)}
        await response.write(self._line({**self._head(chat), **usage, "system_fingerprint": "scripted"}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _event(self, chat: bool, news: Any, script: Script, sent: int, finish: str | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta" if chat else "text": news, "logprobs": None}
        choice |= {"finish_reason": finish, "stop_reason": None}
        return self._line({**self._head(chat), "choices": [choice], "usage": self._usage(script, sent)})

    def _head(self, chat: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": f"answer-of-{self.uid}", "object": kind, "created": 1, "model": "scripted"}

    @staticmethod
    def _usage(script: Script, sent: int) -> dict[str, int]:
        return {
            "prompt_tokens": script.prompt_tokens,
            "total_tokens": script.prompt_tokens + sent,
            "completion_tokens": sent,
        }

    @staticmethod
    def _line(body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"

    @staticmethod
    def _cut(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("cut by the script")


@asynccontextmanager
async def scripted_engines(**roles: Role | None) -> AsyncIterator[dict[str, ScriptedEngine]]:
    """Running engines by uid."""
    engines = {uid: ScriptedEngine(uid, role) for uid, role in roles.items()}
    try:
        for engine in engines.values():
            await engine.start()
        yield engines
    finally:
        for engine in engines.values():
            await engine.stop()
