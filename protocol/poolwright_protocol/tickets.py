"""Signed values: where a token machine may ask for a prefill, and which blocks a prompt machine may write.

Both are canonical JSON with a MAC under the pool key, so no process outside the pool can name an address to connect to.
`now` is Unix seconds and always an argument.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from poolwright_protocol import keys


class TicketError(ValueError):
    """The ticket is malformed, forged or expired; the text says which."""


@dataclass(frozen=True, slots=True)
class _Signed:
    def encode(self, key: bytes) -> str:
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return f"{keys.mac(key, f'{type(self).__name__} {body}')}.{body}"

    @classmethod
    def decode(cls, key: bytes, text: str, now: float) -> Self:
        """Raises TicketError."""
        signature, _, body = text.partition(".")
        if not keys.same(signature, keys.mac(key, f"{cls.__name__} {body}")):
            raise TicketError(f"{cls.__name__}: the signature does not match")
        try:
            ticket = cls._build(json.loads(body))
        except (TypeError, ValueError, KeyError) as error:
            raise TicketError(f"{cls.__name__}: malformed: {error}") from error
        if ticket.expires_at < now:  # type: ignore[attr-defined]
            raise TicketError(f"{cls.__name__}: expired {now - ticket.expires_at:.1f} s ago")  # type: ignore[attr-defined]
        return ticket

    @classmethod
    def _build(cls, raw: dict[str, Any]) -> Self:
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class PromptMachine(_Signed):
    """Value of the header `x-poolwright-prompt-machine`: the machine that the router picked to prefill this request."""

    machine_uid: str
    host: str
    kv_port: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Grant(_Signed):
    """Leave to write KV of one attempt of one request into the receiver's blocks, and the only address to write it to.

    `block_ids` cover the prompt in order, `block_size` tokens each.
    """

    request_id: str
    attempt: int
    receiver_uid: str
    host: str
    kv_port: int
    block_ids: tuple[int, ...]
    block_size: int
    expires_at: float

    @classmethod
    def _build(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "block_ids": tuple(raw["block_ids"])})
