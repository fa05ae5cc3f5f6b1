"""A machine's step times, all of them so many times as long: what a busy host adds then counts for less."""

from collections.abc import Sequence

from poolwright.sim.step_time import Chunk, StepTime


class SlowedStepTime:
    """A `StepTime`."""

    def __init__(self, inner: StepTime, factor: float) -> None:
        self._inner = inner
        self._factor = factor

    @property
    def name(self) -> str:
        return f"{self._inner.name}, slowed {self._factor:g} times"

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        return self._factor * self._inner.seconds(chunks, decodes, context_tokens)

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        steps, spent = self._inner.decode_run(decodes, context_tokens, seconds / self._factor, most_steps)
        return steps, self._factor * spent
