"""Whatever arrives, shares, is aborted, preempted, handed over or lost, and however late steps are read: the books
balance after every step, the budget holds, nobody starves, and every token is what the request gets alone."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, SchedulingPolicy
from poolwright_engine.scheduling.sequence import Sequence, SequenceState
from poolwright_protocol.kv import blocks_for
from support.scheduler_bed import SchedulerBed, request
from support.scripted_runner import ScriptedRunner, expected, next_token

NUM_BLOCKS, BLOCK_SIZE, SEATS = 20, 4, 4
BEGINNINGS = (list(range(1, 31)), [1, 2, 0] * 10)


class Serving(RuleBasedStateMachine):
    sequences: Bundle[Sequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = 0

    @initialize(
        batching=st.sampled_from([Batching.SARATHI, *Batching]),
        budget=st.sampled_from([8, 64]),
        share=st.sampled_from([0, 25, 100]),
        threshold=st.sampled_from([0, 3]),
        policy=st.sampled_from(SchedulingPolicy),
        cached=st.booleans(),
        host=st.sampled_from([0, 6, 20]),
        mode=st.sampled_from(PreemptionMode),
        watermark=st.sampled_from([0.0, 0.2]),
        guesses=st.sampled_from([0, 0, 3]),
        limit=st.sampled_from([0, 2]),
    )
    def begin(
        self,
        batching: Batching,
        budget: int,
        share: int,
        threshold: int,
        policy: SchedulingPolicy,
        cached: bool,
        host: int,
        mode: PreemptionMode,
        watermark: float,
        guesses: int,
        limit: int,
    ) -> None:
        self.bed = SchedulerBed(
            NUM_BLOCKS,
            BLOCK_SIZE,
            num_host_blocks=host,
            max_model_len=64,
            max_num_batched_tokens=budget if batching.cuts_prompts else 64,
            max_num_seqs=SEATS,
            batching=batching,
            ungranted_share_percent=share,
            long_prefill_token_threshold=threshold,
            scheduling_policy=policy,
            enable_prefix_caching=cached,
            preemption=mode,
            watermark=watermark,
            speculative_ngram_tokens=guesses,
            max_preemptions=limit,
            static_window_seconds=2.0,
        )
        self.it = self.bed.it

    def enter(self, prompt: list[int], max_tokens: int, **options: Any) -> Any:
        self.arrivals += 1
        return request(prompt, max_tokens, float(self.arrivals), **options)

    prompts = st.builds(
        lambda beginning, kept, rest: [*beginning[:kept], *rest],
        st.sampled_from(BEGINNINGS),
        st.integers(0, 28),
        st.lists(st.integers(1, 900), min_size=1, max_size=3),
    )
    answers = st.integers(1, 20)

    @rule(
        target=sequences,
        prompt=prompts,
        max_tokens=answers,
        priority=st.integers(0, 2),
        few=st.booleans(),
        remembers=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        salt=st.sampled_from(["", "", "x"]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        few: bool,
        remembers: bool,
        prompt_logprobs: int | None,
        salt: str,
    ) -> Sequence:
        """`few`: of three tokens, so that guesses come true. `remembers`: its sampler knows what came before."""
        return self.bed.add(
            self.enter(
                prompt,
                max_tokens,
                priority=priority,
                cache_salt=salt,
                top_k=3 if few else 0,
                presence_penalty=0.5 if remembers else 0.0,
                prompt_logprobs=prompt_logprobs,
            )
        )

    @rule(prompt=prompts, max_tokens=answers, choices=st.integers(2, 3))
    def arrive_with_siblings(self, prompt: list[int], max_tokens: int, choices: int) -> None:
        for choice in range(choices):
            options = {"siblings": f"s{self.arrivals - choice}", "temperature": 1.0, "seed": choice}
            self.bed.add(self.enter(prompt, max_tokens, **options))

    @rule(target=sequences, prompt=prompts)
    def arrive_for_a_peer(self, prompt: list[int]) -> Sequence:
        return self.bed.add(self.enter(prompt, 1), for_peer=True)

    @rule(target=sequences, prompt=prompts, max_tokens=answers, asked=st.booleans())
    def arrive_remote(self, prompt: list[int], max_tokens: int, asked: bool) -> Sequence:
        sequence = self.bed.know(self.enter(prompt, max_tokens))
        sequence.state = SequenceState.REMOTE
        if asked:
            self.it.add(sequence)
        return sequence

    @rule(sequence=sequences)
    def first_token_comes(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.REMOTE and not sequence.output_ids:
            token = next_token(sequence.request.prompt_ids, sequence.request.params, sequence.num_prompt)
            self.bed.hear(sequence, self.it.accept(sequence, token))

    @rule(sequence=sequences)
    def kv_comes(self, sequence: Sequence) -> None:
        if sequence in self.it.granted and sequence.output_ids:
            peer = ScriptedRunner(NUM_BLOCKS, BLOCK_SIZE)
            blocks = list(range(1, 1 + blocks_for(sequence.num_prompt, BLOCK_SIZE)))
            alone = SchedulerBed(NUM_BLOCKS, BLOCK_SIZE, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=1)
            alone.runner = peer
            alone.add(sequence.request)
            decision = alone.turn(depth=1)
            assert decision.step is not None
            assert list(decision.step.rows[0].table(0, BLOCK_SIZE)) == blocks
            layers, heads = range(peer.kv_shape.layers), range(peer.kv_shape.kv_heads)
            data = peer.read_blocks(layers, heads, blocks).result()
            self.bed.runner.write_blocks(layers, heads, sequence.block_ids[: len(blocks)], data)
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

    @rule()
    def mass_abort(self) -> None:
        for sequence in list(self.it.alive()):
            self.it.release(sequence)

    @rule(place=st.integers(0, 3))
    def preempt(self, place: int) -> None:
        victims = [s for s in self.it.running if not s.for_peer]
        if victims:
            self.bed.preempt(victims[place % len(victims)])

    @precondition(lambda self: self.bed.in_flight < 2)
    @rule(bound=st.sampled_from([None, None, 1, 5]))
    def step(self, bound: int | None = None) -> None:
        config = self.it.config
        decoding = [
            s
            for s in self.it.running
            if not s.is_prefilling
            and s.num_tokens < min(s.max_tokens_total, config.max_model_len)
            and not (config.speculative_ngram_tokens and s.num_placeholders)
        ]
        decision = self.bed.step(max_prefill_tokens=bound)
        rows = decision.step.rows if decision.step else ()
        assert sum(row.length for row in rows) <= config.max_num_batched_tokens
        if config.cuts_prompts:
            assert decision.num_prefill_tokens <= (bound or config.max_num_batched_tokens)
        if config.batching is Batching.SARATHI and not decision.preempted:
            # No decode waits for a prefill; one may wait for memory that is on its way back.
            missed = [s for s in decoding if s not in decision.computing]
            assert all(s.num_computed + 1 > len(s.block_ids) * BLOCK_SIZE for s in missed)
            assert [s for s in decision.computing if s in decoding] == list(
                decision.computing[: len(decoding) - len(missed)]
            )

    @precondition(lambda self: self.bed.in_flight)
    @rule()
    def read(self) -> None:
        self.bed.read()

    @rule(count=st.integers(2, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.bed.turn()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "bed"):
            self.bed.check()

    @invariant()
    def answers_are_what_each_gets_alone(self) -> None:
        if hasattr(self, "bed"):
            self.bed.check_answers(complete=False)

    def teardown(self) -> None:
        """From any state, everybody who is still wanted comes to an end, and every block comes home."""
        if not hasattr(self, "bed"):
            return
        for sequence in self.bed.known:
            if sequence.state is SequenceState.REMOTE:
                self.it.compute_here(sequence)
        for _ in range(4000):
            for sequence in list(self.it.parked):
                self.it.release(sequence)
            if not list(self.it.alive()) and not self.bed.in_flight:
                break
            decision = self.bed.turn()
            if decision.wake_seconds is not None:
                self.bed.number = max(self.bed.number, int(decision.wake_seconds) + 1)
        self.bed.check_empty()
        self.answers_are_what_each_gets_alone()


TestServing = pytest.mark.timeout(300)(Serving.TestCase)
TestServing.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=40), min_size=1, max_size=6),
    budget=st.integers(4, 50),
    block_size=st.integers(1, 20),
    bound=st.one_of(st.none(), st.integers(1, 10)),
    ahead=st.integers(1, 3),
    batching=st.sampled_from([Batching.SARATHI, Batching.VLLM]),
)
def test_tokens_do_not_depend_on_budget_block_size_bound_depth_or_strategy(
    prompts: list[list[int]], budget: int, block_size: int, bound: int | None, ahead: int, batching: Batching
) -> None:
    bed = SchedulerBed(
        2 + 120 // block_size,
        block_size,
        max_model_len=64,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        batching=batching,
    )
    for number, prompt in enumerate(prompts):
        bed.add(request(prompt, 6, float(number), temperature=1.0, seed=number))
    bed.run(depth=ahead, max_prefill_tokens=bound)
    bed.check_answers()
    assert [bed.answers[s] for s in bed.known] == [expected(s.request) for s in bed.known]


def test_the_books_balance_over_ten_thousand_random_operations() -> None:
    """Arrivals that share prefixes, forks of three, aborts of those that wait, are amid a chunk or decode, preemptions,
    evictions for want of memory, a changed model, and now and then the abort of 64 at once."""
    random, arrivals = Random(1), 0
    bed = SchedulerBed(
        60,
        4,
        num_host_blocks=20,  # too few for all: some are recomputed
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        preemption=PreemptionMode.SWAP,
        watermark=0,
    )

    def arrive(prompt: list[int], choices: int = 1) -> None:
        nonlocal arrivals
        arrivals += 1
        for choice in range(choices):
            options = {"temperature": 1.0, "seed": choice, "siblings": f"s{arrivals}" if choices > 1 else None}
            bed.add(request(prompt, random.randint(1, 12), float(arrivals), **options))

    def words(most: int) -> list[int]:
        return random.choices(range(1, 900), k=random.randint(1, most))

    aborted_as = set()
    kinds = ["arrive", "fork", "turn", "abort", "preempt", "new model", "mass abort"]
    for kind in random.choices(kinds, [8, 3, 70, 9, 8, 1, 0.2], k=10_000):
        alive = list(bed.it.alive())
        if kind == "arrive" and len(alive) < 20:
            arrive([*range(1, random.randint(2, 30)), *words(8)])
        elif kind == "fork" and len(alive) < 20:
            arrive(words(30), choices=3)
        elif kind == "abort" and alive:
            victim = random.choice(alive)
            aborted_as.add((victim.state, victim.is_prefilling, victim.num_computed > 0))
            bed.it.end(victim)
            bed.it.end(victim)
        elif kind == "preempt" and bed.it.running:
            bed.preempt(random.choice(bed.it.running))
        elif kind == "new model":
            bed.it.reset_prefix_cache(str(arrivals))
        elif kind == "mass abort":
            for _ in range(64 - len(alive)):
                arrive(words(30))
            for sequence in list(bed.it.alive()):
                bed.it.end(sequence)
        bed.turn()
    assert aborted_as >= {
        (SequenceState.WAITING, True, False),
        (SequenceState.RUNNING, True, True),
        (SequenceState.RUNNING, False, True),
    }
    assert bed.swaps
    for sequence in list(bed.it.alive()):
        bed.it.end(sequence)
    bed.run()
    bed.check_empty()
    bed.check_answers(complete=False)
