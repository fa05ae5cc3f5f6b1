"""Dynamo's current planner: a throughput loop that forecasts, and a load loop of one replica more or less.

ai-dynamo/dynamo at wxsms/dynamo @2a6da14 (2026-08, Apache-2.0), `planner/core`: the throughput loop (180 s) divides the
forecast by what one engine sustains within the SLO and sets a floor; the load loop (5 s) adds one where every engine is
over its target and takes one where the rest would still hold. The easy targets judge queue and KV use instead. Its
forward-pass model, tuned online there, is the simulator's step times here; prefix hits and speculation are left out.
With the budget's floor and ceiling at N it only redistributes, which is how Dynamo pins a total itself.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from poolwright.sim.baselines.forecast import Forecast, Kalman, LastValue
from poolwright.sim.baselines.pools import fitted, moves_to, prompt_count, split_roles
from poolwright.sim.baselines.routers import MakeRouter, ShortestQueue
from poolwright.sim.baselines.rules import split_rules
from poolwright.sim.baselines.run_state import PerRun
from poolwright.sim.baselines.traffic import Meter, metered
from poolwright.sim.policy import ClusterView, MachineView, Policy, RoleChange, Setting
from poolwright.sim.step_time import Chunk
from poolwright_protocol.roles import Role

MOST_HIT_RATE = 0.95
SEARCHED_BATCHES = 128
OBSERVATIONS = 64


class Target(StrEnum):
    SLA = "sla"
    THROUGHPUT = "throughput"
    LATENCY = "latency"


class EasyLimits(NamedTuple):
    """Queued prompt tokens by context length, and KV use, that add a replica (any engine) or take one (all)."""

    prompt_up: float
    prompt_down: float
    token_up: float
    token_down: float


EASY = {Target.THROUGHPUT: EasyLimits(1.0, 0.1, 1.0, 0.6), Target.LATENCY: EasyLimits(0.1, 0.0, 0.4, 0.1)}


class Work(NamedTuple):
    prompts: int = 0
    prompt_tokens: int = 0
    decodes: int = 0
    kv_tokens: int = 0


class EngineLoad(NamedTuple):
    scheduled: Work
    queued: Work


class EngineLimits(NamedTuple):
    step_tokens: int
    sequences: int
    kv_tokens: int
    context_tokens: int = 8192


# Milliseconds of a step with so many prompt tokens, decodes and KV tokens of the decodes.
ForwardPass = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Knobs:
    """`least_machines` and `most_machines` bound both pools together; negative: no bound."""

    ttft_milliseconds: float = 500.0
    itl_milliseconds: float = 50.0
    target: Target = Target.SLA
    least_machines: int = -1
    most_machines: int = 8
    least_of_a_pool: int = 1
    down_sensitivity: float = 0.8
    throughput_loop: bool = True
    load_loop: bool = True


class Mean:
    """Of the last values; zeros before the first other value are no values."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._sum = 0.0

    def add(self, value: float) -> None:
        if value > 0 or self._values:
            self._values.append(value)
            self._sum += value
            if len(self._values) > OBSERVATIONS:
                self._sum -= self._values.pop(0)

    @property
    def value(self) -> float:
        return self._sum / len(self._values) if self._values else 0.0


