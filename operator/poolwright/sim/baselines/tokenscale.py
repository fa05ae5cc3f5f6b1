"""TokenScale: pools sized by token velocities, and convertible decoders that take the bursts of prompts.

Lai et al., TokenScale, arXiv 2512.03416, as far as its abstract and public reviews say: prompt machines = arriving
prompt tokens a second by the slower of prompt and network velocity; token machines = the sum over length buckets of
arriving tokens by what a machine completes; a few decoders, with memory in reserve, take prompts in bounded chunks when
prompt machines would be late. Not published, and so chosen: rates over 10 s, a decision a second, one convertible
decoder in eight, its chunk by Sarathi-Serve's rule, buckets by powers of two.
"""

import math
from collections.abc import Sequence

from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.profile import Profiles
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, ShortestQueue, decode_load, placed, usable
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import ClusterView, MachineView, Policy, RoleChange, Setting
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role

PERIOD_SECONDS = 1.0
RATE_WINDOW_SECONDS = 10.0
CONVERTIBLE_SHARE = 1 / 8
PROMPT_TOKENS_ASKED = 2048


class Velocities:
    """Tokens a second that one machine takes in a phase."""

    def __init__(self, setting: Setting) -> None:
        profile, model = Profiles(setting).first, setting.machines[0]
        self.prompt = profile.prompt_tokens_per_second(PROMPT_TOKENS_ASKED)
        self.network = setting.network_bytes_per_second / model.kv_bytes_per_token
        self._profile, self._tbt = profile, setting.slo.tbt_seconds
        self._decode: dict[tuple[int, int], float] = {}

    def decode(self, prompt_tokens: int, output_tokens: float) -> float:
        """Prompt and answer tokens of the bucket that a machine completes, at the largest batch within the target."""
        bucket = (prompt_tokens.bit_length(), round(output_tokens).bit_length())
        if bucket not in self._decode:
            prompt, output = 0.75 * 2 ** bucket[0], 0.75 * 2 ** bucket[1]
            context = prompt + output / 2
            batch = max(1, self._profile.most_decodes(self._tbt, context))
            seconds = output * self._profile.decode_seconds(batch, batch * context)
            self._decode[bucket] = batch * (prompt + output) / seconds
        return self._decode[bucket]


def wanted(arrivals: Sequence[Arrival], seconds: float, velocities: Velocities) -> tuple[int, int]:
    prompt_rate = sum(a.prompt_tokens for a in arrivals) / seconds
    prompt = math.ceil(prompt_rate / min(velocities.prompt, velocities.network))
    busy = sum(
        (a.prompt_tokens + a.expected_output_tokens) / velocities.decode(a.prompt_tokens, a.expected_output_tokens)
        for a in arrivals
    )
    return max(1, prompt), max(1, math.ceil(busy / seconds))


class VelocityScaler:
    """Convertible decoders are none of both pools."""

    period_seconds = PERIOD_SECONDS

    def __init__(self, setting: Setting, window_seconds: float = RATE_WINDOW_SECONDS) -> None:
        self._velocities = Velocities(setting)
        self._window = window_seconds

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        arrivals = view.arrivals(self._window)
        machines = sum(m.role is not Role.MIXED for m in view.machines)
        if not arrivals or machines < 2:
            return []
        prompt, token = wanted(arrivals, min(self._window, max(now, 1.0)), self._velocities)
        convertible = len(view.machines) - machines
        want = fitted(prompt_count(view), prompt, max(1, token - convertible), machines)
        return moves_to(view, want, "velocity")


class BurstRouter(QuietRouter):
    """Prompts to prompt machines while they are in time; else to a convertible decoder, if that is sooner."""

    def __init__(self, setting: Setting) -> None:
        self._queues = ShortestQueue(setting)
        self._slo = setting.slo

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        if not machines:
            return NO_MACHINE

        def seconds(machine: MachineView) -> float:
            return self._queues.seconds_to_first_token(machine, arrival, view)

        prompts = [m for m in machines if m.role is Role.PROMPT] or machines
        convertible = [m for m in machines if m.role is Role.MIXED]
        tokens = [m for m in machines if m.role is not Role.PROMPT] or machines
        prompt = min(prompts, key=seconds)
        limit = self._slo.ttft_seconds + self._slo.ttft_seconds_per_token * arrival.prompt_tokens
        if convertible and seconds(prompt) > limit:
            burst = min(convertible, key=seconds)
            if seconds(burst) < seconds(prompt):
                return placed(burst, burst, "burst")
        return placed(prompt, min(tokens, key=decode_load))


def tokenscale(
    prompt: int, window_seconds: float = RATE_WINDOW_SECONDS, convertible_share: float = CONVERTIBLE_SHARE
) -> Policy:
    """`prompt`: machines of the prompt pool at the start."""

    def first_roles(setting: Setting) -> Sequence[Role]:
        machines = len(setting.machines)
        convertible = max(1, round(machines * convertible_share)) if machines > 2 else 0
        return split_roles(setting, min(prompt, machines - convertible - 1), convertible)

    return Policy(
        name="TokenScale",
        source="TokenScale, arXiv 2512.03416, as far as published",
        router=BurstRouter,
        scaler=lambda setting: VelocityScaler(setting, window_seconds),
        first_roles=first_roles,
        rules=split_rules,
        parameters={"rate_window_seconds": window_seconds, "convertible_share": convertible_share},
    )
