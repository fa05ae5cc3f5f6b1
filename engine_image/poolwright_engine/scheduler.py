"""`Scheduler`: which tokens of which sequences the next step computes, and what a finished step means.

Sarathi-Serve's Algorithm 3: under one token budget, running decodes first, then chunks in flight, then new requests,
so a decode never waits for a prefill. Admission reserves the blocks of prompt and max_tokens, so nothing that runs ever
runs out of memory. Queues are in order of arrival; a request that does not fit yet holds back those behind it.

Every sequence is in at most one of `waiting`, `running`, `granted` and `parked`. `schedule` may be called again before
the step it returned has been read: outputs in flight are placeholders, and what a step in flight may write is fenced.
It knows no torch, no time and no clients.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from poolwright_engine.blocks import BlockPool
from poolwright_engine.runner import Row, Step, StepResult
from poolwright_engine.sequence import FinishReason, Request, Sequence, SequenceState, TokenLogprobs, TokenOutput
from poolwright_protocol.kv import blocks_for


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`ungranted_share_percent`: the share of the blocks that prompts for other machines may hold while those have not
    granted the memory to send them to; one such prompt always may. `long_prefill_token_threshold`: most tokens of one
    prompt in a step; 0: no limit."""

    max_model_len: int
    block_size: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    ungranted_share_percent: int = 25

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, or a decode would wait")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError("without chunked prefill max_num_batched_tokens must be at least max_model_len")


@dataclass(frozen=True, slots=True)
class Decision:
    """One boundary's outcome. `step` None: nothing to compute now."""

    step: Step | None
    computing: tuple[Sequence, ...] = ()  # of the step's rows, in order
    admitted: tuple[Sequence, ...] = ()  # got memory now, to compute here
    granted: tuple[Sequence, ...] = ()  # got memory now, to be filled by a prompt machine
    asking: tuple[Sequence, ...] = ()  # of `admitted`: prompts for a peer, which has yet to grant memory for them


@dataclass(slots=True)
class _Batch:
    tokens_left: int
    prefill_left: int
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def room_for_prefill(self) -> int:
        return min(self.tokens_left, self.prefill_left)