class EngineModel:
    """What an engine of one phase takes and sustains, over its forward pass."""

    def __init__(self, forward: ForwardPass, limits: EngineLimits) -> None:
        self._forward = forward
        self._limits = limits
        self.mean_prompt = Mean()
        self.mean_context = Mean()

    def observe(self, load: EngineLoad) -> None:
        scheduled = load.scheduled
        self.mean_prompt.add(scheduled.prompt_tokens / scheduled.prompts if scheduled.prompts else 0.0)
        if scheduled.decodes:
            self.mean_context.add(scheduled.kv_tokens / scheduled.decodes)

    def queue_milliseconds(self, load: EngineLoad, queue_scale: float = 1.0, hit_rate: float | None = None) -> float:
        """TTFT of a prompt of the mean length that comes now. `queue_scale` 0: had it no queue before it."""
        tokens = load.queued.prompt_tokens * queue_scale + self.mean_prompt.value
        return self._prompt_seconds(_ceil(tokens * (1.0 - _clamped(hit_rate)))) * 1000

    def gap_milliseconds(self, load: EngineLoad, scale: float = 1.0) -> float:
        """ITL with what is queued and one more of the mean context."""
        decodes = float(load.scheduled.decodes + load.queued.decodes) * scale
        kv = float(load.scheduled.kv_tokens + load.queued.kv_tokens) * scale
        if self.mean_context.value > 0:
            decodes += 1.0
            kv += self.mean_context.value
        return self._seconds(0, _ceil(decodes), _ceil(kv)) * 1000

    def prompts_per_second(self, prompt_tokens: float, ttft_milliseconds: float, hit_rate: float | None) -> float:
        """Sustained within the target, or without it where no batch keeps it."""
        tokens = max(1, _ceil(math.ceil(prompt_tokens) * (1.0 - _clamped(hit_rate))))
        one_step = tokens <= self._limits.step_tokens
        most = min(self._limits.sequences, self._limits.step_tokens // tokens) if one_step else 1
        taken = ((b, self._prompt_seconds(tokens * b)) for b in _batches(most))
        return _sustained(taken, ttft_milliseconds / 1000)

    def answers_per_second(self, prompt_tokens: float, output_tokens: float, itl_milliseconds: float) -> float:
        output = max(1, math.ceil(output_tokens))
        context = max(1, math.ceil(prompt_tokens) + output // 2)
        most = min(self._limits.sequences, self._limits.kv_tokens // context)
        taken = ((b, self._seconds(0, b, b * context)) for b in _batches(most))
        return _sustained(taken, itl_milliseconds / 1000, output)

    def _prompt_seconds(self, tokens: int) -> float:
        full, tail = divmod(tokens, self._limits.step_tokens)
        seconds = self._seconds(self._limits.step_tokens, 0, 0) * full if full else 0.0
        return seconds + self._seconds(tail, 0, 0) if tail else seconds

    def _seconds(self, prompt_tokens: int, decodes: int, kv_tokens: int) -> float:
        return max(0.0, self._forward(prompt_tokens, decodes, kv_tokens)) / 1000.0


class Planner:
    """Both loops for a split cluster. Each answer: prompt and token machines to have, or None for no change."""

    def __init__(self, knobs: Knobs, forward: ForwardPass, limits: EngineLimits) -> None:
        self._knobs = knobs
        self._limits = limits
        self.prompt = EngineModel(forward, limits)
        self.token = EngineModel(forward, limits)
        self.floors = (1, 1)
        self._hit_rate: float | None = None

    def observe(self, prompts: Sequence[EngineLoad], tokens: Sequence[EngineLoad]) -> None:
        """Every load interval, before deciding."""
        if self._knobs.target is Target.SLA:
            for load in prompts:
                self.prompt.observe(load)
            for load in tokens:
                self.token.observe(load)

    def throughput(
        self, requests_per_second: float, prompt_tokens: float, output_tokens: float, hit_rate: float | None = None
    ) -> tuple[int, int] | None:
        """Beside a load loop it only sets the floors."""
        if not self._knobs.throughput_loop:
            return None
        self._hit_rate = self._hit_rate if hit_rate is None else hit_rate
        prompts = self.prompt.prompts_per_second(prompt_tokens, self._knobs.ttft_milliseconds, hit_rate)
        answers = self.token.answers_per_second(prompt_tokens, output_tokens, self._knobs.itl_milliseconds)
        if prompts <= 0 or answers <= 0:
            return None
        least = self._knobs.least_of_a_pool
        wanted = tuple(max(math.ceil(requests_per_second / rate), least) for rate in (prompts, answers))
        if self._knobs.load_loop:
            self.floors = (wanted[0], wanted[1])
            return None
        return self._within_budget(*wanted)

    def load(
        self,
        prompts: Sequence[EngineLoad],
        tokens: Sequence[EngineLoad],
        hit_rate: float | None = None,
        moving: bool = False,
    ) -> tuple[int, int] | None:
        """One more or less of each. While machines move it only observes."""
        if not self._knobs.load_loop or moving:
            return None
        self._hit_rate = self._hit_rate if hit_rate is None else hit_rate
        easy = EASY.get(self._knobs.target)
        if easy is not None:
            queues = [p.queued.prompt_tokens / self._limits.context_tokens for p in prompts]
            uses = [(t.scheduled.kv_tokens + t.queued.kv_tokens) / self._limits.kv_tokens for t in tokens]
            prompt_step = self._easy_prompt(queues, easy)
            token_step = _step(any(u > easy.token_up for u in uses), all(u < easy.token_down for u in uses))
        else:
            prompt_step, token_step = self._prompt_step(prompts), self._token_step(tokens)
        least = self._knobs.least_of_a_pool
        wanted = [_stepped(len(prompts), prompt_step, least), _stepped(len(tokens), token_step, least)]
        if self._knobs.throughput_loop:
            wanted = [max(w, floor) for w, floor in zip(wanted, self.floors, strict=True)]
        answer = self._within_budget(*(max(w, least) for w in wanted))
        return None if answer == (len(prompts), len(tokens)) else answer

    def _easy_prompt(self, queues: Sequence[float], limits: EasyLimits) -> int:
        if self._knobs.target is Target.LATENCY:
            down = all(q <= limits.prompt_down for q in queues)
        else:
            down = all(q < limits.prompt_down for q in queues)
        return _step(any(q >= limits.prompt_up for q in queues), down)

    def _prompt_step(self, loads: Sequence[EngineLoad]) -> int:
        """Down only if the queues of N would still wait little on N - 1; a prompt's own time is no queue."""
        target = self._knobs.ttft_milliseconds
        up = all(self.prompt.queue_milliseconds(load, hit_rate=self._hit_rate) > target for load in loads)
        return _step(up, len(loads) > 1 and all(self._would_wait_little(load, len(loads)) for load in loads))

    def _would_wait_little(self, load: EngineLoad, engines: int) -> bool:
        own = self.prompt.queue_milliseconds(load, 0.0, self._hit_rate)
        room = (self._knobs.ttft_milliseconds - own) * self._knobs.down_sensitivity
        after = self.prompt.queue_milliseconds(load, engines / (engines - 1), self._hit_rate)
        return room > 0 and after - own < room

    def _token_step(self, loads: Sequence[EngineLoad]) -> int:
        target = self._knobs.itl_milliseconds
        up = all(self.token.gap_milliseconds(load) > target for load in loads)
        return _step(up, len(loads) > 1 and all(self._would_decode_in_time(load, len(loads)) for load in loads))

    def _would_decode_in_time(self, load: EngineLoad, engines: int) -> bool:
        scale = engines / (engines - 1)
        fits = int((load.scheduled.kv_tokens + load.queued.kv_tokens) * scale) < self._limits.kv_tokens
        limit = self._knobs.itl_milliseconds * self._knobs.down_sensitivity
        return fits and self.token.gap_milliseconds(load, scale) < limit

    def _within_budget(self, prompt: int, token: int) -> tuple[int, int]:
        least = self._knobs.least_of_a_pool
        return clamped_pair(prompt, token, 1, 1, self._knobs.least_machines, self._knobs.most_machines, least, least)


def clamped_pair(
    prompt: int,
    token: int,
    prompt_gpus: int,
    token_gpus: int,
    least_gpus: int,
    most_gpus: int,
    least_prompt: int,
    least_token: int,
) -> tuple[int, int]:
    """Both pools scaled alike into the GPUs of the budget; its floor is loose by one replica. (0, 0): not even the
    least of both fits. Negative bounds are none."""
    if prompt_gpus <= 0 or token_gpus <= 0:
        return prompt, token
    total = prompt * prompt_gpus + token * token_gpus
    if 0 <= most_gpus < total:
        if most_gpus < least_prompt * prompt_gpus + least_token * token_gpus:
            return 0, 0
        most_prompt = (most_gpus - least_token * token_gpus) // prompt_gpus
        fewer = max(least_prompt, min(most_prompt, math.floor(prompt * (most_gpus / total))))
        return fewer, max(least_token, (most_gpus - fewer * prompt_gpus) // token_gpus)
    loose = max(prompt_gpus, token_gpus) if most_gpus >= 0 else 0
    if least_gpus < 0 or total >= least_gpus - loose:
        return prompt, token
    share = math.ceil(prompt * (least_gpus / total)) if total > 0 else math.ceil(least_gpus / 2 / prompt_gpus)
    more = max(least_prompt, share)
    rest = max(least_token, math.ceil(max(0, least_gpus - more * prompt_gpus) / token_gpus))
    if 0 <= most_gpus < more * prompt_gpus + rest * token_gpus:
        return prompt, token
    return more, rest


def _step(up: bool, down: bool) -> int:
    return 1 if up else -1 if down else 0


def _stepped(count: int, step: int, least: int) -> int:
    """Down never from the last, and not under the least."""
    if step < 0:
        return max(count - 1, least) if count > 1 else count
    return count + step


def _batches(most: int) -> Iterable[int]:
    if most <= SEARCHED_BATCHES:
        return range(1, most + 1)
    return (1 + i * (most - 1) // (SEARCHED_BATCHES - 1) for i in range(SEARCHED_BATCHES))


def _sustained(taken: Iterable[tuple[int, float]], target_seconds: float, per_request: int = 1) -> float:
    """The best rate among batches that keep the target, else among all; 0.0 without any."""
    best, kept = 0.0, False
    for batch, seconds in taken:
        if seconds > 0 and (seconds <= target_seconds, batch / (per_request * seconds)) > (kept, best):
            best, kept = batch / (per_request * seconds), seconds <= target_seconds
    return best


def _clamped(hit_rate: float | None) -> float:
    return 0.0 if hit_rate is None else max(0.0, min(MOST_HIT_RATE, hit_rate))


def _ceil(value: float) -> int:
    return math.ceil(value) if value > 0 else 0


@dataclass(frozen=True, slots=True)
class Loops:
    throughput_seconds: float = 180.0
    load_seconds: float = 5.0


class DynamoRun:
    """The scaler of one run."""

    def __init__(self, setting: Setting, meter: Meter, target: Target, loops: Loops, forecast: type[Forecast]) -> None:
        self.meter = meter
        self._loops = loops
        machines, slo = len(setting.machines), setting.slo
        self._planner = Planner(
            Knobs(
                slo.ttft_seconds * 1000,
                slo.tbt_seconds * 1000,
                target,
                least_machines=machines,
                most_machines=machines,
                throughput_loop=target is Target.SLA,
            ),
            forward_pass(setting),
            EngineLimits(2048, 256, setting.machines[0].kv_capacity_tokens),
        )
        self._forecasts = [forecast() for _ in range(3)]
        self._next_throughput = loops.throughput_seconds

    @property
    def period_seconds(self) -> float:
        return self._loops.load_seconds

    def tick(self, now: float, view: ClusterView) -> Sequence[RoleChange]:
        moving = any(m.moving_to is not None for m in view.machines)
        prompts = [load(m) for m in view.machines if m.ready and m.role is Role.PROMPT]
        tokens = [load(m) for m in view.machines if m.ready and m.role is Role.TOKEN]
        if not prompts or not tokens:
            return []
        self._planner.observe(prompts, tokens)
        if now >= self._next_throughput:
            self._next_throughput = now + self._loops.throughput_seconds
            self._plan(now, view)
        wanted = self._planner.load(prompts, tokens, moving=moving)
        if wanted is None:
            return []
        machines = len(view.machines)
        return moves_to(view, fitted(prompt_count(view), *wanted, machines), "load loop")

    def _plan(self, now: float, view: ClusterView) -> None:
        seconds = self._loops.throughput_seconds
        seen = self.meter.traffic(now, view, seconds)
        if seen.prompt_tokens is None or seen.output_tokens is None:
            return
        for forecast, value in zip(
            self._forecasts, (seen.requests, seen.prompt_tokens, seen.output_tokens), strict=True
        ):
            forecast.add(value)
        requests, prompt_tokens, output_tokens = (f.next() for f in self._forecasts)
        self._planner.throughput(requests / seconds, prompt_tokens, output_tokens)


def load(machine: MachineView, step_tokens: int = 2048) -> EngineLoad:
    """Of the prompts on the machine those are scheduled that the next step has tokens for."""
    left, scheduled = step_tokens, 0
    for tokens in machine.waiting_prompts:
        if left <= 0:
            break
        scheduled += 1
        left -= min(left, tokens)
    now = step_tokens - left
    return EngineLoad(
        Work(scheduled, now, machine.decodes, machine.decode_context_tokens),
        Work(len(machine.waiting_prompts) - scheduled, machine.waiting_tokens - now),
    )


def forward_pass(setting: Setting) -> ForwardPass:
    """Steps of the first kind of machine, in milliseconds."""
    step_time = setting.machines[0].step_time

    def milliseconds(prompt_tokens: int, decodes: int, kv_tokens: int) -> float:
        chunks = (Chunk(0, prompt_tokens),) if prompt_tokens else ()
        return step_time.seconds(chunks, decodes, kv_tokens) * 1000 if prompt_tokens or decodes else 0.0

    return milliseconds


def dynamo(
    prompt: int,
    target: Target = Target.SLA,
    forecast: type[LastValue] | type[Kalman] = LastValue,
    router: MakeRouter = ShortestQueue,
    loops: Loops | None = None,
) -> Policy:
    """`prompt`: machines of the prompt pool at the start. `loops` None: as published."""
    chosen = loops or Loops()
    runs = PerRun(lambda setting: DynamoRun(setting, metered(router, setting), target, chosen, forecast))
    return Policy(
        name=f"Dynamo planner {target}",
        source="ai-dynamo/dynamo planner, read at wxsms/dynamo @2a6da14, Apache-2.0",
        router=lambda setting: runs.router(setting).meter,
        scaler=runs.scaler,
        first_roles=lambda setting: split_roles(setting, prompt),
        rules=split_rules,
        parameters={
            "throughput_seconds": chosen.throughput_seconds,
            "load_seconds": chosen.load_seconds,
            "down_sensitivity": 0.8,
        },
    )
