"""Child processes of local mode: their ports, their logs, their end. Knows nothing of pools."""

import asyncio
import ctypes
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PORTS = (20_000, 30_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different, and below those the system gives to outgoing connections: an
    engine listens seconds after it was told its ports. Raises OSError when there are none."""
    free: list[int] = []
    for port in random.sample(range(*_PORTS), k=_PORTS[1] - _PORTS[0]):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"no {count} free ports between {_PORTS[0]} and {_PORTS[1]}")


def program(name: str) -> str:
    """Path of a console script of this environment, else of the PATH. Raises FileNotFoundError that says what to do."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name} is not installed: pip install 'poolwright[engine]'")
    return found


class Process:
    """One child that ends with its parent, also when the parent is killed (Linux)."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self._child = child
        self.log = log

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "Process":
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the supervisor, which drains its children
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        return cls(child, log)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        return self._child.returncode

    def last_line(self) -> str:
        """The log's last line in the program's own name, else the last one: why it ended, as far as it said."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        own = [line for line in lines if line.startswith("poolwright")]
        return (own or lines or ["no output"])[-1].strip()

    def terminate(self) -> None:
        """Ask it to stop; an engine drains first."""
        if self._child.returncode is None:
            self._child.send_signal(signal.SIGTERM)

    async def wait(self, limit_seconds: float) -> None:
        """Wait for its end; killed past the limit."""
        try:
            await asyncio.wait_for(self._child.wait(), limit_seconds)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
