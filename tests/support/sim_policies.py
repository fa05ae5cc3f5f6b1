"""The plainest policies there are, for tests of the simulator itself."""

from collections.abc import Mapping, Sequence

import numpy as np

from poolwright.sim.policy import ClusterView, EngineRules, Placement, Policy, Scaler, Setting, Slo
from poolwright.sim.request import Arrival, Request, Trace
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.roles import Role


class ShortestQueue:
    """Prompts to the machine with the fewest prompt tokens waiting, answers to the one with the fewest streams."""

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Placement:
        prompts = [m for m in view.machines if m.role is not Role.TOKEN] or list(view.machines)
        tokens = [m for m in view.machines if m.role is not Role.PROMPT] or list(view.machines)
        prompt = min(prompts, key=lambda m: (m.waiting_tokens + m.decodes, m.uid))
        if prompt.role is Role.MIXED:
            return Placement(prompt.uid)
        token = min(tokens, key=lambda m: (m.decodes + m.bound_decodes, m.uid))
        return Placement(token.uid, prompt.uid)

    def first_token(self, now: float, number: int) -> None:
        pass

    def finished(self, now: float, number: int) -> None:
        pass

    def rebind(self, now: float, arrival: Arrival, placement: Placement, view: ClusterView) -> str | None:
        return None


def static_policy(roles: Sequence[Role], rules: EngineRules | None = None, scaler: Scaler | None = None) -> Policy:
    everywhere: Mapping[Role, EngineRules] = dict.fromkeys(Role, rules or EngineRules())
    return Policy(
        name="static",
        source="tests",
        router=lambda _: ShortestQueue(),
        scaler=lambda _: scaler,
        first_roles=lambda _: tuple(roles),
        rules=lambda _: everywhere,
    )


def setting(machines: Sequence[MachineModel], bytes_per_second: float = 25e9) -> Setting:
    return Setting(Slo(1.0, 0.1), machines, bytes_per_second, 1000.0, 100.0, 1.0)


def poisson_trace(
    requests: int, per_second: float, seed: int = 0, prompt_tokens: int = 800, output_tokens: int = 60
) -> Trace:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / per_second, requests))
    prompts = 1 + random.exponential(prompt_tokens, requests).astype(int)
    outputs = 1 + random.exponential(output_tokens, requests).astype(int)
    return Trace(
        "poisson",
        [
            Request(number, float(at), int(prompt), int(output))
            for number, (at, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
        ],
        float(times[-1]) if requests else 0.0,
    )
