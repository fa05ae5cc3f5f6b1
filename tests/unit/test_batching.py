"""Each strategy forms steps as its system does; none changes a token."""

from dataclasses import replace

import pytest

from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, SchedulerConfig, SchedulingPolicy
from poolwright_engine.scheduling.sequence import SequenceState
from support.scheduler_bed import SchedulerBed, request
from support.scripted_runner import expected

RELEGATED_SECONDS = 30.0


def lengths(bed: SchedulerBed) -> list[list[int]]:
    return [[row.length for row in d.step.rows] for d in bed.decisions if d.step]


def prompt(number: int, length: int) -> range:
    return range(100 * number + 1, 100 * number + 1 + length)


def decoding(bed: SchedulerBed, count: int = 1, max_tokens: int = 60) -> None:
    """So many requests that decode from now on."""
    for number in range(count):
        bed.add(request(prompt(number, 1), max_tokens))
    while any(s.is_prefilling for s in bed.known):
        bed.turn(depth=1)
    bed.decisions.clear()


def test_vllm_serves_in_order_of_admission_decode_or_not() -> None:
    bed = SchedulerBed(batching=Batching.VLLM, max_num_batched_tokens=16)
    bed.add(request(prompt(1, 50), 9))
    bed.turn(depth=1)
    bed.add(request(prompt(2, 1), 9, arrival=1))
    for _ in range(4):
        bed.turn(depth=1)
    # The chunk in flight takes all of each step; the new request waits, and later decodes behind it.
    assert lengths(bed) == [[16], [16], [16], [2, 1], [1, 1]]


def test_vllm_cuts_by_threshold_then_by_scheduled_tokens_and_not_on_blocks() -> None:
    bed = SchedulerBed(batching=Batching.VLLM, max_num_batched_tokens=16, long_prefill_token_threshold=7)
    decoding(bed)
    bed.add(request(prompt(5, 40), 2, arrival=1))
    bed.add(request(prompt(6, 40), 2, arrival=2))
    bed.turn(depth=1)
    assert lengths(bed) == [[1, 7, 7]]
    bed = SchedulerBed(batching=Batching.VLLM, max_num_batched_tokens=16, max_num_scheduled_tokens=10)
    decoding(bed)
    bed.add(request(prompt(5, 40), 2, arrival=1))
    bed.turn(depth=1)
    assert lengths(bed) == [[1, 9]]


@pytest.mark.parametrize("batching", Batching)
def test_fewer_tokens_may_be_scheduled_than_a_step_has_memory_for(batching: Batching) -> None:
    """With any batching; more than that has no effect."""
    most = 64
    for scheduled in (16, 200):
        if not batching.cuts_prompts and scheduled < 40:
            continue
        bed = SchedulerBed(
            num_blocks=400, batching=batching, max_model_len=40, max_num_batched_tokens=most, max_num_seqs=4,
            max_num_scheduled_tokens=scheduled, static_window_seconds=0,
        )  # fmt: skip
        for number in range(4):
            bed.add(request(prompt(number, 35), 2, arrival=number))
        for _ in range(12):
            bed.turn(depth=1)
        sizes = [sum(step) for step in lengths(bed)]
        assert max(sizes) <= min(most, scheduled)
        assert sum(sizes) >= 4 * 35
    with pytest.raises(ValueError, match="max_num_scheduled_tokens must be at least max_num_seqs"):
        SchedulerConfig(max_model_len=40, max_num_seqs=4, max_num_scheduled_tokens=3, batching=batching)
    if not batching.cuts_prompts:
        with pytest.raises(ValueError, match="at least max_model_len"):
            SchedulerConfig(max_model_len=40, max_num_seqs=4, max_num_scheduled_tokens=16, batching=batching)


def test_vllm_admits_nobody_in_a_step_that_preempted() -> None:
    bed = SchedulerBed(num_blocks=9, batching=Batching.VLLM, watermark=0, enable_prefix_caching=False)
    for number in range(2):
        bed.add(request(prompt(number, 12), 9, arrival=number))
    new = bed.add(request(prompt(3, 1), 1, arrival=5))
    while not any(d.preempted for d in bed.decisions):
        bed.turn()
    assert bed.decisions[-1].admitted == ()
    assert new.state is SequenceState.WAITING or new.output_ids


def test_orca_mixes_whole_prompts_with_decodes() -> None:
    bed = SchedulerBed(batching=Batching.ORCA, max_model_len=64, max_num_batched_tokens=64)
    decoding(bed, 2)
    for number, length in enumerate((40, 30, 10), 5):
        bed.add(request(prompt(number, length), 2, arrival=number))
    bed.turn(depth=1)
    bed.turn(depth=1)
    assert lengths(bed) == [[1, 1, 40], [1, 1, 1, 30, 10]]


