"""What a policy under test is: a router, a scaler, and the rules of its engines, as values and protocols.

Ours and every published one run behind these, on the same machines, the same step times and the same network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from poolwright.core.reading import MetricsReading
from poolwright.sim.request import Arrival
from poolwright.sim.step_time import MachineModel
from poolwright_engine.scheduling.scheduler_config import Batching, TbtDeadlines
from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class EngineRules:
    """`token_budget`: tokens of one step, decodes included; None: by slack under `tbt_target_seconds`, counted as
    `tbt_deadlines` says, never above `most_tokens`, in multiples of `tile_tokens`. A batching that cuts no prompt takes
    the first in line whole, however long it is. `max_prefill_tokens`: the bound on prompt tokens in a step that a
    controller sends with a role."""

    batching: Batching = Batching.SARATHI
    token_budget: int | None = 2048
    tbt_target_seconds: float | None = None
    tbt_deadlines: TbtDeadlines = TbtDeadlines.CUMULATIVE
    quick_first_tokens: bool = False
    relegated_seconds: float = 120.0
    most_tokens: int = 8192
    max_sequences: int = 256
    tile_tokens: int = 64
    block_tokens: int = 16
    prefix_cache: bool = True
    max_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MachineView:
    """One machine as a policy sees it. Queues count work given and not yet done; ages and times are in seconds.

    `waiting_prompts`: (tokens still to compute) of each request whose first token is not out, first come first.
    `decodes`: requests that decode here now; `decode_context_tokens` the KV they hold. `bound_decodes`: requests that
    will decode here once their prompt is done elsewhere. `idle_since` None: it works.
    """

    uid: str
    role: Role
    model: MachineModel
    ready: bool
    home: Role  # the pool it came from, where a policy lends machines
    role_since: float
    waiting_prompts: tuple[int, ...]
    decodes: int
    decode_context_tokens: int
    bound_decodes: int
    bound_context_tokens: int
    kv_used_tokens: int
    last_step_seconds: float
    decode_step_seconds: float  # mean gap of recent steps with decodes; 0.0 where there was none
    idle_since: float | None
    moving_to: Role | None = None

    @property
    def waiting_tokens(self) -> int:
        return sum(self.waiting_prompts)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All machines, alive ones only. `reading(window)` is what the routers' histograms say, as old as the scrape is;
    `arrivals(window)` what came in; `prefix_hit_tokens(uid, arrival)` what that machine's cache holds of a prompt."""

    machines: Sequence[MachineView]
    reading: Callable[[float], MetricsReading]
    arrivals: Callable[[float], Sequence[Arrival]]
    prefix_hit_tokens: Callable[[str, Arrival], int]


@dataclass(frozen=True, slots=True)
class Placement:
    """`prompt_uid` None: the decoding machine computes the prompt. `relegated`: served after all others. `due_seconds`:
    its place in a machine's queue, instead of when it came there: the earliest due first."""

    token_uid: str
    prompt_uid: str | None = None
    relegated: bool = False
    reason: str = ""
    due_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RoleChange:
    """`home` None: the machine's identity changes with its role. `max_prefill_tokens`: the bound that goes with the
    role, from then on instead of that of the role's rules; with the role that it has, a bound alone."""

    uid: str
    role: Role
    reason: str = ""
    home: Role | None = None
    max_prefill_tokens: int | None = None


class Router(Protocol):
    """One per run; it may keep memory. Deterministic. Every method is told the time."""

    def route(
        self, now: float, arrival: Arrival, view: ClusterView
    ) -> Placement | Refusal | tuple[Placement, Sequence[RoleChange]]: ...

    def first_token(self, now: float, number: int) -> None: ...

    def finished(self, now: float, number: int) -> None: ...

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        """At the end of the prompt: another machine to decode on; None keeps the one chosen."""
        ...


class Scaler(Protocol):
    """Asked every `period_seconds`; only machines that exist may change their roles (the budget is fixed)."""

    @property
    def period_seconds(self) -> float: ...

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]: ...


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds. A request attains them if its TTFT is at most `ttft_seconds` + `ttft_seconds_per_token` ·
    prompt tokens, and the `tbt_percentile` of its gaps is at most `tbt_seconds`."""

    ttft_seconds: float
    tbt_seconds: float
    ttft_seconds_per_token: float = 0.0
    tbt_percentile: int = 99


@dataclass(frozen=True, slots=True)
class Setting:
    """What every policy is told before a run: the SLO, the budget as machines, network, and what to expect."""

    slo: Slo
    machines: Sequence[MachineModel]
    network_bytes_per_second: float
    expected_prompt_tokens: float
    expected_output_tokens: float
    expected_requests_per_second: float


@dataclass(frozen=True, slots=True)
class Policy:
    """A factory, since routers and scalers keep memory. `source` cites where it was published, corrections named."""

    name: str
    source: str
    router: Callable[[Setting], Router]
    scaler: Callable[[Setting], Scaler | None]
    first_roles: Callable[[Setting], Sequence[Role]]
    rules: Callable[[Setting], Mapping[Role, EngineRules]]
    parameters: Mapping[str, float] = field(default_factory=dict)
