"""One machine of the simulator alone with its requests: no router, no network, and the time at which each request was
begun, which a run of the whole simulation does not tell. Also the two ways to form steps that no engine offers, since
only comparisons with a paper want them."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from poolwright.sim.counting import CountingEngine
from poolwright.sim.engine import Engine, Job, Listener, Part, Plan
from poolwright.sim.exact import ExactEngine
from poolwright.sim.gaps import Gaps, Stream
from poolwright.sim.machine import SimMachine, StepMachine
from poolwright.sim.policy import EngineRules
from poolwright.sim.request import Request
from poolwright.sim.step_fit import FixedPredictor
from poolwright.sim.step_time import MachineModel
from poolwright_engine.scheduling.scheduler import Batch, Scheduler
from poolwright_protocol.roles import Role

MakeEngine = Callable[[MachineModel, Listener], Engine]


@dataclass(frozen=True, slots=True)
class Served:
    """`waited_seconds`: from arrival to the begin of the first step that computes something of it."""

    request: Request
    waited_seconds: float
    ttft_seconds: float
    gaps: Gaps


class InLine:
    """Sarathi-Serve's Algorithm 3 with prompts strictly in line; not `hybrid`: a chunk, then the decodes, in turn, as
    the `simple_chunking` scheduler of its artifact."""

    def __init__(self, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._decodes_next = True

    def fill(self, scheduler: Scheduler, batch: Batch) -> None:
        if self._hybrid or self._decodes_next:
            scheduler.decode_running(batch)
        if self._hybrid or not batch.rows:
            for prompt in (*scheduler.prompts_in_flight(), *scheduler.candidates(batch)):
                tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
                if not tokens:
                    break
                scheduler.compute(batch, prompt, tokens)
        if not batch.rows:
            scheduler.decode_running(batch)
        self._decodes_next = bool(batch.prefilled)


class _InLineEngine(ExactEngine):
    def use(self, strategy: InLine) -> "_InLineEngine":
        self._scheduler.strategy = strategy
        return self


@cache
def _predictor(model: MachineModel) -> FixedPredictor:
    return FixedPredictor(model.step_time)


def by_rules(rules: EngineRules) -> MakeEngine:
    return lambda model, listener: CountingEngine(model.kv_capacity_tokens, rules, _predictor(model), listener, False)


def in_line(rules: EngineRules, hybrid: bool, longest: int) -> MakeEngine:
    def make(model: MachineModel, listener: Listener) -> Engine:
        predictor = _predictor(model)
        engine = _InLineEngine(model.kv_capacity_tokens, rules, predictor, listener, False, longest + 1)
        return engine.use(InLine(hybrid))

    return make


class _World:
    """Clock, listener and reader of chunks in one."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self.begun: dict[int, float] = {}  # by request
        self.left = 0
        self._number = 0

    def at(self, seconds: float, call: Callable[[float, Any], None], argument: Any) -> None:
        self._number += 1
        heapq.heappush(self.events, (seconds, self._number, call, argument))

    def on_chunks(self, machine: SimMachine, plan: Plan, began: float, ended: float) -> None:
        for job in plan.chunk_jobs:
            self.begun.setdefault(job.request.number, began)

    def finished(self, job: Job) -> None:
        self.left -= 1

    def admitted(self, job: Job) -> None: ...

    def granted(self, job: Job) -> None: ...

    def first_token(self, job: Job) -> None: ...

    def tokens(self, seconds: float, count: int) -> None: ...

    def preempted(self, job: Job) -> None: ...


def serve(model: MachineModel, engine: MakeEngine, requests: Iterable[Request]) -> Sequence[Served]:
    """To the last token of all. Raises ValueError for a request that can never run."""
    world = _World()
    made = engine(model, world)
    machine = StepMachine("m0", model, Role.MIXED, world, world.on_chunks, made)
    jobs = [Job(request, Part.WHOLE, Stream(), None, request.arrival_seconds) for request in requests]

    def enter(now: float, job: Job) -> None:
        made.enter(job)
        machine.touch(now)

    for job in jobs:
        never = made.why_never(job.request)
        if never is not None:
            raise ValueError(f"a request of {job.prompt_tokens} prompt tokens {never}")
        world.at(job.arrival, enter, job)
    world.left = len(jobs)
    while world.left:
        now, _, call, argument = heapq.heappop(world.events)
        call(now, argument)
    return [_served(job, world.begun[job.request.number]) for job in jobs]


def _served(job: Job, begun: float) -> Served:
    first = job.stream.first_at
    if first is None:
        raise RuntimeError("a request ended without a token")
    return Served(job.request, begun - job.arrival, first - job.arrival, Gaps(job.stream.pieces))
