"""Three passes under one budget: decodes, chunks in flight, new requests."""

from typing import Any

import pytest

from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.runner import Row, Step, StepResult
from poolwright_engine.scheduling.scheduler import Batch, Decision, Scheduler
from poolwright_engine.scheduling.scheduler_config import SchedulerConfig
from poolwright_engine.scheduling.sequence import (
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SequenceState,
    TokenOutput,
)

EOS = 0


def scheduler(num_blocks: int = 100, **config: Any) -> Scheduler:
    settings = {"max_model_len": 1000, "max_num_batched_tokens": 16, "max_num_seqs": 8, **config}
    return Scheduler(SchedulerConfig(**settings), BlockPool(num_blocks, 4), frozenset({EOS}))


def sequence(
    prompt: int, max_tokens: int = 4, arrival: float = 0.0, peer: bool = False, first: int = 1, **params: Any
) -> Sequence:
    """`first`: id of the prompt's first token; prompts that begin alike share cached blocks."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(Request("r", tuple(range(first, first + prompt)), sampling, arrival), for_peer=peer)


def run(
    it: Scheduler, number: int, token: int = 7, **bound: int
) -> tuple[Decision, list[tuple[Sequence, TokenOutput]]]:
    """Schedule a step and read it at once; every row that samples yields `token`."""
    decision = it.schedule(number, **bound)
    if decision.step is None:
        return decision, []
    return decision, it.update(result(decision.step, token))


def result(step: Step, token: int = 7) -> StepResult:
    return StepResult(step.number, tuple((token,) if r.samples else () for r in step.rows), ((),) * len(step.rows), 0)


def lengths(decision: Decision) -> list[int]:
    return [row.length for row in decision.step.rows] if decision.step else []


def test_a_prompt_is_cut_into_chunks_that_end_on_block_boundaries() -> None:
    it = scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    it.add(sequence(21))
    assert [lengths(run(it, n)[0]) for n in range(4)] == [[8], [8], [5], [1]]


def test_decodes_come_first_and_chunks_take_what_is_left() -> None:
    it = scheduler(max_num_batched_tokens=8)
    old = [sequence(1, 50, arrival=i) for i in range(3)]
    for one in old:
        it.add(one)
    run(it, 0)
    it.add(sequence(100, arrival=9))
    for number in range(1, 10):
        decision, _ = run(it, number)
        assert decision.computing[:3] == tuple(old)
        assert lengths(decision)[:3] == [1, 1, 1]
        assert sum(lengths(decision)) <= 8


def test_a_prompt_in_flight_keeps_a_quarter_and_goes_before_new_ones_that_need_as_much() -> None:
    it = scheduler()
    first, short, long = sequence(60), sequence(3, arrival=-1.0), sequence(60, arrival=-1.0, first=100)
    it.add(first)
    run(it, 0)
    it.add(short)
    it.add(long)
    decision, _ = run(it, 1)
    assert decision.computing == (first, short)
    assert lengths(decision) == [12, 3]  # all that the short one left, cut to a block


def test_a_prompt_behind_many_short_ones_still_gets_a_quarter_of_each_step() -> None:
    it = scheduler(max_num_batched_tokens=16, max_num_seqs=4, num_blocks=400)
    long = sequence(64)
    it.add(long)
    steps = 0
    while not long.output_ids:
        while len(it.waiting) < 4:
            it.add(sequence(16, 1, arrival=9.0 + steps, first=100 * steps + 100))
        run(it, steps)
        steps += 1
    assert steps == 14  # alone at first, then 60 tokens, 4 or more a step


def test_the_bound_of_the_role_holds_back_prefill_but_no_decode() -> None:
    it = scheduler()
    it.add(sequence(1, 50))
    run(it, 0)
    it.add(sequence(30, arrival=1))
    for number in range(1, 5):
        assert lengths(run(it, number, max_prefill_tokens=4)[0]) == [1, 4]


def test_a_threshold_lets_a_short_prompt_pass_beside_a_long_one() -> None:
    it = scheduler(long_prefill_token_threshold=8)
    it.add(sequence(100))
    it.add(sequence(4, arrival=1))
    assert lengths(run(it, 0)[0]) == [8, 4]


def test_admission_takes_memory_for_the_prompt_and_keeps_the_order_of_arrival() -> None:
    it = scheduler(num_blocks=11, enable_prefix_caching=False)  # ten to give
    first, big, small = sequence(12, 21, arrival=0), sequence(30, 2, arrival=1), sequence(1, 1, arrival=2)
    for one in (small, big, first):
        it.add(one)
    run(it, 0)
    assert len(first.block_ids) == 4  # of 12 tokens, and of the next one
    run(it, 1)
    assert small.state is SequenceState.WAITING  # it would fit, but may not pass the big one
    it.end(first)
    decision, _ = run(it, 2)
    assert decision.admitted == (big, small)


def test_a_sequence_grows_as_it_decodes_one_step_before_it_must() -> None:
    it = scheduler()
    one = sequence(6, 20)
    it.add(one)
    sizes = []
    for number in range(8):
        run(it, number)
        sizes.append((one.num_computed, len(one.block_ids)))
    assert sizes == [(6, 2), (7, 2), (8, 3), (9, 3), (10, 3), (11, 3), (12, 4), (13, 4)]


def test_the_watermark_is_left_free_while_something_runs() -> None:
    it = scheduler(num_blocks=21, watermark=0.25, enable_prefix_caching=False)
    first, second = sequence(30, 2), sequence(30, 2, arrival=1)
    it.add(first)
    it.add(second)
    run(it, 0)
    assert it.running == [first]  # 12 blocks are free, 8 needed, 5 of them kept
    it.end(first)
    run(it, 1)
    assert it.running == [second]


def test_one_step_ahead_uses_placeholders_and_stops_at_max_tokens() -> None:
    it = scheduler()
    one = sequence(3, 2)
    it.add(one)
    first = it.schedule(0).step
    second = it.schedule(1).step
    assert first is not None
    assert second is not None
    assert second.rows[0].use_last_sampled
    assert second.rows[0].token_ids == ()
    assert it.schedule(2).step is None  # both of its tokens are in flight
    it.update(result(first))
    (ended,) = it.update(result(second))
    assert ended[1].finish_reason is FinishReason.LENGTH
    assert it.blocks.num_free == it.blocks.total


def test_blocks_of_a_sequence_that_ended_stay_fenced_until_the_step_ahead_was_read() -> None:
    it = scheduler()
    one = sequence(3, 10)
    it.add(one)
    first, second = it.schedule(0).step, it.schedule(1).step
    assert first is not None
    assert second is not None
    ((_, output),) = it.update(result(first, EOS))
    assert output.finish_reason is FinishReason.STOP
    assert it.blocks.num_fenced == 2
    assert it.update(result(second)) == []
    assert it.blocks.num_free == it.blocks.total


def test_stop_ids_end_a_request_and_are_named() -> None:
    it = scheduler()
    it.add(sequence(3, stop_token_ids=(9,)))
    assert run(it, 0, token=9)[1][0][1] == TokenOutput((9,), FinishReason.STOP, 9, num_cached_tokens=0)
    it.add(sequence(3, ignore_eos=True))
    assert run(it, 1, token=EOS)[1][0][1].finish_reason is None


def test_the_context_length_ends_a_request() -> None:
    it = scheduler(max_model_len=5)
    one = sequence(3, 100)
    assert it.why_never(one.request) is None
    it.add(one)
    assert [run(it, n)[1][0][1].finish_reason for n in range(2)] == [None, FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [(0, 1, "no tokens"), (5, 0, "max_tokens"), (1000, 1, "context"), (500, 400, "KV cache")],
)
def test_a_request_that_can_never_fit_is_told_why(prompt: int, max_tokens: int, reason: str) -> None:
    assert reason in (scheduler().why_never(sequence(prompt, max_tokens).request) or "")


def test_memory_for_a_hand_off_is_given_in_order_of_arrival_and_costs_no_budget() -> None:
    it = scheduler(max_num_batched_tokens=8, num_blocks=41, enable_prefix_caching=False)
    it.add(sequence(60, 4, arrival=0))
    run(it, 0)
    local, remote = sequence(80, 41, arrival=1), sequence(20, 4, arrival=2)
    remote.state = SequenceState.REMOTE
    it.add(local)
    it.add(remote)
    decision, _ = run(it, 1)
    assert decision.granted == ()  # the local one waits for budget; the memory it needs is kept for it
    it.end(local)
    decision, _ = run(it, 2)
    assert decision.granted == (remote,)
    assert len(remote.block_ids) == 6


def test_a_filled_sequence_decodes_from_its_first_token() -> None:
    it = scheduler()
    remote = sequence(6, 3)
    remote.state = SequenceState.REMOTE
    it.add(remote)
    run(it, 0)
    it.accept(remote, 5)
    it.filled(remote)
    decision, _ = run(it, 1)
    assert decision.step is not None
    row = decision.step.rows[0]
    assert decision.step.starts == (6,)
    assert (row.length, row.token_ids, row.samples) == (1, (5,), True)


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("first_token", [True, False])
def test_a_lost_hand_off_is_computed_here_with_what_was_already_sent(granted: bool, first_token: bool) -> None:
    it = scheduler()
    remote = sequence(6, 3)
    remote.state = SequenceState.REMOTE
    if granted:
        it.add(remote)
        run(it, 0)
        assert remote in it.granted
    if first_token:
        it.accept(remote, 5)
    it.compute_here(remote)
    decision, outputs = run(it, 1)
    assert decision.step is not None
    row = decision.step.rows[0]
    assert row.token_ids == (1, 2, 3, 4, 5, 6) + (5,) * first_token
    assert [output.token_ids for _, output in outputs] == [(7,)]
    assert remote.output_ids == [5] * first_token + [7]


def test_prompts_for_peers_hold_no_more_than_their_share_until_granted() -> None:
    it = scheduler(num_blocks=41, ungranted_share_percent=25)  # 10 of 40
    jobs = [sequence(20, 1, arrival=i, peer=True) for i in range(3)]
    local = sequence(4, 1, arrival=5)
    for one in (*jobs, local):
        it.add(one)
    decision, _ = run(it, 0)
    assert decision.asking == (jobs[0],)
    for number in range(1, 4):
        decision, _ = run(it, number)
    assert it.waiting == [jobs[2]]  # two of five blocks each are the share; a local request passes
    jobs[0].ungranted = False
    decision, _ = run(it, 4)
    assert decision.asking == (jobs[2],)


def test_a_prompt_for_a_peer_keeps_its_blocks_until_released() -> None:
    it = scheduler()
    job = sequence(6, 1, peer=True)
    it.add(job)
    run(it, 0)
    assert job.state is SequenceState.PARKED
    assert it.blocks.num_owned == 2
    it.release(job)
    assert it.blocks.num_free == it.blocks.total


def test_without_chunks_a_prompt_waits_until_it_fits_whole_and_nobody_passes_it() -> None:
    it = scheduler(chunked_prefill=False, max_model_len=16)
    it.add(sequence(2, 14))
    run(it, 0)
    long, short = sequence(15, 1, arrival=1), sequence(2, 1, arrival=2)
    it.add(long)
    it.add(short)
    assert lengths(run(it, 1)[0]) == [1, 15]
    longest = scheduler(chunked_prefill=False, max_model_len=16)
    for i in range(2):
        longest.add(sequence(1, 4, arrival=i))
    run(longest, 0)
    long, short = sequence(15, 1, arrival=3), sequence(2, 1, arrival=4)
    longest.add(long)
    longest.add(short)
    assert [lengths(run(longest, n)[0]) for n in range(1, 5)] == [[1, 1], [1, 1], [1, 1], [15]]


@pytest.mark.parametrize("threshold", [8, 30])
@pytest.mark.parametrize("hot", [False, True])
def test_the_threshold_counts_what_is_left_after_hits_and_is_ignored_for_one_alone(threshold: int, hot: bool) -> None:
    it = scheduler(max_num_batched_tokens=40, long_prefill_token_threshold=threshold)
    if hot:
        earlier = sequence(20, 1)
        it.add(earlier)
        run(it, 0)
    left = 30 - 20 * hot
    it.add(sequence(30))
    decision, _ = run(it, 1)
    assert lengths(decision) == [left]  # nobody else wants tokens
    for one in list(it.alive()):
        it.end(one)
    it = scheduler(max_num_batched_tokens=40, long_prefill_token_threshold=threshold)
    it.add(sequence(4, 50, first=500))
    if hot:
        it.add(sequence(20, 1, arrival=-1))
        for number in range(5):
            run(it, number)
    else:
        run(it, 0)
    it.add(sequence(30, arrival=1))
    decision, _ = run(it, 9)
    assert lengths(decision) == [1, min(threshold, left)]


def test_a_row_that_cannot_go_on_ends_its_request_alone() -> None:
    it = scheduler()
    one, other = sequence(3, 9), sequence(3, 9, arrival=1)
    it.add(one)
    it.add(other)
    step = it.schedule(0).step
    assert step is not None
    told = it.update(StepResult(0, ((), (7,)), ((), ()), 0, errors=((0, "the guide outgrew its limits"),)))
    assert [(s, o.token_ids, o.finish_reason, o.error) for s, o in told] == [
        (other, (7,), None, None),
        (one, (), FinishReason.ERROR, "the guide outgrew its limits"),
    ]
    assert list(it.alive()) == [other]


def test_a_budget_that_could_starve_a_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="a decode would wait"):
        scheduler(max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="without chunked prefill"):
        scheduler(chunked_prefill=False)


def test_rows_of_one_that_decodes_are_one_object_until_it_is_seated_anew() -> None:
    it = scheduler(num_blocks=20, max_num_seqs=4)
    one = sequence(3, 19)
    it.add(one)
    flights = [it.schedule(number).step for number in range(8)]  # over the ends of two blocks
    steps = [step for step in flights if step is not None]
    assert [step.starts for step in steps] == [(0,), *((position,) for position in range(3, 10))]
    assert steps[1].rows == steps[2].rows  # the first is made apart, since it may bring what a seat needs
    assert len({id(step.rows[0]) for step in steps[2:]}) == 1
    assert steps[2].rows[0] == Row(one.slot, 1, (), one.block_ids, True, one.request.params, use_last_sampled=True)
    for step in steps:
        it.update(result(step))
    it._preempt(Batch(8, 0.0, 0, 0), one)
    again = [it.schedule(number).step for number in range(8, 11)]
    assert all(step is not None and step.rows[0].block_ids is one.block_ids for step in again)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_last_token_ends_it_on_whatever_place_of_a_block_it_falls(ahead: int) -> None:
    for tokens in range(1, 12):
        it = scheduler()
        it.add(sequence(3, tokens))
        heard: list[TokenOutput] = []
        steps: list[Step] = []
        for number in range(20):
            step = it.schedule(number).step
            steps += [step] if step is not None else []
            while len(steps) > (ahead if step is not None else 0):
                heard += [output for _, output in it.update(result(steps.pop(0)))]
        reasons = [output.finish_reason for output in heard]
        assert reasons == [None] * (tokens - 1) + [FinishReason.LENGTH]
        assert it.blocks.num_free == it.blocks.total
        it.check()


def test_row_and_output_of_a_decode_say_all_there_is() -> None:
    """The output is not made by its constructor, since there is one for every sequence in every step."""
    it = scheduler()
    it.add(sequence(5, max_tokens=9))
    run(it, 0)
    run(it, 1)
    decision, ((told, output),) = run(it, 2)
    step, params = decision.step, told.request.params
    assert step is not None
    (row,) = step.rows
    assert step.starts == (6,)
    assert row == Row(told.slot, 1, (), told.block_ids, True, params, use_last_sampled=True)
    assert row.table(6, 4) == tuple(told.block_ids[:2])
    assert repr(output) == repr(TokenOutput((7,)))
    assert output == TokenOutput((7,))
    assert output._replace(error="gone").error == "gone"
