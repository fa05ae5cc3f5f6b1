"""xLLM-service's SLO-aware policy: decodes packed on the first machine that keeps TPOT, prompts on the shortest queue.

jd-opensource/xllm-service @c8033e0 (Apache-2.0), `instance_mgr.cpp`: pairs are chosen and machines flipped with each
request, and a machine whose last decode ended goes to the prompts; nothing dwells, drains or is verified. Times are
whole milliseconds there, and so here. Published targets: 1,000 ms and 50 ms; runs use the setting's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from poolwright.sim.baselines.pools import split_roles
from poolwright.sim.baselines.profile import Profiles
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, placed
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.policy import ClusterView, MachineView, Policy, RoleChange, Setting
from poolwright.sim.request import Arrival
from poolwright_protocol.roles import Role

FLIP_PERIOD_SECONDS = 0.1


class Predictor(NamedTuple):
    """TTFT = t0 + t1·n + t2·n²; TPOT = d0 + d1·requests + d2·tokens; milliseconds."""

    t0: float
    t1: float
    t2: float
    d0: float
    d1: float
    d2: float

    def ttft(self, tokens: int) -> int:
        return int(self.t0 * 1.0 + self.t1 * tokens + self.t2 * (tokens * tokens))

    def tpot(self, tokens: int, requests: int) -> int:
        return int(self.d0 + self.d1 * requests + self.d2 * tokens)


@dataclass(slots=True)
class Instance:
    predictor: Predictor
    decodes: int = 0
    decode_tokens: int = 0
    prompt_milliseconds: int = 0


class Pair(NamedTuple):
    prompt: str
    token: str


@dataclass(slots=True)
class Scheduler:
    """`prompts` and `decodes`: uids in the order of the service's indexes, which packing follows.

    `flips_to_decode` False is the service as published: `add_instance_to_index` puts a machine that may do both, and is
    flipped to decode, back among the prompts whenever there is a decode machine, so machines only ever leave decode.
    """

    ttft_milliseconds: int = 1000
    tpot_milliseconds: int = 50
    flips_to_decode: bool = True
    instances: dict[str, Instance] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    decodes: list[str] = field(default_factory=list)

    def add(self, uid: str, predictor: Predictor, role: Role) -> None:
        self.instances[uid] = Instance(predictor)
        (self.prompts if role is Role.PROMPT else self.decodes).append(uid)

    def remove(self, uid: str) -> None:
        for index in (self.prompts, self.decodes):
            if uid in index:
                _take(index, uid)
        del self.instances[uid]

    def schedule(self, tokens: int) -> tuple[Pair, int]:
        """The pair, and the milliseconds that the prompt is expected to take, for `prompt_done`."""
        here = self.instances
        prompt = min(self.prompts, key=lambda uid: here[uid].prompt_milliseconds)
        shortest = here[prompt].prompt_milliseconds
        mean = sum(here[uid].prompt_milliseconds for uid in self.prompts) // len(self.prompts)
        tpots = {
            uid: here[uid].predictor.tpot(here[uid].decode_tokens + tokens, here[uid].decodes + 1)
            for uid in self.decodes
        }
        lightest = min(self.decodes, key=lambda uid: tpots[uid])
        able = next((uid for uid in self.decodes if tpots[uid] <= self.tpot_milliseconds), None)
        # Would each pool hold with one machine less?
        prompt_left = (len(self.prompts) - 1) / len(self.prompts)
        decode_left = (len(self.decodes) - 1) / len(self.decodes)
        if (
            shortest > self.ttft_milliseconds
            and able != lightest
            and tpots[lightest] < self.tpot_milliseconds * decode_left
            and here[lightest].prompt_milliseconds < shortest
        ):
            prompt = lightest
        own = here[prompt].predictor.ttft(tokens)
        here[prompt].prompt_milliseconds += own
        token = able if able is not None else lightest
        here[token].decodes += 1
        here[token].decode_tokens += tokens
        spare = mean < self.ttft_milliseconds * prompt_left or len(self.decodes) < len(self.prompts)
        if able is None and spare and prompt in self.prompts and len(self.prompts) > 1:
            _take(self.prompts, prompt)
            (self.decodes if self.flips_to_decode else self.prompts).append(prompt)
        return Pair(prompt, token), own

    def prompt_done(self, pair: Pair, own_milliseconds: int) -> None:
        if pair.prompt in self.instances:
            self.instances[pair.prompt].prompt_milliseconds -= own_milliseconds
        self.generated(pair, 1)

    def generated(self, pair: Pair, tokens: int) -> None:
        if pair.token in self.instances:
            self.instances[pair.token].decode_tokens += tokens

    def ended(self, pair: Pair, tokens: int) -> None:
        """`tokens`: prompt and answer. A machine that decodes nothing any more goes to the prompts."""
        instance = self.instances.get(pair.token)
        if instance is None:
            return
        instance.decodes -= 1
        instance.decode_tokens -= tokens
        if instance.decodes == 0 and len(self.decodes) > 1 and pair.token in self.decodes:
            _take(self.decodes, pair.token)
            self.prompts.append(pair.token)

    def role(self, uid: str) -> Role:
        return Role.PROMPT if uid in self.prompts else Role.TOKEN


def _take(index: list[str], uid: str) -> None:
    """The last one takes the place of the one that leaves."""
    index[index.index(uid)] = index[-1]
    index.pop()


class XllmRun(QuietRouter):
    """Router and scaler of one run; the answers' lengths so far are what the machines hold."""

    period_seconds = FLIP_PERIOD_SECONDS

    def __init__(self, setting: Setting, flips_to_decode: bool, target_share: float = 1.0) -> None:
        self._profiles = Profiles(setting)
        slo = setting.slo
        targets = (round(slo.ttft_seconds * target_share * 1000), round(slo.tbt_seconds * target_share * 1000))
        self._scheduler = Scheduler(*targets, flips_to_decode)
        self._predictors: dict[str, Predictor] = {}
        self._open: dict[int, tuple[Pair, int]] = {}

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = self._look(view)
        scheduler = self._scheduler
        if not machines:
            return NO_MACHINE
        if not scheduler.prompts or not scheduler.decodes:
            machine = min(machines.values(), key=lambda m: (m.waiting_tokens, m.decodes))
            return placed(machine, machine, "one pool is empty")
        pair, own = scheduler.schedule(arrival.prompt_tokens)
        self._open[arrival.number] = (pair, own)
        return placed(machines[pair.prompt], machines[pair.token]), self._flips(machines)

    def first_token(self, now: float, number: int) -> None:
        pair, own = self._open.get(number, (None, 0))
        if pair is not None:
            self._scheduler.prompt_done(pair, own)

    def finished(self, now: float, number: int) -> None:
        pair, _ = self._open.pop(number, (None, 0))
        if pair is not None:
            self._scheduler.ended(pair, 0)  # tokens are read from the machines

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        return self._flips(self._look(view))

    def _look(self, view: ClusterView) -> dict[str, MachineView]:
        machines = {m.uid: m for m in view.machines if m.ready}
        for uid in [uid for uid in self._scheduler.instances if uid not in machines]:
            self._scheduler.remove(uid)
        for uid, machine in machines.items():
            if uid not in self._scheduler.instances:
                self._scheduler.add(uid, self._predictor(machine), machine.role)
                self._scheduler.instances[uid].decodes = machine.decodes + machine.bound_decodes
            instance = self._scheduler.instances[uid]
            instance.decode_tokens = machine.decode_context_tokens + machine.bound_context_tokens
        return machines

    def _predictor(self, machine: MachineView) -> Predictor:
        name = machine.model.name
        if name not in self._predictors:
            profile = self._profiles.of(machine.model)
            a, b, c = profile.prompt_quadratic()
            d0, d1, d2 = profile.decode_plane()
            self._predictors[name] = Predictor(*(1000 * x for x in (c, b, a, d0, d1, d2)))
        return self._predictors[name]

    def _flips(self, machines: dict[str, MachineView]) -> list[RoleChange]:
        return [
            RoleChange(uid, self._scheduler.role(uid), "flip")
            for uid, machine in machines.items()
            if (machine.moving_to or machine.role) is not self._scheduler.role(uid)
        ]


def xllm(prompt: int, as_published: bool = False, target_share: float = 1.0) -> Policy:
    """`prompt`: machines of the prompt pool at the start. `as_published`: with the flip to decode that does nothing.
    `target_share`: of the SLO, what its flags for both targets are set to."""
    runs = PerRun(lambda setting: XllmRun(setting, not as_published, target_share))
    return Policy(
        name="xLLM-service as published" if as_published else "xLLM-service",
        source="jd-opensource/xllm-service @c8033e0, Apache-2.0, SLO-aware policy",
        router=runs.router,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={"target_share": target_share},
    )
