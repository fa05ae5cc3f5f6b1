"""`Scheduler`: which tokens of which sequences the next step computes, and what a finished step means.

The order in which sequences get tokens is a strategy's (`batching`); memory, seats, prefix hits,
preemption and rows are here, the same for all. It knows no torch, no clock (time is an argument) and no clients.

Every sequence is in at most one of `waiting`, `running`, `granted` and `parked`. `schedule` may be called again before
the step it returned has been read: outputs in flight are placeholders, and what a step in flight may write is fenced.

Memory. A sequence is admitted with blocks for all its tokens so far, prefix hits among them, and grows as it decodes,
asking one step before it must. A sequence whose KV comes from elsewhere, or is computed for elsewhere, has all it can
ever need from the start. Where memory ends, the last in line is preempted: its blocks are given up, or copied to host
memory, whichever is estimated to cost less. It keeps its place, and comes back before anything new, when all of it fits
and the steps in flight have told its last tokens. The line is total (often preempted, then priority, then arrival), and
its head is never preempted for another, so somebody always gets on.

Cached blocks. Blocks of a prompt are published at the end of the `schedule` that completes them: the device runs steps
in order, so a later step that hits them reads what was written. Blocks of an answer are published when it ends or is
preempted: before, hardly anybody can ask for them. Only ids that are known are published, no placeholder and no guess.
The last token of a sequence is always computed, since its logits are wanted.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from poolwright_engine.scheduling.batching.strategy import strategy
from poolwright_engine.scheduling.blocks import NEVER_WRITTEN, BlockPool, BrokenInvariant
from poolwright_engine.scheduling.budget import PromptPace, StepPredictor, StepWork, prompts_of_least_wait
from poolwright_engine.scheduling.ngrams import NgramIndex
from poolwright_engine.scheduling.runner import Row, Seat, Step, StepResult
from poolwright_engine.scheduling.scheduler_config import (
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    TbtDeadlines,
    TokenBudget,
)
from poolwright_engine.scheduling.sequence import (
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    TokenLogprobs,
    TokenOutput,
    output_of,
)
from poolwright_protocol.block_hash import block_key, root_key
from poolwright_protocol.flops import visible_keys
from poolwright_protocol.kv import blocks_for

_WINDOW = 64  # waiting sequences looked at for one step
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy KV between blocks of the device and of the host, pairwise."""

    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """One boundary's outcome. `step` None: nothing to compute now. Swaps go before the step, out before in."""

    step: Step | None
    computing: tuple[Sequence, ...] = ()  # of the step's rows, in order
    num_prefill_tokens: int = 0
    admitted: tuple[Sequence, ...] = ()  # got memory now, to compute here
    granted: tuple[Sequence, ...] = ()  # got memory now, to be filled by a prompt machine
    asking: tuple[Sequence, ...] = ()  # of `admitted`: prompts for a peer, which has yet to grant memory for them
    preempted: tuple[Sequence, ...] = ()
    swaps_out: tuple[Swap, ...] = ()
    swaps_in: tuple[Swap, ...] = ()
    padded_tokens: int = 0  # that a server which pads would have computed beside the step's
    wake_seconds: float | None = None  # with no step: look again then


@dataclass(slots=True)
class Prompt:
    """A sequence with tokens to compute, as a strategy sees it: in flight, or a candidate for admission."""

    sequence: Sequence
    start: int  # tokens that need not be computed: done, cached or swapped out
    remaining: int
    hits: list[int] = field(default_factory=list)  # of a candidate: cached blocks, held for it while the step is formed

    @property
    def is_resumed(self) -> bool:
        """It ran before, and waits to be taken back."""
        return self.sequence.slot < 0 and self.sequence.num_preemptions > 0

    @property
    def is_prompt(self) -> bool:
        """False: it was swapped out while it decoded, and comes back so."""
        return self.sequence.is_prefilling


@dataclass(slots=True)
class Batch:
    """A step that is being formed."""

    number: int
    now: float
    tokens_left: int
    prefill_left: int
    rows: list[Row] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    num_eligible: int = 0  # requests that want tokens
    prefilled: list[Sequence] = field(default_factory=list)
    candidates: list[Prompt] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    granted: list[Sequence] = field(default_factory=list)
    asking: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swaps_out: list[Swap] = field(default_factory=list)
    swaps_in: list[Swap] = field(default_factory=list)
    padded_tokens: int = 0
    wake_seconds: float | None = None

    @property
    def room_for_prefill(self) -> int:
        return min(self.tokens_left, self.prefill_left)


class _Flight(NamedTuple):
    step: Step
    sequences: tuple[Sequence, ...]
    has_prefill: bool


