"""Where memory ends, the last in line gives way, keeps its place, and comes back with every token it had."""

import asyncio
from collections import Counter
from random import Random

import pytest

from poolwright_engine.scheduling.budget import StepWork
from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, SchedulingPolicy
from poolwright_engine.scheduling.sequence import Sequence, SequenceState
from support import engine_bed
from support.scheduler_bed import SchedulerBed, request
from support.scripted_runner import expected

BOTH = pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])


@BOTH
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_a_request_preempted_at_any_step_has_the_same_tokens(
    mode: PreemptionMode, depth: int, guesses: int, cached: bool
) -> None:
    for at in range(12):
        bed = SchedulerBed(
            num_host_blocks=100, preemption=mode, speculative_ngram_tokens=guesses, enable_prefix_caching=cached
        )
        asked = request([7, 8, 9] * 10, 8, temperature=1.0, seed=3, presence_penalty=0.5, prompt_logprobs=0)
        one = bed.add(asked)
        other = bed.add(request(range(100, 120), 8, arrival=1))
        for _ in range(at):
            bed.turn(depth)
        if one.state is SequenceState.RUNNING:
            bed.preempt(one)
            assert one in bed.it.waiting
        bed.run(depth)
        bed.check_answers()
        assert bed.answers[other] == expected(other.request)


@BOTH
def test_what_was_in_flight_at_a_preemption_is_delivered_and_only_then_may_it_come_back(mode: PreemptionMode) -> None:
    bed = SchedulerBed(num_host_blocks=100, preemption=mode)
    one = bed.add(request(range(1, 9), 9))
    bed.step()
    bed.step()
    assert one.num_placeholders == 2
    bed.preempt(one)
    assert bed.step().step is None
    bed.read()
    assert bed.answers[one] == expected(one.request)[:1]
    assert bed.step().step is None
    bed.read()
    assert bed.step().admitted == (one,)
    bed.run()
    bed.check_answers()


@BOTH
def test_a_last_token_in_flight_at_a_preemption_ends_the_request(mode: PreemptionMode) -> None:
    bed = SchedulerBed(num_host_blocks=100, preemption=mode)
    one = bed.add(request(range(1, 9), 2))
    bed.step()
    bed.step()
    bed.preempt(one)
    bed.read()
    bed.read()
    assert one.state is SequenceState.FINISHED
    bed.check_answers()


@BOTH
def test_memory_for_two_and_a_half_is_shared_without_thrashing(mode: PreemptionMode) -> None:
    """KV for 1,024 tokens, three requests of 400 + 200."""
    bed = SchedulerBed(
        num_blocks=65,
        block_size=16,
        num_host_blocks=64,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        preemption=mode,
    )
    for number in range(3):
        bed.add(request(range(1000 * number, 1000 * number + 400), 200, arrival=number))
    bed.run()
    bed.check_answers()
    assert sum(s.num_preemptions for s in bed.known) > 0
    assert all(s.num_preemptions <= 3 for s in bed.known)
    assert bed.prefill_tokens() <= 3 * 3 * 600
    if mode is PreemptionMode.SWAP:
        assert bed.prefill_tokens() == 3 * 400  # nothing is computed twice


def test_a_resumed_request_waits_until_all_of_it_fits() -> None:
    bed = SchedulerBed(num_blocks=21, max_num_batched_tokens=8, enable_prefix_caching=False, watermark=0)
    first = bed.add(request(range(1, 40), 20))
    second = bed.add(request(range(100, 130), 20, arrival=1))
    while not second.num_preemptions:
        bed.turn()
    while second.state is SequenceState.WAITING:
        bed.turn()
    assert first.state is SequenceState.FINISHED  # its next chunk of 8 would have fit long before
    assert len(second.block_ids) * 4 > second.num_tokens
    bed.run()
    bed.check_answers()
    assert second.num_preemptions == 1


