"""Real requests at a fixed rate, from a thread, while the test looks at the cluster."""

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from poolwright.local.traffic import Client, Outcome, Shape


class Traffic:
    """As a context: arrivals from begin to end, whatever the answers do; then it waits for what is under way."""

    def __init__(self, url: str, model: str, shape: Shape, per_second: float, seed: int) -> None:
        self._arguments = (url, model, shape, per_second, seed)
        self._stop = threading.Event()
        self._client: Client | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic")

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Of the requests that have ended. Times are the monotonic clock's."""
        return tuple(self._client.outcomes) if self._client else ()

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
        url, model, shape, per_second, seed = self._arguments
        self._client = Client(url, model, seed)
        try:
            await self._client.open_loop(shape, per_second, self._stop.is_set)
        finally:
            await self._client.close()
