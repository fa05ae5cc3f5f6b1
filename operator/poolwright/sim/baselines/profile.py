"""What one machine can do, asked once of its step times, as every published policy profiles its engines beforehand."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from poolwright.sim.policy import MachineView, Setting
from poolwright.sim.step_time import Chunk, MachineModel

PROMPT_KNOTS = (1, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072)
DECODE_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_TOKENS = 2048
# A batch of this many tokens or more gives this share of the best throughput: the length that saturates a machine.
SATURATED_SHARE = 0.95


class MachineProfile:
    """`step_tokens`: the most prompt tokens of one step, so that a longer prompt takes several."""

    def __init__(self, model: MachineModel, step_tokens: int = STEP_TOKENS) -> None:
        self.model = model
        self.step_tokens = step_tokens
        self._prompt_seconds = [self._prompt(tokens) for tokens in PROMPT_KNOTS]
        self._asked: dict[float, float] = {}

    def _prompt(self, tokens: int) -> float:
        starts = range(0, tokens, self.step_tokens)
        return sum(
            self.model.step_time.seconds((Chunk(at, min(self.step_tokens, tokens - at)),), 0, 0.0) for at in starts
        )

    def prompt_seconds(self, tokens: float) -> float:
        """A prompt alone on the machine; linear between the measured lengths and beyond them."""
        seconds = self._asked.get(tokens)
        if seconds is None:
            seconds = self._asked[tokens] = self._between(tokens) if tokens > 0 else 0.0
        return seconds

    def _between(self, tokens: float) -> float:
        at = min(max(bisect_left(PROMPT_KNOTS, tokens), 1), len(PROMPT_KNOTS) - 1)
        low, high = PROMPT_KNOTS[at - 1], PROMPT_KNOTS[at]
        below, above = self._prompt_seconds[at - 1], self._prompt_seconds[at]
        return max(0.0, below + (above - below) * (tokens - low) / (high - low))

    def decode_seconds(self, decodes: int, context_tokens: float) -> float:
        return self.model.step_time.seconds((), decodes, context_tokens) if decodes > 0 else 0.0

    def most_decodes(self, tbt_seconds: float, context_each: float, most: int = 512) -> int:
        """The largest batch that keeps the gap and fits the memory; 0 where not even one does."""
        most = min(most, int(self.model.kv_capacity_tokens / max(1.0, context_each)))
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.decode_seconds(middle, middle * context_each) <= tbt_seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def prompt_tokens_per_second(self, tokens: float) -> float:
        """Prompts of this length, one after another."""
        return tokens / self.prompt_seconds(tokens)

    def saturating_tokens(self) -> int:
        """The shortest prompt in one step that comes near the best throughput of a step (DistServe's L_m)."""
        steps = [n for n in PROMPT_KNOTS if 64 <= n <= 8192]
        rates = [n / self.model.step_time.seconds((Chunk(0, n),), 0, 0.0) for n in steps]
        return next(n for n, rate in zip(steps, rates, strict=True) if rate >= SATURATED_SHARE * max(rates))

    def prompt_quadratic(self, most_tokens: int = 16384) -> tuple[float, float, float]:
        """Seconds ≈ a·n² + b·n + c by least squares."""
        at = [n for n in PROMPT_KNOTS if n <= most_tokens]
        a, b, c = np.polyfit(at, self._prompt_seconds[: len(at)], 2)
        return float(a), float(b), float(c)

    def decode_line(self, context_each: float) -> tuple[float, float]:
        """Seconds of a step ≈ slope · resident tokens + intercept, by least squares over the batches that fit."""
        batches = self._fitting(context_each)
        slope, intercept = np.polyfit(
            [b * context_each for b in batches], [self.decode_seconds(b, b * context_each) for b in batches], 1
        )
        return float(slope), float(intercept)

    def decode_plane(self, contexts: Sequence[float] = (256, 1024, 4096)) -> tuple[float, float, float]:
        """Seconds of a step ≈ a + b · batch + c · resident tokens, by least squares."""
        points = [(b, b * context) for context in contexts for b in self._fitting(context)]
        matrix = np.array([(1.0, b, tokens) for b, tokens in points])
        seconds = np.array([self.decode_seconds(b, tokens) for b, tokens in points])
        a, b, c = np.linalg.lstsq(matrix, seconds, rcond=None)[0]
        return float(a), float(b), float(c)

    def _fitting(self, context_each: float) -> list[int]:
        """Batches within the memory; always two, so that a line can be laid through them."""
        fitting = [b for b in DECODE_KNOTS if b * context_each <= self.model.kv_capacity_tokens]
        return fitting if len(fitting) > 1 else list(DECODE_KNOTS[:2])


class Profiles:
    """One profile for each kind of machine, made when it is first asked for."""

    def __init__(self, setting: Setting, step_tokens: int = STEP_TOKENS) -> None:
        self._step_tokens = step_tokens
        self._by_name: dict[str, MachineProfile] = {}
        self._queues: dict[str, tuple[tuple[int, ...], float]] = {}
        self.first = self.of(setting.machines[0])

    def queue_seconds(self, machine: MachineView) -> float:
        """Prompts that wait on a machine, one after another. A queue that did not change is not added up again."""
        queue, seconds = self._queues.get(machine.uid, ((), 0.0))
        if queue is not machine.waiting_prompts:
            queue = machine.waiting_prompts
            seconds = sum(map(self.of(machine.model).prompt_seconds, queue))
            self._queues[machine.uid] = (queue, seconds)
        return seconds

    def of(self, model: MachineModel) -> MachineProfile:
        profile = self._by_name.get(model.name)
        if profile is None:
            profile = self._by_name[model.name] = MachineProfile(model, self._step_tokens)
        return profile


def expected_context_tokens(setting: Setting) -> float:
    """Mean context of a request while it decodes: its prompt and half its answer."""
    return setting.expected_prompt_tokens + setting.expected_output_tokens / 2
