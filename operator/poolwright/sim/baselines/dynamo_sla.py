"""Dynamo's SLA planner of 2025, which papers still compare with: profiled throughput, corrected by what was observed.

ai-dynamo/dynamo at zxue2/dynamo @e20adb4 (2025-10, Apache-2.0), `planner_core.py` and `perf_interpolation.py`. Its
prefill correction is at most 1, so a queue never adds a prompt machine; its rounding may leave the budget, so here the
answer is scaled to N once more. An interval without a whole set of averages is skipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import griddata, interp1d

from poolwright.sim.baselines.forecast import Forecast, Kalman, LastValue
from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.profile import MachineProfile, Profiles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.baselines.traffic import Meter, metered
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Setting
from poolwright_protocol.roles import Role

INTERVAL_SECONDS = 180.0
GRID = 100
SWEPT_PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SWEPT_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384)
SWEPT_USES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What profiling before deployment found; times in milliseconds, throughputs in tokens a second and GPU."""

    prompt_tokens: Sequence[float]
    ttft: Sequence[float]
    prompt_throughput: Sequence[float]
    kv_use: Sequence[float]
    context_tokens: Sequence[float]
    itl: Sequence[float]
    decode_throughput: Sequence[float]
    most_kv_tokens: int

    @staticmethod
    def measured(profile: MachineProfile) -> "Sweep":
        ttft = [profile.prompt_seconds(n) * 1000 for n in SWEPT_PROMPTS]
        capacity = profile.model.kv_capacity_tokens
        points = [
            (batch * context / capacity, context, batch, profile.decode_seconds(batch, batch * context) * 1000)
            for context in SWEPT_CONTEXTS
            for use in SWEPT_USES
            if (batch := max(1, int(use * capacity / context))) * context <= capacity
        ]
        return Sweep(
            SWEPT_PROMPTS,
            ttft,
            [n / milliseconds * 1000 for n, milliseconds in zip(SWEPT_PROMPTS, ttft, strict=True)],
            [use for use, _, _, _ in points],
            [context for _, context, _, _ in points],
            [itl for _, _, _, itl in points],
            [batch / itl * 1000 for _, _, batch, itl in points],
            capacity,
        )


class Interpolated:
    """The sweep between its points: cubic, and the nearest point where that is not defined."""

    def __init__(self, sweep: Sweep) -> None:
        self._least, self._most = min(sweep.prompt_tokens), max(sweep.prompt_tokens)
        self._ttft = interp1d(sweep.prompt_tokens, sweep.ttft, kind="cubic")
        self._prompt_throughput = interp1d(sweep.prompt_tokens, sweep.prompt_throughput, kind="cubic")
        self._most_kv_tokens = sweep.most_kv_tokens
        self._uses = np.linspace(0, 1, GRID)
        self._contexts = np.linspace(0, max(sweep.context_tokens), GRID)
        points = (np.asarray(sweep.kv_use, dtype=float), np.asarray(sweep.context_tokens, dtype=float))
        self._itl = self._grid(points, sweep.itl)
        self._decode_throughput = self._grid(points, sweep.decode_throughput)

    def ttft(self, prompt_tokens: float) -> float:
        return float(self._ttft(self._inside(prompt_tokens)))

    def prompt_throughput(self, prompt_tokens: float) -> float:
        return float(self._prompt_throughput(self._inside(prompt_tokens)))

    def itl(self, concurrency: float, context_tokens: float) -> float:
        use = concurrency * context_tokens / self._most_kv_tokens
        return float(self._itl[_nearest(self._contexts, context_tokens), _nearest(self._uses, use)])

    def decode_throughput(self, itl: float, context_tokens: float) -> float:
        """At the fullest memory that keeps `itl`; at the emptiest where none does."""
        row = _nearest(self._contexts, context_tokens)
        kept = np.flatnonzero(self._itl[row] <= itl)
        return float(self._decode_throughput[row, kept[-1] if kept.size else 0])

    def _inside(self, prompt_tokens: float) -> float:
        return max(self._least, min(prompt_tokens, self._most))

    def _grid(self, points: tuple[np.ndarray, np.ndarray], values: Sequence[float]) -> np.ndarray:
        at = np.meshgrid(self._uses, self._contexts)
        grid = griddata(points, values, tuple(at), method="cubic")
        holes = np.isnan(grid)
        if holes.any():
            grid[holes] = griddata(points, values, tuple(at), method="nearest")[holes]
        return np.asarray(grid)


def _nearest(axis: np.ndarray, value: float) -> int:
    return int(np.clip(np.round((value - axis[0]) / (axis[1] - axis[0])), 0, len(axis) - 1))


