"""What `decide` looks at, remembers and answers, as values. Contract between the policy and whoever acts on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from poolwright.core.forecast import Forecast
from poolwright.core.links import Links
from poolwright.core.machine import Machine
from poolwright.core.pricing import MachinePrices
from poolwright.core.reading import LiveReading, MetricsReading
from poolwright.core.spec import Metric
from poolwright_protocol.roles import Role

MIN_SAMPLES = 20
MOVE_DEADLINE_SECONDS = 30.0


class Outcome(StrEnum):
    COMPLETED = "Completed"
    ROLLED_BACK = "RolledBack"
    LOST = "Lost"


class Reason(StrEnum):
    """Why something, or nothing, was done. Closed: conditions, events and metrics may count on these words."""

    # A move was chosen.
    TTFT_MISSED = "TTFTMissed"
    TBT_MISSED = "TBTMissed"
    WORK_SHIFTED = "WorkShifted"
    PROMPT_BACKLOG = "PromptBacklog"
    TOKEN_BACKLOG = "TokenBacklog"  # noqa: S105
    MINIMUM_REPAIRED = "MinimumRepaired"
    ROLE_NOT_ALLOWED = "RoleNotAllowed"
    ABOVE_MAXIMUM = "AboveMaximum"
    MANUAL_COUNTS = "ManualCounts"
    # Only new machines got their first role.
    BORN = "Born"
    # Nothing to do.
    TARGETS_MET = "TargetsMet"
    SPLIT_FITS = "SplitFits"
    COUNTS_HELD = "CountsHeld"
    IDLE = "Idle"
    PAUSED = "Paused"
    NOT_DUE = "NotDue"
    # Something would be to do, but not now or not safely.
    NO_MACHINES = "NoMachines"
    MINIMUM_UNMET = "MinimumUnmet"
    MEMORY_UNREADABLE = "MemoryUnreadable"
    CLOCK_UNREADABLE = "ClockUnreadable"
    MOVE_IN_PROGRESS = "MoveInProgress"
    COOLING_DOWN = "CoolingDown"
    MOVES_CAPPED = "MovesCapped"
    SETTLING = "Settling"
    DWELLING = "Dwelling"
    METRICS_MISSING = "MetricsMissing"
    METRICS_STALE = "MetricsStale"
    METRICS_PARTIAL = "MetricsPartial"
    INSUFFICIENT_SAMPLES = "InsufficientSamples"
    INFEASIBLE = "Infeasible"
    BOTH_MISSED = "BothMissed"
    DONOR_NOT_COMFORTABLE = "DonorNotComfortable"
    NO_DONOR = "NoDonor"
    NO_LINK = "NoLink"  # who could go would leave a prompt machine without a way for its KV
    CONFIRMING = "Confirming"
    HELD_AFTER_MISS = "HeldAfterMiss"
    OVERLOADED = "Overloaded"


MOVING_REASONS = frozenset(
    {
        Reason.TTFT_MISSED,
        Reason.TBT_MISSED,
        Reason.WORK_SHIFTED,
        Reason.PROMPT_BACKLOG,
        Reason.TOKEN_BACKLOG,
        Reason.MINIMUM_REPAIRED,
        Reason.ROLE_NOT_ALLOWED,
        Reason.ABOVE_MAXIMUM,
        Reason.MANUAL_COUNTS,
    }
)


class ObjectiveState(StrEnum):
    """Idle: no arrivals, nothing in flight. Insufficient: under 20 samples. Unknown: no fresh metrics."""

    MET = "Met"
    MISSED = "Missed"
    IDLE = "Idle"
    INSUFFICIENT = "Insufficient"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class ObjectiveReading:
    """One objective as observed. `at_least`: the percentile lies beyond the last bucket, so the value is a floor."""

    name: str
    metric: Metric
    state: ObjectiveState
    target_seconds: float
    observed_seconds: float | None = None
    share_under_target: float | None = None
    samples: float = 0.0
    at_least: bool = False
    infeasible: bool = False  # missed although nothing queues: no move can help
    own_seconds: float | None = None  # the service time alone, where work has a price

    @property
    def stress(self) -> float | None:
        """Observed over target; above 1 is missed."""
        return None if self.observed_seconds is None else self.observed_seconds / self.target_seconds

    @property
    def queued(self) -> float | None:
        """The part of the observed that queueing made, over what the target leaves for it, clamped to 0 and 2: all
        that a machine more could take away. None where the service time is not known, or leaves nothing."""
        own = self.own_seconds
        if self.observed_seconds is None or own is None or own >= self.target_seconds:
            return None
        return min(2.0, max(0.0, (self.observed_seconds - own) / (self.target_seconds - own)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the world: all machines of the pool (complete, never a half-filled cache) and one metrics reading.

    `prices` by machine class: with all of them the plan goes by offered work, else by latency alone. `live`: what
    routers and engines said when asked directly, for the fast loop. `links`: how fast KV moves, where that is known.
    """

    machines: tuple[Machine, ...]
    reading: MetricsReading
    prices: Mapping[str, MachinePrices] = field(default_factory=dict)
    live: LiveReading | None = None
    links: Links | None = None


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A move, begun or ended. Times are Unix seconds. Births have none. `repair` is outside the cap."""

    uid: str
    machine: str
    from_role: Role | None  # None where only a trace of the move was found
    to_role: Role
    reason: str
    started_at: float
    finished_at: float | None = None
    outcome: Outcome | None = None
    repair: bool = False
    drained_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """All that `decide` remembers. A value: rebuilt after a restart by `memory.rebuild_memory`.

    `moves` are oldest first and hold planned moves from the moment they are chosen. `held_until`: no move by policy
    before, because the past could not be read. `unready_since`: when each machine was first seen not ready.

    What is lost with a restart and learned again: `forecast` of offered work; `asked`, the shift that the last plan
    wanted confirmed; `helped` until `helped_until`, the pool that no plan takes from; `backlogged`, ticks in a row
    that the fast loop saw a pool behind; `bounds`, the last `maxPrefillTokensPerStep` of each machine.
    """

    moves: tuple[MoveRecord, ...] = ()
    desired: Mapping[Role, int] | None = None
    held_until: float | None = None
    planned_at: float | None = None
    unready_since: Mapping[str, float] = field(default_factory=dict)
    forecast: Forecast = field(default_factory=Forecast)
    asked: frozenset[tuple[Role, Role]] = frozenset()
    helped: Role | None = None
    helped_until: float = 0.0
    backlogged: Mapping[Role, int] = field(default_factory=dict)
    backlog_at: float | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Birth:
    """A first role. No move: no dwell, no cap, no record."""

    uid: str
    machine: str
    to_role: Role


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """To be begun with `machine.begin`. `repair` ignores dwell and cap."""

    uid: str
    machine: str
    from_role: Role
    to_role: Role
    reason: Reason
    message: str
    repair: bool = False


@dataclass(frozen=True, slots=True)
class PoolCount:
    ready: int
    desired: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, why, and what was looked at.

    `births` and `moves` are to be begun. `advised` are the moves that mode Advisory records and does not do.
    `planned` is False between two planning ticks: then `reason` says NotDue and is not worth recording.
    `next_plan_at`: call again then, at the latest. `bounds`: `maxPrefillTokensPerStep` by uid of mixed and token
    machines, where the spec leaves it to the policy and prices are known; sent with the role. `machines_wanted`: how
    many more than there are the offered work would keep busy; None where that is not known.
    """

    reason: Reason
    message: str
    births: tuple[Birth, ...] = ()
    moves: tuple[PlannedMove, ...] = ()
    advised: tuple[PlannedMove, ...] = ()
    objectives: tuple[ObjectiveReading, ...] = ()
    pools: Mapping[Role, PoolCount] = field(default_factory=dict)
    evidence: tuple[tuple[str, str], ...] = ()
    planned: bool = True
    next_plan_at: float = 0.0
    bounds: Mapping[str, int] = field(default_factory=dict)
    machines_wanted: float | None = None
    minimum_unmet: str = ""  # what repair could not do, for a condition
