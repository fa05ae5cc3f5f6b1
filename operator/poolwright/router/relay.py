"""The way to an engine and back: one aiohttp session with kept connections, and the bytes to the client.

Knows HTTP on both sides, what counts as a machine that failed, and nothing of requests or choices.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from poolwright.core.machine import Machine
from poolwright.router.config import RouterConfig
from poolwright.router.errors import RequestError, error_body
from poolwright_protocol import names

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = (b"content-type", b"application/json")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Of a client's headers only these go on: an engine needs no cookies and no keys, and nobody but a router may set ours.
_FORWARDED = (b"x-request-id", b"traceparent", b"tracestate")
_REQUEST_ID = "x-request-id"
_RETURNED = ("content-type", "retry-after", _REQUEST_ID)
# Shorter than any server keeps an idle connection, so that we seldom write into one that it is closing.
_KEEP_ALIVE_SECONDS = 4.0
_LONGEST_ANSWER_BYTES = 64 * 1024 * 1024


class MachineFailed(Exception):
    """No connection, a connection lost before its first byte, or another machine at that address."""


class Refused(Exception):
    """A 503 before any byte: the machine is alive and takes nothing now. `answer` is what it said."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(f"refused with {answer.status}")
        self.answer = answer


class Answer:
    """A whole response of an engine, to be passed on unchanged."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Reply:
    """What the client of one request has been sent so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._name: list[tuple[bytes, bytes]] = []
        self._said: list[tuple[bytes, bytes]] = []
        self.streaming = False  # the head of an event stream is out
        self.ended = False  # nothing more goes out

    def name(self, response: aiohttp.ClientResponse) -> None:
        """What is put together here carries the id under which the engine answered."""
        if _REQUEST_ID in response.headers:
            self._name = [(_REQUEST_ID.encode(), response.headers[_REQUEST_ID].encode("latin-1"))]

    def say(self, name: str, value: str) -> None:
        """A header of the router's own, beside whatever this client gets."""
        self._said.append((name.encode(), value.encode()))

    async def event_bytes(self, data: bytes) -> None:
        if not self.streaming:
            self.streaming = True
            headers = [*_SSE, *self._name, *self._said]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, last: bytes = b"") -> None:
        if not self.ended:
            self.ended = True
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.ended = True
        sized = [*(headers or [JSON, *self._name]), *self._said, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": sized})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer(self, answer: Answer) -> int:
        await self.whole(answer.status, answer.body, answer.headers)
        return answer.status

    async def error(self, error: RequestError) -> int:
        headers = [JSON]
        if error.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_seconds))
        await self.whole(error.status, error.body, headers)
        return error.status

    async def broken(self, status: int, message: str) -> int:
        """The answer cannot be finished: an error as a whole, or as the last event where a stream has begun. There is
        no [DONE] behind it, so that nobody takes a part for the whole."""
        if self.ended:
            return status
        body = error_body(status, message)
        if self.streaming:
            await self.event_bytes(b"data: " + body + b"\n\n")
            await self.end_events()
        else:
            await self.whole(status, body)
        return status


class Relay:
    """Use as a context manager on the event loop that serves."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._config.connect_timeout_seconds,
                sock_read=self._config.silence_timeout_seconds,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept-encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    async def open(
        self, machine: Machine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The response once its head is there. Close it, whatever happens. Raises MachineFailed or Refused.

        A kept connection may have been closed by the engine in the very moment: that is tried once more.
        """
        try:
            try:
                response = await self._request(machine, method, path, body, headers)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                response = await self._request(machine, method, path, body, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MachineFailed(f"machine {machine.name}: {error or type(error).__name__}") from error
        if response.status == 421:
            response.close()
            raise MachineFailed(f"machine {machine.name}: another machine answers at {machine.host}")
        if response.status == 503:
            raise Refused(await self.read(machine, response))
        return response

    async def read(self, machine: Machine, response: aiohttp.ClientResponse) -> Answer:
        """All of a response that is no stream; closes it. Raises MachineFailed."""
        try:
            body = await response.content.read(_LONGEST_ANSWER_BYTES)
            while not response.content.at_eof():
                if len(body) >= _LONGEST_ANSWER_BYTES:
                    raise MachineFailed(f"machine {machine.name}: an answer of more than {_LONGEST_ANSWER_BYTES} bytes")
                body += await response.content.read(_LONGEST_ANSWER_BYTES - len(body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MachineFailed(f"machine {machine.name}: {error or type(error).__name__}") from error
        finally:
            response.close()
        return Answer(response.status, _returned(response.headers), body)

    async def _request(
        self, machine: Machine, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        assert machine.host is not None
        url = URL.build(scheme="http", host=machine.host, port=machine.api_port, path=path)
        return await self._session.request(
            method,
            url,
            data=body,
            headers={**headers, names.HEADER_MACHINE_UID: machine.uid},
            allow_redirects=False,
        )


def forwarded_headers(scope: Scope) -> dict[str, str]:
    """What of the client's headers an engine gets to see."""
    passed = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _FORWARDED}
    return {"content-type": "application/json", **passed}


def _returned(headers: CIMultiDictProxy[str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), headers[name].encode("latin-1")) for name in _RETURNED if name in headers]


async def read_body(receive: Receive, scope: Scope, limit_bytes: int) -> bytes | None:
    """The client's body, or None if it left. Raises RequestError 413 for a longer one."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(413, f"The body is larger than {limit_bytes} bytes.", kind="BadRequestError")
