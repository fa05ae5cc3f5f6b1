"""An answer on its way to a client: as one body or as server-sent events, and given up the moment the client leaves.

Owns disconnection, keep-alive comments, and that a failure after the first event is an event of its own. Knows no route
and nothing of what it sends.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from poolwright_engine.api import responses
from poolwright_engine.api.answer import Answer
from poolwright_engine.api.api_error import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499  # nobody reads it


class JsonBody(JSONResponse):
    def render(self, content: Any) -> bytes:
        return responses.dumped(content)


async def respond(http: HttpRequest, stream: bool, answer: Answer, keep_alive_seconds: float) -> Response:
    if stream:
        return EventStream(answer.chunks(), keep_alive_seconds)
    try:
        return JsonBody(await _unless_gone(http.receive, answer.body()))
    except _ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """The status waits for the first chunk, so that a refusal is an HTTP error; a later failure is an error event, and
    the stream still ends in [DONE]. When nothing was sent for `keep_alive_seconds` (0: never) a comment is, which
    parsers skip and proxies count as life. What follows it begins with an empty comment: a parser that strips each
    network chunk, as `vllm bench serve` does, lost the end of the last one, and would take the event for a part of
    it."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], keep_alive_seconds: float = 0.0) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._keep_alive_seconds = keep_alive_seconds
        self._started = False
        self._commented = False  # by what was sent last
        self._sent_seconds = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_ClientGone):
            await _unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        keeping = asyncio.create_task(self._keep_alive(send)) if self._keep_alive_seconds > 0 else None
        try:
            await self._relay(scope, receive, send)
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await self._send(send, chunk)
            except ApiError as error:
                if not self._started:
                    self._started = True
                    await JsonBody(error.body, error.status, error.headers)(scope, receive, send)
                    return
                await self._send(send, responses.event(error.body) + responses.DONE)
            except Exception:
                if not self._started:
                    raise
                log.exception("A stream failed")
                await self._send(send, responses.event(ApiError(500, "The server failed.").body) + responses.DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            idle = time.monotonic() - self._sent_seconds
            if idle < self._keep_alive_seconds:
                await asyncio.sleep(self._keep_alive_seconds - idle)
            else:
                await self._send(send, responses.KEEP_ALIVE)

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_seconds = time.monotonic()
        if body is responses.KEEP_ALIVE:
            self._commented = True
        elif self._commented:
            self._commented = False
            body = responses.EMPTY_COMMENT + body
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})


class _ClientGone(Exception):
    pass


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; a client who leaves first cancels it. Raises _ClientGone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(work)
    listener = asyncio.create_task(gone())
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientGone
        return task.result()
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)
