"""No decode waits for a prefill; no short prompt for a huge one; and no huge one for ever."""

import statistics

from poolwright_engine.scheduling.scheduler_config import Batching
from support.scheduler_bed import SchedulerBed, request


def huge_and_short(batching: Batching) -> tuple[list[int], int]:
    """One prompt of 4,000 tokens, then 20 of 32, chunk 256: steps from their arrival to each short one's first token,
    and steps of the long one's prefill."""
    bed = SchedulerBed(
        num_blocks=1000,
        block_size=16,
        max_model_len=5000,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        batching=batching,
        check=False,
    )
    long = bed.add(request(range(5000, 9000), 8))
    bed.turn(depth=1)
    arrived = bed.number
    short = [bed.add(request(range(100 * n, 100 * n + 32), 8, arrival=1 + n)) for n in range(20)]
    bed.run(depth=1)
    bed.check_answers()
    return [bed.first_step[s] + 1 - arrived for s in short], bed.first_step[long] + 1


def test_short_prompts_do_not_wait_for_a_huge_one_which_still_gets_on() -> None:
    waits, long = huge_and_short(Batching.SARATHI)
    assert statistics.quantiles(waits, n=10)[8] <= 4
    assert long <= 1.5 * 4000 / 256


def test_in_order_of_admission_they_would_have_waited() -> None:
    waits, _ = huge_and_short(Batching.VLLM)
    assert min(waits) >= 15


def test_a_huge_prompt_ends_within_four_times_its_lone_time_whatever_arrives() -> None:
    bed = SchedulerBed(
        num_blocks=2000, block_size=16, max_model_len=5000, max_num_batched_tokens=256, max_num_seqs=32, check=False
    )
    long = bed.add(request(range(5000, 7048), 1))
    alone = 2048 // 256
    number = 0
    while not bed.answers[long]:
        number += 1
        for n in range(8):
            bed.add(request(range(100 * n + number, 100 * n + number + 32), 1, arrival=number, cache_salt=str(number)))
        bed.turn(depth=1)
    assert alone < bed.first_step[long] + 1 <= 4 * alone + 1


def test_every_running_decode_has_a_token_in_every_step_while_prompts_keep_coming() -> None:
    """16 decodes, and a new prompt of 512 tokens at every step of 100."""
    bed = SchedulerBed(
        num_blocks=4000, block_size=16, max_num_batched_tokens=256, max_num_seqs=64, max_model_len=1000, check=False
    )
    decodes = [bed.add(request(range(50 * n, 50 * n + 3), 120)) for n in range(16)]
    while any(s.is_prefilling for s in decodes):
        bed.turn(depth=1)
    for number in range(100):
        bed.add(request(range(3000 + number, 3512 + number), 1, arrival=1 + number, cache_salt=str(number)))
        before = [len(s.output_ids) for s in decodes]
        decision = bed.turn(depth=1)
        assert [len(s.output_ids) - count for s, count in zip(decodes, before, strict=True)] == [1] * 16
        assert decision.step is not None
        assert decision.step.num_tokens <= 256
        assert decision.num_prefill_tokens >= 256 - 16 - 16  # what is left goes to prompts, but for less than a block


def test_a_mass_abort_brings_every_block_home() -> None:
    bed = SchedulerBed(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=64)
    group = [bed.add(request(range(7, 30), 40, arrival=n, siblings=f"s{n // 3}")) for n in range(64)]
    for _ in range(12):
        bed.turn()
    assert {s.state for s in group} >= {"waiting", "running"}
    for sequence in group:
        bed.it.end(sequence)
        bed.it.end(sequence)
    bed.run()
    bed.check_empty()
