"""What routers say of the work they have outstanding on each machine: one router's word as text, and several added up.

Each router knows what it sent, so only all of them together say what a machine has to do.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from poolwright.core.reading import MachineWork

_FIELDS = {
    "promptTokens": "prompt_tokens",
    "promptPairs": "prompt_pairs",
    "streams": "streams",
    "contextTokens": "context_tokens",
}


def to_json(work: Mapping[str, MachineWork]) -> str:
    body = {
        uid: {**{key: getattr(one, name) for key, name in _FIELDS.items()}, "lent": one.lent}
        for uid, one in work.items()
    }
    return json.dumps({"machines": body}, separators=(",", ":"))


def from_json(text: str | bytes) -> dict[str, MachineWork]:
    """Unknown keys are ignored. Raises ValueError for anything that is not a router's word."""
    raw = json.loads(text)
    machines = raw.get("machines") if isinstance(raw, dict) else None
    if not isinstance(machines, dict) or not all(isinstance(one, dict) for one in machines.values()):
        raise ValueError(f"not the work of machines: {text[:60]!r}")
    return {uid: _work(uid, one) for uid, one in machines.items()}


def added(routers: Iterable[Mapping[str, MachineWork]]) -> dict[str, MachineWork]:
    total: dict[str, MachineWork] = {}
    for work in routers:
        for uid, one in work.items():
            before = total.get(uid, MachineWork())
            total[uid] = MachineWork(
                before.prompt_tokens + one.prompt_tokens,
                before.prompt_pairs + one.prompt_pairs,
                before.streams + one.streams,
                before.context_tokens + one.context_tokens,
                before.lent or one.lent,
            )
    return total


def _work(uid: str, raw: Mapping[str, Any]) -> MachineWork:
    for key in _FIELDS:
        value = raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"machine {uid}: {key}: expected a number from 0 on, not {value!r}")
    lent = raw.get("lent", False)
    if not isinstance(lent, bool):
        raise ValueError(f"machine {uid}: lent: expected true or false, not {lent!r}")
    return MachineWork(**{name: float(raw[key]) for key, name in _FIELDS.items()}, lent=lent)