def test_prompts_that_wait_together_share_quick_steps_and_a_lone_one_has_the_budget() -> None:
    for quick, first in ((False, [128] * 8), (True, [128] * 3)):
        bed = SchedulerBed(
            num_blocks=400, block_size=16, max_model_len=2048, max_num_batched_tokens=2048, quick_first_tokens=quick
        )
        bed.it.prompt_overhead_tokens = 50.0  # a fourth would let three wait for 128 tokens, to spare five 50
        for number in range(8):
            bed.add(request(prompt(10 * number, 128), 2, arrival=number))
        bed.turn(depth=1)
        assert lengths(bed) == [first]
    bed = SchedulerBed(num_blocks=400, max_model_len=2048, max_num_batched_tokens=2048, quick_first_tokens=True)
    bed.it.prompt_overhead_tokens = 50.0
    bed.add(request(prompt(1, 1500), 2))
    bed.turn(depth=1)
    assert lengths(bed) == [[1500]]


def test_quick_steps_keep_the_share_of_a_huge_prompt_that_is_first_in_line() -> None:
    bed = SchedulerBed(num_blocks=2200, max_model_len=8192, max_num_batched_tokens=512, quick_first_tokens=True)
    bed.it.prompt_overhead_tokens = 0.0
    bed.add(request(prompt(1, 8000), 2))
    for number in range(4):
        bed.add(request(prompt(10 * number, 64), 2, arrival=number + 1))
    bed.turn(depth=1)
    assert lengths(bed) == [[128, 64]]  # a quarter of the budget, and the shortest


@pytest.mark.parametrize("batching", [b for b in Batching if b is not Batching.STATIC])
def test_who_is_relegated_goes_behind_all_others_and_is_served(batching: Batching) -> None:
    bed = SchedulerBed(num_blocks=400, batching=batching, max_model_len=64, max_num_batched_tokens=64)
    late = bed.add(replace(request(prompt(1, 8), 2), relegated=True))
    others = [bed.add(request(prompt(number, 48), 2, arrival=number)) for number in range(2, 5)]
    while any(other.is_prefilling for other in others):
        assert late.state is SequenceState.WAITING or not bed.it.waiting
        bed.turn(depth=1)
    while late.state is not SequenceState.FINISHED:
        bed.turn(depth=1)
    assert len(late.output_ids) == 2


@pytest.mark.parametrize("batching", [Batching.SARATHI, Batching.VLLM, Batching.ORCA])
@pytest.mark.parametrize("memory", ["enough", "short"])
def test_who_is_relegated_waits_no_longer_than_stated_however_many_keep_coming(batching: Batching, memory: str) -> None:
    """A step is a second, and brings a prompt of nearly all its tokens."""
    bed = SchedulerBed(
        num_blocks=400 if memory == "enough" else 48,
        batching=batching,
        max_model_len=128,
        max_num_batched_tokens=128,
        relegated_seconds=RELEGATED_SECONDS,
        check=False,
    )
    late = bed.add(replace(request(prompt(1, 8), 2), relegated=True))
    for number in range(2, 5):
        bed.add(request(prompt(number, 124), 2))
    for number in range(5, 80):
        bed.add(request(prompt(number, 124), 2, arrival=bed.number))
        if bed.number < RELEGATED_SECONDS:
            assert late.state is SequenceState.WAITING
        bed.turn(depth=1)
        if late.output_ids:
            break
    assert RELEGATED_SECONDS <= bed.first_step[late] <= RELEGATED_SECONDS + 8
    bed.run(depth=1)
    assert bed.it._relegated == []


def test_relegated_requests_come_back_in_order_of_arrival_and_leave_nothing_when_they_end() -> None:
    bed = SchedulerBed(
        num_blocks=400,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        relegated_seconds=RELEGATED_SECONDS,
    )
    decoding(bed, 1, max_tokens=62)
    early, other, given_up = [
        bed.add(replace(request(prompt(n, 8), 2, arrival=at), relegated=True)) for n, at in ((2, 0), (3, 1), (4, 0.5))
    ]
    assert bed.it.waiting == [early, given_up, other]
    plain = bed.add(request(prompt(5, 8), 2, arrival=5))
    assert bed.it.waiting == [plain, early, given_up, other]
    bed.it.end(given_up)
    while bed.number <= RELEGATED_SECONDS:
        bed.turn(depth=1)
    assert bed.it.waiting == [early, plain, other]
    bed.turn(depth=1)
    assert bed.it.waiting == [early, other, plain]
    assert [s.relegated for s in (early, other, given_up)] == [False] * 3
    bed.run(depth=1)


