"""A machine whose steps are a line, and views of it, for tests that need no table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poolwright.core.reading import HistogramIncrease, MetricsReading, MetricsState
from poolwright.sim.policy import ClusterView, MachineView, Setting, Slo
from poolwright.sim.request import Arrival
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_protocol.roles import Role


@dataclass(frozen=True)
class LineStepTime:
    fixed_seconds: float = 0.01
    prompt_token_seconds: float = 1e-4
    decode_seconds: float = 1e-4
    context_token_seconds: float = 1e-7

    @property
    def name(self) -> str:
        return "line"

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        if not chunks and not decodes:
            return 0.0
        tokens = sum(c.tokens for c in chunks)
        return (
            self.fixed_seconds
            + tokens * self.prompt_token_seconds
            + decodes * self.decode_seconds
            + context_tokens * self.context_token_seconds
        )

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        steps, total = 0, 0.0
        while steps < most_steps and (not steps or total < seconds):
            total += self.seconds((), decodes, context_tokens + steps * decodes)
            steps += 1
        return steps, total


MODEL = MachineModel("line machine", LineStepTime(), kv_capacity_tokens=100_000, kv_bytes_per_token=1000)


def setting(machines: int = 4, ttft: float = 1.0, tbt: float = 0.05, rate: float = 10.0) -> Setting:
    return Setting(Slo(ttft, tbt), [MODEL] * machines, 1e9, 1000.0, 200.0, rate)


def machine(uid: str, role: Role, **values: object) -> MachineView:
    fields: dict[str, object] = {
        "uid": uid,
        "role": role,
        "model": MODEL,
        "ready": True,
        "home": role,
        "role_since": 0.0,
        "waiting_prompts": (),
        "decodes": 0,
        "decode_context_tokens": 0,
        "bound_decodes": 0,
        "bound_context_tokens": 0,
        "kv_used_tokens": 0,
        "last_step_seconds": 0.0,
        "decode_step_seconds": 0.0,
        "idle_since": None,
    }
    return MachineView(**{**fields, **values})  # type: ignore[arg-type]


def cluster(
    *machines: MachineView,
    arrivals: Sequence[Arrival] = (),
    hit_tokens: Callable[[str, Arrival], int] = lambda uid, arrival: 0,
    **reading: object,
) -> ClusterView:
    def read(window: float) -> MetricsReading:
        return MetricsReading(MetricsState.COMPLETE, window, **reading)  # type: ignore[arg-type]

    return ClusterView(machines, read, lambda window: arrivals, hit_tokens)


def arrival(number: int = 0, prompt: int = 1000, output: float = 200.0, at: float = 0.0) -> Arrival:
    return Arrival(number, at, prompt, output)


def histogram(**counts: float) -> HistogramIncrease:
    """`histogram(b0_1=5, binf=5)`: cumulative counts up to 0.1 and beyond."""
    bounds = tuple(float(name[1:].replace("_", ".")) for name in counts)
    return HistogramIncrease(bounds, tuple(counts.values()))
