"""HeteroScale: one signal, decode tokens a second, sizes both pools together at a fixed ratio.

Li et al., HeteroScale, arXiv 2508.19559 (ByteDance), as far as published: proportional control with a dead band, and a
fifth more when TBT is a fifth over its target. On a fixed number of machines a fixed ratio is a fixed split, so all
that is left of it is the ratio: what the paper's production would release or add is not there to be moved.
"""

import math
from collections.abc import Sequence

from poolwright.sim.baselines.pools import capped, moves_to, split_roles
from poolwright.sim.baselines.profile import Profiles, expected_context_tokens
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.traffic import mean_seconds
from poolwright.sim.policy import ClusterView, Policy, RoleChange, Setting
from poolwright_protocol.roles import Role

PERIOD_SECONDS = 60.0
DEAD_BAND = 0.1
LATE_TBT, LATE_GROWTH = 1.2, 0.2


def decode_machines(current: int, tokens_per_second: float, target_of_one: float, late: bool) -> int:
    """Proportional to the signal outside the dead band; a fifth more where TBT is late."""
    use = tokens_per_second / (target_of_one * current)
    wanted = current if abs(use - 1) <= DEAD_BAND else math.ceil(tokens_per_second / target_of_one)
    return max(wanted, math.ceil(current * (1 + LATE_GROWTH))) if late else max(1, wanted)


class DecodeRate:
    def __init__(self, setting: Setting, period_seconds: float = PERIOD_SECONDS) -> None:
        self.period_seconds = period_seconds
        profile, context = Profiles(setting).first, expected_context_tokens(setting)
        self._tbt = setting.slo.tbt_seconds
        batch = max(1, profile.most_decodes(self._tbt, context))
        self._of_one = batch / profile.decode_seconds(batch, batch * context)
        prompt_work = setting.expected_prompt_tokens / profile.prompt_tokens_per_second(setting.expected_prompt_tokens)
        token_work = setting.expected_output_tokens / self._of_one
        self._ratio = prompt_work / token_work

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        reading = view.reading(self.period_seconds)
        tokens = sum(m.role is Role.TOKEN for m in view.machines)
        if not tokens or len(view.machines) < 2:
            return []
        mean = mean_seconds(reading.tbt)
        late = mean is not None and mean > LATE_TBT * self._tbt
        token = decode_machines(tokens, reading.output_tokens / self.period_seconds, self._of_one, late)
        return moves_to(view, capped(self._ratio * token, token, len(view.machines)), "ratio")


def heteroscale(prompt: int, router: MakeRouter = ShortestQueue, period_seconds: float = PERIOD_SECONDS) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""
    return Policy(
        name="HeteroScale",
        source="HeteroScale, arXiv 2508.19559, as far as published",
        router=router,
        scaler=lambda setting: DecodeRate(setting, period_seconds),
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"dead_band": DEAD_BAND, "period_seconds": period_seconds},
    )
