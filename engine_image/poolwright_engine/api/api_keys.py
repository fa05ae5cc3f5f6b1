"""`ApiKeys`: lets in to `/v1` who brings one of the keys as a bearer token, as vLLM's --api-key does.

What stands outside `/v1` stays open: probes and scrapers have no key.
"""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from poolwright_protocol import keys


class ApiKeys:
    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}" for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and scope["method"] != "OPTIONS":
            given = Headers(scope=scope).get("authorization", "")
            known = [keys.same(given, expected) for expected in self._expected]  # all of them, each in constant time
            if not any(known):
                answer = JSONResponse({"error": "Unauthorized"}, 401, {"www-authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
