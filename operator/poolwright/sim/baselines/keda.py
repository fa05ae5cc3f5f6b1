"""llm-d's SLO loop over KEDA: P90 by its target, a band from .40 to .55, and the HPA's rates.

llm-d/llm-d @d38c9f0, guides/workload-autoscaling (2026-07, Apache-2.0). The guide is for one pool and says that TTFT
would drive prefill and TPOT decode where they are apart; so it is done here, a loop for each. No traffic reads as 0
there, and so here. Ready pods by all pods, its credit while pods warm up, is 1 where every machine is warm.
"""

import math
from collections.abc import Sequence

from poolwright.core.percentile import percentile
from poolwright.core.reading import HistogramIncrease
from poolwright.sim.baselines.autoscaler import SYNC_SECONDS, Behavior, Replicas
from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Setting
from poolwright_protocol.roles import Role

RATE_WINDOW_SECONDS = 60.0
AVERAGED_SECONDS = 45.0
UP_ABOVE, DOWN_BELOW, MOST = 0.55, 0.40, 2.0
BEHAVIOR = Behavior(
    up_pods=4,
    up_share=1.0,
    up_period_seconds=60.0,
    up_window_seconds=30.0,
    down_pods=1,
    down_period_seconds=120.0,
    down_window_seconds=180.0,
)


def recommended(
    replicas: int,
    pressure: float,
    ready_share: float = 1.0,
    up_above: float = UP_ABOVE,
    down_below: float = DOWN_BELOW,
) -> int:
    """`pressure`: the percentile by its target, averaged."""
    if pressure > up_above:
        return replicas + math.ceil(replicas * (pressure * ready_share / up_above - 1))
    if pressure < down_below:
        return replicas - math.floor(replicas * (1 - pressure / down_below))
    return replicas


class SloLoop:
    """One signal of one pool."""

    def __init__(self, target_seconds: float, up_above: float = UP_ABOVE, down_below: float = DOWN_BELOW) -> None:
        self._target_seconds = target_seconds
        self._band = up_above, down_below
        self._raw: list[tuple[float, float]] = []
        self._replicas = Replicas(BEHAVIOR)

    def wish(self, now: float, current: int, histogram: HistogramIncrease) -> int:
        value = percentile(histogram, 90)
        raw = 0.0 if value is None else min(MOST, value.seconds / self._target_seconds)
        self._raw = [(at, r) for at, r in self._raw if at > now - AVERAGED_SECONDS] + [(now, raw)]
        pressure = sum(r for _, r in self._raw) / len(self._raw)
        return self._replicas.wish(now, current, recommended(current, pressure, 1.0, *self._band))


class SloLoops:
    period_seconds = SYNC_SECONDS

    def __init__(self, setting: Setting, up_above: float = UP_ABOVE, down_below: float = DOWN_BELOW) -> None:
        self._prompt = SloLoop(setting.slo.ttft_seconds, up_above, down_below)
        self._token = SloLoop(setting.slo.tbt_seconds, up_above, down_below)

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        reading = view.reading(RATE_WINDOW_SECONDS)
        counts = [max(1, sum(m.role is role for m in view.machines)) for role in (Role.PROMPT, Role.TOKEN)]
        wanted = self._prompt.wish(now, counts[0], reading.ttft), self._token.wish(now, counts[1], reading.tbt)
        return moves_to(view, fitted(prompt_count(view), *wanted, len(view.machines)), "SLO loop")


def keda(
    prompt: int, router: MakeRouter = ShortestQueue, up_above: float = UP_ABOVE, down_below: float = DOWN_BELOW
) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    return Policy(
        name="llm-d KEDA loop",
        source="llm-d/llm-d @d38c9f0, README.slo-aware.md, Apache-2.0",
        router=router,
        scaler=lambda setting: SloLoops(setting, up_above, down_below),
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"up_above": up_above, "down_below": down_below},
    )
