"""The API port: a FastAPI app over an `Engine`. It is up before the model is, and says so.

Owns routes, errors, the bound of a body and the request's id. Knows the engine only through its protocol; nothing here
waits for a step.
"""

import json
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poolwright_engine.api import chat, completions, responses
from poolwright_engine.api.answer import Served
from poolwright_engine.api.api_error import ApiError, brief, validation_error
from poolwright_engine.api.event_stream import JsonBody, respond
from poolwright_engine.api.generation import SHUTDOWN_RETRY_SECONDS
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from poolwright_engine.api.routed import routed_by
from poolwright_protocol import names

__all__ = ["Served", "Service", "create_app"]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
KEEP_ALIVE_SECONDS = 15.0
_LOGGED = "poolwright.logged"  # in a request's scope: what the log says of its refusal
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
# Paths of the API that ask for another kind of model or server, by what they would need.
_OTHER_APIS = {
    "Embeddings": ("/v1/embeddings", "/v2/embed"),
    "Pooling": ("/pooling", "/classify"),
    "Score": ("/score", "/v1/score"),
    "Rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "Responses": ("/v1/responses",),
    "Messages": ("/v1/messages", "/v1/messages/count_tokens"),
    "Transcriptions": ("/v1/audio/transcriptions",),
    "Translations": ("/v1/audio/translations",),
    "Speech": ("/v1/audio/speech",),
    "Images": ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
    "Moderations": ("/v1/moderations",),
    "Files": ("/v1/files",),
    "Batches": ("/v1/batches",),
    "Fine-tuning": ("/v1/fine_tuning/jobs",),
    "LoRA": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


@dataclass(slots=True)
class Service:
    """What the ports share. `served` is None while the model loads; `ready` only after a first token was made.
    `in_flight` counts requests of any kind, `generating` those that generate. `aliases`: other names that clients may
    ask for; answers carry `model_name`."""

    model_name: str
    model_root: str
    machine_uid: str
    metrics: EngineMetrics
    served: Served | None = None
    ready: bool = False
    draining: bool = False
    in_flight: int = 0
    generating: int = 0
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    aliases: tuple[str, ...] = ()
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

    def accepting(self, model: str | None) -> Served:
        """Raises ApiError."""
        served = self.loaded()
        if self.draining:
            raise ApiError(503, "This machine is shutting down.", retry_after_seconds=SHUTDOWN_RETRY_SECONDS)
        self.check_model(model)
        return served

    def check_model(self, name: str | None) -> None:
        """Raises ApiError."""
        if name and name not in self.names:
            shown, known = name if len(name) <= 200 else f"{name[:200]}…", ", ".join(self.names)
            raise ApiError(404, f"The model `{shown}` does not exist. Valid aliases: {known}.", param="model")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_name, *self.aliases)


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    error: ErrorInfo


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 404, 413, 415, 421, 422, 429, 500, 503)
}
_GENERATED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}},
    **_ERRORS,
}


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Poolwright engine", version=responses.VERSION, docs_url=None, redoc_url=None)
    app.add_middleware(_Gate, service=service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    _add_generation(app, service)
    _add_tokenizing(app, service)
    _add_state(app, service)
    for api, paths in _OTHER_APIS.items():
        for path in paths:
            app.add_api_route(path, _refusing(api), methods=["GET", "POST"], include_in_schema=False)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    options: dict[str, Any] = {"dependencies": [Depends(_json_only)], "responses": _GENERATED}

    @app.post("/v1/completions", **options)
    async def create_completion(body: CompletionRequest, http: HttpRequest) -> Response:
        served = service.accepting(body.model)
        answer = await completions.answer(served, body, service.model_name, service.metrics, routed_by(http.headers))
        return await respond(http, bool(body.stream), answer, service.keep_alive_seconds)

    @app.post("/v1/chat/completions", **options)
    async def create_chat_completion(body: ChatCompletionRequest, http: HttpRequest) -> Response:
        served = service.accepting(body.model)
        answer = await chat.answer(served, body, service.model_name, service.metrics, routed_by(http.headers))
        return await respond(http, bool(body.stream), answer, service.keep_alive_seconds)


def _add_tokenizing(app: FastAPI, service: Service) -> None:
    options: dict[str, Any] = {"dependencies": [Depends(_json_only)], "responses": _ERRORS}

    @app.post("/tokenize", **options)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        served = service.loaded()
        service.check_model(body.model)
        if body.messages is not None:
            ids = await served.prompts.tokenized_chat(body.conversation)
        else:
            ids = await served.prompts.tokenized(body.prompt or "", body.add_special_tokens is not False)
        symbols = await served.prompts.symbols(ids) if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=served.engine.max_model_len, tokens=ids, token_strs=symbols)

    @app.post("/detokenize", **options)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        served = service.loaded()
        service.check_model(body.model)
        served.prompts.check_ids(body.tokens, "tokens")
        return Detokenized(prompt=await served.prompts.decoded(body.tokens))


