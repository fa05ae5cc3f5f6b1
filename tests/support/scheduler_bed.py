"""A scheduler over the scripted runner, without a loop: steps as the test says, the books checked after each."""

import itertools
from collections import deque
from collections.abc import Sequence as Tokens
from typing import Any

from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.runner import Handle, Step, StepResult
from poolwright_engine.scheduling.scheduler import Batch, Decision, Scheduler
from poolwright_engine.scheduling.scheduler_config import SchedulerConfig
from poolwright_engine.scheduling.sequence import FinishReason, Request, SamplingParams, Sequence, TokenOutput
from support.scripted_runner import ScriptedRunner, expected, prompt_logprob

_numbers = itertools.count()


def request(prompt: Tokens[int], max_tokens: int = 4, arrival: float = 0.0, **options: Any) -> Request:
    """Options of Request by name; everything else is a sampling parameter."""
    own = {name: options.pop(name) for name in ("priority", "cache_salt", "siblings") if name in options}
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **options})
    return Request(f"r{next(_numbers)}", tuple(prompt), params, arrival, **own)


class SchedulerBed:
    """`now` is the number of steps made. `swaps`: blocks moved, out and in, added up."""

    def __init__(
        self, num_blocks: int = 100, block_size: int = 4, num_host_blocks: int = 0, check: bool = True, **config: Any
    ) -> None:
        settings = {"max_model_len": 1000, "max_num_batched_tokens": 16, "max_num_seqs": 8, **config}
        self.runner = ScriptedRunner(num_blocks, block_size, num_host_blocks=num_host_blocks)
        # A block costs a second to move, at a byte a second.
        pool = BlockPool(num_blocks, block_size, num_host_blocks, block_bytes=1)
        self.it = Scheduler(SchedulerConfig(**settings), pool, frozenset())
        self.number = 0
        self.known: list[Sequence] = []
        self.answers: dict[Sequence, list[int]] = {}
        self.first_step: dict[Sequence, int] = {}  # whose read told its first token
        self.outputs: dict[Sequence, list[TokenOutput]] = {}
        self.decisions: list[Decision] = []
        self.swaps = 0
        self._in_flight: deque[tuple[Step, Handle[StepResult]]] = deque()
        self._check = check

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def know(self, asked: Request, for_peer: bool = False) -> Sequence:
        sequence = Sequence(asked, for_peer=for_peer)
        self.known.append(sequence)
        self.answers[sequence], self.outputs[sequence] = [], []
        return sequence

    def add(self, asked: Request, for_peer: bool = False) -> Sequence:
        sequence = self.know(asked, for_peer)
        assert self.it.why_never(asked) is None
        self.it.add(sequence)
        return sequence

    def step(self, **bound: Any) -> Decision:
        """Schedule and submit."""
        decision = self.it.schedule(self.number, now=float(self.number), **bound)
        self.decisions.append(decision)
        for swap in decision.swaps_out:
            self.runner.swap_out(swap.block_ids, swap.host_block_ids)
            self.swaps += len(swap.block_ids)
        for swap in decision.swaps_in:
            self.runner.swap_in(swap.host_block_ids, swap.block_ids)
            self.swaps += len(swap.block_ids)
        if decision.step is not None:
            assert len({row.slot for row in decision.step.rows}) == len(decision.step.rows)
            for context, sequence in zip(decision.step.contexts, decision.computing, strict=True):
                assert context < min(sequence.max_tokens_total, self.it.config.max_model_len)
            self._in_flight.append((decision.step, self.runner.submit(decision.step)))
            self.number += 1
        self.check()
        return decision

    def read(self) -> None:
        """The oldest step in flight."""
        step, handle = self._in_flight.popleft()
        for sequence, output in self.it.update(handle.result(), float(self.number)):
            self.hear(sequence, output)
            if self.answers[sequence]:
                self.first_step.setdefault(sequence, step.number)
        self.check()

    def hear(self, sequence: Sequence, output: TokenOutput) -> None:
        self.answers[sequence].extend(output.token_ids)
        self.outputs[sequence].append(output)

    def turn(self, depth: int = 2, **bound: Any) -> Decision:
        """As the loop does: schedule, submit, and read once `depth` steps are in flight or there is nothing to do."""
        decision = self.step(**bound)
        if self._in_flight and (len(self._in_flight) >= depth or decision.step is None):
            self.read()
        return decision

    def run(self, depth: int = 2, limit: int = 5000, **bound: Any) -> None:
        """Until everyone has ended."""
        for _ in range(limit):
            if not list(self.it.alive()) and not self._in_flight:
                return
            decision = self.turn(depth, **bound)
            if decision.step is None and not self._in_flight and decision.wake_seconds is not None:
                self.number = max(self.number, int(decision.wake_seconds) + 1)
        raise AssertionError([f"{s.request_id} {s.state} {s.num_computed}/{s.num_tokens}" for s in self.it.alive()])

    def check(self) -> None:
        if self._check:
            self.it.check()
            for sequence in self.it.waiting:
                assert not sequence.block_ids

    def check_answers(self, complete: bool = True) -> None:
        """Everyone has what it gets alone; `complete`: to its end, and every block has come home."""
        for sequence, answer in self.answers.items():
            wanted = expected(sequence.request, self.it.config.max_model_len)
            assert answer == (wanted if complete else wanted[: len(answer)]), sequence.request
            outputs = self.outputs[sequence]
            if complete:
                assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            if outputs and sequence.request.params.prompt_logprobs is not None:
                prompt = sequence.request.prompt_ids
                assert outputs[0].prompt_logprobs == tuple(
                    prompt_logprob(prompt[i], i) for i in range(1, len(prompt))
                ), (sequence, outputs[0].prompt_logprobs)
        if complete:
            self.check_empty()

    def check_empty(self) -> None:
        assert not list(self.it.alive())
        assert self.it.blocks.num_free == self.it.blocks.total
        assert self.it.blocks.host.num_free == self.it.blocks.host.total

    def preempt(self, sequence: Sequence) -> None:
        """As the want of memory would, between two steps."""
        batch = Batch(self.number, 0.0, 0, 0)
        self.it._preempt(batch, sequence)
        for swap in batch.swaps_out:
            self.runner.swap_out(swap.block_ids, swap.host_block_ids)
            self.swaps += len(swap.block_ids)
        self.check()

    def prefill_tokens(self) -> int:
        return sum(decision.num_prefill_tokens for decision in self.decisions)
