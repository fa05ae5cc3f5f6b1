"""When a client that is turned away may come back: as soon as there may be room, and behind those who were told before.

Who is told to return stands in a line of its own, at the pace at which requests end here: told one time, all would
return at once, and all but a few be turned away again. It knows no reason why a client is turned away.
"""

import math
from collections import deque

LEAST_SECONDS = 1
MOST_SECONDS = 60  # by then what was predicted is old, and clients of OpenAI wait no longer
_ENDS = 64
_FRESH_SECONDS = 30.0


class Comeback:
    """Time is the caller's, and does not go back."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_ENDS)
        self._last = -math.inf

    def ended(self, now: float) -> None:
        """A request that was served left its place."""
        self._ends.append(now)

    def turn(self, now: float, seconds: float = 0.0, pace_seconds: float = math.inf) -> int:
        """Whole seconds until one more may come, not before `seconds` from now. `pace_seconds`: what one more takes at
        most from those behind it; a pace that was measured under little load says nothing of what could be."""
        at = max(now + max(LEAST_SECONDS, seconds), self._last + min(pace_seconds, self._pace_seconds(now)))
        self._last = min(at, now + MOST_SECONDS)
        return math.ceil(round(self._last - now, 6))

    def _pace_seconds(self, now: float) -> float:
        """Between two ends; 0 where too little is known."""
        while self._ends and self._ends[0] < now - _FRESH_SECONDS:
            self._ends.popleft()
        return (now - self._ends[0]) / len(self._ends) if len(self._ends) > 1 else 0.0