def test_sarathi_without_chunks_is_orca() -> None:
    bed = SchedulerBed(chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64)
    decoding(bed, 2)
    bed.add(request(prompt(5, 40), 2, arrival=1))
    bed.turn(depth=1)
    assert lengths(bed) == [[1, 1, 40]]


def test_prefill_first_stops_all_decodes_while_prompts_come() -> None:
    bed = SchedulerBed(batching=Batching.PREFILL_FIRST, max_model_len=64, max_num_batched_tokens=64)
    decoding(bed, 2)
    for number in range(5, 8):
        bed.add(request(prompt(number, 30), 3, arrival=number))
    for _ in range(3):
        bed.turn(depth=1)
    assert lengths(bed) == [[30, 30], [30], [1, 1, 1, 1, 1]]


def test_static_closes_a_batch_by_size_or_by_its_window_and_pads_it() -> None:
    bed = SchedulerBed(
        batching=Batching.STATIC,
        max_model_len=64,
        max_num_batched_tokens=64,
        static_batch_size=3,
        static_window_seconds=5.0,
    )
    for number, (length, answer) in enumerate(((10, 4), (4, 1), (7, 2))):
        bed.add(request(prompt(number, length), answer))
    late = bed.add(request(prompt(9, 5), 1, arrival=1.0))
    bed.run(depth=1)
    bed.check_answers()
    steps = [d for d in bed.decisions if d.step]
    assert lengths(bed)[:4] == [[10, 4, 7], [1, 1], [1], [1]]
    assert [d.padded_tokens for d in steps[:4]] == [9, 1, 2, 2]  # to the longest prompt, then to the batch's size
    assert bed.first_step[late] == 7  # 1 + the window, long after the batch had gone
    waits = [d.wake_seconds for d in bed.decisions if d.wake_seconds]
    assert set(waits) == {6.0}


@pytest.mark.parametrize("batching", [Batching.ORCA, Batching.PREFILL_FIRST, Batching.STATIC])
def test_a_strategy_of_whole_prompts_needs_a_budget_for_the_longest(batching: Batching) -> None:
    with pytest.raises(ValueError, match="cuts no prompt"):
        SchedulerConfig(max_model_len=1000, max_num_batched_tokens=512, batching=batching)


@pytest.mark.parametrize("batching", Batching)
def test_under_the_priority_policy_the_most_urgent_enters_first(batching: Batching) -> None:
    bed = SchedulerBed(
        batching=batching,
        scheduling_policy=SchedulingPolicy.PRIORITY,
        max_num_seqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
    )
    calm = bed.add(request(prompt(1, 5), 2, arrival=0, priority=5))
    urgent = bed.add(request(prompt(2, 5), 2, arrival=1, priority=-1))
    bed.run()
    bed.check_answers()
    assert bed.first_step[urgent] < bed.first_step[calm]


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64, 200])
@pytest.mark.parametrize("preemption", [None, PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_tokens_are_the_same_under_every_strategy_chunk_hit_and_preemption(
    batching: Batching, chunk: int, preemption: PreemptionMode | None
) -> None:
    """For a hundred turns, somebody is preempted at every third."""
    budget = chunk if batching.cuts_prompts else 200
    bed = SchedulerBed(
        num_blocks=120,
        num_host_blocks=120,
        batching=batching,
        max_model_len=200,
        max_num_batched_tokens=budget,
        max_num_seqs=min(4, budget),
        preemption=preemption or PreemptionMode.AUTO,
    )
    shared = range(1, 34)
    asked = [request([*shared, 500 + n], 6, arrival=n, temperature=1.0, seed=n) for n in range(3)]
    asked += [request(prompt(n, length), 6, arrival=n) for n, length in ((3, 1), (4, 16), (5, 50))]
    for one in asked:
        bed.add(one)
    for turn in range(3000):
        bed.turn()
        if preemption and bed.it.running and turn % 3 == 0 and turn < 300:
            bed.preempt(bed.it.running[turn // 3 % len(bed.it.running)])
        if not list(bed.it.alive()) and not bed.in_flight:
            break
    bed.check_answers()
    assert bool(bed.swaps) == (preemption is PreemptionMode.SWAP)
    repeat = bed.add(asked[0])
    bed.run()
    assert repeat.num_cached == 32  # a full hit but for the last block, whose last token is computed
    assert bed.answers[repeat] == expected(asked[0])
