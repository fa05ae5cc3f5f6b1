"""What was computed for one request is used by the next, if and only if its KV would be the same."""

import pytest

from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode
from poolwright_engine.scheduling.sequence import Sequence, SequenceState
from support.scheduler_bed import SchedulerBed, request
from support.scripted_runner import expected


def serve(bed: SchedulerBed, prompt: range | list[int], **options: object) -> Sequence:
    sequence = bed.add(request(prompt, **options))  # type: ignore[arg-type]
    bed.run()
    assert bed.answers[sequence] == expected(sequence.request)
    return sequence


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_hit_has_the_answer_of_a_miss_and_leaves_at_least_the_last_token_to_compute(length: int) -> None:
    bed = SchedulerBed(block_size=16)
    first = serve(bed, range(1, length + 1), max_tokens=64)
    again = serve(bed, range(1, length + 1), max_tokens=64)
    other_tail = serve(bed, [*range(1, length), 999], max_tokens=64)
    assert first.num_cached == 0
    assert again.num_cached == other_tail.num_cached == (length - 1) // 16 * 16
    assert bed.outputs[again][0].num_cached_tokens == again.num_cached
    assert all(output.num_cached_tokens is None for output in bed.outputs[again][1:])


def test_an_answer_is_found_by_the_next_turn_of_its_conversation() -> None:
    bed = SchedulerBed()
    first = serve(bed, range(1, 20), max_tokens=30)
    follow = serve(bed, [*range(1, 20), *bed.answers[first], 5, 6, 7])
    assert follow.num_cached == 48  # 49 tokens, but the last one sampled was never an input


def test_log_probabilities_of_a_prompt_are_the_same_hot_and_cold() -> None:
    """33 tokens, twice; then another prompt that shares 32 of them."""
    bed = SchedulerBed(block_size=16)
    heard = []
    for tail in (7, 7, 8):
        sequence = serve(bed, [*range(100, 132), tail], max_tokens=1, prompt_logprobs=1)
        assert sequence.num_cached == 0
        entries = bed.outputs[sequence][0].prompt_logprobs
        assert entries is not None
        assert len(entries) == 32
        heard.append(entries)
    assert heard[0] == heard[1]
    assert heard[0][:31] == heard[2][:31]
    assert serve(bed, [*range(100, 132), 9]).num_cached == 32  # others may use what it computed
    bed.check_answers()


def test_nothing_is_found_across_salts_or_after_the_model_changed() -> None:
    bed = SchedulerBed()
    prompt = range(1, 20)
    assert serve(bed, prompt).num_cached == 0
    assert serve(bed, prompt, cache_salt="x").num_cached == 0
    assert serve(bed, prompt, cache_salt="x").num_cached == 16
    assert serve(bed, prompt).num_cached == 16
    bed.it.reset_prefix_cache("another revision")
    assert serve(bed, prompt).num_cached == 0
    assert serve(bed, prompt).num_cached == 16


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_kv_of_the_old_model_that_is_still_held_is_never_found_under_the_new_one(mode: PreemptionMode) -> None:
    bed = SchedulerBed(num_host_blocks=50, preemption=mode)
    one = bed.add(request(range(1, 20), 30))
    for _ in range(5):
        bed.turn()
    if mode is PreemptionMode.SWAP:
        bed.preempt(one)
    bed.it.reset_prefix_cache("another revision")
    bed.run()
    assert serve(bed, range(1, 20)).num_cached == 0


def test_a_cache_that_is_off_finds_nothing() -> None:
    bed = SchedulerBed(enable_prefix_caching=False)
    for _ in range(2):
        assert serve(bed, range(1, 20)).num_cached == 0
    assert bed.it.blocks.num_keyed == 0


def test_a_request_in_flight_is_hit_once_the_step_before_has_computed_it() -> None:
    bed = SchedulerBed(max_num_batched_tokens=16)
    bed.add(request(range(1, 40), 20))
    bed.step()
    bed.step()
    late = bed.add(request([*range(1, 25), 99], 3, arrival=1))
    bed.step()
    assert late.num_cached == 24
    bed.run()
    bed.check_answers()


@pytest.mark.parametrize("batching", Batching)
def test_siblings_wait_for_the_first_and_share_its_prompt(batching: Batching) -> None:
    bed = SchedulerBed(batching=batching, max_model_len=64, max_num_batched_tokens=64, static_window_seconds=0.0)
    group = [bed.add(request(range(1, 38), 9, arrival=n, siblings="s", temperature=1.0, seed=n)) for n in range(3)]
    bed.run()
    bed.check_answers()
    assert [s.num_cached for s in group] == [0, 36, 36]
    assert sum(d.num_prefill_tokens for d in bed.decisions) == 37 + 1 + 1
    assert len({tuple(bed.answers[s]) for s in group}) == 3


def test_siblings_share_blocks_and_go_on_when_the_first_is_aborted_in_its_prompt() -> None:
    bed = SchedulerBed(max_num_batched_tokens=16)
    group = [bed.add(request(range(1, 38), 9, arrival=n, siblings="s")) for n in range(3)]
    bed.turn()
    assert [s.state for s in group] == [SequenceState.RUNNING, SequenceState.WAITING, SequenceState.WAITING]
    bed.it.end(group[0])
    while group[2].is_prefilling:
        bed.turn()
    assert group[1].block_ids[:9] == group[2].block_ids[:9]
    bed.run()
    assert bed.answers[group[1]] == bed.answers[group[2]] == expected(group[1].request)
    bed.check_empty()


def test_siblings_without_a_cache_do_not_wait() -> None:
    bed = SchedulerBed(enable_prefix_caching=False, max_num_batched_tokens=64)
    for number in range(3):
        bed.add(request(range(1, 20), 2, arrival=number, siblings="s"))
    assert len(bed.turn().admitted) == 3
    bed.run()
    bed.check_answers()


def test_a_filled_hand_off_is_found_by_the_next_request() -> None:
    bed = SchedulerBed()
    asked = request(range(1, 20), 5)
    sequence = bed.know(asked)
    sequence.state = SequenceState.REMOTE
    bed.it.add(sequence)
    bed.step()
    peer = SchedulerBed(max_num_batched_tokens=64)
    job = peer.add(asked)
    peer.turn(depth=1)
    layers, heads = range(3), range(2)
    data = peer.runner.read_blocks(layers, heads, job.block_ids[:5]).result()
    bed.runner.write_blocks(layers, heads, sequence.block_ids[:5], data)
    bed.hear(sequence, bed.it.accept(sequence, peer.answers[job][0]))
    bed.it.filled(sequence)
    late = bed.add(request([*range(1, 17), 50], 5, arrival=1))
    bed.run()
    assert late.num_cached == 16
    bed.check_answers()


def test_what_the_cache_holds_is_given_up_for_memory_before_anybody_is_preempted() -> None:
    bed = SchedulerBed(num_blocks=21)
    for number in range(8):
        serve(bed, range(100 * number, 100 * number + 30), max_tokens=20)
    assert bed.it.blocks.num_keyed > 0
    assert not any(s.num_preemptions for s in bed.known)
