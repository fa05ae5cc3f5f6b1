"""A handle on a running cluster, for tests and people.

Owns nothing: closing it ends the bed that this process started, and a bed of somebody else goes on.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import binaries, keeper, oci, packages
from testbed.folder import BedFolder, all_beds
from testbed.node import TESTPOD_IMAGE
from testbed.progress import Unavailable, say

START_LIMIT_SECONDS = 120
COMMAND_LIMIT_SECONDS = 30
CLOSE_LIMIT_SECONDS = 300  # large images are many files to remove
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


@dataclass(frozen=True)
class ClientFiles:
    """What a client presents, as the paths of PEM files."""

    certificate: Path
    key: Path
    authority: Path


class Cluster:
    """A cluster that answers to a kubeconfig file: the bed's, or one that was lent."""

    def __init__(
        self, kubeconfig: Path, url: str, kubectl: Path, context: str | None = None, cache: Path | None = None
    ) -> None:
        self.kubeconfig = kubeconfig
        self.url = url
        self._kubectl = kubectl
        self._context = context
        self._cache = cache

    def kubectl(
        self, *arguments: str, input: str | None = None, check: bool = True, timeout_seconds: float = 60
    ) -> "subprocess.CompletedProcess[str]":
        """Runs kubectl as admin; on failure raises with what it said, unless `check` is off."""
        done = subprocess.run(
            self.kubectl_command(*arguments),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"kubectl {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def kubectl_command(self, *arguments: str) -> list[str]:
        """The command line that runs kubectl as admin."""
        command = [str(self._kubectl), f"--kubeconfig={self.kubeconfig}"]
        if self._context is not None:
            command.append(f"--context={self._context}")
        if self._cache is not None:
            command.append(f"--cache-dir={self._cache}")
        return self._wrapped([*command, *arguments])

    def get(self, *arguments: str) -> Any:
        """The object (or list) that `kubectl get ARGUMENTS -o json` prints."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)

    def new_namespace(self, prefix: str = "test", *, labels: dict[str, str] = RESTRICTED) -> str:
        """A namespace of its own for one test, under restricted pod security, with its default account there."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.kubectl("create", "-f", "-", input=json.dumps(manifest))
        self._made(name)
        if self.has_controllers:
            self.wait_for(f"namespace {name} has its account", "get", "serviceaccount", "default", "-n", name)
        return name

    def wait_for(self, claim: str, *arguments: str, timeout_seconds: float = 30) -> str:
        """Repeats a kubectl command until it succeeds; returns what it printed."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            done = self.kubectl(*arguments, check=False)
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_seconds:g} s: {claim}; kubectl said: {done.stderr}")
            time.sleep(0.1)

    @property
    def has_controllers(self) -> bool:
        return True

    def _wrapped(self, command: list[str]) -> list[str]:
        return command

    def _made(self, namespace: str) -> None:
        """A hook for a lent cluster, which has to be left as it was found."""


class Bed(Cluster):
    """A bed that the keeper runs from a folder."""

    def __init__(self, folder: BedFolder, owner: "subprocess.Popen[bytes] | None" = None) -> None:
        self.folder = folder
        self._owned = owner
        url = json.loads(folder.address.read_text())["url"]
        super().__init__(
            folder.kubeconfig, url, binaries.control_plane_assets() / "kubectl", cache=folder.path / "kubectl-cache"
        )
        pki = folder.certificates
        self.admin = ClientFiles(pki / "admin.crt", pki / "admin.key", pki / "ca.crt")

    def audit_events(self, since: int = 0) -> list[dict[str, Any]]:
        """Every request the API server has finished, in order, from the `since`-th on (see `audit_mark`)."""
        with self.folder.audit_log.open() as log:
            lines = log.read().split("\n")[:-1]  # a last line without its end is still being written
        return [json.loads(line) for line in lines[since:]]

    def audit_mark(self) -> int:
        """How many requests were finished by now."""
        with self.folder.audit_log.open() as log:
            return sum(1 for line in log if line.endswith("\n"))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.folder.state.read_text())
        return state

    def stop_component(self, name: str) -> None:
        """Ends it and waits until it has gone."""
        self._command(f"stop {name}", lambda: name not in self.state()["running"])

    def kill_component(self, name: str) -> None:
        self._command(f"kill {name}", lambda: name not in self.state()["running"])

    def start_component(self, name: str) -> None:
        self._command(f"start {name}", lambda: name in self.state()["running"])
        if name == "kube-apiserver":
            self.wait_for(
                "the API server is ready again", "get", "--raw=/readyz", timeout_seconds=COMMAND_LIMIT_SECONDS
            )

    def pause_component(self, name: str) -> None:
        """It keeps its connections and says nothing, which is worse for its clients than being gone."""
        self._command(f"pause {name}", lambda: True)

    def resume_component(self, name: str) -> None:
        self._command(f"resume {name}", lambda: True)

    @contextmanager
    def without_component(self, name: str) -> Iterator[None]:
        self.stop_component(name)
        try:
            yield
        finally:
            self.start_component(name)

    @property
    def has_controllers(self) -> bool:
        return "kube-controller-manager" in self.state()["running"]

    def log_of(self, component: str) -> str:
        return (self.folder.logs / f"{component}.log").read_text(errors="replace")

    def memory_mebibytes(self) -> dict[str, int]:
        """Resident memory of every process of the bed, containers included, by program."""
        total: dict[str, int] = {}
        for pid in self.pids():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                argv0 = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            resident = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]
            name = Path(argv0).name
            total[name] = total.get(name, 0) + sum(resident) // 1024
        return total

    def pids(self) -> list[int]:
        """Every process of the bed below its keeper, containers included, in this machine's numbering."""
        return list(_descendants(self.keeper_pid))

    @property
    def keeper_pid(self) -> int:
        return int((self.folder.path / "keeper.pid").read_text())

    def close(self) -> None:
        """Ends the bed and waits until nothing of it is left."""
        if self._owned is None:
            return
        assert self._owned.stdin is not None
        self._owned.stdin.close()
        self._owned.wait(timeout=CLOSE_LIMIT_SECONDS)

    def _command(self, line: str, done: Any) -> None:
        if self._owned is not None:
            assert self._owned.stdin is not None
            self._owned.stdin.write(f"{line}\n".encode())
            self._owned.stdin.flush()
        else:
            with self.folder.commands.open("w") as commands:
                commands.write(f"{line}\n")
        deadline = time.monotonic() + COMMAND_LIMIT_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"the bed did not do within {COMMAND_LIMIT_SECONDS} s: {line}")
            time.sleep(0.02)


