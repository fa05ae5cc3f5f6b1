"""DistServe: each phase gets the parallelism and the number of instances that its goodput for each GPU asks for.

Zhong et al., DistServe, OSDI '24: the waits of section 3.1, Algorithms 1 and 2 of section 4, and its online dispatch
(shortest queue, then least loaded; prompt batches up to the length that saturates a machine). Goodput of one phase is
found as there, by bisection over a simulation of that phase alone (its simulator, LLMServe/DistServe @82831f1, bisects
to .25 requests a second and GPU and draws Poisson arrivals). A plan is made once; the paper plans anew when the
workload shifts, within minutes, and gives no rule for when.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from poolwright.sim.baselines.pools import capped, fitted, split_roles
from poolwright.sim.baselines.profile import MachineProfile, Profiles
from poolwright.sim.baselines.routers import NO_MACHINE, QuietRouter, Routed, placed, usable
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.policy import ClusterView, EngineRules, Policy, Setting, Slo
from poolwright.sim.request import Arrival
from poolwright.sim.step_time import MachineModel
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_protocol.roles import Role

Lengths = Sequence[tuple[int, int]]  # prompt and answer

SIMULATED_REQUESTS = 400
RATE_STEP = 0.25
ATTAINMENT = 0.9


def wait_one(rate: float, seconds: float) -> float:
    """Mean TTFT of an M/D/1 queue with prompts of `seconds` (formula 1); replicas share the rate."""
    busy = rate * seconds
    return math.inf if busy >= 1 else seconds + rate * seconds**2 / (2 * (1 - busy))


def wait_pipelined(rate: float, seconds: float) -> float:
    """Two pipeline stages: the same time through, twice the rate (formula 2)."""
    busy = rate * seconds
    return math.inf if busy >= 2 else seconds + rate * seconds**2 / (4 * (2 - busy))


def wait_split(rate: float, seconds: float, speedup: float) -> float:
    """Two GPUs on one prompt, faster by `speedup` between 1 and 2 (formula 3)."""
    busy = rate * seconds
    if busy >= speedup:
        return math.inf
    return seconds / speedup + rate * seconds**2 / (2 * speedup * (speedup - busy))


@dataclass(frozen=True, slots=True)
class Parallelism:
    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


# Requests a second that one instance of a phase sustains within its target.
Goodput = Callable[[Parallelism], float]


@dataclass(frozen=True, slots=True)
class Placement:
    prompt: Parallelism
    token: Parallelism
    prompt_instances: int
    token_instances: int

    @property
    def gpus(self) -> int:
        return self.prompt.gpus * self.prompt_instances + self.token.gpus * self.token_instances


def placed_apart(
    nodes: int, node_gpus: int, fits: Callable[[Parallelism], bool], prompt: Goodput, token: Goodput, rate: float
) -> Placement | None:
    """Algorithm 1, any machine reaches any other fast: the phases are placed each for itself."""
    best: dict[Role, tuple[float, Parallelism]] = {}
    for tensor in range(1, node_gpus + 1):
        for pipeline in range(1, nodes * node_gpus // tensor + 1):
            parallelism = Parallelism(tensor, pipeline)
            if not fits(parallelism):
                continue
            for phase, goodput in ((Role.PROMPT, prompt), (Role.TOKEN, token)):
                each = goodput(parallelism) / parallelism.gpus
                if phase not in best or each > best[phase][0]:
                    best[phase] = (each, parallelism)
    if len(best) < 2 or min(each for each, _ in best.values()) <= 0:
        return None
    (prompt_each, prompt_best), (token_each, token_best) = best[Role.PROMPT], best[Role.TOKEN]
    return Placement(
        prompt_best,
        token_best,
        math.ceil(rate / (prompt_each * prompt_best.gpus)),
        math.ceil(rate / (token_each * token_best.gpus)),
    )


def placed_together(
    node_gpus: int,
    most_stages: int,
    fits: Callable[[Parallelism], bool],
    goodput: Callable[[Parallelism, Parallelism], float],
    rate: float,
) -> Placement | None:
    """Algorithm 2, nodes are far from each other: both phases of a stage share a node, so KV never leaves it."""
    best: tuple[float, Parallelism, Parallelism] | None = None
    for stages in range(1, most_stages + 1):
        for prompt, token in _node_shares(node_gpus, stages):
            if not fits(prompt) or not fits(token):
                continue
            each = goodput(prompt, token) / (prompt.gpus + token.gpus)
            if best is None or each > best[0]:
                best = (each, prompt, token)
    if best is None or best[0] <= 0:
        return None
    each, prompt, token = best
    instances = math.ceil(rate / (each * (prompt.gpus + token.gpus)))
    return Placement(prompt, token, instances, instances)


def _node_shares(node_gpus: int, stages: int) -> Iterator[tuple[Parallelism, Parallelism]]:
    for prompt in range(1, node_gpus):
        for token in range(1, node_gpus - prompt + 1):
            yield Parallelism(prompt, stages), Parallelism(token, stages)


def placed_within(gpus: int, candidates: Sequence[Parallelism], prompt: Goodput, token: Goodput) -> Placement | None:
    """Algorithm 1 where the GPUs are given and the rate is asked for: the parallelism and the instances of each phase
    that sustain most together, the fewest GPUs among equals. None where a phase keeps its target at no rate."""
    best: tuple[float, int, Placement] | None = None
    for first in candidates:
        for second in candidates:
            for instances in range(1, (gpus - second.gpus) // first.gpus + 1):
                answering = (gpus - instances * first.gpus) // second.gpus
                placement = Placement(first, second, instances, answering)
                rate = min(instances * prompt(first), answering * token(second))
                if rate > 0 and (best is None or (rate, -placement.gpus) > (best[0], best[1])):
                    best = rate, -placement.gpus, placement
    return None if best is None else best[2]


def goodput(keeps: Callable[[float], bool], most: float = 64.0) -> float:
    """The largest rate, to within RATE_STEP, at which the simulated phase keeps its target."""
    low, high = 0.0, most
    while high - low > RATE_STEP:
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def goodputs(models: Mapping[Parallelism, MachineModel], lengths: Lengths, slo: Slo) -> tuple[Goodput, Goodput]:
    """Of an instance for prompts and one for answers, over machines measured at some degrees; 0.0 for the others."""
    profiles = {parallelism: MachineProfile(model) for parallelism, model in models.items()}

    def of(kept: Callable[[MachineProfile, Lengths, float, Slo], bool]) -> Goodput:
        @cache
        def each(parallelism: Parallelism) -> float:
            profile = profiles.get(parallelism)
            return 0.0 if profile is None else goodput(lambda rate: kept(profile, lengths, rate, slo))

        return each

    return of(prompts_kept), of(answers_kept)


def prompts_kept(profile: MachineProfile, lengths: Lengths, rate: float, slo: Slo) -> bool:
    """First come first served, prompts batched up to the saturating length, longer ones alone."""
    limit = profile.saturating_tokens()
    waiting: deque[tuple[float, int]] = deque()
    arrivals = deque(_poisson(lengths, rate))
    now, good, total = 0.0, 0, len(arrivals)
    while arrivals or waiting:
        if not waiting:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, (prompt, _) = arrivals.popleft()
            waiting.append((at, prompt))
        batch = [waiting.popleft()]
        tokens = batch[0][1]
        while waiting and tokens + waiting[0][1] <= limit:
            batch.append(waiting.popleft())
            tokens += batch[-1][1]
        now += profile.prompt_seconds(tokens)
        good += sum(now - at <= slo.ttft_seconds + slo.ttft_seconds_per_token * prompt for at, prompt in batch)
    return good >= ATTAINMENT * total


def answers_kept(profile: MachineProfile, lengths: Lengths, rate: float, slo: Slo) -> bool:
    """Requests that come with their prompt done, all decoded together while memory lasts."""
    arrivals = deque(_poisson(lengths, rate))
    waiting: deque[list[float]] = deque()  # tokens left, context, when it came, answer
    running: list[list[float]] = []
    now, context, good, total = 0.0, 0.0, 0, len(arrivals)
    while arrivals or waiting or running:
        if not running and not waiting:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, (prompt, answer) = arrivals.popleft()
            waiting.append([max(1, answer - 1), prompt, at, max(1, answer - 1)])
        while waiting and (not running or context + waiting[0][1] <= profile.model.kv_capacity_tokens):
            running.append(waiting.popleft())
            context += running[-1][1]
        steps = int(min(left for left, *_ in running))
        if arrivals:  # nobody is kept waiting for the whole run
            step = profile.decode_seconds(len(running), context)
            steps = max(1, min(steps, math.ceil((arrivals[0][0] - now) / step)))
        now += steps * profile.decode_seconds(len(running), context + steps * len(running) / 2)
        context += steps * len(running)
        for row in running:
            row[0] -= steps
            row[1] += steps
        ended = [row for row in running if row[0] <= 0]
        context -= sum(row[1] for row in ended)
        good += sum((now - at) / answer <= slo.tbt_seconds for _, _, at, answer in ended)
        running = [row for row in running if row[0] > 0]
    return good >= ATTAINMENT * total


def _poisson(lengths: Lengths, rate: float, seed: int = 0) -> Iterator[tuple[float, tuple[int, int]]]:
    chance = random.Random(seed)
    now = 0.0
    for _ in range(SIMULATED_REQUESTS):
        now += chance.expovariate(max(rate, 1e-9))
        yield now, chance.choice(lengths)


def expected_lengths(setting: Setting) -> Lengths:
    return [(max(1, round(setting.expected_prompt_tokens)), max(1, round(setting.expected_output_tokens)))]


def placement(
    models: Mapping[Parallelism, MachineModel], gpus: int, setting: Setting, lengths: Lengths = ()
) -> Placement | None:
    """Of so many GPUs, with parallelism as the machines are measured; `lengths` as for `distserve`."""
    prompt, token = goodputs(models, lengths or expected_lengths(setting), setting.slo)
    return placed_within(gpus, list(models), prompt, token)


def prompt_machines(setting: Setting, lengths: Lengths) -> int:
    """Algorithm 1 where every machine has its one parallelism: replicas of each phase, scaled to the machines there."""
    one = Parallelism(setting.machines[0].gpus, 1)
    prompt, token = (g(one) for g in goodputs({one: setting.machines[0]}, lengths, setting.slo))
    machines, rate = len(setting.machines), setting.expected_requests_per_second
    if machines < 2:
        return machines
    replicas = math.ceil(rate / max(prompt, RATE_STEP)), math.ceil(rate / max(token, RATE_STEP))
    return fitted(capped(*replicas, machines), *replicas, machines)


class Dispatch(QuietRouter):
    """Prompts to the queue with the fewest requests, answers to the machine with the fewest."""

    def __init__(self, setting: Setting) -> None:
        del setting

    def route(self, now: float, arrival: Arrival, view: ClusterView) -> Routed:
        machines = usable(view)
        prompts = [m for m in machines if m.role is not Role.TOKEN] or machines
        tokens = [m for m in machines if m.role is not Role.PROMPT] or machines
        if not machines:
            return NO_MACHINE
        prompt = min(prompts, key=lambda m: len(m.waiting_prompts))
        return placed(prompt, min(tokens, key=lambda m: m.decodes + m.bound_decodes))


def distserve(prompt: int | None = None, lengths: Lengths = ()) -> Policy:
    """`lengths`: the workload to plan for, as its history; without, the setting's expected lengths. `prompt`: a split
    decided before, such as that of machines with different parallelism for each phase."""

    def first_roles(setting: Setting) -> Sequence[Role]:
        return split_roles(setting, prompt or prompt_machines(setting, lengths or expected_lengths(setting)))

    def rules(setting: Setting) -> dict[Role, EngineRules]:
        whole = EngineRules(Batching.PREFILL_FIRST, Profiles(setting).first.saturating_tokens())
        return {**split_rules(setting), Role.PROMPT: whole}

    return Policy(
        name="DistServe",
        source="DistServe, OSDI '24, Algorithms 1 and 2; LLMServe/DistServe @82831f1, Apache-2.0",
        router=Dispatch,
        scaler=lambda setting: None,
        first_roles=first_roles,
        rules=rules,
        parameters={"attainment": ATTAINMENT, "rate_step": RATE_STEP},
    )
