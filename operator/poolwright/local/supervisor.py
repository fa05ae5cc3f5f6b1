"""`Children` without Kubernetes: engine processes and one router on this machine, as the spec of the pool says.

Owns processes, ports and readiness, and tells `LocalMachines` what it sees; gives no roles and decides no moves. A
crashed engine is restarted as the same machine with the role its record says, as a container restarts in its pod. An
edit of model, engine or template replaces machines one at a time. There is no node to choose: a machine's is taken to
carry the labels that its class selects nodes by.
"""

import asyncio
import hashlib
import math
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from poolwright.api.models import InferencePool, MachineClass
from poolwright.controller.ports import ChildrenState
from poolwright.controller.render import engine_arguments
from poolwright.core.links import Place
from poolwright.core.machine import Machine
from poolwright.local.machines import LocalMachines
from poolwright.local.processes import Process, free_ports, program
from poolwright_protocol import names

HOST = "127.0.0.1"
_WATCH_SECONDS = 0.25
_RESTART_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the nth failure in a row
_STOP_SECONDS = 40.0
_UNREADY_AFTER = 2  # looks without an answer, as the readiness probe of a pod


@dataclass(slots=True)
class _Engine:
    machine_class: str
    digest: str
    command: list[str]
    environment: dict[str, str]
    ports: tuple[int, int, int] = (0, 0, 0)
    process: Process | None = None
    failures: int = 0
    unanswered: int = 0  # looks in a row
    restart_at: float = math.inf  # inf while it runs or is being started
    retiring: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What the spec leaves open here. `default_cpu_percent` caps an engine whose class has no cpu limit."""

    folder: Path
    pool_key: bytes = field(repr=False)
    router_port: int = 0
    default_cpu_percent: int = 50


class Supervisor:
    """Start with `start`, end with `close`; both from one event loop."""

    def __init__(self, machines: LocalMachines, machines_file: Path, settings: LocalSettings) -> None:
        self._machines = machines
        self._machines_file = machines_file
        self._settings = settings
        self._engines: dict[str, _Engine] = {}
        self._router: Process | None = None
        self._router_uid = str(uuid.uuid4())
        self._router_ready = False
        self._watcher: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._closing = False
        self.router_url = f"http://{HOST}:{settings.router_port or free_ports(1)[0]}"

    @property
    def router_uid(self) -> str:
        return self._router_uid

    @property
    def pids(self) -> dict[str, int]:
        """Of the engines, by machine, and of `router`, as far as they run."""
        processes = {name: engine.process for name, engine in self._engines.items()} | {"router": self._router}
        return {name: process.pid for name, process in processes.items() if process}

    @property
    def router_ready(self) -> bool:
        return self._router_ready

    def first_problem(self) -> str:
        """Why an engine still does not run after a second try, in its own words; empty where none is so."""
        stuck = (f"{name}: {e.problem}" for name, e in sorted(self._engines.items()) if e.problem and e.failures > 1)
        return next(stuck, "")

    def metrics_targets(self) -> list[str]:
        """host:port of everything that exposes /metrics."""
        engines = [f"{HOST}:{engine.ports[0]}" for engine in self._engines.values()]
        return [self.router_url.removeprefix("http://"), *engines]

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0))
        self._watcher = asyncio.create_task(self._watch(), name="supervisor")

    async def close(self) -> None:
        """Ask everything to stop, router first so that nothing new comes in; killed past a limit."""
        self._closing = True
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._http:
            await self._http.close()
        if self._router:
            self._router.terminate()
            await self._router.wait(_STOP_SECONDS)
        processes = [engine.process for engine in self._engines.values() if engine.process]
        for process in processes:
            process.terminate()
        await asyncio.gather(*(process.wait(_STOP_SECONDS) for process in processes))

    async def ensure(self, pool: InferencePool) -> ChildrenState:
        changed = 0
        for machine_class in pool.spec.machines:
            changed += await self._ensure_class(pool, machine_class)
        known = {machine_class.name for machine_class in pool.spec.machines}
        for name, engine in self._engines.items():
            if engine.machine_class not in known:
                changed += self._retire(name, engine)
        if self._router is None:
            await self._start_router(pool)
            changed += 1
        problems = [f"{name}: {engine.problem}" for name, engine in sorted(self._engines.items()) if engine.problem]
        return ChildrenState(
            changed=changed,
            problems=problems,
            routers_ready=int(self._router_ready),
            routers_desired=1,
            router_uids=(self._router_uid,),
            router_urls={self._router_uid: self.router_url},
        )

    # ------------------------------------------------------------------------------------------------------- engines

    async def _ensure_class(self, pool: InferencePool, machine_class: MachineClass) -> int:
        present = {n: e for n, e in self._engines.items() if e.machine_class == machine_class.name and not e.retiring}
        command, digest = self._command(pool, machine_class)
        changed = 0
        for name in present:
            self._machines.observe(name, place=Place.of_labels(machine_class.template.node_selector))
        for index in range(machine_class.replicas):
            name = f"{pool.metadata.name}-{machine_class.name}-{index}"
            if name not in self._engines:
                await self._start_engine(pool, machine_class, name, command, digest)
                changed += 1
        for name, engine in sorted(present.items()):
            if int(name.rsplit("-", 1)[1]) >= machine_class.replicas:
                changed += self._retire(name, engine)
        outdated = [(n, e) for n, e in sorted(present.items()) if e.digest != digest]
        if outdated and all((m := self._machines.get(n)) is not None and m.ready for n in self._engines):
            changed += self._retire(*outdated[0])
        return changed

    def _command(self, pool: InferencePool, machine_class: MachineClass) -> tuple[list[str], str]:
        source = pool.spec.model.source
        if source.path is None:
            raise ValueError("spec.model.source: local mode serves a path of this machine, not a PersistentVolumeClaim")
        command = [
            program("poolwright-engine"),
            "serve",
            *engine_arguments(pool, machine_class, source.path),
            "--host=" + HOST,
            "--cpu-threads=1",
            f"--cpu-duty-percent={self._cpu_percent(machine_class)}",
        ]
        variables = sorted((v.name, v.value or "") for v in machine_class.template.env)
        return command, hashlib.sha256(repr((command, variables)).encode()).hexdigest()

    def _cpu_percent(self, machine_class: MachineClass) -> int:
        limit = machine_class.template.resources.limits.get("cpu")
        if limit is None:
            return self._settings.default_cpu_percent
        text = str(limit)
        cores = float(text[:-1]) / 1000 if re.fullmatch(r"[0-9.]+m", text) else float(text)
        return max(1, min(100, round(cores * 100)))

    async def _start_engine(
        self, pool: InferencePool, machine_class: MachineClass, name: str, command: list[str], digest: str
    ) -> None:
        uid = str(uuid.uuid4())
        environment = {variable.name: variable.value or "" for variable in machine_class.template.env} | {
            names.ENV_POD_UID: uid,
            names.ENV_POD_IP: HOST,
            names.ENV_POD_NAME: name,
            names.ENV_POOL: pool.metadata.name,
            names.ENV_POOL_NAMESPACE: pool.metadata.namespace,
            names.ENV_POOL_KEY: self._settings.pool_key.hex(),
        }
        engine = _Engine(machine_class.name, digest, command, environment)
        self._engines[name] = engine
        self._machines.put(
            Machine(
                name=name,
                uid=uid,
                machine_class=machine_class.name,
                host=HOST,
                ready=False,
                role=None,
                role_epoch=0,
                role_since=None,
                move=None,
                created_at=time.time(),
                place=Place.of_labels(machine_class.template.node_selector),
            )
        )
        await self._run_engine(name, engine)

    async def _run_engine(self, name: str, engine: _Engine) -> None:
        """As the downward API does for a container: its role and epoch are what the record says at each start."""
        machine = self._machines.get(name)
        role = {
            names.ENV_ROLE: machine.role.value if machine and machine.role else "",
            names.ENV_ROLE_EPOCH: str(machine.role_epoch if machine else 0),
        }
        engine.restart_at = math.inf
        api, admin, kv = free_ports(3)  # new ones at each start: what made it fail may have been a port
        self._machines.observe(name, api_port=api, admin_port=admin, kv_port=kv)
        engine.ports = (api, admin, kv)
        command = [*engine.command, f"--port={api}", f"--admin-port={admin}", f"--kv-port={kv}"]
        log = self._settings.folder / f"{name}.log"
        engine.process = await Process.start(command, engine.environment | role, log)

    def _retire(self, name: str, engine: _Engine) -> int:
        if engine.retiring:
            return 0
        engine.retiring = True
        self._machines.observe(name, deleting=True, ready=False)
        if engine.process:
            engine.process.terminate()
        return 1

    # -------------------------------------------------------------------------------------------------------- router

    async def _start_router(self, pool: InferencePool) -> None:
        port = self.router_url.rsplit(":", 1)[1]
        self._router = await Process.start(
            [
                program("poolwright"),
                "router",
                f"--host={HOST}",
                f"--port={port}",
                f"--machines-file={self._machines_file}",
            ],
            {
                names.ENV_POD_UID: self._router_uid,
                names.ENV_POOL: pool.metadata.name,
                names.ENV_POOL_NAMESPACE: pool.metadata.namespace,
                names.ENV_POOL_KEY: self._settings.pool_key.hex(),
            },
            self._settings.folder / "router.log",
        )

    # --------------------------------------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(self._look(name, engine) for name, engine in list(self._engines.items())))
            if self._router:
                if self._router.exit_code is not None and not self._closing:
                    self._router, self._router_ready = None, False  # the next `ensure` starts it again
                else:
                    self._router_ready = await self._answers(f"{self.router_url}/ready")
            await asyncio.sleep(_WATCH_SECONDS)

    async def _look(self, name: str, engine: _Engine) -> None:
        process = engine.process
        if process is None:
            if time.monotonic() >= engine.restart_at:
                await self._run_engine(name, engine)
            return
        if process.exit_code is None:
            if await self._answers(f"http://{HOST}:{engine.ports[0]}/ready"):
                engine.failures, engine.unanswered, engine.problem = 0, 0, ""
            else:
                engine.unanswered += 1
            machine = self._machines.get(name)
            lasting = machine is not None and machine.ready and engine.unanswered < _UNREADY_AFTER
            self._machines.observe(name, ready=(not engine.unanswered or lasting) and not engine.retiring)
            return
        if engine.retiring:
            del self._engines[name]
            self._machines.remove(name)
            return
        engine.problem = f"exited with code {process.exit_code}: {process.last_line()}"
        engine.restart_at = time.monotonic() + _RESTART_SECONDS[min(engine.failures, len(_RESTART_SECONDS) - 1)]
        engine.failures += 1
        engine.process = None
        machine = self._machines.get(name)
        self._machines.observe(name, ready=False, restarts=(machine.restarts if machine else 0) + 1)

    async def _answers(self, url: str) -> bool:
        assert self._http is not None
        try:
            async with self._http.get(url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