class Scheduler:
    def __init__(self, config: SchedulerConfig, blocks: BlockPool, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: list[Sequence] = []  # by arrival; REMOTE here: its prompt machine asked for a grant
        self.running: list[Sequence] = []  # by admission
        self.granted: list[Sequence] = []  # REMOTE, holding blocks
        self.parked: list[Sequence] = []
        self._eos_token_ids = eos_token_ids
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[int, tuple[Sequence, ...]]] = deque()

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
        needed = self._blocks_of(prompt, request.params.max_tokens)
        if needed > self.blocks.total:
            tokens = self.blocks.total * self.config.block_size
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
        """Queue it by arrival. A REMOTE one is queued for memory alone."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.request.arrival_seconds)

    def filled(self, sequence: Sequence) -> None:
        """A granted sequence's KV is complete and its first token known: it decodes from the next step on."""
        if sequence.state is not SequenceState.REMOTE or not sequence.output_ids:
            raise ValueError(f"{sequence.request_id} awaits no KV, or has no first token")
        self.granted.remove(sequence)
        self._run(sequence)
        sequence.num_computed = sequence.num_prompt

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

    def accept(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None) -> TokenOutput:
        """A token of it is known: append it, and end the sequence where that token does."""
        sequence.output_ids.append(token_id)
        output = self.output(sequence.request, len(sequence.output_ids), token_id, logprobs)
        if output.finish_reason is not None:
            self.end(sequence)
        return output

    def end(self, sequence: Sequence) -> None:
        """Take it out of every queue. Blocks it may still have written are fenced; those of a prompt computed to its
        end for another machine stay until `release`. Ending twice is ending once."""
        computed = sequence.state is SequenceState.RUNNING and not sequence.is_prefilling
        if sequence.state in (SequenceState.FINISHED, SequenceState.PARKED):
            return
        for queue in (self.running, self.waiting, self.granted):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
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

    # Steps.

    def schedule(self, number: int, max_prefill_tokens: int | None = None) -> Decision:
        """The next step. `number` grows from call to call; `max_prefill_tokens` bounds the step's prefill tokens."""
        budget = self.config.max_num_batched_tokens
        bound = budget if max_prefill_tokens is None or not self.config.chunked_prefill else max(1, max_prefill_tokens)
        batch = _Batch(budget, bound)
        for sequence in self.running:
            if not sequence.is_prefilling and sequence.num_tokens < self._limit(sequence):
                self._decode(batch, sequence, number)
        for sequence in self.running:
            if sequence.is_prefilling and self._chunk(batch, sequence, number) == 0:
                batch.prefill_left = 0  # nobody admitted later may pass it
        admitted, granted, asking = self._admit(batch, number)
        step = None
        if batch.rows:
            step = Step(number, tuple(batch.rows))
            self._in_flight.append((number, tuple(batch.sequences)))
        return Decision(step, tuple(batch.sequences), tuple(admitted), tuple(granted), tuple(asking))

    def update(self, result: StepResult) -> list[tuple[Sequence, TokenOutput]]:
        """Read the oldest step in flight. A sequence that ended meanwhile gets nothing more."""
        number, sequences = self._in_flight.popleft()
        if number != result.number:
            raise ValueError(f"step {result.number} was read, {number} is the oldest in flight")
        outputs = []
        for sequence, token_ids, logprobs in zip(sequences, result.token_ids, result.logprobs, strict=True):
            if not token_ids or sequence.state is not SequenceState.RUNNING:
                continue
            sequence.num_placeholders -= 1
            outputs.append((sequence, self.accept(sequence, token_ids[0], logprobs[0] if logprobs else None)))
        self.blocks.step_read(number)
        return outputs

    def alive(self) -> Iterator[Sequence]:
        return itertools.chain(self.running, self.waiting, self.granted, self.parked)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    # Parts of the above.

    def _limit(self, sequence: Sequence) -> int:
        return min(sequence.max_tokens_total, self.config.max_model_len)

    def _blocks_of(self, prompt: int, max_tokens: int) -> int:
        """The last token sampled is never an input, so its KV is never written."""
        return blocks_for(min(prompt + max_tokens, self.config.max_model_len) - 1, self.config.block_size)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        self.blocks.free(sequence.block_ids, sequence.last_step)
        sequence.block_ids = []

    def _decode(self, batch: _Batch, sequence: Sequence, number: int) -> None:
        ahead = sequence.num_placeholders > 0
        start = sequence.num_computed
        ids = () if ahead else tuple(sequence.token_ids(start, start + 1))
        self._append(batch, sequence, number, 1, ids, samples=True, use_last_sampled=ahead)

    def _chunk(self, batch: _Batch, sequence: Sequence, number: int) -> int:
        """Tokens taken; 0 when there is no room."""
        remaining = sequence.num_tokens - sequence.num_computed
        room = batch.room_for_prefill
        if not self.config.chunked_prefill:
            length = remaining if remaining <= room else 0
        else:
            threshold = self.config.long_prefill_token_threshold or remaining
            length = min(remaining, room, threshold)
            if length < remaining:
                # A chunk that ends on a block boundary leaves no partial block to send twice.
                end = sequence.num_computed + length
                aligned = end - end % self.config.block_size - sequence.num_computed
                length = aligned if aligned > 0 else length
        if length > 0:
            ids = tuple(sequence.token_ids(sequence.num_computed, sequence.num_computed + length))
            self._append(batch, sequence, number, length, ids, samples=length == remaining, use_last_sampled=False)
            batch.prefill_left -= length
        return length

    def _append(
        self,
        batch: _Batch,
        sequence: Sequence,
        number: int,
        length: int,
        token_ids: tuple[int, ...],
        samples: bool,
        use_last_sampled: bool,
    ) -> None:
        start, params = sequence.num_computed, sequence.request.params
        table = tuple(sequence.block_ids[: blocks_for(start + length, self.config.block_size)])
        batch.rows.append(Row(sequence.slot, start, length, token_ids, table, samples, params, use_last_sampled))
        batch.sequences.append(sequence)
        batch.tokens_left -= length
        sequence.num_computed += length
        sequence.num_placeholders += samples
        sequence.last_step = number

    def _admit(self, batch: _Batch, number: int) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        admitted: list[Sequence] = []
        granted: list[Sequence] = []
        asking: list[Sequence] = []
        still_waiting: list[Sequence] = []
        ungranted = sum(len(s.block_ids) for s in itertools.chain(self.running, self.parked) if s.ungranted)
        share = self.blocks.total * self.config.ungranted_share_percent // 100
        # Memory and seats of those that wait only for token budget: nobody behind may take them.
        kept_blocks = kept_slots = 0
        queue = iter(self.waiting)
        for sequence in queue:
            needed = self._blocks_of(sequence.num_prompt, sequence.request.params.max_tokens)
            if len(self._free_slots) - kept_slots < 1 or self.blocks.num_free - kept_blocks < needed:
                still_waiting.append(sequence)
                break
            if sequence.for_peer and ungranted and ungranted + needed > share:
                still_waiting.append(sequence)
                continue
            if sequence.state is SequenceState.REMOTE:
                self._take(sequence, needed)
                self.granted.append(sequence)
                granted.append(sequence)
            elif kept_slots == 0 and self._has_room(batch, sequence):
                self._take(sequence, needed)
                self._run(sequence)
                self._chunk(batch, sequence, number)
                admitted.append(sequence)
                if sequence.for_peer:
                    sequence.ungranted = True
                    ungranted += needed
                    asking.append(sequence)
            else:
                kept_blocks += needed
                kept_slots += 1
                still_waiting.append(sequence)
        still_waiting.extend(queue)
        self.waiting = still_waiting
        return admitted, granted, asking

    def _has_room(self, batch: _Batch, sequence: Sequence) -> bool:
        return batch.room_for_prefill >= (1 if self.config.chunked_prefill else sequence.num_tokens)

    def _take(self, sequence: Sequence, needed: int) -> None:
        block_ids = self.blocks.allocate(needed)
        if block_ids is None:
            raise RuntimeError("admission counted free blocks wrongly")
        sequence.block_ids = block_ids
        sequence.slot = self._free_slots.pop()
