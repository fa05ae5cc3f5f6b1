"""Mooncake's conductor: the prompt machine with the least time to first token, counting what its cache holds.

Qin et al., Mooncake, FAST '25, Algorithm 1: transfer of the prefix, queue, and the prompt less its prefix; decode by
load balance. Caches here stay where they are, so the branch that copies a far longer prefix from another machine
(`kvcache_balancing_threshold`) falls to recomputing it. The split is fixed, as there. Its early rejection, naive and
predicted, is in `admission`.
"""

from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.profile import Profiles
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, placed, usable
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import ClusterView, MachineView, Policy, Setting
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role


class Conductor(QuietRouter):
    def __init__(self, setting: Setting) -> None:
        self._profiles = Profiles(setting)

    def first_token_seconds(self, machine: MachineView, arrival: Arrival, view: ClusterView) -> float:
        own = arrival.prompt_tokens - view.prefix_hit_tokens(machine.uid, arrival)
        own_seconds = self._profiles.of(machine.model).prompt_seconds(max(1, own))
        return self._profiles.queue_seconds(machine) + own_seconds

    def token_seconds(self, machine: MachineView, arrival: Arrival) -> float:
        """Gap with this request and those that are bound to it."""
        decodes = machine.decodes + machine.bound_decodes + 1
        context = machine.decode_context_tokens + machine.bound_context_tokens + arrival.prompt_tokens
        return self._profiles.of(machine.model).decode_seconds(decodes, context)

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if not machines:
            return NO_MACHINE
        prompts = [m for m in machines if m.role is not Role.TOKEN] or machines
        tokens = [m for m in machines if m.role is not Role.PROMPT] or machines
        prompt = min(prompts, key=lambda m: self.first_token_seconds(m, arrival, view))
        return placed(prompt, min(tokens, key=lambda m: self.token_seconds(m, arrival)))


def mooncake(prompt: int) -> Policy:
    """`prompt`: machines of the prompt pool, for good."""
    return Policy(
        name="Mooncake",
        source="Mooncake, FAST '25, Algorithm 1",
        router=Conductor,
        scaler=lambda setting: None,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"prompt": prompt},
    )
