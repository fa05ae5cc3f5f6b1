"""Quiet for a test that measures while other sessions of the suite run: each waits before its next module.

Owns two locks in a folder that `scripts/suite.py` names; without one there are no other sessions. A lock ends with the
process that holds it, so a session that dies keeps nobody waiting.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "POOLWRIGHT_TEST_QUIET"


class Quiet:
    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")
        self._module: Path | None = None

    def close(self) -> None:
        self._door.close()
        self._room.close()

    def begin(self, module: Path) -> None:
        """Before each test. Where another module begins, no server of the last one runs, and whoever measures may."""
        if module == self._module:
            return
        self._leave()
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)
        self._module = module

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within a test. It waits at the door without a place in the room, or two who measure would wait for each
        other."""
        self._leave()
        fcntl.flock(self._door, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_SH)
            fcntl.flock(self._door, fcntl.LOCK_UN)

    def _leave(self) -> None:
        fcntl.flock(self._room, fcntl.LOCK_UN)


def of_this_suite() -> Quiet | None:
    """Once: what this process starts is part of the test that started it, and asks nobody."""
    folder = os.environ.pop(FOLDER, None)
    return Quiet(Path(folder)) if folder else None
