"""Real requests from a thread, while the test looks at the cluster: at a rate that rises until a target is missed."""

import asyncio
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from poolwright.local.traffic import Client, Outcome, Shape, ttfts

RISE = 1.05
# In this time a queue that grows by a tenth of a second in each second is seen to grow.
STEP_SECONDS = 20.0
LOOKED_AT = 12
MISSED_SECONDS = 15.0


class RisingRate:
    """Arrivals a second: more in each step, until half of the last requests or more have missed the target for a while.

    That load then stays. It is found by observation, because what machines serve differs from minute to minute and with
    how much waits; a load that was computed from a measured capacity is missed on one day and met on another.
    """

    def __init__(self, first_per_second: float, target_seconds: float, now: float) -> None:
        self.per_second = first_per_second
        self.found_at: float | None = None
        self.missed_at: float | None = None
        self._target_seconds = target_seconds
        self._step_at = now

    def look(self, begun: Sequence[Outcome], now: float) -> None:
        """`begun` are all requests in order of arrival, under way or ended."""
        if self.found_at is not None:
            return
        last = known(begun, self._target_seconds, now)[-LOOKED_AT:]
        if len(last) == LOOKED_AT and met_share(last, self._target_seconds) <= 0.5:
            self.missed_at = self.missed_at or now
            if now - self.missed_at >= MISSED_SECONDS:
                self.found_at = now
            return
        self.missed_at = None
        if now - self._step_at >= STEP_SECONDS:
            self.per_second *= RISE
            self._step_at = now


def known(begun: Sequence[Outcome], target_seconds: float, now: float) -> list[Outcome]:
    """Those of which it is known whether they miss the target, however long they have yet to wait."""
    return [outcome for outcome in begun if now - outcome.started_at > target_seconds]


def met_share(outcomes: Sequence[Outcome], target_seconds: float) -> float:
    met = sum(ttft <= target_seconds for ttft in ttfts(outcomes))
    return met / len(outcomes) if outcomes else 0.0


class Traffic:
    """As a context: arrivals from begin to end, whatever the answers do; then it waits for what is under way."""

    def __init__(
        self, url: str, model: str, shape: Shape, first_per_second: float, target_seconds: float, seed: int
    ) -> None:
        self._arguments = (url, model, shape, seed)
        self.rate = RisingRate(first_per_second, target_seconds, time.monotonic())
        self._target_seconds = target_seconds
        self._stop = threading.Event()
        self._client: Client | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic")

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Of the requests that have ended. Times are the monotonic clock's."""
        return tuple(self._client.outcomes) if self._client else ()

    def met_share(self, since: float, now: float) -> float:
        """Of the requests that arrived since then and of which it is known; 0 of none."""
        begun = self._client.begun if self._client else []
        last = [outcome for outcome in known(tuple(begun), self._target_seconds, now) if outcome.started_at >= since]
        return met_share(last, self._target_seconds)

    @property
    def failures(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._send())
        except BaseException as error:
            self._error = error

    async def _send(self) -> None:
        url, model, shape, seed = self._arguments
        client = self._client = Client(url, model, seed)

        def per_second() -> float:
            self.rate.look(client.begun, time.monotonic())
            return self.rate.per_second

        try:
            await client.open_loop(shape, per_second, self._stop.is_set)
        finally:
            await client.close()
