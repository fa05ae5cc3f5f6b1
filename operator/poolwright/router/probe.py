"""A look at every machine's /health, so that one that died is known to the ledger before its pod is known to be gone;
and at its /load, so that what other routers sent it is known too.

A prompt machine gets no request from the router itself: without this, its death would only make it look idle.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.routing import is_live
from poolwright.router.beside import Beside
from poolwright.router.fleet import Fleet
from poolwright.router.relay import Answer, MachineFailed, Refused, Relay

_SILENCES_THAT_COUNT = 3  # one late answer means load, not death


class Probe:
    def __init__(
        self,
        relay: Relay,
        fleet: Fleet,
        ledger: Ledger,
        beside: Beside,
        interval_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._relay = relay
        self._fleet = fleet
        self._ledger = ledger
        self._beside = beside
        self._interval_seconds = interval_seconds
        self._silences: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            machines = [machine for machine in self._fleet.machines if is_live(machine)]
            await asyncio.gather(*(self._look(machine) for machine in machines))
            alive = {machine.uid for machine in machines}
            self._beside.keep(alive)
            self._silences = {uid: count for uid, count in self._silences.items() if uid in alive}

    async def _look(self, machine: Machine) -> None:
        try:
            async with asyncio.timeout(self._interval_seconds):
                await self._relay.read(machine, await self._relay.open(machine, "GET", "/health", None, {}))
                own = self._beside.own(machine.uid)
                said = await self._relay.read(machine, await self._relay.open(machine, "GET", "/load", None, {}))
        except TimeoutError:
            self._silences[machine.uid] = self._silences.get(machine.uid, 0) + 1
            if self._silences[machine.uid] >= _SILENCES_THAT_COUNT:
                self._ledger.failed(machine.uid, self._clock())
            return
        except (MachineFailed, Refused):
            self._ledger.failed(machine.uid, self._clock())
            return
        self._silences.pop(machine.uid, None)
        self._ledger.answered(machine.uid)
        requests = _requests(said)
        if requests is not None:
            self._beside.heard(machine.uid, requests, own, self._clock())


def _requests(said: Answer) -> int | None:
    """That generate there; None where the engine does not say."""
    with suppress(ValueError):
        body = json.loads(said.body)
        load = body.get("server_load") if isinstance(body, dict) else None
        if said.status == 200 and type(load) is int and load >= 0:
            return load
    return None
