"""The admin port of engines, over HTTP: PUT and GET of a role. Owns deadlines and what an answer means, no decision.

An answer in the name of another pod is no answer: an IP may have been given to another pod since it was read.
"""

import json
from types import TracebackType
from typing import Self

import httpx

from poolwright.controller.ports import EngineRefused, EngineUnreachable
from poolwright.core.machine import Machine
from poolwright_protocol import keys
from poolwright_protocol.roles import RolePut, RoleState

_MISDIRECTED = 421


class HttpEngineAdmin:
    """`EngineAdmin` of one pool; its bearer token is derived from the pool key."""

    def __init__(self, pool_key: bytes, *, timeout_seconds: float = 3.0, connect_timeout_seconds: float = 1.0) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_seconds, connect=connect_timeout_seconds),
            headers={"authorization": f"Bearer {keys.admin_token(pool_key)}"},
            limits=httpx.Limits(max_keepalive_connections=0),  # an idle connection would outlive an IP's owner
            trust_env=False,
        )

    async def put_role(self, machine: Machine, put: RolePut) -> RoleState:
        return await self._call(machine, "PUT", put)

    async def get_role(self, machine: Machine) -> RoleState:
        return await self._call(machine, "GET", None)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, machine: Machine, method: str, put: RolePut | None) -> RoleState:
        if machine.host is None:
            raise EngineUnreachable(f"{machine.name} has no address yet")
        host = f"[{machine.host}]" if ":" in machine.host else machine.host
        url = f"http://{host}:{machine.admin_port}/admin/role"
        try:
            answer = await self._client.request(method, url, json=put.to_json() if put else None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnreachable(f"{machine.name} at {url}: {error or type(error).__name__}") from error
        if answer.status_code == _MISDIRECTED:
            raise EngineUnreachable(f"{machine.name} at {url}: the address belongs to another machine now")
        if answer.status_code != httpx.codes.OK:
            raise EngineRefused(answer.status_code, f"{machine.name}: {_message(answer)}")
        try:
            state = RoleState.from_json(answer.json())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineUnreachable(f"{machine.name} at {url}: not a role state: {answer.text[:200]!r}") from error
        if state.pod_uid != machine.uid:
            raise EngineUnreachable(f"{machine.name} at {url}: the address belongs to machine {state.pod_uid} now")
        return state


def _message(answer: httpx.Response) -> str:
    """The text of an OpenAI-shaped, a FastAPI-shaped or any other error body."""
    try:
        body = answer.json()
    except json.JSONDecodeError:
        return answer.text[:200]
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
    return str(body)[:200]
