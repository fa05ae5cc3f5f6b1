"""What an engine says of its machine: what its steps take, and what they and its KV memory can hold.

What is not known is absent, never zero. A reader refuses what is malformed, names the field, and keeps what it knew.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poolwright_protocol.step_time import StepCost

_MOST_SECONDS = 86_400.0  # of a step, a token, a token of context: a day of any of them is no machine
_MOST_COUNT = 2**53  # what every JSON reader counts exactly
_COST_FIELDS = {
    "fixedSeconds": "fixed_seconds",
    "tokenSeconds": "token_seconds",
    "kvTokenSeconds": "kv_token_seconds",
}


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """`decode`: steps of decodes alone; `mixed`: steps with prompts; None: too little was measured yet.

    `max_tokens_per_step`, `max_sequences`: what a step may hold at most; chunks of prompts are cut to multiples of
    `tile_tokens`. `kv_capacity_tokens`: tokens of context that its KV memory holds.
    """

    decode: StepCost | None
    mixed: StepCost | None
    max_tokens_per_step: int
    max_sequences: int
    tile_tokens: int
    kv_capacity_tokens: int | None = None
    kv_bytes_per_token: int | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "maxTokensPerStep": self.max_tokens_per_step,
            "maxSequences": self.max_sequences,
            "tileTokens": self.tile_tokens,
            "kvCapacityTokens": self.kv_capacity_tokens,
            "kvBytesPerToken": self.kv_bytes_per_token,
            "decode": _cost_to_json(self.decode),
            "mixed": _cost_to_json(self.mixed),
        }
        return {key: value for key, value in body.items() if value is not None}

    @classmethod
    def from_json(cls, body: object) -> "MachineProfile":
        """Unknown keys are ignored, so a newer engine may say more. Raises ValueError that names the offending
        field."""
        if not isinstance(body, Mapping):
            raise ValueError(f"expected a JSON object, not {_shown(body)}")
        return cls(
            decode=_cost(body, "decode"),
            mixed=_cost(body, "mixed"),
            max_tokens_per_step=_count(body, "maxTokensPerStep"),
            max_sequences=_count(body, "maxSequences"),
            tile_tokens=_count(body, "tileTokens"),
            kv_capacity_tokens=_optional_count(body, "kvCapacityTokens"),
            kv_bytes_per_token=_optional_count(body, "kvBytesPerToken"),
        )


def _cost_to_json(cost: StepCost | None) -> dict[str, float] | None:
    return None if cost is None else {key: getattr(cost, name) for key, name in _COST_FIELDS.items()}


def _cost(body: Mapping[Any, Any], key: str) -> StepCost | None:
    given = body.get(key)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}: expected a JSON object, not {_shown(given)}")
    seconds = {name: _seconds(given.get(field), f"{key}.{field}") for field, name in _COST_FIELDS.items()}
    cost = StepCost(**seconds)
    if cost.seconds(1, 1) <= 0:
        raise ValueError(f"{key}: a step that takes no time; what is not known must be left out")
    return cost


def _seconds(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS:
        return float(value)  # NaN compares with nothing, so it is refused too
    raise ValueError(f"{where}: expected seconds from 0 to {_MOST_SECONDS:.0f}, not {_shown(value)}")


def _count(body: Mapping[Any, Any], key: str) -> int:
    value = body.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_COUNT:
        return value
    raise ValueError(f"{key}: expected a positive integer, not {_shown(value)}")


def _optional_count(body: Mapping[Any, Any], key: str) -> int | None:
    return None if body.get(key) is None else _count(body, key)


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    return repr(value)[:60]
