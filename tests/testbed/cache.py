"""Keeps what is slow to make, outside the repository, keyed by what it was made from.

Owns the cache folder, its locks and the rule that a folder in it is complete or absent.
Refuses to know what is in a folder.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.progress import say

KEPT_VERSIONS = 3  # of each kind; older ones are removed when a new one is made


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "poolwright" / "testbed"


def digest(*parts: bytes | str | Path) -> str:
    """A short name for exactly these inputs; a path stands for the file's bytes."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.hexdigest()[:16]


@contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Holds an exclusive lock. The kernel drops it when its holder dies, so no lock is ever stale."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is {waiting_for}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find(kind: str, key: str) -> Path | None:
    folder = cache_root() / f"{kind}-{key}"
    return folder if folder.is_dir() else None


def build_once(
    kind: str, key: str, doing: str, build: Callable[[Path], None], *, kept_versions: int = KEPT_VERSIONS
) -> Path:
    """The folder for this key, built by `build(empty folder)` if it is not there: by one process of all that ask."""
    folder = cache_root() / f"{kind}-{key}"
    if not folder.is_dir():
        with locked(cache_root() / f"{kind}.lock", doing):
            if not folder.is_dir():
                for partial in cache_root().glob(f".{kind}-*"):
                    shutil.rmtree(partial, ignore_errors=True)
                say(doing)
                partial = cache_root() / f".{kind}-{key}"
                partial.mkdir(parents=True)
                build(partial)
                partial.rename(folder)
                _forget_old(kind, folder, kept_versions)
    os.utime(folder)
    return folder


def _forget_old(kind: str, newest: Path, kept_versions: int) -> None:
    versions = [p for p in cache_root().glob(f"{kind}-*") if p.is_dir() and len(p.name) == len(newest.name)]
    versions.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    for old in versions[kept_versions:]:
        shutil.rmtree(old, ignore_errors=True)
