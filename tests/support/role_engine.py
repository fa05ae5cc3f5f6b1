"""An engine's admin port without a model: the real admin app over the smallest engine that keeps a role.

Takes any free address, so that a test can also put it where another engine was.
"""

import asyncio
import socket
import uuid

import uvicorn

from poolwright_engine.api.admin import create_admin_app
from poolwright_engine.loop.engine import RoleRefused
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.roles import Role, RolePut, RoleState
from support.scripted_runner import EOS, ScriptedRunner


class RoleKeeper:
    """The role rules of an engine. A step boundary passes right after a switch, unless `busy`: a long step runs."""

    def __init__(self, pod_uid: str, role: Role | None, epoch: int) -> None:
        self.pod_uid = pod_uid
        self.boot_id = uuid.uuid4().hex
        self.busy = False
        self._put = role is not None
        self._role = role or Role.MIXED
        self._epoch = epoch
        self._steps = 1
        self._bound: int | None = None
        self.profile: MachineProfile | None = None  # what it says of its machine, as an older engine does not

    async def put_role(self, put: RolePut) -> RoleState:
        if put.pod_uid != self.pod_uid:
            raise RoleRefused(421, f"this is {self.pod_uid}")
        if put.epoch < self._epoch:
            raise RoleRefused(409, f"epoch {put.epoch} is older than {self._epoch}")
        if put.epoch == self._epoch and self._put and put.role is not self._role:
            raise RoleRefused(409, f"epoch {put.epoch} is {self._role.value} already")
        if put.role is not self._role or put.epoch != self._epoch:
            self._steps = 0 if self.busy else 1
        self._put, self._role, self._epoch, self._bound = True, put.role, put.epoch, put.max_prefill_tokens_per_step
        return self.role_state()

    def role_state(self) -> RoleState:
        return RoleState(
            self.pod_uid,
            self.boot_id,
            self._role,
            self._epoch,
            self._steps,
            drained_seconds=0.0,
            max_prefill_tokens_per_step=self._bound,
            step_profile=self.profile,
        )

    def end_step(self) -> None:
        self.busy = False
        self._steps += 1

    async def start(self) -> None:
        """The process begins."""

    async def close(self) -> None:
        """The process ends."""


class LoopKeeper(RoleKeeper):
    """The same by the real engine loop, over a scripted device. Its boundaries are its own: it cannot be made busy."""

    def __init__(self, pod_uid: str, role: Role | None, epoch: int) -> None:
        super().__init__(pod_uid, role, epoch)
        self._loop = EngineLoop(
            ScriptedRunner(),
            config=LoopConfig(max_model_len=64),
            identity=Identity(pod_uid=pod_uid, role=role, role_epoch=epoch),
            eos_token_ids=frozenset({EOS}),
        )

    async def start(self) -> None:
        await self._loop.start()

    async def close(self) -> None:
        await self._loop.close()

    async def put_role(self, put: RolePut) -> RoleState:
        return await self._loop.put_role(put)

    def role_state(self) -> RoleState:
        return self._loop.role_state()


class RoleEngine:
    """One engine process's worth of admin port, in this process."""

    def __init__(self, keeper: RoleKeeper, pool_key: bytes) -> None:
        self.keeper = keeper
        self.loading = False
        app = create_admin_app(lambda: None if self.loading else keeper, pool_key)  # type: ignore[arg-type,return-value]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int = 0) -> None:
        await self.keeper.start()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        self.port = int(listener.getsockname()[1])
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """At once, as a killed process: connections are cut."""
        self._server.should_exit = self._server.force_exit = True
        if self._task:
            await self._task
            self._task = None
            await self.keeper.close()
