"""KV hand-off on the wire: one frame a message, each header signed with the pool key.

A token machine T opens a control connection to a prompt machine P:

    T → P  PrefillRequest         P → T  GrantWanted, FirstToken, Heartbeat, Declined
    T → P  GrantGiven (again to renew it), Heartbeat; closing the connection cancels

P opens a data connection to the address in the grant:

    P → T  PushStart, Piece*, Manifest         T → P  Received

Only a manifest for (request, attempt) completes a transfer, never a count. KV is addressed by layers, kv heads and
blocks, so that the parallel degrees of the two machines may differ one day. Block numbers count the prompt's blocks
from 0: a prompt machine cannot name memory, only its place in a grant.

    frame := header_bytes (u32) payload_bytes (u32) MAC (32 bytes, of the header) header (JSON) payload
"""

import hashlib
import hmac
import json
import struct
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self, get_args, get_origin

PROTOCOL_VERSION = 3
PREFIX_BYTES = 40
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20

_SIZES = struct.Struct("!II")


class HandoffError(ValueError):
    """A frame that is malformed, forged, too large or out of turn; the text says which."""


@dataclass(frozen=True, slots=True)
class Message:
    """`to_bytes` and `decode` are inverse. Every field is JSON; sequences come back as tuples."""

    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def to_bytes(self, key: bytes, payload: bytes = b"") -> bytes:
        header = json.dumps({"kind": type(self).__name__, **asdict(self)}, separators=(",", ":")).encode()
        return _SIZES.pack(len(header), len(payload)) + _mac(key, header) + header + payload

    @classmethod
    def _from_json(cls, raw: dict[str, Any]) -> Self:
        return cls(**{field.name: _typed(field.name, raw.get(field.name), field.type) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class PrefillRequest(Message):
    """`shape` is (layers, kv heads, head size, bytes of a number). `sampling` holds the fields of the engine's sampling
    parameters. A prompt machine whose version, shape, block size or model differs declines."""

    version: int
    request_id: str
    attempt: int
    receiver_uid: str
    prompt_ids: tuple[int, ...]
    sampling: dict[str, Any]
    shape: tuple[int, ...]
    block_size: int
    model_fingerprint: str
    priority: int = 0
    relegated: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class GrantWanted(Message):
    """The prompt has memory here and is scheduled: where shall its KV go?"""

    attempt: int


@dataclass(frozen=True, slots=True)
class GrantGiven(Message):
    """`grant` is a signed tickets.Grant."""

    attempt: int
    grant: str


@dataclass(frozen=True, slots=True)
class FirstToken(Message):
    """`logprobs`: [token id, log probability, [[token id, log probability], …]], or empty."""

    attempt: int
    token_id: int
    logprobs: list[Any]


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    attempt: int


@dataclass(frozen=True, slots=True)
class Declined(Message):
    """Compute it yourself. `reason` is for people."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PushStart(Message):
    grant: str


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """The payload is K then V of these layers, kv heads and blocks, as ModelRunner.read_blocks gives them."""

    request_id: str
    attempt: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    block_start: int
    block_stop: int
    checksum: int

    @property
    def entry(self) -> tuple[int, ...]:
        """Its line in the manifest."""
        return (
            self.layer_start,
            self.layer_stop,
            self.head_start,
            self.head_stop,
            self.block_start,
            self.block_stop,
            self.checksum,
        )


@dataclass(frozen=True, slots=True)
class Manifest(Message):
    """All of it was sent: `pieces` are the entries of every piece, in order."""

    request_id: str
    attempt: int
    num_tokens: int
    first_token_id: int
    pieces: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Received(Message):
    attempt: int
    accepted: bool
    reason: str


for _kind in (
    PrefillRequest,
    GrantWanted,
    GrantGiven,
    FirstToken,
    Heartbeat,
    Declined,
    PushStart,
    Piece,
    Manifest,
    Received,
):
    Message.kinds[_kind.__name__] = _kind


def checksum(payload: bytes) -> int:
    """CRC-32 of a piece's payload; the signed header carries it."""
    return zlib.crc32(payload)


def sizes(prefix: bytes) -> tuple[int, int]:
    """Bytes of header and payload that follow a prefix of PREFIX_BYTES. Raises HandoffError for absurd ones, before
    anything is allocated."""
    header_bytes, payload_bytes = _SIZES.unpack_from(prefix)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise HandoffError(f"a frame of {header_bytes} + {payload_bytes} bytes is too large")
    return header_bytes, payload_bytes


def decode(key: bytes, prefix: bytes, header: bytes) -> Message:
    """Raises HandoffError."""
    if not hmac.compare_digest(prefix[_SIZES.size : PREFIX_BYTES], _mac(key, header)):
        raise HandoffError("the signature of a message does not match")
    try:
        raw = json.loads(header)
        kind = Message.kinds[raw.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise HandoffError(f"a message is malformed: {error}") from error
    return kind._from_json(raw)


def _mac(key: bytes, header: bytes) -> bytes:
    return hmac.new(key, b"poolwright hand-off\0" + header, hashlib.sha256).digest()


def _typed(name: str, value: Any, expected: Any) -> Any:
    if get_origin(expected) is tuple:
        item = get_args(expected)[0]
        if isinstance(value, list):
            return tuple(_typed(name, element, item) for element in value)
    else:
        plain = get_origin(expected) or expected
        # JSON's true is no number here.
        if isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
            return value
    raise HandoffError(f"{name}: expected {expected}, not {type(value).__name__}")
