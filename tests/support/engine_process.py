"""An engine as it is run: the real `poolwright-engine serve` in a process of its own.

    with start_engine(model, role=Role.PROMPT) as engine:
        engine.wait_ready()
        httpx.get(f"{engine.url}/v1/models")

It ends with the test, also when the test is killed (Linux).
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from poolwright.local.processes import free_ports
from poolwright_protocol import keys, names
from poolwright_protocol.roles import Role, RolePut, RoleState

POOL_KEY = bytes(range(32))
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class EngineProcess:
    process: subprocess.Popen[bytes]
    host: str
    port: int
    admin_port: int
    kv_port: int
    uid: str
    log_path: Path
    pool_key: bytes = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def wait_listening(self, limit_seconds: float = 30.0) -> None:
        """The port answers; the model may still be loading."""
        self._wait("/health", limit_seconds)

    def wait_ready(self, limit_seconds: float = 110.0) -> None:
        self._wait("/ready", limit_seconds)

    def put_role(self, role: Role, epoch: int, max_prefill_tokens_per_step: int | None = None) -> RoleState:
        put = RolePut(self.uid, role, epoch, max_prefill_tokens_per_step)
        return self._role(httpx.put(self._role_url, headers=self._bearer, json=put.to_json()))

    def get_role(self) -> RoleState:
        return self._role(httpx.get(self._role_url, headers=self._bearer))

    def terminate(self, limit_seconds: float = 40.0) -> int:
        """As Kubernetes does it: SIGTERM, and SIGKILL past the limit. Gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def _role_url(self) -> str:
        return f"http://{self.host}:{self.admin_port}/admin/role"

    @property
    def _bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {keys.admin_token(self.pool_key)}"}

    @staticmethod
    def _role(answer: httpx.Response) -> RoleState:
        answer.raise_for_status()
        return RoleState.from_json(answer.json())

    def _wait(self, path: str, limit_seconds: float) -> None:
        """Raises TimeoutError, or RuntimeError once the process has ended; both with its log."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended with exit code {self.process.returncode}:\n{self.log}")
            try:
                if httpx.get(f"{self.url}{path}", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"{self.url}{path} was not 200 within {limit_seconds} s:\n{self.log}")


@contextmanager
def start_engine(
    model: Path,
    *,
    name: str = "smollm2",
    host: str = "127.0.0.1",
    ports: tuple[int, int, int] | None = None,
    uid: str = "uid-1",
    role: Role | None = None,
    role_epoch: int = 0,
    pool_key: bytes = POOL_KEY,
    options: Sequence[str] = ("--cpu-threads", "1"),
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (sys.executable, "-m", "poolwright_engine"),
) -> Iterator[EngineProcess]:
    """`ports`: API, admin, KV; without them, three that are free. Does not wait: see `wait_ready`."""
    port, admin_port, kv_port = ports or free_ports(3, host)
    command = [
        *(*program, "serve", "--model", str(model), "--served-model-name", name),
        *("--host", host, "--port", str(port), "--admin-port", str(admin_port), "--kv-port", str(kv_port)),
        *options,
    ]
    who = {
        names.ENV_POD_UID: uid,
        names.ENV_POD_IP: host,
        names.ENV_POOL: "chat",
        names.ENV_POOL_NAMESPACE: "default",
        names.ENV_POOL_KEY: pool_key.hex(),
        names.ENV_ROLE: role.value if role else "",
        names.ENV_ROLE_EPOCH: str(role_epoch),
    }
    with tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **who, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        engine = EngineProcess(process, host, port, admin_port, kv_port, uid, Path(log.name), pool_key)
        try:
            yield engine
        finally:
            if process.poll() is None:
                engine.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
