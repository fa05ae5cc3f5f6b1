"""Starts a bed's components, one after another, and obeys its owner until that is gone.

Owns the components' processes. Inside a bed with a node it is the first process of its PID namespace and reaps for all.
Its standard input is the owner: a line `stop|start|kill|pause|resume COMPONENT` is a command, end of file is the end.
Refuses to know what a component is; refuses to clean up the machine, which is the keeper's work.
"""

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from testbed.components import Component, ControlPlane
from testbed.folder import BedFolder

START_LIMIT_SECONDS = 60
STOP_LIMIT_SECONDS = 3  # then it is killed: an API server with watches open takes a minute to end politely
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ComponentFailed(Exception):
    pass


class Runner:
    def __init__(self, folder: BedFolder) -> None:
        self._folder = folder
        self._components: dict[str, Component] = {}
        self._running: dict[str, int] = {}
        self._exited: dict[str, int] = {}
        self._ready = False

    def start_all(self, components: list[Component]) -> None:
        self._components = {c.name: c for c in components}
        for component in components:
            self.start(component.name)
            self.wait_until_ready(component.name)
        self._ready = True
        self.write_state()

    def start(self, name: str) -> None:
        self.reap()
        if name in self._running:
            return
        component = self._components[name]
        with (self._folder.logs / f"{name}.log").open("ab") as log:
            process = Popen(
                component.command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder.path,
                env={**os.environ, **component.environment},
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        process.returncode = 0  # reap() waits for it, not Popen
        self._running[name] = process.pid
        self._exited.pop(name, None)
        self.write_state()

    def wait_until_ready(self, name: str) -> None:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not self._components[name].ready():
            self.reap()
            if name not in self._running or time.monotonic() > deadline:
                how = f"exited with {self._exited[name]}" if name in self._exited else "did not become ready"
                log = (self._folder.logs / f"{name}.log").read_text(errors="replace")
                raise ComponentFailed(f"{name} {how}; its log ends with:\n{log[-3000:]}")
            time.sleep(0.05)

    def signal(self, name: str, number: signal.Signals) -> None:
        if name in self._running:
            os.kill(self._running[name], number)

    def stop(self, name: str) -> None:
        self.signal(name, signal.SIGTERM)
        deadline = time.monotonic() + STOP_LIMIT_SECONDS
        while name in self._running:
            self.reap()
            if time.monotonic() > deadline:
                self.signal(name, signal.SIGKILL)
            time.sleep(0.02)

    def obey(self, line: str) -> None:
        verb, _, name = line.strip().partition(" ")
        verbs: dict[str, Callable[[str], None]] = {
            "start": self.start,
            "stop": self.stop,
            "kill": lambda n: self.signal(n, signal.SIGKILL),
            "pause": lambda n: self.signal(n, signal.SIGSTOP),
            "resume": lambda n: self.signal(n, signal.SIGCONT),
        }
        if verb in verbs and name in self._components:
            verbs[verb](name)
        self.write_state()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, running in list(self._running.items()):
                if running == pid:
                    del self._running[name]
                    self._exited[name] = os.waitstatus_to_exitcode(status)
                    self.write_state()

    def write_state(self) -> None:
        state = {"ready": self._ready, "running": self._running, "exited": self._exited}
        fresh = self._folder.state.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.rename(self._folder.state)

    def serve_owner(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        buffer = b""
        while True:
            self.reap()
            readable, _, _ = select.select([0, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
            if 0 in readable:
                data = os.read(0, 4096)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self.obey(line.decode())

    def kill_all(self) -> None:
        """In reverse order. Not politely: nothing of a bed is kept."""
        for name in reversed(list(self._running)):
            self.signal(name, signal.SIGKILL)
        deadline = time.monotonic() + STOP_LIMIT_SECONDS
        while self._running and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--with-node", action="store_true")
    arguments = parser.parse_args()
    folder = BedFolder(arguments.folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    runner = Runner(folder)
    try:
        for attempt in range(3):
            try:
                runner.start_all(_components(folder, arguments.assets, arguments.with_node))
                break
            except ComponentFailed as failure:
                runner.kill_all()
                # Somebody else took the port between our choosing and using it.
                if "address already in use" not in str(failure) or attempt == 2:
                    print(failure, file=sys.stderr)
                    return 1
        runner.serve_owner()
    finally:
        runner.kill_all()
    return 0


def _components(folder: BedFolder, assets: Path, with_node: bool) -> list[Component]:
    extra: list[Component] = []
    if with_node:
        from testbed import node

        node.prepare_namespaces(folder)
        plane = ControlPlane(folder, assets, node.BRIDGE_IP, 6443)
        plane.prepare()
        extra = node.components(folder, assets, plane)
    else:
        plane = ControlPlane(folder, assets, "127.0.0.1", free_port())
        plane.prepare()
    address: dict[str, Any] = {"url": plane.url}
    folder.address.write_text(json.dumps(address))
    return [*plane.components(), *extra]


if __name__ == "__main__":
    sys.exit(main())
