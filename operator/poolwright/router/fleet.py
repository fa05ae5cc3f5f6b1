"""The machines as last seen. An outage of their source changes nothing here: the last known set stays."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.routing import is_live
from poolwright.machines import Machines

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Fleet:
    def __init__(self, source: Machines, ledger: Ledger) -> None:
        self._source = source
        self._ledger = ledger
        self.machines: tuple[Machine, ...] = ()
        self.ready = False  # a Ready machine has been seen; from then on this router has something to say

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            try:
                # The protocol promises an iterator; every source is a generator, to be closed when we leave.
                sets = cast(AsyncGenerator[tuple[Machine, ...], None], self._source.watch())
                async with aclosing(sets):
                    async for machines in sets:
                        self._replace(machines)
                log.warning("The watch of the machines ended, and begins again")
            except Exception as error:
                log.warning("The watch of the machines failed, and begins again error=%r", error)
            await asyncio.sleep(_RETRY_SECONDS)

    def _replace(self, machines: tuple[Machine, ...]) -> None:
        self.machines = machines
        self._ledger.keep(machine.uid for machine in machines)
        if not self.ready and any(is_live(machine) for machine in machines):
            self.ready = True
            log.info("Serving machines=%d", len(machines))
