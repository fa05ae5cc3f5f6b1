"""What `reconcile` needs from the outside: implemented over Kubernetes by `kube.py`, without it by `local/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from poolwright.api.models import InferencePool
from poolwright.core.machine import Machine
from poolwright.core.reading import LiveReading, MetricsReading
from poolwright.machines import Machines
from poolwright_protocol.roles import RolePut, RoleState


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event, or a line of the local log. Repeats of (kind, reason, message) are one with a count."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


class PoolStore(Protocol):
    """The InferencePool object itself."""

    async def get(self) -> InferencePool | None:
        """None when it is gone. Raises Unavailable, or InvalidPool (api.models) for a spec that does not validate."""
        ...

    async def write_status(self, status: Mapping[str, Any]) -> None:
        """Server-side apply of the whole status; raises Conflict or Unavailable."""
        ...

    async def emit(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class ChildrenState:
    """Outcome of `Children.ensure`. `conflicts` and `problems` become conditions."""

    changed: int = 0
    conflicts: Sequence[str] = ()
    problems: Sequence[str] = ()
    routers_ready: int = 0
    routers_desired: int = 0
    router_uids: Sequence[str] = ()
    router_urls: Mapping[str, str] = field(default_factory=dict)  # by uid, of those that can be reached


class Children(Protocol):
    async def ensure(self, pool: InferencePool) -> ChildrenState:
        """Make engines, router and services as the spec says; writes nothing where all is as it should be."""
        ...


class MetricsSource(Protocol):
    async def read(self, window_seconds: float, router_uids: Sequence[str], now: float) -> MetricsReading:
        """Never raises: a failure is a reading in state Missing whose detail names the failing query."""
        ...


class LiveSource(Protocol):
    async def read(self, router_urls: Mapping[str, str], now: float) -> LiveReading | None:
        """None where not every router said what it has outstanding. Never raises."""
        ...


class EngineAdmin(Protocol):
    """The admin port of one machine. Raises EngineRefused with the status, or EngineUnreachable."""

    async def put_role(self, machine: Machine, put: RolePut) -> RoleState: ...

    async def get_role(self, machine: Machine) -> RoleState: ...


class EngineUnreachable(Exception):
    """No answer, or a 421: the address belongs to another machine now."""


class EngineRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class World:
    """Everything one pool's reconcile may touch."""

    store: PoolStore
    machines: Machines
    children: Children
    metrics: MetricsSource
    engines: EngineAdmin
    live: LiveSource | None = None  # None: nothing is known between two plans
