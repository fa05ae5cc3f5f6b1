"""The API port: a FastAPI app over an `Engine`. It is up before the model is, and says so.

Owns HTTP: routes, errors, streams, and that a client who leaves is a request aborted. Knows the engine only through
its protocol; nothing here waits for a step.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poolwright_engine import responses
from poolwright_engine.engine import Engine
from poolwright_engine.generation import Piece, pieces
from poolwright_engine.metrics import EngineMetrics
from poolwright_engine.openai_api import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    bad_parameter,
    check_supported,
    fit_max_tokens,
    sampling_params,
    validation_error,
)
from poolwright_engine.openai_api import Message as ChatMessage
from poolwright_engine.sequence import Request, SamplingParams, TokenLogprobs
from poolwright_engine.stop_strings import StopStrings
from poolwright_engine.tokenizer import ChatTemplateError, Tokenizer
from poolwright_protocol import names

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 32 * 2**20
# Longer text is tokenized in a thread, so that other streams go on.
_INLINE_CHARACTERS = 4096
# Enough of the prompt for the decoder to know whether a leading space belongs to the first token; the whole of it
# would be decoded once more at the first token.
_DECODER_CONTEXT_TOKENS = 16
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class Served:
    """What there is to serve once the model is loaded. `vocab_size` is the model's: what it can embed."""

    engine: Engine
    tokenizer: Tokenizer
    vocab_size: int
    max_chars_per_token: int


