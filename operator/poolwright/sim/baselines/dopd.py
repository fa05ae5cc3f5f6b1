"""DOPD: the ratio of prompt to token machines at which neither waits for the other.

Liao et al., DOPD, arXiv 2511.20982; liao4s/DOPD @4bc8838, `calculate_optimal_pd`. P/D = C · TTFT(n) / (o · TPOT(C, n +
o/2)) with C = KV tokens / (n + o/2), from the forecast lengths every 180 s. Corrected: the published function reads an
undefined name (`ols`), divides blocks by tokens, and is called by nothing; the formula is the paper's. C is bounded by
the 256 sequences of an engine. Its length-aware scheduling of prompts inside one engine is not part of it here.
"""

from collections.abc import Sequence

from poolwright.sim.baselines.forecast import Forecast, LastValue
from poolwright.sim.baselines.pools import capped, moves_to, split_roles
from poolwright.sim.baselines.profile import MachineProfile, Profiles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.baselines.traffic import Meter, metered
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Setting

INTERVAL_SECONDS = 180.0
MOST_SEQUENCES = 256


def ratio(profile: MachineProfile, prompt_tokens: float, output_tokens: float) -> float:
    context = prompt_tokens + output_tokens / 2
    concurrency = max(1, min(MOST_SEQUENCES, int(profile.model.kv_capacity_tokens / context)))
    decode = output_tokens * profile.decode_seconds(concurrency, concurrency * context)
    return concurrency * profile.prompt_seconds(prompt_tokens) / decode


class DopdRun:
    """The scaler of one run."""

    def __init__(self, setting: Setting, meter: Meter, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.meter = meter
        self.period_seconds = interval_seconds
        self._profile = Profiles(setting).first
        self._forecasts: tuple[Forecast, Forecast] = (LastValue(), LastValue())

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        seen = self.meter.traffic(now, view, self.period_seconds)
        if not seen.prompt_tokens or not seen.output_tokens or len(view.machines) < 2:
            return []
        self._forecasts[0].add(seen.prompt_tokens)
        self._forecasts[1].add(seen.output_tokens)
        wanted = ratio(self._profile, *(f.next() for f in self._forecasts))
        return moves_to(view, capped(wanted, 1.0, len(view.machines)), "ratio")


def dopd(prompt: int, router: MakeRouter = ShortestQueue, interval_seconds: float = INTERVAL_SECONDS) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    runs = PerRun(lambda setting: DopdRun(setting, metered(router, setting), interval_seconds))
    return Policy(
        name="DOPD",
        source="DOPD, arXiv 2511.20982; liao4s/DOPD @4bc8838, Apache-2.0",
        router=lambda setting: runs.router(setting).meter,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"interval_seconds": interval_seconds},
    )
