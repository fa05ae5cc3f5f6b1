"""`Watchdog`: sees that the loop makes progress, from a thread that neither the loop nor the event loop can stop.

A device that hangs in a call cannot be interrupted, so past the second bound it is the process that ends. Owns the
bounds and the order of things; what progress is, and what clients are told, it asks and calls.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poolwright_engine.loop.engine import Heartbeat
from poolwright_engine.process.last_words import EXIT_ENGINE_DIED, fail

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Pulse:
    """For how long work has been owed without progress. Pure."""

    _progress: int = -1
    _since: float | None = None

    def stalled_seconds(self, now: float, beat: Heartbeat) -> float:
        if beat.progress != self._progress or not beat.owes:
            self._progress, self._since = beat.progress, None
        if not beat.owes:
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


class Watchdog:
    """On its own thread: `on_stall(True)` after `stall_seconds`, `on_stall(False)` once it goes on, `give_up(reason)`
    after `exit_seconds`. `grace_seconds` later the process ends, unless it has by itself."""

    def __init__(
        self,
        heartbeat: Callable[[], Heartbeat],
        stall_seconds: float,
        exit_seconds: float,
        on_stall: Callable[[bool], None],
        give_up: Callable[[str], None],
        grace_seconds: float = 5.0,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._heartbeat = heartbeat
        self._stall_seconds = stall_seconds
        self._exit_seconds = exit_seconds
        self._on_stall = on_stall
        self._give_up = give_up
        self._grace_seconds = grace_seconds
        self._end = end or end_process
        self._stopped = threading.Event()
        self._end_by: tuple[float, str] | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def end_within(self, seconds: float, reason: str) -> None:
        """The process is ending by itself; should that take longer, it is ended. From any thread."""
        self._end_by = (time.monotonic() + seconds, reason)

    def _watch(self) -> None:
        pulse, stalled, given_up = Pulse(), False, False
        while not self._stopped.wait(min(_LOOK_SECONDS, self._stall_seconds / 4)):
            now = time.monotonic()
            if self._end_by is not None and now >= self._end_by[0]:
                self._end(self._end_by[1])
                return
            if given_up:
                continue
            beat = self._heartbeat()
            seconds = pulse.stalled_seconds(now, beat)
            if (seconds >= self._stall_seconds) != stalled:
                stalled = not stalled
                if stalled:
                    _log.error("The engine made no progress for %.1f s, %s", seconds, _what(beat))
                else:
                    _log.warning("The engine makes progress again")
                self._on_stall(stalled)
            if seconds >= self._exit_seconds:
                given_up = True
                reason = f"the engine made no progress for {seconds:.0f} s, {_what(beat)}"
                self.end_within(self._grace_seconds, reason)
                self._give_up(reason)


def _what(beat: Heartbeat) -> str:
    """From outside, a step that hangs and one that is only long look alike."""
    if beat.step is None:
        return "with work and no step"
    advice = "if the machine is only slow, lower --max-num-batched-tokens or raise --stall-exit-seconds"
    return f"in {beat.step} ({advice})"


def end_process(reason: str) -> None:
    """At once, whatever hangs."""
    code = fail(reason, EXIT_ENGINE_DIED)
    logging.shutdown()
    os._exit(code)