@dataclass(slots=True)
class Service:
    """What the ports share. `served` is None while the model loads; `ready` only after a first token was made."""

    model_name: str
    model_root: str
    machine_uid: str
    metrics: EngineMetrics
    served: Served | None = None
    ready: bool = False
    draining: bool = False
    in_flight: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def healthy(self) -> bool:
        """True also while the model loads: only a dead loop is beyond help."""
        return self.served is None or self.served.engine.healthy

    def loaded(self) -> Served:
        """Raises ApiError."""
        if self.served is None:
            raise ApiError(503, "The model is still loading.", retry_after_seconds=5)
        return self.served

    def check_model(self, name: str | None) -> None:
        """Raises ApiError."""
        if name and name != self.model_name:
            raise ApiError(404, f"The model `{name}` does not exist. Valid aliases: {self.model_name}.", param="model")


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Poolwright engine", version=responses.VERSION, docs_url=None, redoc_url=None)
    app.add_middleware(_Gate, service=service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)

    @app.post("/v1/completions", dependencies=[Depends(_json_only)])
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        return await _answer(http, body, await _completion(service, body, http))

    @app.post("/v1/chat/completions", dependencies=[Depends(_json_only)])
    async def chat_completions(body: ChatCompletionRequest, http: HttpRequest) -> Response:
        return await _answer(http, body, await _chat(service, body, http))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "poolwright",
            "root": service.model_root,
            "parent": None,
            "max_model_len": service.loaded().engine.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if service.ready and service.healthy and not service.draining else 503)

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": responses.VERSION}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.in_flight}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize", dependencies=[Depends(_json_only)])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served = service.loaded()
        service.check_model(body.model)
        if body.messages is not None:
            text = _render(served.tokenizer, body.messages, body.add_generation_prompt)
            add_special_tokens = bool(body.add_special_tokens)
        else:
            text = body.prompt or ""
            add_special_tokens = body.add_special_tokens is not False
        ids = await _encode(served, text, add_special_tokens)
        strings = [served.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": served.engine.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @app.post("/detokenize", dependencies=[Depends(_json_only)])
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        served = service.loaded()
        service.check_model(body.model)
        _check_ids(served, body.tokens, "tokens")
        return {"prompt": served.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return app


# --- what a request becomes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """`chunks` for a client that streams, `body` for one that does not; only one of them is ever started."""

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    body: Callable[[], Coroutine[Any, Any, responses.Json]]


async def _completion(service: Service, asked: CompletionRequest, http: HttpRequest) -> _Answer:
    served, params = _begin(service, asked)
    prompts: list[tuple[int, ...]] = []
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            prompts.append(tuple(await _encode(served, prompt, asked.add_special_tokens)))
        else:
            _check_ids(served, prompt, "prompt")
            prompts.append(tuple(prompt))
    head = _head(service, "cmpl", http)
    echoes = [
        (prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)) if asked.echo else ""
        for prompt in asked.prompts
    ]
    choices = [
        _choice(service, served, asked, params, ids, f"{head.id}-{index}", http) for index, ids in enumerate(prompts)
    ]
    prompt_tokens = sum(len(ids) for ids in prompts)
    logprobs = [responses.CompletionLogprobs(served.tokenizer, len(echo)) for echo in echoes]

    async def chunks() -> AsyncGenerator[bytes, None]:
        counts = [0] * len(choices)
        begun = [False] * len(choices)
        async with aclosing(_merged([start() for start in choices])) as merged:
            async for index, piece in merged:
                ids = [] if piece.token_id is None else [piece.token_id]
                counts[index] += len(ids)
                first, begun[index] = not begun[index], True
                chunk = responses.completion_chunk(
                    head,
                    index,
                    replace(piece, text=echoes[index] + piece.text) if first and echoes[index] else piece,
                    logprobs[index].of([piece.logprobs]) if piece.logprobs else None,
                    prompts[index] if first and asked.return_token_ids else None,
                    ids if asked.return_token_ids else None,
                )
                if asked.continuous_usage:
                    chunk["usage"] = responses.usage(len(prompts[index]), counts[index])
                yield responses.event(chunk)
        if asked.include_usage:
            yield responses.event(head.usage_chunk(responses.COMPLETION, prompt_tokens, sum(counts)))
        yield responses.DONE

    async def body() -> responses.Json:
        collected = [_Collected() for _ in choices]
        async with aclosing(_merged([start() for start in choices])) as merged:
            async for index, piece in merged:
                collected[index].add(piece)
        return responses.completion_body(
            head,
            [
                responses.completion_choice(
                    index,
                    echoes[index] + got.text,
                    got.last,
                    logprobs[index].of(got.logprobs) if params.logprobs is not None else None,
                    prompts[index] if asked.return_token_ids else None,
                    got.token_ids if asked.return_token_ids else None,
                )
                for index, got in enumerate(collected)
            ],
            prompt_tokens,
            sum(len(got.token_ids) for got in collected),
        )

    return _Answer(chunks, body)


async def _chat(service: Service, asked: ChatCompletionRequest, http: HttpRequest) -> _Answer:
    served, params = _begin(service, asked)
    text = _render(served.tokenizer, asked.messages, asked.add_generation_prompt)
    prompt_ids = tuple(await _encode(served, text, asked.add_special_tokens))
    head = _head(service, "chatcmpl", http)
    start = _choice(service, served, asked, params, prompt_ids, head.id, http)
    shown_prompt_ids = prompt_ids if asked.return_token_ids else None
    top = params.logprobs or 0

    def with_usage(chunk: responses.Json, completion_tokens: int) -> bytes:
        if asked.continuous_usage:
            chunk["usage"] = responses.usage(len(prompt_ids), completion_tokens)
        return responses.event(chunk)

    async def chunks() -> AsyncGenerator[bytes, None]:
        count = 0
        begun = False
        async with aclosing(start()) as made:
            async for piece in made:
                if not begun:
                    begun = True
                    yield with_usage(responses.role_chunk(head, shown_prompt_ids), 0)
                ids = [] if piece.token_id is None else [piece.token_id]
                count += len(ids)
                logprobs = responses.chat_logprobs(served.tokenizer, [piece.logprobs], top) if piece.logprobs else None
                chunk = responses.chat_chunk(head, piece, logprobs, ids if asked.return_token_ids else None)
                yield with_usage(chunk, count)
        if asked.include_usage:
            yield responses.event(head.usage_chunk(responses.CHAT_CHUNK, len(prompt_ids), count))
        yield responses.DONE

    async def body() -> responses.Json:
        got = _Collected()
        async with aclosing(start()) as made:
            async for piece in made:
                got.add(piece)
        return responses.chat_body(
            head,
            got.text,
            got.last,
            responses.chat_logprobs(served.tokenizer, got.logprobs, top) if params.logprobs is not None else None,
            shown_prompt_ids,
            got.token_ids if asked.return_token_ids else None,
            len(prompt_ids),
            len(got.token_ids),
        )

    return _Answer(chunks, body)


def _begin(service: Service, asked: CompletionRequest | ChatCompletionRequest) -> tuple[Served, SamplingParams]:
    served = service.loaded()
    if service.draining:
        raise ApiError(503, "This machine is shutting down.", retry_after_seconds=1)
    service.check_model(asked.model)
    check_supported(asked)
    return served, sampling_params(asked, served.vocab_size)


def _choice(
    service: Service,
    served: Served,
    asked: GenerationRequest,
    params: SamplingParams,
    prompt_ids: tuple[int, ...],
    request_id: str,
    http: HttpRequest,
) -> Callable[[], AsyncGenerator[Piece, None]]:
    """Everything that can be refused is refused here, before anything starts."""
    if not prompt_ids:
        raise bad_parameter("The prompt holds no tokens.", "prompt")
    request = Request(
        request_id,
        prompt_ids,
        replace(params, max_tokens=fit_max_tokens(len(prompt_ids), params.max_tokens, served.engine.max_model_len)),
        prompt_machine=http.headers.get(names.HEADER_PROMPT_MACHINE),
    )
    stops = asked.stops
    context = prompt_ids[-_DECODER_CONTEXT_TOKENS:]

    def start() -> AsyncGenerator[Piece, None]:
        return pieces(
            served.engine,
            request,
            served.tokenizer.detokenizer(context, asked.skip_special_tokens),
            StopStrings(stops, asked.include_stop_str_in_output),
            service.metrics,
            asked.include_stop_str_in_output,
        )

    return start


def _head(service: Service, prefix: str, http: HttpRequest) -> responses.Head:
    """The id is our own, whatever id a client gives: two clients may give the same."""
    return responses.Head(f"{prefix}-{secrets.token_hex(8)}", int(time.time()), service.model_name)


def _render(tokenizer: Tokenizer, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
    try:
        return tokenizer.render_chat([message.for_template() for message in messages], add_generation_prompt)
    except ChatTemplateError as error:
        raise bad_parameter(f"{error}.", "messages") from error


async def _encode(served: Served, text: str, add_special_tokens: bool) -> list[int]:
    longest = served.engine.max_model_len * served.max_chars_per_token
    if len(text) > longest:  # refused without the work of tokenizing it
        raise bad_parameter(
            f"You passed {len(text)} input characters. However, the model's context length is only "
            f"{served.engine.max_model_len} tokens (at most {longest} characters). "
            "Please reduce the length of the input prompt.",
            "input_text",
            len(text),
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_parameter("The text holds a lone surrogate, which is no character.", "prompt") from error
    if len(text) <= _INLINE_CHARACTERS:
        return served.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(served.tokenizer.encode, text, add_special_tokens)


def _check_ids(served: Served, token_ids: Sequence[int], parameter: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < served.vocab_size:
            raise bad_parameter(f"Token id {token_id} is out of vocabulary [0, {served.vocab_size}).", parameter)


class _Collected:
    """One choice of a client that does not stream."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last = Piece(None, "")

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        if piece.token_id is not None:
            self.token_ids.append(piece.token_id)
        if piece.logprobs is not None:
            self.logprobs.append(piece.logprobs)
        self.last = piece

    @property
    def text(self) -> str:
        return "".join(self._texts)


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all choices as they come. The first failure ends them all; closing this closes them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    ready: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue(maxsize=len(sources))

    async def pump(index: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await ready.put((index, piece))
            await ready.put(None)
        except Exception as error:
            await ready.put(error)

    pumps = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            item = await ready.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


# --- HTTP --------------------------------------------------------------------------------------------------------


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


async def _answer(http: HttpRequest, asked: GenerationRequest, answer: _Answer) -> Response:
    if asked.stream:
        return _EventStream(answer.chunks())
    try:
        return JSONResponse(await _unless_gone(http.receive, answer.body()))
    except _ClientGone:
        return Response(status_code=499)  # nobody reads it


class _EventStream(Response):
    """The status waits for the first chunk, so that a refusal is an HTTP error; a later failure is an error event, and
    the stream still ends in [DONE]."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_ClientGone):
            await _unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except ApiError as error:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_body(send, first)
            try:
                async for chunk in chunks:
                    await _send_body(send, chunk)
            except ApiError as error:
                await _send_body(send, responses.event(error.body) + responses.DONE)
            except Exception:
                log.exception("A stream failed")
                body = ApiError(500, "The server failed.").body
                await _send_body(send, responses.event(body) + responses.DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class _Gate:
    """Before any route: is the request for this machine, and of a size to be read? After it: the request's id."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
            return message

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            await send(message)

        refusal = self._refusal(headers)
        if refusal is not None:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, named)
            return
        self._service.in_flight += 1
        try:
            await self._app(scope, counted, named)
        finally:
            self._service.in_flight -= 1

    def _refusal(self, headers: Headers) -> ApiError | None:
        asked = headers.get(names.HEADER_MACHINE_UID)
        if asked is not None and asked != self._service.machine_uid:
            return ApiError(
                421,
                f"This is machine {self._service.machine_uid}, not {asked}.",
                names.HEADER_MACHINE_UID,
                type="MisdirectedRequest",
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", type="Content Too Large")
        return None


async def _json_only(http: HttpRequest) -> None:
    media_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "Unsupported Media Type: Only 'application/json' is allowed")


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return JSONResponse(error.body, error.status, error.headers)


async def _validation_error(_: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    refusal = validation_error(error.errors())
    return JSONResponse(refusal.body, refusal.status)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    body = ApiError(error.status_code, str(error.detail), type=HTTPStatus(error.status_code).phrase).body
    return JSONResponse(body, error.status_code, error.headers)


async def _unexpected_error(_: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "The server failed.").body, 500)
