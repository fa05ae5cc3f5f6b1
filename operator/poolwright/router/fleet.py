"""The machines as last seen, and what work costs on them. An outage of their source changes nothing: the last stays."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

from poolwright.core.class_profiles import prices_of
from poolwright.core.ledger import Ledger
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.router_note import RouterNote
from poolwright.core.routing import Targets, is_live
from poolwright.machines import Machines
from poolwright_protocol.machine_profile import MachineProfile

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Fleet:
    def __init__(self, source: Machines, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._source = source
        self._ledger = ledger
        self._clock = clock
        self._starting_since: dict[str, float] = {}  # as seen from here
        self._start_seconds: float | None = None  # of the last that became Ready
        self.machines: tuple[Machine, ...] = ()
        self._note: RouterNote | None = None  # the targets in it are the pool's, so any machine's will do
        self._prices: dict[MachineProfile, MachinePrices | None] = {}  # one object for machines that are alike
        self.ready = False  # a Ready machine has been seen; from then on this router has something to say

    def targets(self, output_tokens: float) -> Targets | None:
        """What a request with an answer of this length is promised; None: routers were not told."""
        return Targets.of(self._note, output_tokens) if self._note else None

    @property
    def relegates(self) -> bool:
        """Whether who would be late in any case is to be served behind all others."""
        return self._note is not None and self._note.relegates

    @property
    def refuses(self) -> bool:
        """Whether who would be late may be turned away."""
        return self._note is not None and self._note.refuses

    def ready_in_seconds(self, now: float) -> float:
        """Until a machine that is starting will be Ready, if it takes as long as the last one did; 0: not known."""
        if self._start_seconds is None or not self._starting_since:
            return 0.0
        return max(0.0, min(self._starting_since.values()) + self._start_seconds - now)

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

    def _price(self, machines: tuple[Machine, ...]) -> None:
        notes = {machine.uid: machine.note for machine in machines}
        profiles = {note.profile for note in notes.values() if note is not None}
        self._prices = {p: self._prices[p] if p in self._prices else prices_of(p) for p in profiles}
        for uid, note in notes.items():
            if note is None:
                self._ledger.price(uid, None)
            else:
                gap = math.inf if note.tbt_seconds is None else note.tbt_seconds
                self._ledger.price(uid, self._prices[note.profile], note.max_prefill_tokens_per_step, gap)
        known = next((note for note in notes.values() if note is not None), None)
        if (known is None) is not (self._note is None):
            log.info("Prices of work are %s", "known" if known is not None else "not known any more")
        self._note = known

    def _time_starts(self, machines: tuple[Machine, ...]) -> None:
        now, starting = self._clock(), {}
        for machine in machines:
            since = self._starting_since.get(machine.uid)
            if machine.ready and since is not None:
                self._start_seconds = now - since
            elif not machine.ready and not machine.deleting:
                starting[machine.uid] = now if since is None else since
        self._starting_since = starting

    def _replace(self, machines: tuple[Machine, ...]) -> None:
        self._time_starts(machines)
        self.machines = machines
        self._ledger.keep(machine.uid for machine in machines)
        self._price(machines)
        if not self.ready and any(is_live(machine) for machine in machines):
            self.ready = True
            log.info("Serving machines=%d", len(machines))
