"""Where a bed keeps its files, and which of these folders nobody owns any more.

Owns the layout that keeper, runner and handle share. A folder is held by a lock of its keeper; one whose lock can be
taken is stale, whatever killed its keeper.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO


def beds_root() -> Path:
    """Not /tmp: that is memory on some machines, and images are large. Short, because sockets' paths must be."""
    return Path(os.environ.get("TMPDIR") or "/var/tmp") / f"poolwright-testbed-{os.getuid()}"


@dataclass(frozen=True)
class BedFolder:
    path: Path

    @classmethod
    def create(cls) -> "BedFolder":
        path = beds_root() / secrets.token_hex(3)
        path.mkdir(parents=True, mode=0o700)
        folder = cls(path)
        folder.certificates.mkdir()
        folder.logs.mkdir()
        return folder

    @property
    def name(self) -> str:
        """Also the name of the bed's cgroup."""
        return f"poolwright-testbed-{self.path.name}"

    @property
    def certificates(self) -> Path:
        return self.path / "certificates"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def state(self) -> Path:
        """Written by the runner: what runs, and whether the bed is ready."""
        return self.path / "state.json"

    @property
    def address(self) -> Path:
        """Written by the runner before it starts anything: where the API server will answer."""
        return self.path / "address.json"

    @property
    def init_pid(self) -> Path:
        """Written by the keeper of a bed with a node: the first process inside its namespaces."""
        return self.path / "init.pid"

    @property
    def kubeconfig(self) -> Path:
        return self.path / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.jsonl"

    @property
    def commands(self) -> Path:
        """A FIFO for a bed that belongs to no process."""
        return self.path / "commands"

    def hold(self) -> IO[str] | None:
        """Takes the folder for as long as the file stays open; None where somebody has it."""
        lock = (self.path / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock


def all_beds() -> Iterator[BedFolder]:
    root = beds_root()
    if root.is_dir():
        yield from (BedFolder(path) for path in sorted(root.iterdir()) if path.is_dir())
