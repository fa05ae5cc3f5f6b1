"""A keyed work queue: one run per key at a time, repeats coalesced, failures backed off.

Owns when a key runs next. Knows neither what a key means nor what running it does. Nothing is lost by a failure or by
an add during a run: an add while a key runs makes it run once more, and a failure runs it again after a growing delay.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class Handle(Protocol):
    def cancel(self) -> object: ...


class Timer(Protocol):
    """What the queue needs of a clock; an asyncio event loop is one."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle: ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delay after the n-th failure in a row: base·2^(n−1) up to the cap, less up to `jitter_share` of it."""

    base_seconds: float = 1.0
    cap_seconds: float = 120.0
    jitter_share: float = 0.2

    def delay_seconds(self, failures: int, random_unit: float) -> float:
        """`failures` ≥ 1; `random_unit` in [0, 1)."""
        delay = min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))
        return delay * (1.0 - self.jitter_share * random_unit)


@dataclass(slots=True, eq=False)
class _Entry:
    """A key the queue remembers: waiting for `timer`, ready, or running; `again` is an add that came during the run."""

    timer: Handle | None = None
    due: float = 0.0
    ready: bool = False
    running: bool = False
    again: bool = False
    failures: int = 0


class KeyedQueue(Generic[K]):
    """`work(key)` returns seconds until it wants to run again, or None when it has nothing to wait for.

    Lives on one event loop: call every method from it. At most `max_parallel` different keys run at once.
    """

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        backoff: Backoff | None = None,
        max_parallel: int = 8,
        seed: int | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._work = work
        self._backoff = backoff or Backoff()
        self._random = random.Random(seed)
        self._timer = timer
        self._max_parallel = max_parallel
        self._entries: dict[K, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, key: K) -> None:
        """Run the key as soon as it can be. An event overrides a back-off: what failed may be what it has mended."""
        self.add_after(key, 0.0)

    def add_after(self, key: K, delay_seconds: float) -> None:
        """Run the key after the delay, or sooner if it already is to run sooner."""
        if self._closed:
            return
        entry = self._entries.setdefault(key, _Entry())
        if entry.running and delay_seconds <= 0:
            entry.again = True
        elif not entry.ready:
            self._schedule(key, entry, delay_seconds)

    def forget(self, key: K) -> None:
        """Drop what is planned for a key whose object is gone; a run in progress ends by itself."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.timer:
            entry.timer.cancel()
            entry.timer = None
        entry.ready = entry.again = False
        if not entry.running:
            del self._entries[key]

    def failures(self, key: K) -> int:
        """How often in a row the key has failed."""
        entry = self._entries.get(key)
        return entry.failures if entry else 0

    @property
    def oldest_overdue_seconds(self) -> float:
        """How long the longest-waiting ready key has waited for a free worker: what a liveness probe asks."""
        now = self._clock.time()
        return max((now - e.due for e in self._entries.values() if e.ready), default=0.0)

    async def shutdown(self, limit_seconds: float) -> None:
        """Start nothing more, let what runs finish up to the limit, then cancel it."""
        self._closed = True
        for entry in self._entries.values():
            entry.ready = entry.again = False
            if entry.timer:
                entry.timer.cancel()
                entry.timer = None
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._entries.clear()

    @property
    def _clock(self) -> Timer:
        return self._timer or asyncio.get_running_loop()

    def _schedule(self, key: K, entry: _Entry, delay_seconds: float) -> None:
        due = self._clock.time() + max(0.0, delay_seconds)
        if entry.timer:
            if entry.due <= due:
                return
            entry.timer.cancel()
            entry.timer = None
        entry.due = due
        if delay_seconds <= 0:
            entry.ready = True
            self._start_ready()
        else:
            entry.timer = self._clock.call_later(delay_seconds, self._ring, key)

    def _ring(self, key: K) -> None:
        entry = self._entries[key]
        entry.timer = None
        if entry.running:
            entry.again = True
        else:
            entry.ready = True
            self._start_ready()

    def _start_ready(self) -> None:
        """Oldest due first, so that a busy key cannot starve the others."""
        waiting = sorted((e.due, n, k) for n, (k, e) in enumerate(self._entries.items()) if e.ready and not e.running)
        for _, _, key in waiting[: max(0, self._max_parallel - len(self._tasks))]:
            entry = self._entries[key]
            entry.ready, entry.running = False, True
            task = asyncio.get_running_loop().create_task(self._run(key, entry), name=f"reconcile {key}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, key: K, entry: _Entry) -> None:
        requeue_after: float | None = None
        entry.again = False  # adds until here are this run's
        try:
            requeue_after = await self._work(key)
            entry.failures = 0
        except Exception:
            entry.failures += 1
            requeue_after = self._backoff.delay_seconds(entry.failures, self._random.random())
            log.exception("Work failed key=%s failures=%d retry_after_seconds=%.1f", key, entry.failures, requeue_after)
        finally:
            entry.running = False
            current = asyncio.current_task()
            if current in self._tasks:
                self._tasks.discard(current)
        if self._closed:
            return
        if entry.again:
            entry.again = False
            self._schedule(key, entry, 0.0)
        elif requeue_after is not None:
            self._schedule(key, entry, requeue_after)
        elif entry.timer is None:
            self._entries.pop(key, None)
        self._start_ready()