def start(*, detached: bool = False) -> Bed:
    """A control plane on this machine's loopback; needs no root. Ends with this process, unless detached."""
    bed: Bed = _start(Bed, binaries.control_plane_assets(), [], detached=detached)
    return bed


def _start(kind: "type[Bed]", assets: Path, options: Sequence[str], *, detached: bool) -> Any:
    for swept in keeper.sweep():
        say(f"removed what was left of bed {swept}")
    folder = BedFolder.create()
    log = folder.logs / "keeper.log"
    command = [sys.executable, "-m", "testbed.keeper", "--folder", str(folder.path), "--assets", str(assets), *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    if options:
        oci.write_archive(folder.path / "testpod.tar", TESTPOD_IMAGE, binaries.testpod())
    if detached:
        os.mkfifo(folder.commands, 0o600)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            # A FIFO opened for both never ends, so that a detached bed has an owner that never dies.
            stdin=os.open(folder.commands, os.O_RDWR) if detached else subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    (folder.path / "keeper.pid").write_text(str(process.pid))
    deadline = time.monotonic() + START_LIMIT_SECONDS
    text = ""
    while process.poll() is None and time.monotonic() < deadline:
        text = log.read_text(errors="replace") if log.exists() else text
        if folder.state.exists() and json.loads(folder.state.read_text())["ready"]:
            return kind(folder, None if detached else process)
        time.sleep(0.05)
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    process.wait(timeout=60)
    raise Unavailable(f"the test bed did not start:\n{text[-4000:]}")


def running_beds() -> list[Bed]:
    return [
        (NodeBed if f.init_pid.exists() else Bed)(f)
        for f in all_beds()
        if f.state.exists() and json.loads(f.state.read_text())["ready"]
    ]


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from _descendants(child)


class NodeBed(Bed):
    """A bed with one real node. Cluster, node and pods are inside namespaces; so is what `run_in` runs."""

    def run_in(
        self, command: Sequence[str], *, check: bool = True, timeout_seconds: float = 120, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program where the cluster's addresses work; files are the machine's own, except under /run."""
        options = {"capture_output": True, "text": True, **options}
        if "input" not in options and "stdin" not in options:
            options["stdin"] = subprocess.DEVNULL
        done = subprocess.run(self.inside(command), timeout=timeout_seconds, check=False, **options)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside; a long-running program gets SIGTERM when this is terminated."""
        enter = ["nsenter", f"--target={self.init_pid}", "--mount", "--net", "--pid", "--"]
        return [*enter, "setpriv", "--pdeathsig", "TERM", "env", f"--chdir={Path.cwd()}", *command]

    @property
    def init_pid(self) -> int:
        return int(self.folder.init_pid.read_text())

    def load_image(self, archive: Path) -> None:
        """Imports an OCI or Docker archive under the names that it carries."""
        self.run_in(["ctr", "-n", "k8s.io", "images", "import", str(archive)], timeout_seconds=600)

    @contextmanager
    def forward(self, address: str, port: int) -> Iterator[int]:
        """A port on this machine's loopback for one inside: for clients that live in the test's own process."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            local = probe.getsockname()[1]
        enter = f"nsenter --target={self.init_pid} --net -- socat STDIO TCP\\:{address}\\:{port}"
        listener = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "socat",
                f"TCP-LISTEN:{local},bind=127.0.0.1,fork,reuseaddr",
                f"EXEC:{enter}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + COMMAND_LIMIT_SECONDS
            while not _accepts(local):
                if listener.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"no forward to {address}:{port}")
                time.sleep(0.02)
            yield local
        finally:
            listener.terminate()
            listener.wait()

    def _wrapped(self, command: list[str]) -> list[str]:
        return self.inside(command)


def start_with_node(*, detached: bool = False) -> NodeBed:
    """A whole cluster inside namespaces; needs root."""
    if os.getuid() != 0:
        raise Unavailable(f"a node needs namespaces and cgroups, so root; this is user {os.getuid()}")
    packages.ensure(packages.NODE)
    bed: NodeBed = _start(NodeBed, binaries.kubernetes(), ["--with-node"], detached=detached)
    return bed


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
