"""`Engine`: what the server may ask of the engine. The loop implements it; the server and admin port only call it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from poolwright_engine.scheduling.sequence import Request, TokenOutput
from poolwright_protocol.roles import RolePut, RoleState


class Refused(Exception):
    """A request the engine does not take, with the HTTP status it deserves (400, 429, 503)."""

    def __init__(self, status: int, message: str, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class RoleRefused(Exception):
    """421 for another podUid; 409 for an older epoch, or the same epoch with another role."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for `/metrics` and `/load`."""

    running: int
    waiting: int
    kv_usage: float  # share of blocks in use, 0 to 1
    kv_free_blocks: int
    kv_total_blocks: int
    waiting_prompt_tokens: int
    oldest_waiting_seconds: float
    deferred: int = 0  # of those waiting: their prompt is being computed on another machine


class Heartbeat(NamedTuple):
    """`progress` grows with each step that was read, and only then. `owes`: there is work that is this machine's to do,
    and not a peer's. `step`: what the step holds that is computed now; None: none is."""

    progress: int
    owes: bool
    step: str | None = None


class Engine(Protocol):
    max_model_len: int

    def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Queue it and yield its tokens in order; the last one carries a finish reason. Raises Refused on the first
        `__anext__`. Closing the generator aborts the request and frees what it held."""
        ...

    async def put_role(self, put: RolePut) -> RoleState:
        """Takes effect at the next step boundary, which an idle loop passes at once. Raises RoleRefused."""
        ...

    def role_state(self) -> RoleState: ...

    def stats(self) -> EngineStats: ...

    @property
    def healthy(self) -> bool:
        """False once the loop has died; `/health` then answers 503 and the process exits non-zero."""
        ...

    async def drain(self, limit_seconds: float) -> None:
        """Take nothing new, let what runs finish up to the limit, then abort the rest."""
        ...
