"""Server-sent events of an engine: cut, told apart, and freed of usage that the client did not ask for.

Engines send one event for each sampled token, with the usage so far as the last key. That order makes the common event
cheap (only its usage is parsed), never wrong: whatever does not look like it is parsed whole.
"""

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

DONE = b"data: [DONE]"
_DATA = b"data: "
_USAGE = b',"usage":{'
_NO_CHOICES = b'"choices":[]'
_LONGEST_EVENT_BYTES = 16 * 1024 * 1024


class Kind(Enum):
    TOKENS = auto()  # has choices
    USAGE = auto()  # the last one: usage and no choices
    ERROR = auto()
    DONE = auto()
    OTHER = auto()  # a comment, or what a newer engine may add


@dataclass(slots=True)
class Event:
    """`raw` ends before the blank line; `bare` is the same without its usage. `fields` only where parsed whole."""

    kind: Kind
    raw: bytes
    bare: bytes
    usage: dict[str, Any] | None = None
    choice: int = 0
    fields: dict[str, Any] | None = None


class Splitter:
    """Bytes as they come → whole events. Raises ValueError for an event without an end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > _LONGEST_EVENT_BYTES:
            raise ValueError(f"an event of more than {_LONGEST_EVENT_BYTES} bytes")
        return events


def read(raw: bytes, whole: bool) -> Event:
    """`whole`: parse all of it, as bodies and requests with several choices need. Raises ValueError for broken JSON."""
    if not raw.startswith(_DATA):
        return Event(Kind.OTHER, raw, raw)
    if raw == DONE:
        return Event(Kind.DONE, raw, raw)
    if not whole:
        at = raw.rfind(_USAGE)
        if at > 0 and (usage := _last_object(raw, at + len(_USAGE) - 1)) is not None:
            kind = Kind.USAGE if _NO_CHOICES in raw else Kind.TOKENS
            return Event(kind, raw, raw[:at] + b"}", usage)
    return _read_whole(raw)


def _last_object(raw: bytes, start: int) -> dict[str, Any] | None:
    """The object from `start` to the brace that closes the event; None if that is not one object."""
    try:
        usage = json.loads(raw[start:-1].decode())
    except ValueError:
        return None
    return usage if raw.endswith(b"}") and isinstance(usage, dict) else None


def _read_whole(raw: bytes) -> Event:
    fields = json.loads(raw[len(_DATA) :])
    if not isinstance(fields, dict):
        raise ValueError("an event that is not a JSON object")
    if "error" in fields and "choices" not in fields:
        return Event(Kind.ERROR, raw, raw, fields=fields)
    usage = fields.get("usage")
    bare = raw
    if "usage" in fields:
        without = {key: value for key, value in fields.items() if key != "usage"}
        bare = _DATA + json.dumps(without, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    choices = fields.get("choices")
    if not choices:
        return Event(Kind.USAGE if usage else Kind.OTHER, raw, bare, usage, fields=fields)
    return Event(Kind.TOKENS, raw, bare, usage, choices[0].get("index", 0), fields)