@dataclass(frozen=True, slots=True)
class Observed:
    """Averages of one interval; milliseconds, tokens, seconds. None: nothing was counted."""

    ttft: float | None
    itl: float | None
    requests: float
    prompt_tokens: float | None
    output_tokens: float | None
    request_seconds: float | None


@dataclass(slots=True)
class SlaPlanner:
    profile: Interpolated
    interval_seconds: float = INTERVAL_SECONDS
    itl_milliseconds: float = 50.0
    prompt_gpus: int = 1
    token_gpus: int = 1
    most_gpus: int = 8
    least_of_a_pool: int = 1
    corrects: bool = True
    _prompt_correction: float = 1.0
    _token_correction: float = 1.0

    def observe(self, observed: Observed, token_machines: int) -> bool:
        """False: the averages are not whole, so nothing is to be decided."""
        if (
            observed.ttft is None
            or observed.itl is None
            or observed.prompt_tokens is None
            or observed.output_tokens is None
        ):
            return False
        if self.corrects:
            if observed.request_seconds is None or token_machines < 1:
                return False
            self._prompt_correction = observed.ttft / self.profile.ttft(observed.prompt_tokens)
            concurrency = observed.requests / token_machines * observed.request_seconds / self.interval_seconds
            context = observed.prompt_tokens + observed.output_tokens / 2
            self._token_correction = observed.itl / self.profile.itl(concurrency, context)
        return True

    def machines(self, requests: float, prompt_tokens: float, output_tokens: float) -> tuple[int, int]:
        """Prompt and token machines for a forecast interval."""
        work = requests * prompt_tokens / self.interval_seconds * min(1, self._prompt_correction)
        prompt = math.ceil(work / self.profile.prompt_throughput(prompt_tokens) / self.prompt_gpus)
        itl = self.itl_milliseconds / self._token_correction if self._token_correction > 0 else self.itl_milliseconds
        rate = self.profile.decode_throughput(itl, prompt_tokens + output_tokens / 2)
        token = math.ceil(requests * output_tokens / self.interval_seconds / rate / self.token_gpus)
        prompt, token = max(prompt, self.least_of_a_pool), max(token, self.least_of_a_pool)
        gpus = prompt * self.prompt_gpus + token * self.token_gpus
        if gpus > self.most_gpus:
            prompt = max(self.least_of_a_pool, round(prompt * (self.most_gpus / gpus)))
            left = (self.most_gpus - prompt * self.prompt_gpus) / self.token_gpus
            token = max(self.least_of_a_pool, round(left))
        return prompt, token


class DynamoSlaRun:
    """The scaler of one run."""

    def __init__(
        self, setting: Setting, meter: Meter, forecast: type[Forecast], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self.meter = meter
        self.period_seconds = interval_seconds
        self._planner = SlaPlanner(
            Interpolated(Sweep.measured(Profiles(setting).first)),
            interval_seconds,
            itl_milliseconds=setting.slo.tbt_seconds * 1000,
            most_gpus=len(setting.machines),
        )
        self._forecasts = [forecast() for _ in range(3)]

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        seen = self.meter.traffic(now, view, self.period_seconds)
        observed = Observed(
            _milliseconds(seen.ttft_seconds),
            _milliseconds(seen.tbt_seconds),
            seen.requests,
            seen.prompt_tokens,
            seen.output_tokens,
            seen.request_seconds,
        )
        if not self._planner.observe(observed, sum(m.role is Role.TOKEN for m in view.machines)):
            return []
        for forecast, value in zip(
            self._forecasts, (observed.requests, observed.prompt_tokens, observed.output_tokens), strict=True
        ):
            forecast.add(value or 0.0)
        wanted = self._planner.machines(*(f.next() for f in self._forecasts))
        return moves_to(view, fitted(prompt_count(view), *wanted, len(view.machines)), "interval")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def dynamo_sla(
    prompt: int,
    forecast: type[LastValue] | type[Kalman] = LastValue,
    router: MakeRouter = ShortestQueue,
    interval_seconds: float = INTERVAL_SECONDS,
) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    runs = PerRun(lambda setting: DynamoSlaRun(setting, metered(router, setting), forecast, interval_seconds))
    return Policy(
        name="Dynamo SLA planner 2025",
        source="ai-dynamo/dynamo planner_core.py, read at zxue2/dynamo @e20adb4, Apache-2.0",
        router=lambda setting: runs.router(setting).meter,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"interval_seconds": interval_seconds},
    )
