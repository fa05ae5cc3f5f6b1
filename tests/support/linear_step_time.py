"""A machine whose step is a straight line in its work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poolwright.sim.step_time import Chunk, MachineModel


@dataclass(frozen=True)
class LinearStepTime:
    name: str = "linear"
    fixed_seconds: float = 0.010
    prompt_token_seconds: float = 4e-5
    decode_seconds: float = 1e-4
    kv_token_seconds: float = 1e-8

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        tokens = sum(chunk.tokens for chunk in chunks)
        kv_tokens = context_tokens + sum(chunk.start + chunk.tokens for chunk in chunks)
        return (
            self.fixed_seconds
            + tokens * self.prompt_token_seconds
            + decodes * self.decode_seconds
            + kv_tokens * self.kv_token_seconds
        )

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        first = self.seconds((), decodes, context_tokens)
        growth = decodes * self.kv_token_seconds
        steps = most_steps
        if math.isfinite(seconds):
            # The largest k with k - 1 steps ending within `seconds`: first·j + growth·j(j-1)/2 <= seconds.
            linear = first - growth / 2
            j = (math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth if growth else seconds / first
            steps = min(most_steps, max(1, math.floor(max(0.0, j)) + 1))
        return steps, steps * first + growth * steps * (steps - 1) / 2


def machine_model(capacity: int = 100_000, step_time: LinearStepTime | None = None, **options: int) -> MachineModel:
    return MachineModel("linear", step_time or LinearStepTime(), capacity, 131_072, **options)
