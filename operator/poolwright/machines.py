"""The `Machines` protocol: how router and controller see the machines of one pool.

`kube.py` implements it over pods, `local/` over engine processes; tests run the same moves on both.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from poolwright.core.machine import Machine, MachinePatch
from poolwright.core.router_note import RouterNote


class Conflict(Exception):
    """Another writer won (uid, epoch or resource version differs), or the machine is gone. Read again."""


class Unavailable(Exception):
    """The store cannot be reached now. What was last known stays valid; absence means nothing."""


class Machines(Protocol):
    async def list(self) -> tuple[Machine, ...]:
        """All machines of the pool, complete or not at all. Raises Unavailable."""
        ...

    def watch(self) -> AsyncIterator[tuple[Machine, ...]]:
        """The whole set, first as it is and then after each change. Heals its own interruptions; ends only when closed.

        A consumer that is slow sees fewer, later sets. During an outage nothing is yielded: keep the last set.
        """
        ...

    async def patch(self, patch: MachinePatch) -> Machine:
        """Test uid and epoch, then write, in one step. Raises Conflict or Unavailable."""
        ...

    async def annotate(self, machine: Machine, note: RouterNote | None) -> None:
        """Test the uid, then write the note and nothing else; None removes it. Raises Conflict or Unavailable."""
        ...
