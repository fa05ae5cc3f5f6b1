"""The exact engine: the scheduler that engines run, asked for every step. What the fast one is tested against."""

from collections.abc import Sequence as Values

from poolwright.sim.engine import Job, Listener, Part, Plan
from poolwright.sim.policy import EngineRules
from poolwright.sim.prefix import block_keys
from poolwright.sim.request import Request
from poolwright.sim.step_rules import cuts_prompts, seats, whole_prompt_budget
from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling import scheduler_config
from poolwright_engine.scheduling.batching.strategy import Strategy, strategy
from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.budget import StepPredictor
from poolwright_engine.scheduling.runner import Step, StepResult
from poolwright_engine.scheduling.scheduler import Batch, Scheduler
from poolwright_engine.scheduling.scheduler_config import PreemptionMode, SchedulerConfig, SchedulingPolicy, TokenBudget
from poolwright_engine.scheduling.sequence import Request as EngineRequest
from poolwright_engine.scheduling.sequence import SamplingParams, Sequence, SequenceState
from poolwright_protocol.kv import blocks_for

_TOKEN = 0


class _WholePrompts:
    """A strategy that cuts no prompt, with a budget that always holds the first in line."""

    def __init__(self, inner: Strategy, rules: EngineRules) -> None:
        self._inner = inner
        self._rules = rules

    def fill(self, scheduler: Scheduler, batch: Batch) -> None:
        prompts = [s for s in scheduler.running if s.is_prefilling]
        prompts += [s for s in scheduler.waiting if s.state is SequenceState.WAITING]
        head = prompts[0].num_tokens - prompts[0].num_computed if prompts else 0
        decodes = sum(not s.is_prefilling for s in scheduler.running)
        batch.tokens_left = batch.prefill_left = whole_prompt_budget(self._rules, head, decodes)
        self._inner.fill(scheduler, batch)