def test_a_preempted_request_keeps_its_place() -> None:
    bed = SchedulerBed(
        num_blocks=31,
        max_num_seqs=2,
        watermark=0,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        enable_prefix_caching=False,
    )
    other = bed.add(request(range(500, 540), 60, arrival=-1, priority=-1))
    a = bed.add(request(range(1, 40), 60, arrival=0))
    b, c = (bed.add(request(range(100 * n, 100 * n + 20), 4, arrival=n)) for n in (1, 2))
    while not a.num_preemptions:
        bed.turn()
    d = bed.add(request(range(700, 710), 4, arrival=9, priority=-5))
    assert bed.it.waiting == [d, a, b, c]
    bed.run()
    bed.check_answers()
    started = [s for decision in bed.decisions for s in decision.admitted]
    assert started.index(d) < started.index(a, 2) < started.index(b) < started.index(c)
    assert other.num_preemptions == 0


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_preempted_request_ends_under_steady_arrivals(policy: SchedulingPolicy) -> None:
    bed = SchedulerBed(
        num_blocks=21,
        max_num_seqs=4,
        watermark=0,
        scheduling_policy=policy,
        enable_prefix_caching=False,
        check=False,
    )
    bed.add(request(range(500, 530), 40, arrival=-1))
    a = bed.add(request(range(1, 30), 45, arrival=0))
    while not a.num_preemptions:
        bed.turn()
    for number in range(1, 400):
        bed.add(request(range(number, number + 10), 10, arrival=number))
        bed.turn()
        if a.state is SequenceState.FINISHED:
            break
    assert bed.answers[a] == expected(a.request)


@BOTH
def test_nobody_is_preempted_without_end(mode: PreemptionMode) -> None:
    """Many that grow in little memory: each preemption makes it likelier that the next hits another."""
    bed = SchedulerBed(
        num_blocks=25,
        num_host_blocks=60,
        preemption=mode,
        watermark=0,
        max_preemptions=2,
        enable_prefix_caching=False,
    )
    for number in range(12):
        bed.add(request(range(100 * number, 100 * number + 4), 60, arrival=number))
    bed.run()
    bed.check_answers()
    assert max(s.num_preemptions for s in bed.known) <= 4


