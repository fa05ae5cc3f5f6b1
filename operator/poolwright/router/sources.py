"""Machines from a file that a supervisor on the same computer keeps: for a router without Kubernetes. Read only.

The file holds a JSON list, each row the fields of a `Machine` with `move` as its annotation's text, replaced whole.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from poolwright.core.machine import Machine, MachinePatch
from poolwright.core.router_note import RouterNote
from poolwright.machines import Conflict, Unavailable

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1


class FileMachines:
    def __init__(self, file: Path) -> None:
        self._file = file

    def check(self) -> None:
        """Raises Unavailable where the file does not hold machines now."""
        self._read()

    async def list(self) -> tuple[Machine, ...]:
        return self._read()

    async def watch(self) -> AsyncIterator[tuple[Machine, ...]]:
        last: tuple[Machine, ...] | None = None
        seen: object = None
        while True:
            try:
                stamp = self._stamp()
                if stamp != seen:
                    machines = self._read()
                    seen = stamp
                    if machines != last:
                        last = machines
                        yield machines
            except Unavailable as error:
                if seen != str(error):
                    seen = str(error)
                    log.warning("The machines could not be read error=%s", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def patch(self, patch: MachinePatch) -> Machine:
        raise Conflict(f"machine {patch.name}: a router only reads")

    async def annotate(self, machine: Machine, note: RouterNote | None) -> None:
        raise Conflict(f"machine {machine.name}: a router only reads")

    def _stamp(self) -> tuple[int, int, int] | str:
        try:
            stat = self._file.stat()
        except OSError as error:
            raise Unavailable(f"{self._file}: {error.strerror}") from error
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> tuple[Machine, ...]:
        try:
            return tuple(Machine.from_row(row) for row in json.loads(self._file.read_text()))
        except OSError as error:
            raise Unavailable(f"{self._file}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"{self._file} does not hold the machines of a pool: {error}") from error
