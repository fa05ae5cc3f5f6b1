"""What routers are told of a machine beside its role: its class's profile, the pool's targets, the bound on its chunks.

It stands on the machine itself, as its role does: whoever sees the machine has it, and an operator that is away takes
nothing from routers. It is written again only when routers would choose otherwise by it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from poolwright_protocol.machine_profile import MachineProfile
from poolwright_protocol.step_time import StepCost

# Machines measure themselves again and again, and a choice between two of them does not turn on a few percent.
_NOTABLE = 0.2
# Steps that a change is looked for in: tokens, and tokens of context.
_DECODES = ((1, 512), (32, 32 * 512))
_PROMPTS = ((64, 64), (512, 1024))


@dataclass(frozen=True, slots=True)
class RouterNote:
    """Annotation `poolwright.dev/routing`. None: no such objective, no such bound. `relegates`: requests that would be
    late in any case go behind all others; `refuses`: such may be refused."""

    profile: MachineProfile
    ttft_seconds: float | None = None
    tbt_seconds: float | None = None
    tbt_percentile: float | None = None
    max_prefill_tokens_per_step: int | None = None
    relegates: bool = False
    refuses: bool = False

    def to_json(self) -> str:
        body: dict[str, Any] = {
            "profile": self.profile.to_json(),
            "ttftSeconds": self.ttft_seconds,
            "tbtSeconds": self.tbt_seconds,
            "tbtPercentile": self.tbt_percentile,
            "maxPrefillTokensPerStep": self.max_prefill_tokens_per_step,
            "relegates": self.relegates or None,
            "refuses": self.refuses or None,
        }
        return json.dumps({key: value for key, value in body.items() if value is not None}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "RouterNote":
        """Raises ValueError for anything that is not a note."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError(f"not a note: {text[:60]!r}")
        bound = raw.get("maxPrefillTokensPerStep")
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
            raise ValueError(f"maxPrefillTokensPerStep: expected a positive integer, not {bound!r}")
        try:
            profile = MachineProfile.from_json(raw.get("profile"))
        except ValueError as error:
            raise ValueError(f"profile: {error}") from error
        return cls(
            profile,
            _positive(raw, "ttftSeconds", 1e9),
            _positive(raw, "tbtSeconds", 1e9),
            _positive(raw, "tbtPercentile", 100.0),
            bound,
            _flag(raw, "relegates"),
            _flag(raw, "refuses"),
        )

    def is_news_after(self, old: "RouterNote | None") -> bool:
        """Whether a router that knows `old` is to be told."""
        if old is None:
            return True
        if replace(self, profile=_bare(self.profile)) != replace(old, profile=_bare(old.profile)):
            return True
        return any(
            abs(new - known) > _NOTABLE * known
            for new, known in zip(_seconds(self.profile), _seconds(old.profile), strict=True)
        )


def _bare(profile: MachineProfile) -> MachineProfile:
    """Without what is measured."""
    return replace(profile, decode=None, mixed=None, kv_capacity_tokens=None, kv_bytes_per_token=None)


def _seconds(profile: MachineProfile) -> Iterator[float]:
    for cost, steps in ((profile.decode, _DECODES), (profile.mixed, _PROMPTS)):
        for tokens, kv_tokens in steps:
            yield (cost or StepCost(0.0, 0.0, 0.0)).seconds(tokens, kv_tokens)
    yield float(profile.kv_capacity_tokens or 0)


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if isinstance(value, bool):
        return value
    raise ValueError(f"{key}: expected true or false, not {value!r}")


def _positive(raw: dict[str, Any], key: str, most: float) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
        return float(value)
    raise ValueError(f"{key}: expected a number above 0 and up to {most:g}, not {value!r}")
