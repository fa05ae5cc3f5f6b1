"""Admission as a column of its own: any policy with requests refused at their arrival, as Mooncake refuses them.

Mooncake (FAST '25, section 6): early rejection refuses what would miss TTFT on the best prompt machine, or TBT on the
best token machine as loaded now. A decode's load is felt only after its prompt, so loads of the two pools swing against
each other; the predicted form judges decode load at the moment this prompt will end, with every request decoding for
one same time t_d.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from poolwright.sim.baselines.mooncake import Conductor
from poolwright.sim.baselines.profile import Profiles, expected_context_tokens
from poolwright.sim.baselines.routers import Routed, usable
from poolwright.sim.policy import ClusterView, MachineView, Placement, Policy, Refusal, Router, Setting
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role


class Admission(StrEnum):
    ALL = "all"
    EARLY = "early rejection"
    PREDICTED = "early rejection, predicted"


class EarlyRejection:
    """Stands before another router."""

    def __init__(self, setting: Setting, router: Router, predicted: bool) -> None:
        self._setting = setting
        self._router = router
        self._predicted = predicted
        self._conductor = Conductor(setting)
        self._profiles = Profiles(setting)
        self._context = expected_context_tokens(setting)
        self._coming: dict[int, float] = {}  # when the prompts under way are expected to end
        self._decoding: dict[int, float] = {}  # since when

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if not machines:
            return self._router.route(now, arrival, view)
        prompts = [m for m in machines if m.role is not Role.TOKEN] or machines
        tokens = [m for m in machines if m.role is not Role.PROMPT] or machines
        ttft = min(self._conductor.first_token_seconds(m, arrival, view) for m in prompts)
        slo = self._setting.slo
        limit = slo.ttft_seconds + slo.ttft_seconds_per_token * arrival.prompt_tokens
        if ttft > limit:
            return Refusal("TTFT would be missed", ttft - limit)
        gap = self._gap_then(now + ttft, tokens) if self._predicted else self._gap_now(arrival, tokens)
        if gap > slo.tbt_seconds:
            return Refusal("TBT would be missed", self._decode_seconds())
        routed = self._router.route(now, arrival, view)
        if not isinstance(routed, Refusal):
            self._coming[arrival.number] = now + ttft
        return routed

    def first_token(self, now: float, number: int) -> None:
        if self._coming.pop(number, None) is not None:
            self._decoding[number] = now
        self._router.first_token(now, number)

    def finished(self, now: float, number: int) -> None:
        self._coming.pop(number, None)
        self._decoding.pop(number, None)
        self._router.finished(now, number)

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        return self._router.rebind(now, arrival, placement, view)

    def _gap_now(self, arrival: Arrival, tokens: Sequence[MachineView]) -> float:
        """What decodes now, and this one: those whose prompts are under way are not seen."""
        return min(
            self._profiles.of(m.model).decode_seconds(m.decodes + 1, m.decode_context_tokens + arrival.prompt_tokens)
            for m in tokens
        )

    def _gap_then(self, at: float, tokens: Sequence[MachineView]) -> float:
        """Decodes at `at`: those that began less than t_d before, spread evenly over the machines."""
        began = [*self._decoding.values(), *(end for end in self._coming.values() if end <= at)]
        lasts = self._decode_seconds()
        each = sum(since + lasts > at for since in began) / len(tokens) + 1
        decodes = max(1, round(each))
        return self._profiles.of(tokens[0].model).decode_seconds(decodes, decodes * self._context)

    def _decode_seconds(self) -> float:
        """t_d: the expected answer at the target's pace."""
        return self._setting.expected_output_tokens * self._setting.slo.tbt_seconds


def with_admission(policy: Policy, admission: Admission) -> Policy:
    if admission is Admission.ALL:
        return policy
    predicted = admission is Admission.PREDICTED
    return replace(
        policy,
        name=f"{policy.name} + {admission}",
        source=f"{policy.source}; admission: Mooncake, FAST '25, section 6",
        router=lambda setting: EarlyRejection(setting, policy.router(setting), predicted),
    )
