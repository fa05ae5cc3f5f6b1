"""What a run gave: one record for each request, the moves, and the states of the pools over time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from poolwright_protocol.roles import Role


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """`gaps`: (seconds, how many) runs of equal time between tokens, in order; their counts sum to output tokens - 1.
    A request that was refused, or lost with a machine and not served again, has no first token."""

    number: int
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    first_token_seconds: float | None
    finished_seconds: float | None
    gaps: Sequence[tuple[float, int]]
    refused: str | None = None
    prompt_uid: str | None = None
    token_uid: str | None = None
    preemptions: int = 0
    restarts: int = 0
    cached_tokens: int = 0

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_seconds is None else self.first_token_seconds - self.arrival_seconds


@dataclass(frozen=True, slots=True)
class RoleInterval:
    uid: str
    role: Role
    began_seconds: float
    ended_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """`moves` counts changes of role after the start; `lost_machine_seconds` what moves, starts and failures cost."""

    policy: str
    trace: str
    seed: int
    requests: Sequence[RequestOutcome]
    intervals: Sequence[RoleInterval]
    horizon_seconds: float
    steps: int
    moves: int = 0
    lost_machine_seconds: float = 0.0
    transferred_bytes: int = 0
    notes: Sequence[str] = field(default_factory=tuple)
