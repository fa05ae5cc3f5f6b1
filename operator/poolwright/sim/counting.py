"""The fast engine: what the engine's scheduler decides, over counts instead of rows.

All who decode move in lock-step, so a step of decodes costs the same however many they are, and a run of such steps
is one operation. Where memory is short the line is walked one by one, as the scheduler does. With prefixes in the trace
the engine's own `BlockPool` holds the blocks; without, a count does. It is tested equal to `exact`; what each rule is
for is written at the scheduler, in `poolwright_engine.scheduling`.
"""

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from poolwright.sim.engine import Job, Listener, Part, Plan
from poolwright.sim.gaps import GapLog
from poolwright.sim.policy import EngineRules
from poolwright.sim.prefix import block_keys
from poolwright.sim.request import Request
from poolwright.sim.step_rules import cuts_prompts, seats, whole_prompt_budget
from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.blocks import NEVER_WRITTEN, BlockPool
from poolwright_engine.scheduling.budget import StepPredictor, StepWork, prompts_of_least_wait
from poolwright_engine.scheduling.scheduler_config import Batching, SchedulerConfig, TbtDeadlines
from poolwright_protocol.kv import blocks_for

_DEFAULTS = SchedulerConfig(max_model_len=1)
_WINDOW = 64  # the scheduler's
_SHARE_OF_FIRST = 4  # the sarathi batching's


class Wanted(NamedTuple):
    """A prompt that could be computed now: in flight, or a candidate for admission with its cached blocks."""

    job: Job
    start: int
    remaining: int
    hits: list[int] | None  # None: in flight


