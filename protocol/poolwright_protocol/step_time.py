"""What a step of an engine takes, as lines fitted to measurements: one formula for engine, router and simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROFILE_FORMAT = 1  # of the document that `poolwright-engine profile` writes


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted seconds of a step: fixed + token · tokens + kv_token · (context lengths of its rows, summed)."""

    fixed_seconds: float
    token_seconds: float
    kv_token_seconds: float

    def seconds(self, tokens: float, kv_tokens: float) -> float:
        return self.fixed_seconds + tokens * self.token_seconds + kv_tokens * self.kv_token_seconds

    @property
    def overhead_tokens(self) -> float | None:
        """What a step costs besides its tokens, in tokens; None where those cost nothing."""
        return self.fixed_seconds / self.token_seconds if self.token_seconds > 0 else None


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Measured before serving; fitted on from there. `decode`: steps of decodes alone; `mixed`: steps with prefill,
    where other kernels run."""

    decode: StepCost
    mixed: StepCost

    def cost(self, has_prefill: bool) -> StepCost:
        return self.mixed if has_prefill else self.decode


def profile_from_document(document: Mapping[str, Any]) -> StepProfile:
    """The fitted part. Raises ValueError."""
    try:
        if document["format"] != PROFILE_FORMAT:
            raise ValueError(f"format {document['format']} is not {PROFILE_FORMAT}")
        return StepProfile(decode=StepCost(**document["decode"]), mixed=StepCost(**document["mixed"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no profile of a machine: {type(error).__name__}: {error}") from error
