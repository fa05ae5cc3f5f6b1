"""Whatever arrives, is aborted, handed over or lost, and however late steps are read: the books balance, the budget
holds, nobody starves, and every token is what the request gets alone."""

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from poolwright_engine.blocks import BlockPool
from poolwright_engine.scheduler import Scheduler, SchedulerConfig
from poolwright_engine.sequence import Request, SamplingParams, Sequence, SequenceState
from poolwright_protocol.kv import blocks_for
from support.scripted_runner import ScriptedRunner, expected, next_token

NUM_BLOCKS, BLOCK_SIZE, BUDGET, SEATS = 20, 4, 8, 4


class Serving(RuleBasedStateMachine):
    sequences: Bundle[Sequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.arrivals = 0
        self.in_flight: deque[Any] = deque()
        self.known: list[Sequence] = []
        self.answers: dict[Sequence, list[int]] = {}

    @initialize(share=st.sampled_from([0, 25, 100]), threshold=st.sampled_from([0, 3]))
    def begin(self, share: int, threshold: int) -> None:
        config = SchedulerConfig(
            max_model_len=64,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=SEATS,
            ungranted_share_percent=share,
            long_prefill_token_threshold=threshold,
        )
        self.it = Scheduler(config, BlockPool(NUM_BLOCKS), frozenset())
        self.runner = ScriptedRunner(NUM_BLOCKS, BLOCK_SIZE)

    def enter(self, prompt: list[int], max_tokens: int, **kind: bool) -> Sequence:
        self.arrivals += 1
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        sequence = Sequence(Request(f"r{self.arrivals}", tuple(prompt), params, float(self.arrivals)), **kind)
        self.known.append(sequence)
        self.answers[sequence] = []
        return sequence

    prompts = st.lists(st.integers(1, 900), min_size=1, max_size=30)

    @rule(target=sequences, prompt=prompts, max_tokens=st.integers(1, 20))
    def arrive(self, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = self.enter(prompt, max_tokens)
        assert self.it.why_never(sequence.request) is None
        self.it.add(sequence)
        return sequence

    @rule(target=sequences, prompt=prompts)
    def arrive_for_a_peer(self, prompt: list[int]) -> Sequence:
        sequence = self.enter(prompt, 1, for_peer=True)
        self.it.add(sequence)
        return sequence

    @rule(target=sequences, prompt=prompts, max_tokens=st.integers(1, 20), asked=st.booleans())
    def arrive_remote(self, prompt: list[int], max_tokens: int, asked: bool) -> Sequence:
        sequence = self.enter(prompt, max_tokens)
        sequence.state = SequenceState.REMOTE
        if asked:
            self.it.add(sequence)
        return sequence

    @rule(sequence=sequences)
    def first_token_comes(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.REMOTE and not sequence.output_ids:
            self.hear(sequence, self.first_token(sequence))

    @rule(sequence=sequences)
    def kv_comes(self, sequence: Sequence) -> None:
        if sequence in self.it.granted and sequence.output_ids:
            peer = ScriptedRunner(NUM_BLOCKS, BLOCK_SIZE)
            blocks = list(range(1, 1 + blocks_for(sequence.num_prompt, BLOCK_SIZE)))
            self.compute(peer, sequence, blocks)
            layers, heads = range(peer.kv_shape.layers), range(peer.kv_shape.kv_heads)
            data = peer.read_blocks(layers, heads, blocks).result()
            self.runner.write_blocks(layers, heads, sequence.block_ids[: len(blocks)], data)
            self.it.filled(sequence)

    @rule(sequence=sequences)
    def hand_off_fails(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.REMOTE:
            self.it.compute_here(sequence)

    @rule(sequence=sequences)
    def peer_grants(self, sequence: Sequence) -> None:
        sequence.ungranted = False

    @rule(sequence=consumes(sequences))
    def end(self, sequence: Sequence) -> None:
        self.it.release(sequence)

    @rule(sequence=sequences)
    def abort(self, sequence: Sequence) -> None:
        if not sequence.for_peer:
            self.it.end(sequence)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule(bound=st.sampled_from([None, 1, 5]))
    def step(self, bound: int | None = None) -> None:
        decoding = [
            s
            for s in self.it.running
            if not s.is_prefilling and len(s.output_ids) + s.num_placeholders < s.request.params.max_tokens
        ]
        decision = self.it.schedule(self.number, bound)
        if decision.step is None:
            assert not decoding
            return
        step = decision.step
        assert step.num_tokens <= BUDGET
        assert list(decision.computing[: len(decoding)]) == decoding  # decodes never wait for a prefill
        prefill = sum(row.length for row in step.rows[len(decoding) :])
        assert prefill <= (bound or BUDGET)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        self.in_flight.append(self.runner.submit(step))
        self.number += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self) -> None:
        for sequence, output in self.it.update(self.in_flight.popleft().result()):
            self.answers[sequence].extend(output.token_ids)

    @invariant()
    def books_balance(self) -> None:
        pool = self.it.blocks
        assert pool.num_free + pool.num_owned + pool.num_fenced == pool.total
        owned = Counter(block for sequence in self.known for block in sequence.block_ids)
        assert pool.num_owned == len(owned)
        assert all(count == 1 for count in owned.values())

    @invariant()
    def nobody_is_in_two_queues(self) -> None:
        queued = Counter(self.it.alive())
        assert all(count == 1 for count in queued.values())
        for sequence in queued:
            assert sequence.state is not SequenceState.FINISHED

    @invariant()
    def only_who_computes_or_waits_for_kv_has_memory(self) -> None:
        for sequence in self.it.waiting:
            assert not sequence.block_ids

    @invariant()
    def answers_are_what_each_gets_alone(self) -> None:
        for sequence, answer in self.answers.items():
            assert answer == expected(sequence.request)[: len(answer)]

    def teardown(self) -> None:
        """From any state, everybody who is still wanted comes to an end, and every block comes home."""
        if not hasattr(self, "it"):
            return
        unreachable = [s for s in self.known if s.state is SequenceState.REMOTE]
        for sequence in unreachable:
            self.it.compute_here(sequence)
        for _ in range(2000):
            for sequence in list(self.it.parked):
                self.it.release(sequence)
            if not list(self.it.alive()) and not self.in_flight:
                break
            if len(self.in_flight) < 2:
                self.step()
            if self.in_flight:
                self.read()
        assert not list(self.it.alive())
        assert self.it.blocks.num_free == self.it.blocks.total
        self.answers_are_what_each_gets_alone()

    def hear(self, sequence: Sequence, token: int) -> None:
        self.answers[sequence].extend(self.it.accept(sequence, token).token_ids)

    def first_token(self, sequence: Sequence) -> int:
        return next_token(sequence.request.prompt_ids, sequence.request.params, sequence.num_prompt)

    def compute(self, runner: ScriptedRunner, sequence: Sequence, blocks: list[int]) -> None:
        """The whole prompt in one step, on another machine."""
        config = SchedulerConfig(max_model_len=64, block_size=BLOCK_SIZE, max_num_batched_tokens=64, max_num_seqs=1)
        alone = Scheduler(config, BlockPool(NUM_BLOCKS), frozenset())
        alone.add(Sequence(sequence.request))
        decision = alone.schedule(0)
        assert decision.step is not None
        assert list(decision.step.rows[0].block_ids) == blocks
        runner.submit(decision.step).result()


TestServing = pytest.mark.timeout(300)(Serving.TestCase)
TestServing.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=40), min_size=1, max_size=6),
    budget=st.integers(4, 50),
    block_size=st.integers(1, 20),
    bound=st.one_of(st.none(), st.integers(1, 10)),
    ahead=st.integers(1, 3),
)
def test_tokens_do_not_depend_on_budget_block_size_bound_or_depth(
    prompts: list[list[int]], budget: int, block_size: int, bound: int | None, ahead: int
) -> None:
    num_blocks = 2 + 120 // block_size
    config = SchedulerConfig(max_model_len=64, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=4)
    it, runner = Scheduler(config, BlockPool(num_blocks), frozenset()), ScriptedRunner(num_blocks, block_size)
    asked = [
        Request(f"r{i}", tuple(p), SamplingParams(6, seed=i, ignore_eos=True), float(i)) for i, p in enumerate(prompts)
    ]
    sequences = [Sequence(one) for one in asked]
    for sequence in sequences:
        it.add(sequence)
    in_flight: deque[Any] = deque()
    for number in range(1000):
        decision = it.schedule(number, bound)
        if decision.step is not None:
            in_flight.append(runner.submit(decision.step))
        if in_flight and (decision.step is None or len(in_flight) >= ahead):
            it.update(in_flight.popleft().result())
        if not in_flight and not list(it.alive()):
            break
    assert [sequence.output_ids for sequence in sequences] == [expected(one) for one in asked]
    assert it.blocks.num_free == it.blocks.total