class CountingEngine:
    def __init__(
        self, kv_capacity_tokens: int, rules: EngineRules, predictor: StepPredictor, listener: Listener, prefixes: bool
    ) -> None:
        self.log = GapLog()
        self._block = rules.block_tokens
        self._total = max(1, kv_capacity_tokens // self._block)
        self._free = self._total
        self._pool = BlockPool(self._total + 1, self._block) if prefixes and rules.prefix_cache else None
        self._watermark = int(_DEFAULTS.watermark * self._total)
        self._fenced: deque[tuple[int, int]] = deque()
        self._predictor = predictor
        self._listener = listener
        self._rules = rules
        self._seated = 0

        self._serial = 0
        self._waiting: list[Job] = []
        self._relegated: list[Job] = []  # by arrival, those that ended meanwhile included
        self._line: list[Job] = []  # of those: who waits to be computed here
        self._line_tokens: list[int] = []  # by place in the line
        self._running: dict[Job, None] = {}  # by admission
        self._prefilling: dict[Job, None] = {}  # of those
        self._ready: list[Job] = []  # of those: decode from the next step on
        self._stalled: list[Job] = []  # of those: decode, but found no memory or no tokens in the last step
        self._is_short = False  # somebody who decodes has no block for the step behind the last one formed
        self._granted: dict[Job, None] = {}
        self._parked: dict[Job, None] = {}
        self._ungranted_blocks = 0

        # Who decodes in every step.
        self._steps = 0  # formed with decodes
        self._active: dict[Job, None] = {}
        self._context = 0  # of the active, as of the next step
        self._ends: list[tuple[int, int, int, Job]] = []
        self._crossing: list[dict[Job, None]] = [
            {} for _ in range(self._block)
        ]  # by (step mod block) of their next block
        self._dues: list[
            tuple[float, int, int, Job]
        ] = []  # of the active: when their next token is due, less steps made
        self._last_decode_end = 0.0
        self._last_decode_number = NEVER_WRITTEN

        self._unread: list[Plan] = []
        self._last_read = NEVER_WRITTEN
        self._in_run = False  # of steps of which each has the next behind it, though that is no plan yet
        self._members: list[Job] = []  # of the static batch
        self.wake_at: float | None = None

        # Of the step that is being formed.
        self._tokens_left = 0
        self._prefill_left = 0
        self._has_preempted = False
        self._admitted: list[Job] = []

    # What may happen between two steps.

    def set_rules(self, rules: EngineRules) -> None:
        has_new_target = rules.tbt_target_seconds != self._rules.tbt_target_seconds
        self._rules = rules
        if has_new_target:
            self._dues = []
            for job in self._active:
                self._note_due(job)

    def why_never(self, request: Request) -> str | None:
        needed = blocks_for(request.prompt_tokens + request.output_tokens - 1, self._block)
        return None if needed <= self._total else "needs more KV cache than the machine has"

    def enter(self, job: Job) -> None:
        job.serial = self._serial
        self._serial += 1
        if job.priority:
            bisect.insort(self._relegated, job, key=_arrival)
        self._queue(job)

    ask_memory = enter

    def granted_to_peer(self, job: Job) -> None:
        if job.ungranted:
            job.ungranted = False
            self._ungranted_blocks -= job.blocks

    def filled(self, job: Job) -> None:
        del self._granted[job]
        self._running[job] = None
        job.sampled = 1
        job.computed = job.request.prompt_tokens
        job.prefilling = False
        job.part = Part.WHOLE
        self._publish(job)
        self._ready.append(job)

    def compute_here(self, job: Job) -> None:
        job.part = Part.WHOLE
        if job in self._granted:
            del self._granted[job]
            self._running[job] = None
            self._prefilling[job] = None
        elif job.serial < 0:
            self.enter(job)
        else:
            self._waiting.remove(job)
            self._queue(job)

    def release(self, job: Job) -> None:
        if job in self._parked:
            del self._parked[job]
            self._give_up(job)
        elif not job.ended:
            self._end(job, park=False)

    def lose(self, job: Job) -> None:
        if job.log_start >= 0:
            self._close(job, len(self.log), self._last_decode_end)

    # Steps.

    def compose(self, number: int, now: float) -> Plan | None:
        rules = self._rules
        self._in_run = False
        plan = Plan(number)
        self.wake_at = None
        self._has_preempted = False
        self._admitted = []
        while self._relegated and self._relegated[0].arrival + rules.relegated_seconds <= now:
            self._return_to_rank(self._relegated.pop(0))
        if self._prefilling or self._waiting:
            self._tokens_left = self._budget(now)
            bound = rules.max_prefill_tokens
            self._prefill_left = (
                self._tokens_left if bound is None or not cuts_prompts(rules) else min(self._tokens_left, max(1, bound))
            )
        else:
            self._tokens_left = rules.most_tokens if rules.token_budget is None else rules.token_budget
            self._prefill_left = 0
        match rules.batching:
            case Batching.SARATHI:
                self._fill_sarathi(plan)
            case Batching.VLLM:
                self._fill_vllm(plan)
            case Batching.ORCA:
                self._fill_orca(plan)
            case Batching.PREFILL_FIRST:
                self._fill_prefill_first(plan)
            case Batching.STATIC:
                self._fill_static(plan, now)
        if self._pool is not None:
            for job in plan.chunk_jobs:
                self._publish(job)
        if not plan.chunks and not plan.decodes:
            return None
        self._unread.append(plan)
        return plan

    def read(self, plan: Plan, now: float) -> None:
        listener, unread = self._listener, self._unread
        unread.remove(plan)
        self._last_read = plan.number
        if plan.decodes:
            gap = now - self._last_decode_end
            self._last_decode_end = now
            self.log.add(gap, 1)
            old = plan.decodes - len(plan.joined)
            if old:
                listener.tokens(gap, old)
            end = len(self.log)
            for job in plan.joined:
                self._gap(job, now)
                job.log_start = end
            for job in plan.leaving:
                self._close(job, end, now)
            for job in plan.finished:
                if job.log_start >= 0:
                    self._close(job, end, now)
        for job in plan.first:
            if job.ended:
                continue
            if job.stream.first_at is None:
                job.stream.first_at = job.stream.last_at = now
                if job in self._active:
                    self._note_due(job)
                listener.first_token(job)
            else:
                self._gap(job, now)
        for job in plan.finished:
            if not job.ended:
                self._end(job)
                listener.finished(job)
        self._unfence(plan.number)

    def run_steps(self, plan: Plan) -> int:
        if (
            plan.chunks
            or plan.joined
            or plan.finished
            or plan.leaving
            or self._ready
            or self._waiting
            or self._prefilling
            or self._stalled
            or self._is_short
            or len(self._unread) != 1
        ):
            self._in_run = False
            return 1
        ends = self._ends
        while ends[0][2] != ends[0][3].epoch:
            heapq.heappop(ends)
        steps = ends[0][0] - self._steps - 1
        most = (self._free // len(self._active)) * self._block  # each takes at most one block in as many steps
        if steps > most:
            steps = most
        self._in_run = steps > 1
        return steps if steps > 1 else 1

    def advance(self, plan: Plan, steps: int, now: float, seconds: float) -> None:
        active = len(self._active)
        before = self._steps
        if self._pool is None:
            for offset in range(1, min(steps, self._block) + 1):
                if crossing := self._crossing[(before + offset) % self._block]:
                    self._free -= ((steps - offset) // self._block + 1) * len(crossing)
        else:
            for offset in range(1, steps + 1):
                for job in self._crossing[(before + offset) % self._block]:
                    job.table.append(self._pool.allocate_one())
                if offset == 1:  # the step behind the first was formed before that was read
                    self._pool.step_read(plan.number)
            self._free = self._pool.num_free
        self._steps += steps
        self._context += active * steps
        plan.context += active * steps
        mean = seconds / steps
        pause = now - seconds - self._last_decode_end
        if pause > 1e-9:
            self.log.add(mean + pause, 1)
            self._listener.tokens(mean + pause, active)
            if steps > 1:
                self.log.add(mean, steps - 1)
                self._listener.tokens(mean, active * (steps - 1))
        else:
            self.log.add(mean, steps)
            self._listener.tokens(mean, active * steps)
        self._last_decode_end = now
        plan.number += steps
        self._last_decode_number = plan.number
        self._last_read = plan.number - 1
        self._unfence(self._last_read)

    # What a policy may see.

    def waiting_prompts(self) -> Sequence[int]:
        return [*unread_prompts(self._unread, self._prefilling).values(), *self._line_tokens]

    @property
    def decodes(self) -> int:
        return len(self._active) + len(self._ready) + len(self._stalled)

    @property
    def context_tokens(self) -> int:
        return self._context + sum(job.computed for job in self._ready) + sum(job.computed for job in self._stalled)

    @property
    def kv_used_tokens(self) -> int:
        return (self._total - self._free) * self._block

    def hit_tokens(self, request_keys: Sequence[bytes]) -> int:
        return 0 if self._pool is None else len(self._pool.find(request_keys)) * self._block

    # Strategies.

    def _fill_sarathi(self, plan: Plan) -> None:
        self._decode_all(plan)
        if not self._prefilling and not self._waiting:
            return
        prompts = self._prompts()
        if not prompts:
            return
        first, room = prompts[0], self._room
        if len(prompts) == 1:
            tokens = self._piece(first, room)
            if tokens:
                self._compute(plan, first, tokens)
            self._settle(prompts)
            return
        reserved = min(first.remaining, -(-room // _SHARE_OF_FIRST))
        order = sorted((not _is_resumed(p), p.job.priority, p.remaining, place) for place, p in enumerate(prompts))
        overhead = self._predictor.overhead_tokens
        if self._rules.quick_first_tokens and overhead is not None:
            remaining = [tokens for _, _, tokens, _ in order]
            soon = sum(remaining[: prompts_of_least_wait(overhead, remaining)])
            room = min(room, max(soon, reserved) if order[0][3] == 0 else soon + reserved)
        left = room - reserved
        shares = [0] * len(prompts)
        for *_, place in order:
            if place and left < 1:
                continue
            prompt = prompts[place]
            own = 0 if place else reserved
            tokens = self._piece(prompt, left + own)
            if place and tokens < min(prompt.remaining, self._block):
                tokens = 0
            left -= max(0, tokens - own)
            shares[place] = tokens
        for prompt, tokens in zip(prompts, shares, strict=True):
            if tokens:
                self._compute(plan, prompt, tokens)
        self._settle(prompts)

    def _fill_orca(self, plan: Plan) -> None:
        self._decode_all(plan)
        self._whole_prompts(plan, self._prompts())

    def _fill_prefill_first(self, plan: Plan) -> None:
        line = self._prompts()
        if line:
            self._whole_prompts(plan, line)
        else:
            self._decode_all(plan)

    def _fill_static(self, plan: Plan, now: float) -> None:
        if not any(job in self._running for job in self._members):
            self._close_batch(now)
        line = [Wanted(job, job.computed, job.remaining, None) for job in self._prefilling]
        self._whole_prompts(plan, line)
        if not plan.chunks:
            self._decode_all(plan)

    def _close_batch(self, now: float) -> None:
        self._members = []
        size = seats(self._rules)
        line = self._candidates(size)
        if line:
            since = min(prompt.job.arrival for prompt in line)
            resumed = any(_is_resumed(prompt) for prompt in line)
            if len(line) < size and now < since + _DEFAULTS.static_window_seconds and not resumed:
                self.wake_at = since + _DEFAULTS.static_window_seconds
            else:
                for prompt in line[:size]:
                    self._admit(prompt)
                    self._members.append(prompt.job)
        self._settle(line)

    def _fill_vllm(self, plan: Plan) -> None:
        if not self._prefilling:
            self._decode_all(plan)
        else:
            self._decode_in_line(plan)
        for prompt in (line := self._candidates()):
            tokens = self._piece(prompt, self._room, rounded=False)
            if not tokens:
                break
            self._compute(plan, prompt, tokens)
        self._settle(line)

    def _whole_prompts(self, plan: Plan, line: list[Wanted]) -> None:
        for prompt in line:
            tokens = self._piece(prompt, self._room)
            if not tokens:
                break
            self._compute(plan, prompt, tokens)
        self._settle(line)

    # Parts of strategies: prompts.

    @property
    def _room(self) -> int:
        return min(self._tokens_left, self._prefill_left)

    def _prompts(self) -> list[Wanted]:
        started = [Wanted(job, job.computed, job.remaining, None) for job in self._prefilling]
        return started + self._candidates()

    def _candidates(self, most: int = _WINDOW) -> list[Wanted]:
        found: list[Wanted] = []
        if self._has_preempted or not self._waiting:
            return found
        room = self._room
        if room < 1 and len(self._line) == len(self._waiting):
            return found
        share = self._total * _DEFAULTS.ungranted_share_percent // 100
        ungranted = self._ungranted_blocks
        seats_left = seats(self._rules) - self._seated
        kept_blocks = kept_seats = wanted = 0
        granted: list[Job] = []
        pool, block, last_read = self._pool, self._block, self._last_read
        free = self._free
        others = bool(self._running or self._granted)
        hits: list[int] = []
        for job in self._waiting:
            if seats_left <= kept_seats or (wanted >= room and len(found) >= most):
                break
            if job.held_until > last_read:
                continue
            all_blocks = needed = job.need
            if pool is not None:
                hits = self._hits(job)
                needed += pool.num_free_among(hits) - len(hits)
            if free - kept_blocks < needed + (self._watermark if others or found else 0):
                break
            part = job.part
            if part is not Part.WHOLE:
                if part is Part.ANSWER:
                    self._seated += 1
                    seats_left -= 1
                    job.seated = True
                    self._take(job, needed)
                    free = self._free
                    others = True
                    self._granted[job] = None
                    granted.append(job)
                    continue
                if ungranted and ungranted + all_blocks > share:
                    continue
                ungranted += all_blocks
            if hits and pool is not None:
                pool.touch(hits)
                free = pool.num_free
            kept_blocks += all_blocks - len(hits)
            kept_seats += 1
            start = len(hits) * block
            remaining = job.request.prompt_tokens + job.sampled - start
            found.append(Wanted(job, start, remaining, hits))
            wanted += remaining
        self._free = free
        for job in granted:
            self._unqueue(job)
            self._listener.granted(job)
        return found

    def _settle(self, prompts: Iterable[Wanted] = ()) -> None:
        """The step is formed: who was admitted has left the line, and hits of who was not are let go."""
        for job in self._admitted:
            self._unqueue(job)
        self._admitted = []
        if self._pool is not None:
            for prompt in prompts:
                if prompt.hits and not prompt.job.seated:
                    self._pool.free(prompt.hits)
            self._free = self._pool.num_free

    def _piece(self, prompt: Wanted, tokens: int, rounded: bool = True) -> int:
        remaining = prompt.remaining
        if tokens >= remaining:
            return remaining
        if tokens <= 0 or not cuts_prompts(self._rules):
            return 0
        end = prompt.start + tokens
        aligned = end - end % self._block - prompt.start
        return aligned if rounded and aligned > 0 else tokens

    def _compute(self, plan: Plan, prompt: Wanted, tokens: int) -> None:
        job = prompt.job
        if not job.seated:
            self._admit(prompt)
        length = min(tokens, job.remaining, self._room)
        if length < 1:
            return
        plan.chunks.append(Chunk(job.computed, length))
        plan.chunk_jobs.append(job)
        self._tokens_left -= length
        self._prefill_left -= length
        is_last = length == job.remaining
        job.computed += length
        if is_last:
            del self._prefilling[job]
            job.prefilling = False
            job.sampled += 1
            job.held_until = plan.number
            plan.first.append(job)
            (self._ready if job.computed + 1 < job.limit else plan.finished).append(job)

    def _admit(self, prompt: Wanted) -> None:
        job, hits = prompt.job, prompt.hits or []
        self._seated += 1
        job.seated = True
        if self._pool is not None:
            job.table = list(hits)
        job.blocks = len(hits)
        self._take(job, job.need - len(hits))
        if job.preemptions == 0 and job.cached < 0:
            job.cached = len(hits) * self._block
        job.computed = len(hits) * self._block
        job.published = len(hits)
        self._running[job] = None
        self._prefilling[job] = None
        self._admitted.append(job)
        if job.part is Part.PROMPT:
            job.ungranted = True
            self._ungranted_blocks += job.blocks
            self._listener.admitted(job)

    # Parts of strategies: decodes.

    def _decode_all(self, plan: Plan) -> None:
        """A token for everyone who decodes; in order of admission where memory is short."""
        if not self._active and not self._ready and not self._stalled:
            return
        step = self._steps + 1
        ending: list[Job] = []
        ends = self._ends
        while ends and ends[0][0] <= step:
            _, _, epoch, job = heapq.heappop(ends)
            if job.epoch == epoch:  # else it was put aside meanwhile
                ending.append(job)
        crossing = self._crossing[step % self._block]
        # A last token is no input, and its KV is never written.
        needed = len(crossing) - sum(job.last_crosses and job.cross_class >= 0 for job in ending)
        joining: list[tuple[Job, int]] = []
        for job in self._ready:
            extra = blocks_for(min(job.computed + 2, job.limit - 1), self._block) - job.blocks
            if extra > 0:
                needed += extra
            joining.append((job, max(0, extra)))
        if (
            self._is_short
            or self._stalled
            or needed > self._free
            or len(self._active) + len(joining) > self._tokens_left
        ):
            self._decode_in_line(plan)
            return
        if self._pool is None:
            self._free -= needed
        else:
            for job in crossing:
                if not (job.last_crosses and job.ends_at == step):
                    job.table.append(self._pool.allocate_one())
        self._steps = step
        for job, extra in joining:
            if extra:
                job.blocks += extra
                if self._pool is not None:
                    job.table.extend(self._pool.allocate_one() for _ in range(extra))
            self._activate(job, step)
            if job.ends_at == step:
                ending.append(job)
            else:
                heapq.heappush(ends, (job.ends_at, job.serial, job.epoch, job))
        self._ready = []
        if self._pool is not None:
            self._free = self._pool.num_free
        self._form_decodes(plan, ending, [job for job, _ in joining])

    def _form_decodes(self, plan: Plan, ending: list[Job], joining: list[Job]) -> None:
        """All that is active has a row in this step; `ending` have their last."""
        plan.decodes = len(self._active)
        plan.context = self._context
        self._last_decode_number = plan.number
        self._tokens_left -= plan.decodes
        if len(ending) > 1:  # who ends first lets go of its blocks first
            places = {job: place for place, job in enumerate(self._running)}
            ending.sort(key=places.__getitem__)
        for job in joining:
            if not job.logged:
                job.logged = True
                plan.joined.append(job)
        for job in ending:
            self._deactivate(job)
            job.held_until = plan.number
            plan.finished.append(job)
        self._context += len(self._active)

    def _activate(self, job: Job, step: int) -> None:
        """From this step on it decodes in every one. Its blocks for this step have been taken."""
        start, block = job.computed, self._block
        job.join_at, job.join_start = step, start
        job.ends_at = step + job.limit - 2 - start
        job.plain = True
        capacity = job.blocks * block
        job.cross_class, job.last_crosses = -1, False
        if capacity <= job.limit - 1:
            job.last_crosses = (job.limit - 1 - capacity) % block == 0 and job.ends_at > step
            if capacity < job.limit - 1:
                job.cross_class = (step + capacity - 1 - start) % block
                self._crossing[job.cross_class][job] = None
        self._active[job] = None
        self._context += start + 1
        self._note_due(job)

    def _note_due(self, job: Job) -> None:
        """Its tokens are due a target apart from its first one on; with each step each is one further."""
        target, first = self._rules.tbt_target_seconds, job.stream.first_at
        if target is not None and first is not None:  # else when that is read
            sampled = job.join_start - job.join_at + 2 - job.request.prompt_tokens  # at step 0, so to speak
            heapq.heappush(self._dues, (first + sampled * target, job.serial, job.epoch, job))

    def _deactivate(self, job: Job) -> None:
        """It decoded up to the last step formed; put down where that leaves it."""
        job.epoch += 1
        steps = self._steps - job.join_at + 1
        self._context -= job.join_start + steps  # as before this step's own is added for those who stay
        job.computed = job.join_start + steps
        job.sampled = job.computed - job.request.prompt_tokens + 1
        job.blocks = self._blocks_of(job)
        if job.cross_class >= 0:
            del self._crossing[job.cross_class][job]
            job.cross_class = -1
        del self._active[job]

    def _blocks_of(self, job: Job) -> int:
        """Of one that is active."""
        if self._pool is not None:
            return len(job.table)
        blocks = job.blocks
        if job.cross_class >= 0:
            until = self._steps
            if job.last_crosses and job.ends_at == until:
                until -= 1
            blocks += (until - job.cross_class) // self._block - (job.join_at - job.cross_class) // self._block
        return blocks

    def _decode_in_line(self, plan: Plan) -> None:
        """As the scheduler does it: one by one, by admission, preempting the last in line for want of memory. Under the
        vllm batching prompts in flight stand in the same line."""
        for job in tuple(self._active):
            self._deactivate(job)
            job.held_until = self._last_decode_number
        self._context = 0
        vllm = self._rules.batching is Batching.VLLM
        step = self._steps + 1
        rows: dict[Job, None] = {}
        for job in tuple(self._running):
            if not job.seated:
                continue
            if job.prefilling:
                if vllm:
                    prompt = Wanted(job, job.computed, job.remaining, None)
                    self._compute(plan, prompt, self._piece(prompt, self._room, rounded=False))
                continue
            if job in plan.first or job.computed + 1 >= job.limit or self._tokens_left < 1:
                continue
            if self._grow(job, plan, rows, widens=job.plain and not vllm):
                rows[job] = None
                self._tokens_left -= 1
        self._tokens_left += len(rows)  # `_form_decodes` takes them
        for job in self._running:
            if job.logged and job not in rows and job.computed + 1 < job.limit:
                self._leave_log(job)
        self._ready = [job for job in plan.first if job in self._running and job.computed + 1 < job.limit]
        self._stalled = [
            job
            for job in self._running
            if not job.prefilling and job not in rows and job.computed + 1 < job.limit and job not in plan.first
        ]
        self._is_short = False
        if not rows:
            return
        self._steps = step
        ending = []
        for job in rows:
            self._is_short |= job.blocks * self._block - 1 == job.computed and job.computed + 2 < job.limit
            self._activate(job, step)
            if job.ends_at == step:
                ending.append(job)
            else:
                heapq.heappush(self._ends, (job.ends_at, job.serial, job.epoch, job))
        self._form_decodes(plan, ending, list(rows))

    def _grow(self, job: Job, plan: Plan, rows: dict[Job, None], widens: bool) -> bool:
        start, block = job.computed, self._block
        if widens:
            if start < job.blocks * block - 1:
                return True
            if self._free and start + 2 < job.limit:
                self._take(job, 1)
                return True
        needed = blocks_for(start + 1, block) - job.blocks
        wanted = blocks_for(min(start + 2, job.limit - 1), block) - job.blocks
        if wanted <= 0:
            return True
        if wanted > self._free:
            self._make_room(job, wanted, needed > self._free, plan, rows)
            if not job.seated:
                return False
        if wanted <= self._free:
            self._take(job, wanted)
        elif 0 < needed <= self._free:
            self._take(job, needed)
        else:
            return needed <= 0
        return True

    def _make_room(self, job: Job, count: int, give_way: bool, plan: Plan, rows: dict[Job, None]) -> None:
        while self._free + self._num_fenced() < count:
            line = [other for other in self._running if other.part is not Part.PROMPT]
            victim = max(line, key=_worth)
            if victim is job and (not give_way or len(line) == 1):
                return
            self._preempt(victim, plan, rows)
            if victim is job:
                return

    def _preempt(self, job: Job, plan: Plan, rows: dict[Job, None]) -> None:
        if job in rows:
            del rows[job]
            self._tokens_left += 1
        elif job in plan.chunk_jobs:
            self._take_back(job, plan)
        self._publish(job)
        del self._running[job]
        self._prefilling.pop(job, None)
        if job in self._ready:
            self._ready.remove(job)
        if job.logged and job.computed + 1 < job.limit:
            self._leave_log(job)
        self._seated -= 1
        job.seated = False
        self._give_up(job)
        job.computed = 0
        job.prefilling = True
        job.preemptions += 1
        self._queue(job)
        self._has_preempted = True
        self._listener.preempted(job)

    def _take_back(self, job: Job, plan: Plan) -> None:
        """Its chunk of the step that is being formed."""
        index = plan.chunk_jobs.index(job)
        chunk = plan.chunks.pop(index)
        del plan.chunk_jobs[index]
        self._tokens_left += chunk.tokens
        self._prefill_left += chunk.tokens
        job.computed = chunk.start
        if job in plan.first:
            plan.first.remove(job)
            if job in plan.finished:
                plan.finished.remove(job)
            job.sampled -= 1
            job.held_until = self._last_read

    def _leave_log(self, job: Job) -> None:
        """It decoded in the last step formed, and does not in this one."""
        job.logged = False
        if self._unread and self._unread[-1].decodes:
            self._unread[-1].leaving.append(job)
        else:
            self._close(job, len(self.log), self._last_decode_end)

    # Parts of the above: memory.

    def _needed(self, job: Job) -> int:
        if job.part is not Part.WHOLE:
            return blocks_for(job.limit - 1, self._block)
        return blocks_for(min(job.tokens + 1, job.limit - 1), self._block)

    def _take(self, job: Job, count: int) -> None:
        job.blocks += count
        if self._pool is None:
            self._free -= count
        else:
            job.table.extend(self._pool.allocate(count) or ())
            self._free = self._pool.num_free

    def _give_up(self, job: Job) -> None:
        """The newest step under way is the last that may write them."""
        if job.ungranted:
            job.ungranted = False
            self._ungranted_blocks -= job.blocks
        fence = self._unread[-1].number + self._in_run if self._unread else NEVER_WRITTEN
        if self._pool is not None:
            self._pool.free(job.table, fence)
            self._free = self._pool.num_free
            job.table = []
        elif fence <= self._last_read:
            self._free += job.blocks
        elif job.blocks:
            self._fenced.append((fence, job.blocks))
        job.blocks = 0
        job.plain = False

    def _unfence(self, number: int) -> None:
        if self._pool is not None:
            self._pool.step_read(number)
            self._free = self._pool.num_free
        while self._fenced and self._fenced[0][0] <= number:
            self._free += self._fenced.popleft()[1]

    def _num_fenced(self) -> int:
        return sum(count for _, count in self._fenced) if self._pool is None else self._pool.num_fenced

    # Parts of the above: cached blocks.

    def _keys(self, job: Job, count: int) -> list[bytes]:
        if len(job.keys) < count:
            job.keys = block_keys(job.request, self._block)
        return job.keys

    def _hits(self, job: Job) -> list[int]:
        if self._pool is None or job.part is Part.ANSWER:
            return []
        count = (job.tokens - 1) // self._block
        return self._pool.find(self._keys(job, count)[:count])

    def _publish(self, job: Job) -> None:
        if self._pool is None or job not in self._running:
            return
        computed = job.computed
        known = job.tokens - (1 if job.held_until > self._last_read else 0)
        full = min(computed, known) // self._block
        if full > job.published:
            keys = self._keys(job, full)
            for index in range(job.published, full):
                self._pool.publish(job.table[index], keys[index])
            job.published = full

    # Parts of the above: the line and its ends.

    def _queue(self, job: Job) -> None:
        job.wait_key = (job.priority, job.preemptions == 0, job.arrival, job.serial)
        job.need = self._needed(job)
        bisect.insort(self._waiting, job, key=_wait_key)
        if job.part is not Part.ANSWER:
            place = bisect.bisect(self._line, job.wait_key, key=_wait_key)
            self._line.insert(place, job)
            self._line_tokens.insert(place, job.remaining)

    def _return_to_rank(self, job: Job) -> None:
        waits = job in self._waiting
        if waits:
            self._unqueue(job)
        job.priority = 0
        if waits:
            self._queue(job)

    def _unqueue(self, job: Job) -> None:
        self._waiting.remove(job)
        if job.part is not Part.ANSWER:
            place = self._line.index(job)
            del self._line[place], self._line_tokens[place]

    def _end(self, job: Job, park: bool = True) -> None:
        job.ended = True
        if job in self._active:
            self._deactivate(job)
            self._context -= 1  # of the step behind the last one formed
        if job in self._running:
            self._publish(job)
            del self._running[job]
        self._prefilling.pop(job, None)
        for queue in (self._ready, self._stalled):
            if job in queue:
                queue.remove(job)
        if not job.seated and job.serial >= 0:
            self._unqueue(job)
        self._granted.pop(job, None)
        if job.seated:
            self._seated -= 1
            job.seated = False
        if park and job.part is Part.PROMPT and not job.prefilling:
            self._parked[job] = None
        else:
            self._give_up(job)

    # Parts of the above: tokens.

    def _gap(self, job: Job, now: float) -> None:
        stream = job.stream
        gap = now - stream.last_at
        stream.pieces.append(gap)
        stream.last_at = now
        self._listener.tokens(gap, 1)

    def _close(self, job: Job, end: int, now: float) -> None:
        """All its gaps of the log up to here."""
        if 0 <= job.log_start < end:
            job.stream.pieces.append((self.log, job.log_start, end))
            job.stream.last_at = now
        job.log_start = -1

    def _budget(self, now: float) -> int:
        rules = self._rules
        if not cuts_prompts(rules):
            head = next(iter(self._prefilling), None) or next(iter(self._line), None)
            decoding = len(self._running) - len(self._prefilling)
            return whole_prompt_budget(rules, head.remaining if head else 0, decoding)
        if rules.token_budget is not None:
            return rules.token_budget
        most, target = rules.most_tokens, rules.tbt_target_seconds
        if target is None:
            return most
        decodes = len(self._running) - len(self._prefilling)
        if not decodes:
            return most
        begins = now + sum(self._predictor.predict(_work(plan)) for plan in self._unread)
        adds_up = rules.tbt_deadlines is TbtDeadlines.CUMULATIVE
        slack = float("inf") if adds_up else target
        kv_tokens = self._context - len(self._active) + next((j.computed for j in self._prefilling if j.computed), 0)
        dues = self._dues
        while dues and dues[0][2] != dues[0][3].epoch:
            heapq.heappop(dues)
        if dues and adds_up:
            slack = dues[0][0] + self._steps * target - begins
        ending = (job for plan in self._unread for job in plan.finished if job in self._running)
        for job in itertools.chain(self._ready, self._stalled, ending):
            kv_tokens += job.computed
            first = job.stream.first_at
            if not adds_up:
                continue
            slack = min(slack, (begins if first is None else first) + job.sampled * target - begins)
        budget = self._predictor.budget(slack, decodes, kv_tokens, rules.tile_tokens, most)
        return max(budget, min(most, decodes + 1))


def unread_prompts(unread: Iterable[Plan], prefilling: Iterable[Job]) -> dict[Job, int]:
    """Prompt tokens still to compute of those that have begun: steps under way have not ended."""
    tokens: dict[Job, int] = {}
    for plan in unread:
        for job, chunk in zip(plan.chunk_jobs, plan.chunks, strict=True):
            if not job.ended:
                tokens[job] = tokens.get(job, 0) + chunk.tokens
    for job in prefilling:
        tokens[job] = tokens.get(job, 0) + job.remaining
    return tokens


def _is_resumed(prompt: Wanted) -> bool:
    return not prompt.job.seated and prompt.job.preemptions > 0


def _worth(job: Job) -> tuple[bool, int, float, int]:
    return job.preemptions < _DEFAULTS.max_preemptions, job.priority, job.arrival, job.serial


def _wait_key(job: Job) -> tuple[int, bool, float, int]:
    return job.wait_key


def _work(plan: Plan) -> StepWork:
    tokens = plan.decodes + sum(chunk.tokens for chunk in plan.chunks)
    kv_tokens = plan.context + sum(chunk.start + chunk.tokens for chunk in plan.chunks)
    return StepWork(tokens, kv_tokens, bool(plan.chunks))


def _arrival(job: Job) -> float:
    return job.arrival