def _add_state(app: FastAPI, service: Service) -> None:
    empty: dict[str, Any] = {"response_class": Response, "responses": {503: {"description": "Not now."}}}

    @app.get("/v1/models", responses={503: {"model": ErrorBody}})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service, name) for name in service.names]}

    @app.get("/v1/models/{model_id:path}", responses={404: {"model": ErrorBody}, 503: {"model": ErrorBody}})
    async def model(model_id: str) -> dict[str, Any]:
        service.check_model(model_id)
        return _model_card(service, model_id)

    @app.get("/health", **empty)
    async def health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/ready", **empty)
    async def ready() -> Response:
        return Response(status_code=200 if service.ready and service.healthy and not service.draining else 503)

    @app.get("/ping", **empty, name="ping")
    @app.post("/ping", **empty, name="post_ping")
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": responses.VERSION}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.generating}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_card(service: Service, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "poolwright",
        "root": service.model_root,
        "parent": None,
        "max_model_len": service.loaded().engine.max_model_len,
        "permission": [permission],
    }


def _refusing(api: str) -> Any:
    async def refuse(_: HttpRequest) -> Response:
        raise ApiError(404, f"The model does not support {api} API")

    return refuse


# --- HTTP --------------------------------------------------------------------------------------------------------


class _Gate:
    """Before any route: is the request for this machine, and of a size to be read? After it: the request's id, and a
    line in the log for what was refused. Not for 429 and 503, which may be many, are nobody's mistake, and are counted
    by metrics."""

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
        received, status = 0, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
            return message

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).setdefault("x-request-id", request_id)
            elif status >= 400 and status not in (429, 503) and (body := message.get("body")):
                _log_refusal(scope, status, request_id, body)
            await send(message)

        refusal = self._refusal(headers)
        if refusal is not None:
            await JsonBody(refusal.body, refusal.status)(scope, receive, named)
            return
        generating = scope["path"].endswith("/completions")
        self._service.in_flight += 1
        self._service.generating += generating
        try:
            await self._app(scope, counted, named)
        finally:
            self._service.in_flight -= 1
            self._service.generating -= generating

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


def _log_refusal(scope: Scope, status: int, request_id: str, body: bytes) -> None:
    """Without what the client sent: prompts are nobody else's business."""
    error = json.loads(body)["error"]
    log.info(
        "Refused a request status=%d method=%s path=%r request_id=%s param=%r message=%r",
        status,
        scope["method"],
        brief(scope["path"]),
        request_id,
        brief(error["param"]),
        brief(scope.get(_LOGGED, error["message"])),
    )


async def _json_only(http: HttpRequest) -> None:
    media_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "Unsupported Media Type: Only 'application/json' is allowed")


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    request.scope[_LOGGED] = error.logged
    return JsonBody(error.body, error.status, error.headers)


async def _validation_error(request: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return await _api_error(request, validation_error(error.errors()))


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    body = ApiError(error.status_code, str(error.detail), type=HTTPStatus(error.status_code).phrase).body
    return JsonBody(body, error.status_code, error.headers)


async def _unexpected_error(_: HttpRequest, error: Exception) -> Response:
    return JsonBody(ApiError(500, "The server failed.").body, 500)