class ExactEngine:
    def __init__(
        self,
        kv_capacity_tokens: int,
        rules: EngineRules,
        predictor: StepPredictor,
        listener: Listener,
        prefixes: bool,
        max_model_len: int,
    ) -> None:
        self._block = rules.block_tokens
        self._total = max(1, kv_capacity_tokens // self._block)
        self._listener = listener
        self._prefixes = prefixes
        self._max_model_len = max_model_len
        self._seats = seats(rules)
        self._scheduler = Scheduler(self._config(rules), BlockPool(self._total + 1, self._block), frozenset())
        self._scheduler.predictor = predictor
        self._scheduler.prompt_overhead_tokens = predictor.overhead_tokens
        self._strategies: dict[scheduler_config.Batching, Strategy] = {}
        self._jobs: dict[Sequence, Job] = {}
        self._steps: dict[int, tuple[Step, tuple[Sequence, ...], set[Sequence]]] = {}  # and whose rows are chunks
        self.wake_at: float | None = None
        self.set_rules(rules)

    def set_rules(self, rules: EngineRules) -> None:
        """Raises ValueError where the seats would change, which an engine cannot."""
        if seats(rules) != self._seats or rules.block_tokens != self._block:
            raise ValueError("an engine keeps its seats and its blocks in every role")
        config = self._config(rules)
        self._bound = rules.max_prefill_tokens
        self._scheduler.config = config
        inner = self._strategies.setdefault(config.batching, strategy(config))  # one may remember a batch
        self._scheduler.strategy = inner if cuts_prompts(rules) else _WholePrompts(inner, rules)

    def _config(self, rules: EngineRules) -> SchedulerConfig:
        by_slack = rules.token_budget is None and rules.tbt_target_seconds is not None
        most = rules.most_tokens if rules.token_budget is None else rules.token_budget
        return SchedulerConfig(
            max_model_len=self._max_model_len,
            max_num_batched_tokens=most if cuts_prompts(rules) else max(most, self._max_model_len),
            max_num_seqs=self._seats,
            batching=rules.batching,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            enable_prefix_caching=self._prefixes and rules.prefix_cache,
            preemption=PreemptionMode.RECOMPUTE,
            token_budget=TokenBudget.AUTO if by_slack and cuts_prompts(rules) else TokenBudget.FIXED,
            tbt_target_seconds=rules.tbt_target_seconds,
            tbt_deadlines=rules.tbt_deadlines,
            quick_first_tokens=rules.quick_first_tokens,
            relegated_seconds=rules.relegated_seconds,
            tile_tokens=rules.tile_tokens,
        )

    # What may happen between two steps.

    def why_never(self, request: Request) -> str | None:
        needed = blocks_for(request.prompt_tokens + request.output_tokens - 1, self._block)
        return None if needed <= self._total else "needs more KV cache than the machine has"

    def enter(self, job: Job) -> None:
        self._scheduler.add(self._sequence(job))

    ask_memory = enter

    def granted_to_peer(self, job: Job) -> None:
        if isinstance(job.handle, Sequence):
            job.handle.ungranted = False

    def filled(self, job: Job) -> None:
        sequence = self._sequence(job)
        self._accept_first(job, sequence)
        self._scheduler.filled(sequence)
        job.part = Part.WHOLE
        job.prefilling = False

    def compute_here(self, job: Job) -> None:
        sequence = self._sequence(job)
        job.part = Part.WHOLE
        if job.stream.first_at is not None:
            self._accept_first(job, sequence)
        self._scheduler.compute_here(sequence)

    def release(self, job: Job) -> None:
        if isinstance(job.handle, Sequence):
            self._scheduler.release(job.handle)
            self._jobs.pop(job.handle, None)
        job.ended = True

    def lose(self, job: Job) -> None:
        pass  # every token is in its stream

    # Steps.

    def compose(self, number: int, now: float) -> Plan | None:
        decision = self._scheduler.schedule(number, self._bound, now)
        jobs = self._jobs
        for sequence in decision.granted:
            self._listener.granted(jobs[sequence])
        for sequence in decision.asking:
            self._listener.admitted(jobs[sequence])
        for sequence in decision.preempted:
            job = jobs[sequence]
            job.prefilling = True
            self._listener.preempted(job)
        self.wake_at = decision.wake_seconds
        if decision.step is None:
            return None
        plan = Plan(number)
        chunked: set[Sequence] = set()
        step = decision.step
        for start, row, sequence in zip(step.starts, step.rows, decision.computing, strict=True):
            job = jobs[sequence]
            if job.prefilling:
                plan.chunks.append(Chunk(start, row.length))
                plan.chunk_jobs.append(job)
                chunked.add(sequence)
                job.cached = sequence.num_cached or 0
                job.prefilling = not row.samples
            else:
                plan.decodes += 1
                plan.context += start + 1
        self._steps[number] = step, decision.computing, chunked
        return plan

    def read(self, plan: Plan, now: float) -> None:
        step, _, _ = self._steps.pop(plan.number)
        tokens: tuple[tuple[int, ...], ...] = tuple((_TOKEN,) if row.samples else () for row in step.rows)
        result = StepResult(step.number, tokens, ((),) * len(tokens), 0.0)
        for sequence, output in self._scheduler.update(result, now):
            job = self._jobs[sequence]
            stream = job.stream
            if stream.first_at is None:
                stream.first_at = stream.last_at = now
                self._listener.first_token(job)
            else:
                gap = now - stream.last_at
                stream.pieces.append(gap)
                stream.last_at = now
                self._listener.tokens(gap, 1)
            if output.finish_reason is not None:
                job.ended = True
                if sequence.state is SequenceState.FINISHED:
                    del self._jobs[sequence]
                self._listener.finished(job)

    def run_steps(self, plan: Plan) -> int:
        return 1

    def advance(self, plan: Plan, steps: int, now: float, seconds: float) -> None:
        raise RuntimeError("every step is read")

    # What a policy may see.

    def waiting_prompts(self) -> Values[int]:
        jobs, scheduler = self._jobs, self._scheduler
        started: dict[Job, int] = {}
        for step, sequences, chunked in self._steps.values():
            for row, sequence in zip(step.rows, sequences, strict=True):
                if sequence in chunked and sequence in jobs:
                    started[jobs[sequence]] = started.get(jobs[sequence], 0) + row.length
        for s in scheduler.running:
            if s.is_prefilling:
                started[jobs[s]] = started.get(jobs[s], 0) + s.num_tokens - s.num_computed
        waiting = [s.num_tokens for s in scheduler.waiting if s.state is SequenceState.WAITING]
        return [*started.values(), *waiting]

    @property
    def decodes(self) -> int:
        return sum(not s.is_prefilling and s.num_computed + 1 < s.limit for s in self._scheduler.running)

    @property
    def context_tokens(self) -> int:
        return sum(s.num_computed for s in self._scheduler.running if not s.is_prefilling)

    @property
    def kv_used_tokens(self) -> int:
        return (self._total - self._scheduler.blocks.num_free) * self._block

    def hit_tokens(self, request_keys: Values[bytes]) -> int:
        return len(self._scheduler.blocks.find(request_keys)) * self._block

    # Parts of the above.

    def _sequence(self, job: Job) -> Sequence:
        if isinstance(job.handle, Sequence):
            return job.handle
        request = job.request
        params = SamplingParams(job.limit - request.prompt_tokens, temperature=0.0, ignore_eos=True)
        asked = EngineRequest(
            f"{request.number}", (_TOKEN,) * request.prompt_tokens, params, job.arrival, relegated=job.priority > 0
        )
        sequence = Sequence(asked, for_peer=job.part is Part.PROMPT)
        if job.part is Part.ANSWER:
            sequence.state = SequenceState.REMOTE
        sequence.block_keys = block_keys(request, self._block)
        job.handle = sequence
        job.serial = 0
        self._jobs[sequence] = job
        return sequence

    def _accept_first(self, job: Job, sequence: Sequence) -> None:
        first_at = job.stream.first_at
        if not sequence.output_ids:
            self._scheduler.accept(sequence, _TOKEN, now=0.0 if first_at is None else first_at)
