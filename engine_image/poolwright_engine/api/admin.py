"""The admin port: reading and setting this machine's role. Every request carries the pool's bearer token.

Owns the mapping of role messages to HTTP; what a role change means is the engine's. The port is up before the model
is: until then a role can be neither set nor read, and the answer is 503.
"""

import json
from collections.abc import Callable

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from poolwright_engine.loop.engine import Engine, RoleRefused
from poolwright_protocol import keys
from poolwright_protocol.roles import RolePut

_MAX_BODY_BYTES = 64 * 1024


def create_admin_app(engine: Callable[[], Engine | None], pool_key: bytes) -> FastAPI:
    """`engine` gives None while the model loads."""
    expected = f"Bearer {keys.admin_token(pool_key)}"

    def authorized(http: Request) -> None:
        if not keys.same(http.headers.get("authorization", ""), expected):
            raise HTTPException(401, "a valid bearer token is needed", {"www-authenticate": "Bearer"})

    def running() -> Engine:
        found = engine()
        if found is None:
            raise HTTPException(503, "the model is still loading", {"retry-after": "5"})
        return found

    app = FastAPI(title="Poolwright engine admin", openapi_url=None, dependencies=[Depends(authorized)])
    app.add_exception_handler(HTTPException, _error)

    @app.get("/admin/role")
    async def get_role() -> JSONResponse:
        return JSONResponse(running().role_state().to_json())

    @app.put("/admin/role")
    async def put_role(http: Request) -> JSONResponse:
        found = running()
        body = b""
        async for part in http.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
        try:
            put = RolePut.from_json(json.loads(body))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        try:
            return JSONResponse((await found.put_role(put)).to_json())
        except RoleRefused as refused:
            raise HTTPException(refused.status, str(refused)) from refused

    return app


async def _error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse(
        {"error": {"message": error.detail, "code": error.status_code}}, error.status_code, error.headers
    )
