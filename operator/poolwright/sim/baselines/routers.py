"""The routers that several baselines share: for policies whose source says nothing of routing, and their parts."""

from collections.abc import Callable, Sequence

from poolwright.sim.baselines.profile import Profiles, expected_context_tokens
from poolwright.sim.policy import ClusterView, MachineView, Placement, Refusal, RoleChange, Router, Setting
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role

Routed = Placement | Refusal | tuple[Placement, Sequence[RoleChange]]
MakeRouter = Callable[[Setting], Router]

NO_MACHINE = Refusal("no machine is ready")


class QuietRouter:
    """What a router that is not told anything more says."""

    def first_token(self, now: float, number: int) -> None:
        pass

    def finished(self, now: float, number: int) -> None:
        pass

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        return None


def usable(view: ClusterView) -> list[MachineView]:
    """Ready ones that are not being moved; the moving ones only if there is nothing else."""
    ready = [m for m in view.machines if m.ready]
    return [m for m in ready if m.moving_to is None] or ready


def placed(prompt: MachineView, token: MachineView, reason: str = "") -> Placement:
    """A pair; one machine for both is no pair."""
    return Placement(token.uid, None if prompt.uid == token.uid else prompt.uid, reason=reason)


class ShortestQueue(QuietRouter):
    """Prompts join the queue that ends first, in seconds of prompt work beside what decodes there; answers go where the
    least KV is held or bound. A mixed machine keeps what it is given."""

    def __init__(self, setting: Setting) -> None:
        self._profiles = Profiles(setting)
        self._context = expected_context_tokens(setting)

    def seconds_to_first_token(self, machine: MachineView, arrival: Arrival, view: ClusterView) -> float:
        profile = self._profiles.of(machine.model)
        own = arrival.prompt_tokens - view.prefix_hit_tokens(machine.uid, arrival)
        prompts = self._profiles.queue_seconds(machine) + profile.prompt_seconds(own)
        if not machine.decodes:
            return prompts
        # Every step of its prompt carries the decodes along.
        steps = max(1.0, (machine.waiting_tokens + own) / profile.step_tokens)
        return prompts + steps * profile.decode_seconds(machine.decodes, machine.decode_context_tokens) / 2

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if not machines:
            return NO_MACHINE

        def seconds(machine: MachineView) -> float:
            return self.seconds_to_first_token(machine, arrival, view)

        prompts = [m for m in machines if m.role is not Role.TOKEN]
        tokens = [m for m in machines if m.role is not Role.PROMPT]
        if not prompts or not tokens:
            machine = min(machines, key=seconds)
            return placed(machine, machine, "one pool")
        prompt = min(prompts, key=seconds)
        if prompt.role is Role.MIXED:
            return placed(prompt, prompt, "mixed")
        return placed(prompt, min(tokens, key=decode_load), "split")


class FewestRequests(QuietRouter):
    """One pool; each request goes where the fewest are (round robin's load-aware form, as vLLM's data parallelism)."""

    def __init__(self, setting: Setting) -> None:
        del setting

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if not machines:
            return NO_MACHINE
        machine = min(machines, key=lambda m: (len(m.waiting_prompts) + m.decodes + m.bound_decodes, m.waiting_tokens))
        return placed(machine, machine)


def decode_load(machine: MachineView) -> float:
    """KV held and bound, as a share of the memory."""
    return (machine.decode_context_tokens + machine.bound_context_tokens) / machine.model.kv_capacity_tokens
