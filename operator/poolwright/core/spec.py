"""What the user asked of the policy, as plain values. Built from the resource by `api.policy`; knows no YAML."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from poolwright_protocol.roles import Role


class Metric(StrEnum):
    TTFT = "TTFT"
    TBT = "TBT"


class Mode(StrEnum):
    """Who chooses moves. In all four: births, repair of a minimum, and moves already begun."""

    ACTIVE = "Active"
    ADVISORY = "Advisory"
    MANUAL = "Manual"
    PAUSED = "Paused"


@dataclass(frozen=True, slots=True)
class Objective:
    name: str
    metric: Metric
    percentile: int
    target_seconds: float


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """`replicas`: the count in Manual, the starting split otherwise; None leaves the start to the policy.

    `max_prefill_tokens_per_step` bounds the prompt tokens in one step of a machine of the pool; None: its own budget.
    """

    minimum: int = 0
    maximum: int | None = None
    replicas: int | None = None
    max_prefill_tokens_per_step: int | None = None


@dataclass(frozen=True, slots=True)
class MachineClass:
    name: str
    replicas: int
    roles: frozenset[Role] = frozenset(Role)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A valid spec: an assignment of machines to roles that meets all bounds exists."""

    objectives: tuple[Objective, ...]
    classes: tuple[MachineClass, ...]
    pools: Mapping[Role, PoolBounds] = field(default_factory=lambda: {role: PoolBounds() for role in Role})
    mode: Mode = Mode.ACTIVE
    interval_seconds: float = 60.0
    metrics_window_seconds: float = 120.0
    dwell_seconds: float = 60.0
    max_moves_per_window: int = 2
    window_seconds: float = 300.0
    fast_interval_seconds: float = 5.0

    @property
    def budget(self) -> int:
        return sum(c.replicas for c in self.classes)

    def roles_of(self, machine_class: str) -> frozenset[Role]:
        """None at all for a class that is no longer in the spec: its machines are on their way out."""
        for c in self.classes:
            if c.name == machine_class:
                return c.roles
        return frozenset()

    def objective(self, metric: Metric) -> Objective | None:
        return next((o for o in self.objectives if o.metric is metric), None)
