"""A machine whose layers are cut into stages: as many batches are under way, each with sequences and KV of its own.

A batch goes through the stages in order, and each stage holds one batch at a time; where a long batch is before a short
one, the stages behind it stand idle: those are the bubbles. All stages take the same share of a step. A batch is formed
when the first stage is free for it, so nothing is formed ahead.
"""

from collections import deque
from collections.abc import Callable, Sequence

from poolwright.sim.engine import Engine, Job, Plan
from poolwright.sim.machine import ChunkReader, Clock, SimMachine
from poolwright.sim.policy import EngineRules
from poolwright.sim.request import Request
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.roles import Role


class Lanes:
    """Several engines as one: a job goes to the lane with the least to do and stays there."""

    def __init__(self, lanes: Sequence[Engine]) -> None:
        self.lanes = lanes
        self._jobs = [0] * len(lanes)

    def set_rules(self, rules: EngineRules) -> None:
        for lane in self.lanes:
            lane.set_rules(rules)

    def why_never(self, request: Request) -> str | None:
        return self.lanes[0].why_never(request)

    def _enter(self, job: Job) -> Engine:
        job.lane = min(range(len(self.lanes)), key=self._load)
        self._jobs[job.lane] += 1
        return self.lanes[job.lane]

    def _load(self, lane: int) -> tuple[int, int]:
        engine = self.lanes[lane]
        return sum(engine.waiting_prompts()) + engine.decodes, self._jobs[lane]

    def enter(self, job: Job) -> None:
        self._enter(job).enter(job)

    def ask_memory(self, job: Job) -> None:
        self._enter(job).ask_memory(job)

    def granted_to_peer(self, job: Job) -> None:
        self.lanes[job.lane].granted_to_peer(job)

    def filled(self, job: Job) -> None:
        self.lanes[job.lane].filled(job)

    def compute_here(self, job: Job) -> None:
        (self._enter(job) if job.serial < 0 else self.lanes[job.lane]).compute_here(job)

    def release(self, job: Job) -> None:
        self.lanes[job.lane].release(job)

    def lose(self, job: Job) -> None:
        self.lanes[job.lane].lose(job)

    def waiting_prompts(self) -> Sequence[int]:
        return [tokens for lane in self.lanes for tokens in lane.waiting_prompts()]

    @property
    def decodes(self) -> int:
        return sum(lane.decodes for lane in self.lanes)

    @property
    def context_tokens(self) -> int:
        return sum(lane.context_tokens for lane in self.lanes)

    @property
    def kv_used_tokens(self) -> int:
        return sum(lane.kv_used_tokens for lane in self.lanes)

    def hit_tokens(self, request_keys: Sequence[bytes]) -> int:
        return max(lane.hit_tokens(request_keys) for lane in self.lanes)


class PipelinedMachine(SimMachine):
    def __init__(
        self, uid: str, model: MachineModel, role: Role, clock: Clock, on_chunks: ChunkReader, lanes: Sequence[Engine]
    ) -> None:
        super().__init__(uid, model, role, clock, on_chunks, Lanes(lanes))
        self._lanes = lanes
        self._under_way: list[tuple[Plan, float] | None] = [None] * len(lanes)
        self._idle = set(range(len(lanes)))
        self._ready: deque[int] = deque()  # lanes that wait for the first stage
        self._free_at = [0.0] * model.pipeline_stages
        self._numbers = [0] * len(lanes)
        self._pumping = False

    def touch(self, now: float) -> None:
        self._view = None
        self._ready.extend(sorted(self._idle))
        self._idle.clear()
        self._pump(now, self._version)

    def settle(self, now: float) -> None:
        """Every step is accounted for when it ends."""

    def submitted_until(self, now: float) -> float:
        return max(now, self._free_at[-1])

    def _pump(self, now: float, version: int) -> None:
        """Let the lanes that are ready into the first stage, one after the other."""
        if version != self._version or self._pumping:
            return
        self._pumping = True
        self._apply_role(now)
        while self._ready and self._free_at[0] <= now:
            lane = self._ready.popleft()
            plan = self._lanes[lane].compose(self._numbers[lane], now)
            if plan is None:
                self._idle.add(lane)
                wake = self._lanes[lane].wake_at
                if wake is not None:
                    self._clock.at(max(now, wake), self._wake, version)
                continue
            self._numbers[lane] += 1
            self._under_way[lane] = plan, now
            self._clock.at(self._pass(plan, now), self._end_of(lane), version)
        if self._ready:
            self._clock.at(self._free_at[0], self._pump, version)
        self.idle_since = (self.idle_since or now) if len(self._idle) == len(self._lanes) else None
        self._pumping = False

    def _wake(self, now: float, version: int) -> None:
        if version == self._version:
            self.touch(now)

    def _pass(self, plan: Plan, now: float) -> float:
        """When it leaves the last stage."""
        seconds = self.model.step_time.seconds(plan.chunks, plan.decodes, plan.context) / len(self._free_at)
        self.busy_seconds += seconds
        at = now
        for stage, free_at in enumerate(self._free_at):
            at = self._free_at[stage] = max(at, free_at) + seconds
        return at

    def _end_of(self, lane: int) -> Callable[[float, int], None]:
        def end(now: float, version: int) -> None:
            entry = self._under_way[lane]
            if version != self._version or entry is None:
                return
            plan, began = entry
            self._view = None
            self._under_way[lane] = None
            self.steps += 1
            self.last_step_seconds = now - began
            if plan.decodes:
                self._note_gap(now - began)
            self._lanes[lane].read(plan, now)
            if plan.chunks:
                self._on_chunks(self, plan, began, now)
            self._ready.append(lane)
            self._pump(now, version)

        return end
