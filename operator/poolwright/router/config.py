"""What a router is told at its start."""

from dataclasses import dataclass, field
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`pool_key` signs what engines are told. The limits bound everything that waits, queues or retries."""

    pool: str
    pool_namespace: str
    pool_key: bytes = field(repr=False)
    router_uid: str = field(default_factory=lambda: str(uuid4()))

    max_in_flight_requests: int = 2048
    max_body_bytes: int = 16 * 1024 * 1024
    max_attempts: int = 3  # machines tried for one request
    local_prompt_tokens: int = 32  # prompts up to this long may be computed on the token machine

    body_timeout_seconds: float = 30.0
    connect_timeout_seconds: float = 2.0
    # Silence of an engine, before its first byte or between two. Long: a prompt may queue behind many others.
    silence_timeout_seconds: float = 300.0
    prompt_ticket_seconds: float = 300.0
    probe_interval_seconds: float = 2.0
    drain_seconds: float = 30.0  # for streams in flight at a shutdown