@pytest.mark.parametrize("later_tokens", [9, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_many_answers_to_each_prompt_share_it_and_complete_in_little_memory(later_tokens: int) -> None:
    """Fifty requests of four answers each, memory for six sequences. `later_tokens`: of all but the first four."""
    bed = SchedulerBed(
        num_blocks=6 * 19 + 1,
        block_size=16,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        num_host_blocks=40,
        check=False,
    )
    for number in range(50):
        for choice in range(4):
            options = {"siblings": f"s{number}", "temperature": 1.0, "seed": choice}
            bed.add(
                request(range(number, number + 100), 200 if number < 4 else later_tokens, arrival=number, **options)
            )
    most = 0
    for _ in range(20_000):
        bed.turn()
        groups = Counter(s.request.siblings for s in bed.it.running if not s.is_prefilling)
        for name, count in groups.items():
            tables = [s.block_ids[:6] for s in bed.it.running if s.request.siblings == name and not s.is_prefilling]
            most = max(most, count if len({tuple(table) for table in tables}) == 1 else 0)
        if not list(bed.it.alive()) and not bed.in_flight:
            break
    bed.check_answers()
    assert most == 4  # four decoded at once from the same blocks of one prompt
    assert any(s.num_preemptions for s in bed.known)
    put_back: set[Sequence] = set()
    for decision in bed.decisions:
        newcomers = [s for s in decision.admitted if s not in put_back]
        put_back -= set(decision.admitted)
        assert not (newcomers and put_back)  # what was begun comes back before anything new
        put_back |= set(decision.preempted)


async def test_recomputing_is_no_hit() -> None:
    """Random prompts under pressure: what they find of themselves is not counted."""
    async with engine_bed.machine(
        num_blocks=65, block_size=16, max_model_len=1000, max_num_batched_tokens=128, enable_prefix_caching=True
    ) as one:
        asked = [engine_bed.request(Random(n).choices(range(1, 900), k=400), 200) for n in range(3)]
        assert await asyncio.gather(*(engine_bed.tokens(one.engine, each) for each in asked)) == [
            expected(each) for each in asked
        ]
        await one.empty()
    assert one.seen.preemptions
    assert one.seen.lookups == [(400, 0)] * 3
    assert one.seen.cached_tokens == 0


def test_a_victim_whose_row_was_already_in_the_step_hands_its_tokens_back() -> None:
    """The last in line by priority is the first in the order of admission."""
    bed = SchedulerBed(
        num_blocks=14,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        max_num_seqs=2,
        max_num_batched_tokens=40,
        enable_prefix_caching=False,
        watermark=0,
    )
    calm = bed.add(request(range(1, 18), 20, priority=9))
    bed.turn(depth=1)
    urgent = bed.add(request(range(100, 121), 20, arrival=1, priority=0))
    while not calm.num_preemptions:
        decision = bed.turn(depth=1)
    assert decision.preempted == (calm,)
    assert decision.computing == (urgent,)
    bed.run()
    bed.check_answers()


def test_a_prompt_for_a_peer_is_never_preempted() -> None:
    bed = SchedulerBed(
        num_blocks=16, max_num_batched_tokens=4, max_num_seqs=4, watermark=0, enable_prefix_caching=False
    )
    local = bed.add(request(range(1, 5), 40))
    bed.turn()
    job = bed.add(request(range(100, 132), 1, arrival=5), for_peer=True)
    for _ in range(300):
        bed.turn()
        assert not job.num_preemptions
        if job.state is SequenceState.PARKED and local.num_tokens > 28:
            break
    assert not local.num_preemptions  # nobody else could have used what it has: it waits for the job to be sent
    bed.it.release(job)
    bed.run()
    assert bed.answers[local] == expected(local.request)


def test_the_cheaper_way_is_taken() -> None:
    """A block takes a second to move, there and back two; a token takes what was measured."""
    for token_seconds, swapped in ((0.1, False), (0.9, True)):
        bed = SchedulerBed(num_host_blocks=50, swap_bytes_per_second=1.0)
        one = bed.add(request(range(1, 17), 9))
        bed.turn(depth=1)
        for tokens in (8, 16, 4, 12, 16) * 20:
            bed.it.predictor.observe(StepWork(tokens, 0, True), token_seconds * tokens)
        bed.preempt(one)
        assert bool(one.host_block_ids) is swapped
        bed.run()
        bed.check_answers()


def test_without_room_on_the_host_a_swap_becomes_a_recompute() -> None:
    bed = SchedulerBed(num_host_blocks=5, preemption=PreemptionMode.SWAP)
    first, second = bed.add(request(range(1, 17), 9)), bed.add(request(range(100, 117), 9, arrival=1))
    while first.is_prefilling or second.is_prefilling:
        bed.turn(depth=1)
    bed.preempt(second)
    bed.preempt(first)
    assert (len(second.host_block_ids), len(first.host_block_ids)) == (5, 0)
    bed.run()
    bed.check_answers()


def test_a_swapped_request_that_is_aborted_gives_its_host_memory_back() -> None:
    bed = SchedulerBed(num_host_blocks=5, preemption=PreemptionMode.SWAP)
    one = bed.add(request(range(1, 17), 9))
    bed.turn(depth=1)
    bed.preempt(one)
    bed.it.end(one)
    bed.check_empty()


@pytest.mark.parametrize("batching", Batching)
def test_every_strategy_gets_through_with_memory_for_the_longest_alone(batching: Batching) -> None:
    bed = SchedulerBed(
        num_blocks=17, num_host_blocks=9, batching=batching, max_model_len=64, max_num_batched_tokens=64, watermark=0
    )
    for number in range(6):
        bed.add(request(range(100 * number, 100 * number + 30), 34, arrival=number))
    bed.run()
    bed.check_answers()


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_memory_that_was_short_for_a_step_does_not_hide_the_last_token(max_tokens: int) -> None:
    """One that asks for its next block a step ahead, gets none, and gets one when it must have it, ends where it ends,
    wherever in a block that is."""
    bed = SchedulerBed(num_blocks=20, check=False)
    one = bed.add(request(range(1, 22), max_tokens))
    while one.num_computed < 23 and one.state is not SequenceState.FINISHED:
        bed.turn()
    taken = bed.it.blocks.allocate(bed.it.blocks.num_free)
    assert taken
    bed.turn()
    bed.it.blocks.free(taken)
    bed.run(limit=50)
    bed.check_answers()
