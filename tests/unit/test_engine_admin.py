"""The admin port lets in who holds the pool's key, and passes the engine's verdict on."""

from collections.abc import AsyncIterator

import httpx
import pytest

from poolwright_engine.api.admin import create_admin_app
from poolwright_protocol import keys
from poolwright_protocol.roles import Role, RolePut, RoleState
from support.role_engine import RoleKeeper

KEY = b"k" * 32
TOKEN = {"authorization": f"Bearer {keys.admin_token(KEY)}"}


@pytest.fixture
def keeper() -> RoleKeeper:
    return RoleKeeper("uid-1", Role.PROMPT, 3)


@pytest.fixture
async def admin(keeper: RoleKeeper) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(lambda: keeper, KEY)  # type: ignore[arg-type,return-value]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        yield client


async def test_get_says_what_the_engine_does_now(admin: httpx.AsyncClient, keeper: RoleKeeper) -> None:
    answer = await admin.get("/admin/role", headers=TOKEN)
    assert answer.status_code == 200
    assert RoleState.from_json(answer.json()) == keeper.role_state()


async def test_put_sets_the_role_and_answers_with_the_state(admin: httpx.AsyncClient, keeper: RoleKeeper) -> None:
    put = RolePut("uid-1", Role.TOKEN, 4, max_prefill_tokens_per_step=128)
    answer = await admin.put("/admin/role", headers=TOKEN, json=put.to_json())
    assert answer.status_code == 200
    state = RoleState.from_json(answer.json())
    assert (state.role, state.epoch, state.max_prefill_tokens_per_step) == (Role.TOKEN, 4, 128)
    assert keeper.role_state() == state


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": keys.admin_token(KEY)},
        {"authorization": f"Bearer {keys.admin_token(b'x' * 32)}"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_without_the_pools_token_nothing_is_said_or_done(
    admin: httpx.AsyncClient, keeper: RoleKeeper, headers: dict[str, str], method: str
) -> None:
    put = RolePut("uid-1", Role.TOKEN, 4).to_json()
    answer = await admin.request(method, "/admin/role", headers=headers, json=put if method == "PUT" else None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert keeper.role_state().role is Role.PROMPT


@pytest.mark.parametrize(
    ("put", "status"),
    [
        (RolePut("uid-2", Role.TOKEN, 4), 421),
        (RolePut("uid-1", Role.TOKEN, 2), 409),
        (RolePut("uid-1", Role.TOKEN, 3), 409),
        (RolePut("uid-1", Role.PROMPT, 3), 200),
    ],
)
async def test_the_engines_verdict_is_the_status(admin: httpx.AsyncClient, put: RolePut, status: int) -> None:
    answer = await admin.put("/admin/role", headers=TOKEN, json=put.to_json())
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == status


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "body"),
        (b'{"podUid": "uid-1", "role": "Token", "epoch": 4}', "role"),
        (b'{"podUid": "uid-1", "role": "token", "epoch": -4}', "epoch"),
        (b'{"podUid": "uid-1", "role": "token", "epoch": 4, "maxPrefillTokensPerStep": 0}', "maxPrefillTokensPerStep"),
    ],
)
async def test_a_body_that_is_no_role_is_a_400_that_names_the_field(
    admin: httpx.AsyncClient, body: bytes, named: str
) -> None:
    answer = await admin.put("/admin/role", headers=TOKEN, content=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


async def test_a_body_without_end_is_not_read() -> None:
    app = create_admin_app(lambda: RoleKeeper("uid-1", None, 0), KEY)  # type: ignore[arg-type,return-value]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        assert (await client.put("/admin/role", headers=TOKEN, content=b"x" * 100_000)).status_code == 413


async def test_while_the_model_loads_the_role_is_not_known() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_admin_app(lambda: None, KEY)), base_url="http://engine"
    ) as client:
        answer = await client.get("/admin/role", headers=TOKEN)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (await client.get("/admin/role")).status_code == 401
