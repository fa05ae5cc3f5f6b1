"""The Kubernetes part of every autoscaler that ends in an HPA: tolerance, stabilization and the rates of its behavior.

autoscaling/v2 and its defaults: sync every 15 s; tolerance 10 %; down after the highest wish of 300 s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SYNC_SECONDS = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Behavior:
    """`up_pods`, `up_share`: the larger of both may be added in `up_period_seconds`; `down_pods` be taken in
    `down_period_seconds`, None: all. Stabilization: the least wish of the window up, the highest one down."""

    up_pods: int = 4
    up_share: float = 1.0
    up_period_seconds: float = 15.0
    up_window_seconds: float = 0.0
    down_pods: int | None = None
    down_period_seconds: float = 15.0
    down_window_seconds: float = 300.0


@dataclass(slots=True)
class Replicas:
    """One pool. `wish` says what a sync makes of a recommendation."""

    behavior: Behavior = field(default_factory=Behavior)
    _wishes: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def wish(self, now: float, current: int, recommended: int) -> int:
        behavior = self.behavior
        if not self._wishes:
            self._wishes.append((now, current))  # as the controller begins
        up = min([recommended, *self._since(now - behavior.up_window_seconds)])
        down = max([recommended, *self._since(now - behavior.down_window_seconds)])
        keep = max(behavior.up_window_seconds, behavior.down_window_seconds)
        self._wishes = [(at, n) for at, n in self._wishes if at > now - keep] + [(now, recommended)]
        wanted = up if up > current else down if down < current else current
        wanted = max(1, self._within_rate(now, current, wanted))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _since(self, since: float) -> list[int]:
        return [n for at, n in self._wishes if at > since]

    def _within_rate(self, now: float, current: int, wanted: int) -> int:
        behavior = self.behavior
        if wanted > current:
            added = self._changed(now - behavior.up_period_seconds, 1)
            began = current - added
            return min(wanted, began + max(behavior.up_pods, math.ceil(began * behavior.up_share)))
        if behavior.down_pods is None or wanted == current:
            return wanted
        taken = -self._changed(now - behavior.down_period_seconds, -1)
        return min(current, max(wanted, current + taken - behavior.down_pods))

    def _changed(self, since: float, sign: int) -> int:
        self._changes = [(at, change) for at, change in self._changes if at > since - 3600.0]
        return sum(change for at, change in self._changes if at > since and change * sign > 0)


def average_value(values: Sequence[float], target: float, current: int) -> int:
    """What the HPA recommends for a metric with `averageValue`: the sum by the target, unless within the tolerance."""
    total = sum(values)
    if current and abs(total / (target * current) - 1.0) <= TOLERANCE:
        return current
    return math.ceil(total / target)