class Scheduler:
    def __init__(self, config: SchedulerConfig, blocks: BlockPool, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: list[Sequence] = []  # in line; REMOTE here: its prompt machine asked for a grant
        self.running: list[Sequence] = []  # by admission
        self.granted: list[Sequence] = []  # REMOTE, holding blocks
        self.parked: list[Sequence] = []
        self._relegated: list[Sequence] = []  # by arrival: who is behind others now
        self.predictor = StepPredictor(config.step_profile)
        self.pace: PromptPace | None = None
        if config.max_step_seconds is not None and config.cuts_prompts:
            self.pace = PromptPace(config.max_step_seconds, config.prompt_token_seconds)
        self.prompt_overhead_tokens: float | None = None  # of a step with prompts, as far as whoever runs them knows
        self.strategy = strategy(config)
        self._eos_token_ids = eos_token_ids
        self._model_identity = config.model_identity
        self._watermark = int(config.watermark * blocks.total)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_Flight] = deque()
        self._serials = itertools.count()
        self._wants_step_times = config.token_budget is TokenBudget.AUTO or blocks.host.total > 0
        self._first_siblings: dict[str, Sequence] = {}

    # Asked before a sequence enters.

    def why_never(self, request: Request) -> str | None:
        """Why this request can never run here, for its client; None: it can."""
        prompt, limit = len(request.prompt_ids), self.config.max_model_len
        if prompt == 0:
            return "the prompt holds no tokens"
        if request.params.max_tokens < 1:
            return f"max_tokens must be at least 1, not {request.params.max_tokens}"
        if prompt >= limit:
            return f"the prompt has {prompt} tokens; the model's context of {limit} leaves no room for an answer"
        needed = self._blocks_of_all(prompt, request.params.max_tokens)
        if needed > self.blocks.total:
            tokens = self.blocks.total * self.blocks.block_size
            return (
                f"the prompt of {prompt} tokens with max_tokens {request.params.max_tokens} needs more KV cache than "
                f"this machine has ({tokens} tokens); ask for fewer"
            )
        return None

    def output(
        self, request: Request, num_output: int, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> TokenOutput:
        """What a client hears of its output token number `num_output` (from 1), and whether it is the last. Pure."""
        params = request.params
        reason, stop_token_id = None, None
        if token_id in self._eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        elif token_id in params.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif num_output >= min(params.max_tokens, self.config.max_model_len - len(request.prompt_ids)):
            reason = FinishReason.LENGTH
        return TokenOutput((token_id,), reason, stop_token_id, logprobs=(logprobs,) if logprobs else ())

    # What may happen to a sequence between two steps.

    def add(self, sequence: Sequence) -> None:
        """Queue it. A REMOTE one is queued for memory alone."""
        request = sequence.request
        sequence.serial = next(self._serials)
        sequence.limit = min(sequence.max_tokens_total, self.config.max_model_len)
        sequence.stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            sequence.stop_ids |= self._eos_token_ids
        if request.relegated and not sequence.relegated:
            sequence.relegated = True
            bisect.insort(self._relegated, sequence, key=_arrival)
        if request.siblings is not None:
            self._first_siblings.setdefault(request.siblings, sequence)
        self._queue(sequence)

    def filled(self, sequence: Sequence) -> None:
        """A granted sequence's KV is complete and its first token known: it decodes from the next step on."""
        if sequence.state is not SequenceState.REMOTE or not sequence.output_ids:
            raise ValueError(f"{sequence.request_id} awaits no KV, or has no first token")
        self.granted.remove(sequence)
        self._run(sequence)
        sequence.num_computed = sequence.num_prompt
        sequence.is_prefilling = False
        self._publish(sequence)

    def compute_here(self, sequence: Sequence) -> None:
        """The hand-off failed: compute prompt and tokens already sent here, in the blocks it holds, if it does."""
        if sequence.state is not SequenceState.REMOTE:
            raise ValueError(f"{sequence.request_id} awaits no KV")
        if sequence in self.granted:
            self.granted.remove(sequence)
            self._run(sequence)
        else:
            sequence.state = SequenceState.WAITING
            if sequence not in self.waiting:
                self.add(sequence)

    def accept(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None, now: float = 0.0
    ) -> TokenOutput:
        """A token of it is known: append it, and end the sequence where that token does."""
        sequence.output_ids.append(token_id)
        output = self.output(sequence.request, len(sequence.output_ids), token_id, logprobs)
        if len(sequence.output_ids) == 1:
            sequence.first_token_seconds = now
            output = output._replace(
                num_cached_tokens=sequence.num_cached, prompt_logprobs=self._prompt_logprobs(sequence)
            )
        if output.finish_reason is not None:
            self.end(sequence)
        return output

    def end(self, sequence: Sequence) -> None:
        """Take it out of every queue. Blocks it may still have written are fenced; those of a prompt computed to its
        end for another machine stay until `release`. Ending twice is ending once."""
        computed = sequence.state is SequenceState.RUNNING and not sequence.is_prefilling
        if sequence.state in (SequenceState.FINISHED, SequenceState.PARKED):
            return
        self._publish(sequence)
        for queue in (self.running, self.waiting, self.granted):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.relegated:
            sequence.relegated = False
            self._relegated.remove(sequence)
        self._stand_up(sequence)
        name = sequence.request.siblings
        if name is not None and self._first_siblings.get(name) is sequence:
            del self._first_siblings[name]
        if sequence.for_peer and computed and sequence.output_ids:
            sequence.state = SequenceState.PARKED
            self.parked.append(sequence)
        else:
            self._finish(sequence)

    def release(self, sequence: Sequence) -> None:
        """Sent, or given up: end it if it runs, free its blocks if it is parked."""
        self.end(sequence)
        if sequence.state is SequenceState.PARKED:
            self.parked.remove(sequence)
            self._finish(sequence)

    def reset_prefix_cache(self, model_identity: str) -> None:
        """The model has changed: nothing computed before is found again."""
        self._model_identity = model_identity
        self.blocks.forget()
        for sequence in self.alive():
            # What still holds KV of the old model must not be found under the new one.
            sequence.num_published = _NEVER if sequence.block_ids or sequence.host_block_ids else 0
            sequence.block_keys = []

    # Steps.

    def schedule(self, number: int, max_prefill_tokens: int | None = None, now: float = 0.0) -> Decision:
        """The next step. `number` grows from step to step; `max_prefill_tokens` bounds the step's prefill tokens."""
        if self._relegated:
            self._return_to_rank(now)
        budget = self._budget(now)
        bound = budget if max_prefill_tokens is None or not self.config.cuts_prompts else max(1, max_prefill_tokens)
        batch = Batch(number, now, budget, bound, num_eligible=len(self.running) + len(self.waiting))
        self.strategy.fill(self, batch)
        if batch.admitted or batch.granted:
            self.waiting = [s for s in self.waiting if not s.block_ids]
        for prompt in batch.candidates:
            self.blocks.free(prompt.hits)
        for sequence in batch.prefilled:
            self._publish(sequence)
        step, sequences = None, tuple(batch.sequences)
        if batch.rows:
            step = Step(number, tuple(batch.rows), tuple(batch.starts))
            self._in_flight.append(_Flight(step, sequences, bool(batch.prefilled)))
        return Decision(
            step,
            sequences,
            bound - batch.prefill_left,
            tuple(batch.admitted),
            tuple(batch.granted),
            tuple(batch.asking),
            tuple(batch.preempted),
            tuple(batch.swaps_out),
            tuple(batch.swaps_in),
            batch.padded_tokens,
            batch.wake_seconds,
        )

    def update(self, result: StepResult, now: float = 0.0) -> list[tuple[Sequence, TokenOutput]]:
        """Read the oldest step in flight. A sequence that ended meanwhile gets nothing more; one that was preempted
        gets what it had in flight."""
        step, sequences, has_prefill = self._in_flight.popleft()
        if step.number != result.number:
            raise ValueError(f"step {result.number} was read, {step.number} is the oldest in flight")
        if len(result.token_ids) != len(sequences) or len(result.logprobs) != len(sequences):
            raise ValueError(f"step {step.number} of {len(sequences)} rows came back with another number")
        if self._wants_step_times:
            self.predictor.observe(work_of(step, has_prefill), result.busy_seconds)
        if self.pace is not None and has_prefill:
            pairs = sum(visible_keys(start, row.length) for start, row in zip(step.starts, step.rows, strict=True))
            self.pace.observe(step.num_tokens, pairs, result.busy_seconds)
        if has_prefill and any(result.prompt_logprobs):
            for start, sequence, entries in zip(step.starts, sequences, result.prompt_logprobs, strict=True):
                self._collect_prompt_logprobs(start, sequence, entries)
        outputs: list[tuple[Sequence, TokenOutput]] = []
        running, waiting = SequenceState.RUNNING, SequenceState.WAITING
        for row, sequence, token_ids, logprobs in zip(
            step.rows, sequences, result.token_ids, result.logprobs, strict=True
        ):
            if not token_ids:
                continue
            token_id = token_ids[0]
            if row is sequence.plain_row and token_id not in sequence.stop_ids:
                # The common case of `_take`: one token, neither the first nor the last, of one that runs.
                sequence.num_placeholders -= 1
                sequence.output_ids.append(token_id)
                outputs.append((sequence, output_of((token_ids, None, None, None, logprobs, None, None))))
            elif sequence.state is running or sequence.state is waiting:
                outputs.append((sequence, self._take(row, sequence, token_ids, logprobs, now)))
        for index, reason in result.errors:
            sequence = sequences[index]
            if sequence.state is running or sequence.state is waiting:
                self.release(sequence)
                outputs.append((sequence, TokenOutput(finish_reason=FinishReason.ERROR, error=reason)))
        self.blocks.step_read(step.number)
        return outputs

    def alive(self) -> Iterator[Sequence]:
        return itertools.chain(self.running, self.waiting, self.granted, self.parked)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def check(self) -> None:
        """Raises BrokenInvariant. Walks everything."""
        queued: set[int] = set()
        for sequence in self.alive():
            if id(sequence) in queued or sequence.state is SequenceState.FINISHED:
                raise BrokenInvariant(f"{sequence.request_id} is in two queues, or has ended")
            queued.add(id(sequence))
        slots = [sequence.slot for sequence in self.alive() if sequence.slot >= 0]
        if sorted([*slots, *self._free_slots]) != list(range(self.config.max_num_seqs)):
            raise BrokenInvariant("seats are not all free or taken, each once")
        self.blocks.check(sequence.block_ids for sequence in self.alive())
        self.blocks.host.check(sequence.host_block_ids for sequence in self.alive())

    # What strategies are made of. They may change a batch's budgets, and call these.

    def prompt(self, sequence: Sequence) -> Prompt:
        return Prompt(sequence, sequence.num_computed, sequence.num_tokens - sequence.num_computed)

    def prompts_in_flight(self) -> list[Prompt]:
        return [self.prompt(sequence) for sequence in self.running if sequence.is_prefilling]

    def candidates(self, batch: Batch, most: int = _WINDOW) -> list[Prompt]:
        """The longest run of the line that fits into seats and memory together, so each of them may be computed. Who
        is passed over for want of tokens keeps memory and seat: nobody behind may take them. REMOTE sequences, which
        cost no tokens, get their memory on the way. Nobody where somebody was just preempted. `most`: how many are
        looked at, if the step's tokens do not ask for more."""
        found: list[Prompt] = []
        wanted = 0
        if batch.preempted or not self.waiting:
            return found
        if batch.room_for_prefill < 1 and all(s.state is not SequenceState.REMOTE for s in self.waiting):
            return found
        share = self.blocks.total * self.config.ungranted_share_percent // 100
        ungranted = sum(len(s.block_ids) for s in itertools.chain(self.running, self.parked) if s.ungranted)
        kept_blocks = kept_slots = 0
        for sequence in self.waiting:
            if len(self._free_slots) <= kept_slots or (len(found) >= most and wanted >= batch.room_for_prefill):
                break
            if sequence.block_ids or self._is_held(sequence):
                continue
            hits = self._hits(sequence)
            needed = self._needed(sequence) - len(hits) + self.blocks.num_free_among(hits)
            # Where nothing runs, the watermark must not keep out what needs all of the memory.
            spare = self._watermark if self.running or self.granted or found else 0
            if self.blocks.num_free - kept_blocks < needed + spare:
                break
            if sequence.for_peer and ungranted and ungranted + self._needed(sequence) > share:
                continue
            if sequence.state is SequenceState.REMOTE:
                self._sit_down(sequence)
                self._allocate(sequence, needed)
                self.granted.append(sequence)
                batch.granted.append(sequence)
                continue
            if sequence.for_peer:
                ungranted += self._needed(sequence)
            self.blocks.touch(hits)
            kept_blocks += self._needed(sequence) - len(hits)
            kept_slots += 1
            start = sequence.num_computed or len(hits) * self.blocks.block_size
            found.append(Prompt(sequence, start, sequence.num_tokens - start, hits))
            wanted += sequence.num_tokens - start
        batch.candidates += found
        return found

    def tokens_soon(self, prompts: list[Prompt]) -> int | None:
        """Of these prompts, in the order in which they are served, those that one step should hold so that they wait
        least on average: their tokens. None: as many as there is room for."""
        overhead = self.prompt_overhead_tokens
        if len(prompts) < 2 or overhead is None or not self.config.quick_first_tokens:
            return None
        remaining = [prompt.remaining for prompt in prompts]
        return sum(remaining[: prompts_of_least_wait(overhead, remaining)])

    def piece(self, batch: Batch, prompt: Prompt, tokens: int, *, rounded: bool = True) -> int:
        """How many tokens its next chunk has if it may have so many. `rounded`: one that does not end its prompt ends
        on a block, where it can: no partial block has to be sent twice, or is missed by the next one's hits."""
        tokens = max(0, tokens)
        if not self.config.cuts_prompts:
            return prompt.remaining if prompt.remaining <= tokens else 0
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < tokens and batch.num_eligible > 1:
            tokens = threshold
        if tokens >= prompt.remaining:
            return prompt.remaining
        end = prompt.start + tokens
        aligned = end - end % self.blocks.block_size - prompt.start
        return aligned if rounded and aligned > 0 else tokens

    def decode_running(self, batch: Batch) -> None:
        """A row for everyone who decodes, in order of admission. Before any other rows of a step."""
        rows, starts, sequences, plain = batch.rows, batch.starts, batch.sequences, 0
        for sequence in tuple(self.running):
            row, start = sequence.plain_row, sequence.num_computed
            if row is None or (start >= sequence.plain_until and not self._widen(sequence)):
                if not sequence.is_prefilling:
                    self.decode(batch, sequence)
                continue
            # The common case of `decode`: this is what a step costs.
            rows.append(row)
            starts.append(start)
            sequences.append(sequence)
            sequence.num_computed = start + 1
            sequence.num_placeholders += 1
            plain += 1
        batch.num_decodes += plain
        batch.tokens_left -= plain

    def decode(self, batch: Batch, sequence: Sequence) -> bool:
        """A row for one that decodes; False where it needs none, or there is no memory for it now."""
        start = sequence.num_computed
        if sequence.slot < 0 or start + 1 >= sequence.limit or batch.tokens_left < 1:
            return False
        ahead = sequence.num_placeholders > 0
        if ahead and self.config.speculative_ngram_tokens:
            return False  # how many tokens come, and so where the next stands, is not known yet
        if not self._grow(batch, sequence, start + 1):
            return False
        guess = self._guess(batch, sequence)
        ids = () if ahead else (sequence.output_ids[-1], *guess)
        self._append(batch, sequence, 1 + len(guess), ids, samples=True, ahead=ahead, num_draft=len(guess))
        batch.num_decodes += 1
        if not self.config.speculative_ngram_tokens:
            sequence.plain_until = min(len(sequence.block_ids) * self.blocks.block_size, sequence.limit - 1) - 1
            sequence.plain_row = sequence.plain_row or _plain_row(sequence)
        return True

    def compute(self, batch: Batch, prompt: Prompt, tokens: int) -> None:
        """Up to so many tokens of it, as `piece` says; admits a candidate."""
        sequence = prompt.sequence
        if sequence.slot < 0:
            self.admit(batch, prompt)
        if not sequence.is_prefilling:
            self.decode(batch, sequence)
            return
        remaining = sequence.num_tokens - sequence.num_computed
        length = min(tokens, remaining, batch.room_for_prefill)
        if length < 1:
            return
        start, stop = sequence.num_computed, sequence.num_computed + length
        self._append(batch, sequence, length, sequence.token_ids(start, stop), samples=length == remaining)
        batch.prefill_left -= length
        batch.prefilled.append(sequence)
        if length == remaining:
            sequence.is_prefilling = False

    def admit(self, batch: Batch, prompt: Prompt) -> None:
        """Memory and a seat for a candidate."""
        sequence = prompt.sequence
        self._sit_down(sequence)
        hits, prompt.hits = prompt.hits, []
        sequence.block_ids = list(hits)
        self._allocate(sequence, self._needed(sequence) - len(hits))
        if sequence.num_preemptions == 0 and sequence.num_cached is None:
            sequence.num_cached = len(hits) * self.blocks.block_size
        if sequence.host_block_ids:
            # Guesses that came to nothing may have left it less than was copied.
            pairs = list(zip(sequence.block_ids, sequence.host_block_ids, strict=False))
            batch.swaps_in.append(Swap(tuple(block for block, _ in pairs), tuple(host for _, host in pairs)))
            self.blocks.host.free(sequence.host_block_ids)
            sequence.host_block_ids = []
            sequence.num_published = 0 if sequence.num_published < _NEVER else _NEVER
        else:
            sequence.num_computed = len(hits) * self.blocks.block_size
            sequence.num_published = len(hits)
        self._run(sequence)
        batch.admitted.append(sequence)
        if sequence.for_peer:
            sequence.ungranted = True
            batch.asking.append(sequence)

    # Parts of the above: the line.

    def rank(self, sequence: Sequence) -> tuple[bool, int]:
        """The lower goes first, of whatever age."""
        request = sequence.request
        by_priority = self.config.scheduling_policy is SchedulingPolicy.PRIORITY
        return sequence.relegated, request.priority if by_priority else 0

    def _return_to_rank(self, now: float) -> None:
        """Those who have been behind others for long enough."""
        while self._relegated and _arrival(self._relegated[0]) + self.config.relegated_seconds <= now:
            sequence = self._relegated.pop(0)
            sequence.relegated = False
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                self._queue(sequence)

    def _place(self, sequence: Sequence) -> tuple[tuple[bool, int], bool, float, int]:
        """In the waiting line: those that ran before go before those of their rank that did not."""
        return self.rank(sequence), sequence.num_preemptions == 0, sequence.request.arrival_seconds, sequence.serial

    def _worth(self, sequence: Sequence) -> tuple[bool, tuple[bool, int], float, int]:
        """Among those that run: the largest is preempted first."""
        rank, _, arrival, serial = self._place(sequence)
        return sequence.num_preemptions < self.config.max_preemptions, rank, arrival, serial

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=self._place)

    def _is_held(self, sequence: Sequence) -> bool:
        """Its steps in flight have not told all its tokens; or a sibling is about to compute the prompt they share."""
        if sequence.num_placeholders:
            return True
        name = sequence.request.siblings
        if name is None or not self._may_hit(sequence) or sequence.num_preemptions:
            return False
        first = self._first_siblings.setdefault(name, sequence)
        if first is sequence or first.num_preemptions:
            return False
        return first.state is SequenceState.WAITING or (first.state is SequenceState.RUNNING and first.is_prefilling)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def _sit_down(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.seat_due = sequence.request.params.needs_history

    def _stand_up(self, sequence: Sequence) -> None:
        sequence.plain_row = None
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    # Parts of the above: memory.

    def _blocks_of_all(self, prompt: int, max_tokens: int) -> int:
        """The last token sampled is never an input, so its KV is never written."""
        return blocks_for(min(prompt + max_tokens, self.config.max_model_len) - 1, self.blocks.block_size)

    def _needed(self, sequence: Sequence) -> int:
        """Blocks it is admitted with, hits included."""
        if sequence.state is SequenceState.REMOTE or sequence.for_peer:
            return self._blocks_of_all(sequence.num_prompt, sequence.request.params.max_tokens)
        return blocks_for(min(sequence.num_tokens + 1, sequence.limit - 1), self.blocks.block_size)

    def _allocate(self, sequence: Sequence, count: int) -> None:
        block_ids = self.blocks.allocate(count)
        if block_ids is None:
            raise BrokenInvariant("admission counted free blocks wrongly")
        sequence.block_ids.extend(block_ids)

    def _grow(self, batch: Batch, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens, and if need be soon for one more: whom that preempts is out of the way in time.
        False where it cannot go on now; then it may have been preempted itself."""
        table, block_size = sequence.block_ids, self.blocks.block_size
        needed = blocks_for(tokens, block_size) - len(table)
        wanted = blocks_for(min(tokens + 1, sequence.limit - 1), block_size) - len(table)
        if wanted <= 0:
            return True
        if wanted > self.blocks.num_free:
            self._make_room(batch, sequence, wanted, give_way=needed > self.blocks.num_free)
            if sequence.slot < 0:
                return False
        block_ids = self.blocks.allocate(wanted)
        if block_ids is None and needed > 0:
            block_ids = self.blocks.allocate(needed)
        if block_ids is None:
            return needed <= 0
        table.extend(block_ids)
        return True

    def _widen(self, sequence: Sequence) -> bool:
        """The common case of `_grow`: its last block is full, and another one free. False: see there."""
        blocks, until, last = self.blocks, sequence.plain_until, sequence.limit - 2
        # Where no block was free a step ago, it stands one further by now, and perhaps at its last token.
        if sequence.num_computed >= last or not blocks.num_free:
            return False
        sequence.block_ids.append(blocks.allocate_one())
        until += blocks.block_size
        sequence.plain_until = until if until < last else last
        return True

    def _make_room(self, batch: Batch, sequence: Sequence, count: int, give_way: bool) -> None:
        """Preempt until so many blocks are free, or will be when the steps in flight are read. `give_way`: the sequence
        itself too, if it is the last in line."""
        while self.blocks.num_free + self.blocks.num_fenced < count:
            # A prompt for a peer has all it needs, and its KV is on its way.
            victim = max((s for s in self.running if not s.for_peer), key=self._worth)
            if victim is sequence and (not give_way or sum(not s.for_peer for s in self.running) == 1):
                return
            self._preempt(batch, victim)
            if victim is sequence:
                return

    def _preempt(self, batch: Batch, sequence: Sequence) -> None:
        if sequence in batch.sequences:
            self._take_back(batch, sequence)
        self._publish(sequence)
        self.running.remove(sequence)
        self._stand_up(sequence)
        used = sequence.block_ids[: blocks_for(sequence.num_computed, self.blocks.block_size)]
        if self._is_swapped(sequence, len(used)):
            sequence.host_block_ids = self.blocks.host.allocate(len(used)) or []
            batch.swaps_out.append(Swap(tuple(used), tuple(sequence.host_block_ids)))
        else:
            sequence.num_computed = 0
            sequence.is_prefilling = True
        self._give_up_blocks(sequence)
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self._queue(sequence)
        batch.preempted.append(sequence)

    def _take_back(self, batch: Batch, sequence: Sequence) -> None:
        """Its row of the step that is being formed, and the row's tokens."""
        index = batch.sequences.index(sequence)
        row = batch.rows.pop(index)
        del batch.sequences[index]
        batch.tokens_left += row.length
        sequence.num_computed = batch.starts.pop(index)
        sequence.num_placeholders -= (1 + row.num_draft) if row.samples else 0
        if sequence in batch.prefilled:
            batch.prefilled.remove(sequence)
            batch.prefill_left += row.length
            sequence.is_prefilling = True
        else:
            batch.num_decodes -= 1

    def _is_swapped(self, sequence: Sequence, num_blocks: int) -> bool:
        mode, host = self.config.preemption, self.blocks.host
        if mode is PreemptionMode.RECOMPUTE or not 0 < num_blocks <= host.num_free:
            return False
        if mode is PreemptionMode.SWAP:
            return True
        per_token = self.predictor.prefill_token_seconds
        there_and_back = 2 * num_blocks * self.blocks.block_bytes / self.config.swap_bytes_per_second
        return per_token is not None and there_and_back < sequence.num_computed * per_token

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        self._give_up_blocks(sequence)
        self.blocks.host.free(sequence.host_block_ids)
        sequence.host_block_ids = []
        sequence.guesses = None

    def _give_up_blocks(self, sequence: Sequence) -> None:
        """The newest step in flight is the last that may write them."""
        fence = self._in_flight[-1].step.number if self._in_flight else NEVER_WRITTEN
        self.blocks.free(sequence.block_ids, fence)
        sequence.block_ids = []

    # Parts of the above: cached blocks.

    def _may_hit(self, sequence: Sequence) -> bool:
        """Cached tokens have no logits, so who wants those of its prompt computes all of it."""
        return (
            self.config.enable_prefix_caching
            and sequence.request.params.prompt_logprobs is None
            and sequence.state is not SequenceState.REMOTE
            and not sequence.host_block_ids
        )

    def _hits(self, sequence: Sequence) -> list[int]:
        if not self._may_hit(sequence):
            return []
        count = (sequence.num_known - 1) // self.blocks.block_size
        return self.blocks.find(self._key(sequence, index) for index in range(count))

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Of one of its full blocks; the keys of those before it have been asked for."""
        keys, block_size = sequence.block_keys, self.blocks.block_size
        if index == len(keys):
            root = keys[-1] if keys else root_key(model=self._model_identity, salt=sequence.request.cache_salt)
            keys.append(block_key(root, sequence.token_ids(index * block_size, (index + 1) * block_size)))
        return keys[index]

    def _publish(self, sequence: Sequence) -> None:
        """Its blocks that are computed in full, of ids that are known."""
        if self.config.enable_prefix_caching and sequence.state is SequenceState.RUNNING:
            full = min(sequence.num_computed, sequence.num_known) // self.blocks.block_size
            for index in range(sequence.num_published, full):
                self.blocks.publish(sequence.block_ids[index], self._key(sequence, index))
                sequence.num_published = index + 1

    # Parts of the above: tokens.

    def _budget(self, now: float) -> int:
        most = self._most_at_pace(self.config.step_tokens)
        target = self.config.tbt_target_seconds
        if self.config.token_budget is TokenBudget.FIXED or target is None:
            return most
        adds_up = self.config.tbt_deadlines is TbtDeadlines.CUMULATIVE
        slack, decodes, kv_tokens, first_prompt = float("inf") if adds_up else target, 0, 0, 0
        begins = now + sum(
            self.predictor.predict(work_of(step, has_prefill)) for step, _, has_prefill in self._in_flight
        )
        for sequence in self.running:
            if sequence.is_prefilling:
                first_prompt = first_prompt or sequence.num_computed
                continue
            decodes += 1
            kv_tokens += sequence.num_computed
            if not adds_up:
                continue
            first = sequence.first_token_seconds
            index = len(sequence.output_ids) + sequence.num_placeholders
            # A first token that is still in flight comes with the step that begins next, at the latest.
            due = (begins if first is None else first) + index * target
            slack = min(slack, due - begins)
        if not decodes:
            return most
        tile = self.config.tile_tokens
        return max(self.predictor.budget(slack, decodes, kv_tokens + first_prompt, tile, most), min(most, decodes + 1))

    def _most_at_pace(self, most: int) -> int:
        """Of `most` tokens those that a step has time for; all of them where none of a prompt is to be computed."""
        if self.pace is None:
            return most
        contexts = [sequence.num_computed for sequence in self.running if sequence.is_prefilling]
        if not contexts and not self.waiting:
            return most
        decodes = len(self.running) - len(contexts)
        paced = self.pace.most_tokens(max(contexts, default=0), decodes, self.config.tile_tokens, most)
        return max(paced, min(most, decodes + 1))

    def _guess(self, batch: Batch, sequence: Sequence) -> tuple[int, ...]:
        """Tokens it may go on with. They cost budget like any, but never that of another decode, and no memory that it
        does not have."""
        most = self.config.speculative_ngram_tokens
        if not most:
            return ()
        if sequence.guesses is None:
            sequence.guesses = NgramIndex(sequence.request.prompt_ids)
        sequence.guesses.extend(sequence.output_ids[len(sequence.guesses) - sequence.num_prompt :])
        others = len(self.running) - batch.num_decodes - 1
        room = len(sequence.block_ids) * self.blocks.block_size - sequence.num_computed - 1
        most = min(most, room, sequence.limit - sequence.num_tokens - 1, batch.tokens_left - 1 - others)
        return sequence.guesses.guess(most) if most > 0 else ()

    def _append(
        self,
        batch: Batch,
        sequence: Sequence,
        length: int,
        token_ids: tuple[int, ...],
        samples: bool,
        ahead: bool = False,
        num_draft: int = 0,
    ) -> None:
        start, params = sequence.num_computed, sequence.request.params
        seat = None
        if sequence.seat_due:
            seat = Seat(sequence.request.prompt_ids, tuple(sequence.output_ids))
            sequence.seat_due = False
        follower = None
        if params.prompt_logprobs is not None and not samples:
            (follower,) = sequence.token_ids(start + length, start + length + 1)
        batch.rows.append(
            Row(
                sequence.slot,
                length,
                token_ids,
                sequence.block_ids,
                samples,
                params,
                ahead,
                num_draft,
                seat,
                follower,
            )
        )
        batch.starts.append(start)
        batch.sequences.append(sequence)
        batch.tokens_left -= length
        sequence.num_computed += length
        sequence.num_placeholders += (1 + num_draft) if samples else 0

    def _take(
        self,
        row: Row,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> TokenOutput:
        """What a row sampled: one token, or where guesses came true more."""
        sequence.num_placeholders -= 1 + row.num_draft
        if row.num_draft and not sequence.is_prefilling:
            # Unless its KV was given up meanwhile: what follows the last guess that came true is to be computed again.
            sequence.num_computed -= 1 + row.num_draft - len(token_ids)
        taken = 0
        for index, token_id in enumerate(token_ids):
            output = self.accept(sequence, token_id, logprobs[index] if logprobs else None, now)
            taken += 1
            if output.finish_reason is not None:
                break
        return output._replace(token_ids=token_ids[:taken], logprobs=logprobs[:taken])

    def _collect_prompt_logprobs(self, start: int, sequence: Sequence, entries: tuple[TokenLogprobs, ...]) -> None:
        """A part may come again, or in part, after a preemption."""
        known = len(sequence.prompt_logprobs)
        if not sequence.output_ids and start <= known:
            sequence.prompt_logprobs.extend(entries[known - start :])

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprobs, ...] | None:
        if sequence.request.params.prompt_logprobs is None:
            return None
        entries = tuple(sequence.prompt_logprobs[: sequence.num_prompt - 1])
        sequence.prompt_logprobs = []
        return entries


def _arrival(sequence: Sequence) -> float:
    return sequence.request.arrival_seconds


def _plain_row(sequence: Sequence) -> Row:
    """The token before was sampled in its slot, and perhaps is still in flight."""
    params = sequence.request.params
    return Row(sequence.slot, 1, (), sequence.block_ids, samples=True, params=params, use_last_sampled=True)


def work_of(step: Step, has_prefill: bool) -> StepWork:
    tokens = step.num_tokens
    return StepWork(tokens, tokens + sum(step.starts), has_prefill)
