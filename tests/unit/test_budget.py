"""The automatic token budget: no decode late, no prompt at a standstill, and steps learnt as they are."""

import random
from collections.abc import Iterable, Iterator

import pytest

from poolwright_engine.scheduling.budget import PromptPace, StepPredictor, StepWork, prompts_of_least_wait
from poolwright_engine.scheduling.scheduler_config import SchedulerConfig, TbtDeadlines, TokenBudget
from poolwright_protocol.flops import visible_keys
from poolwright_protocol.step_time import StepCost, StepProfile
from support.scheduler_bed import SchedulerBed, request

COST = StepCost(0.010, 1e-4, 1e-7)
PROFILE = StepProfile(decode=StepCost(0.008, 5e-5, 1e-7), mixed=COST)


def seconds(work: StepWork, cost: StepCost = COST) -> float:
    return cost.fixed_seconds + work.tokens * cost.token_seconds + work.kv_tokens * cost.kv_token_seconds


def test_the_budget_is_the_largest_multiple_of_the_tile_that_fits_the_slack_with_a_margin() -> None:
    predictor = StepPredictor(PROFILE)
    tokens = predictor.budget(0.060, decodes=8, kv_tokens=20_000, tile_tokens=64, most_tokens=2048)
    assert tokens % 64 == 0
    assert 1.2 * predictor.predict(StepWork(tokens, 20_000 + tokens, True)) <= 0.060
    assert 1.2 * predictor.predict(StepWork(tokens + 64, 20_000 + tokens + 64, True)) > 0.060


@pytest.mark.parametrize(("slack", "tokens"), [(10.0, 2048), (float("inf"), 2048), (0.0, 64), (-3.0, 64), (0.013, 64)])
def test_the_budget_stays_within_one_tile_beyond_the_decodes_and_the_most(slack: float, tokens: int) -> None:
    assert StepPredictor(PROFILE).budget(slack, 8, 1000, 64, 2048) == tokens


def test_without_slack_prompts_still_get_on() -> None:
    assert StepPredictor(PROFILE).budget(-1.0, 130, 1000, 64, 2048) == 192
    assert StepPredictor(PROFILE).budget(-1.0, 64, 1000, 64, 64) == 64
    assert StepPredictor().budget(1.0, 64, 1000, 64, 2048) == 128  # nothing is known yet


@pytest.mark.parametrize("start", [None, PROFILE])
def test_the_predictor_learns_each_regime_from_its_own_steps(start: StepProfile | None) -> None:
    rng = random.Random(1)
    real = StepProfile(decode=StepCost(0.02, 2e-4, 3e-8), mixed=StepCost(0.05, 3e-4, 5e-8))
    predictor = StepPredictor(start)
    for _ in range(400):
        for cost, prefill in ((real.decode, False), (real.mixed, True)):
            tokens = rng.randint(64, 2048) if prefill else rng.randint(1, 64)
            work = StepWork(tokens, rng.randint(0, 200_000), prefill)
            predictor.observe(work, seconds(work, cost) * rng.uniform(0.95, 1.05))
    for cost, prefill in ((real.decode, False), (real.mixed, True)):
        for tokens, kv in ((32, 50_000), (64, 150_000)):
            work = StepWork(tokens, kv, prefill)
            assert predictor.predict(work) == pytest.approx(seconds(work, cost), rel=0.1)
    assert predictor.prefill_token_seconds == pytest.approx(3e-4, rel=0.1)


def test_the_predictor_follows_a_machine_that_becomes_slower() -> None:
    predictor = StepPredictor(PROFILE)
    work = StepWork(512, 10_000, True)
    for _ in range(200):
        predictor.observe(work, seconds(work))
    for _ in range(200):
        predictor.observe(work, 3 * seconds(work))
    assert predictor.predict(work) == pytest.approx(3 * seconds(work), rel=0.05)


def test_a_long_time_of_equal_steps_leaves_it_able_to_learn() -> None:
    predictor = StepPredictor(PROFILE)
    same = StepWork(64, 1000, False)
    for _ in range(20_000):
        predictor.observe(same, seconds(same, PROFILE.decode))
    for tokens in range(1, 200):
        work = StepWork(tokens, 1000, False)
        predictor.observe(work, seconds(work, PROFILE.decode))
    work = StepWork(128, 1000, False)
    assert predictor.predict(work) == pytest.approx(seconds(work, PROFILE.decode), rel=0.05)


def test_a_target_is_needed() -> None:
    with pytest.raises(ValueError, match="tbt_target_seconds"):
        SchedulerConfig(max_model_len=10, token_budget=TokenBudget.AUTO)


def chunks(
    target: float, idle: float, with_decode: bool = True, deadlines: TbtDeadlines = TbtDeadlines.CUMULATIVE
) -> list[int]:
    """Prompt tokens of each step while one request decodes at a context of a few tokens. `idle`: seconds that its
    tokens came early, all together."""
    bed = SchedulerBed(
        num_blocks=2000,
        block_size=16,
        max_model_len=9000,
        max_num_batched_tokens=2048,
        token_budget=TokenBudget.AUTO,
        tbt_target_seconds=target,
        tbt_deadlines=deadlines,
        step_profile=PROFILE,
    )
    now, number, sizes = 0.0, 0, []

    def turn() -> None:
        nonlocal now, number
        decision = bed.it.schedule(number, now=now)
        assert decision.step is not None
        work = StepWork(
            decision.step.num_tokens,
            sum(decision.step.contexts),
            decision.num_prefill_tokens > 0,
        )
        spent = seconds(work, COST if work.has_prefill else PROFILE.decode)
        now += spent
        number += 1
        result = bed.runner.submit(decision.step).result()
        bed.it.update(result.__class__(result.number, result.token_ids, result.logprobs, spent), now)
        sizes.append(decision.num_prefill_tokens)

    if with_decode:
        bed.add(request([1], 2000))
        turn()
        ahead = 0.0
        while ahead < idle:
            before = now
            turn()
            ahead += target - (now - before)
        sizes.clear()
    long = bed.add(request(range(1000, 9000), 4, arrival=1))
    while long.is_prefilling:
        turn()
    if with_decode:
        decode = bed.known[0]
        assert decode.first_token_seconds is not None
        assert now <= decode.first_token_seconds + (len(decode.output_ids) - 1) * target + 1e-9
    return sizes


def test_chunks_fit_the_target_and_slack_earned_early_is_spent_on_larger_ones() -> None:
    tight, early = chunks(0.060, idle=0.0), chunks(0.060, idle=0.3)
    assert all(320 <= size <= 512 for size in tight[:-1])
    assert max(early) > 1000
    assert len(early) < len(tight)
    assert all(-(size + 1) % 64 < 16 for size in tight[:-1])  # a step is a multiple of the tile; chunks end on blocks


def test_where_each_gap_counts_no_slack_is_saved_up() -> None:
    sizes = chunks(0.060, idle=0.3, deadlines=TbtDeadlines.EACH)
    assert all(seconds(StepWork(size + 1, 8000, True)) <= 0.060 for size in sizes)
    assert min(sizes[:-1]) >= 320


def test_the_margin_becomes_what_steps_take_beyond_the_prediction() -> None:
    def tokens(predictor: StepPredictor) -> int:
        return predictor.budget(0.060, decodes=8, kv_tokens=20_000, tile_tokens=1, most_tokens=2048)

    work, steady, uneven = StepWork(300, 20_000, True), StepPredictor(PROFILE), StepPredictor(PROFILE)
    first = tokens(steady)
    for step in range(400):
        steady.observe(work, seconds(work))
        uneven.observe(work, seconds(work) * (1.4 if step % 20 == 19 else 1.0))
    assert tokens(uneven) < first < tokens(steady)
    assert 1.02 * seconds(StepWork(tokens(steady), 20_000 + tokens(steady), True)) <= 0.060 * 1.001


@pytest.mark.parametrize("overhead", [0.0, 10.0, 68.0, 200.0, 5000.0])
@pytest.mark.parametrize("lengths", [[128] * 8, [128] * 40, [20, 30, 200, 1000], [16] * 3, [7, 4000], [900]])
def test_steps_of_least_wait_are_near_the_best_that_trying_all_divisions_finds(
    overhead: float, lengths: list[int]
) -> None:
    """Of prompts in a line, each gets its first token at the end of the step that holds it, and nobody else comes."""

    def total(counts: Iterable[int]) -> float:
        found, now, first = 0.0, 0.0, 0
        for count in counts:
            now += overhead + sum(lengths[first : first + count])
            found += count * now
            first += count
        return found

    def own() -> Iterator[int]:
        left = lengths
        while left:
            yield (count := prompts_of_least_wait(overhead, left))
            left = left[count:]

    # The best from each place on: a step of any number of prompts delays all that are left by its own time.
    best = [0.0] * (len(lengths) + 1)
    for first in reversed(range(len(lengths))):
        left = len(lengths) - first
        best[first] = min(
            left * (overhead + sum(lengths[first : first + count])) + best[first + count]
            for count in range(1, left + 1)
        )
    assert best[0] <= total(own()) * (1 + 1e-9) <= 1.15 * best[0]


def test_without_overhead_a_step_is_a_prompt_and_the_longer_the_line_the_larger_it_is() -> None:
    assert prompts_of_least_wait(0.0, [64] * 9) == 1
    found = [prompts_of_least_wait(50.0, [128] * count) for count in range(1, 400)]
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] > 50


def test_without_decodes_the_budget_is_all_there_is() -> None:
    assert chunks(0.060, idle=0.0, with_decode=False)[0] == 2048


def paced_steps(
    prompt: int, token_seconds: float, pair_seconds: float, probed: bool = True, others: int = 0
) -> tuple[list[int], list[float]]:
    """Prompt tokens and seconds of each step on a machine of that speed, under a bound of two seconds. `others` decode
    meanwhile."""
    bed = SchedulerBed(
        num_blocks=2000,
        block_size=16,
        max_model_len=12_000,
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        max_step_seconds=2.0,
        prompt_token_seconds=token_seconds if probed else None,
    )
    sizes, times = [], []

    def turn() -> None:
        decision = bed.it.schedule(bed.number)
        bed.number += 1
        assert decision.step is not None
        placed = zip(decision.step.starts, decision.step.rows, strict=True)
        pairs = sum(visible_keys(start, row.length) for start, row in placed)
        spent = 0.05 + decision.step.num_tokens * token_seconds + pairs * pair_seconds
        result = bed.runner.submit(decision.step).result()
        bed.it.update(result.__class__(result.number, result.token_ids, result.logprobs, spent))
        if decision.num_prefill_tokens:
            sizes.append(decision.num_prefill_tokens)
            times.append(spent)

    for index in range(others):
        bed.add(request([index + 1], 2000))
    while others and any(sequence.is_prefilling for sequence in bed.known):
        turn()
    sizes.clear()
    times.clear()
    long = bed.add(request(range(1000, 1000 + prompt), 4, arrival=1))
    while long.is_prefilling:
        turn()
    return sizes, times


@pytest.mark.parametrize("probed", [True, False])
def test_no_step_of_a_long_prompt_on_a_slow_machine_takes_long_though_attention_grows(probed: bool) -> None:
    sizes, times = paced_steps(8190, token_seconds=0.0083, pair_seconds=2.4e-6, probed=probed)
    assert max(time for size, time in zip(sizes, times, strict=True) if size > 128) <= 2.5
    assert max(times) <= 4.0  # of the least chunk, where the context is longest
    assert sizes[-2] < max(sizes)  # a later part costs more a token, and so is smaller
    assert sum(sizes) == 8190


def test_a_step_at_pace_leaves_every_decode_its_token_and_the_prompt_a_chunk() -> None:
    sizes, _ = paced_steps(500, token_seconds=10.0, pair_seconds=0.0, others=100)
    assert all(0 < size <= 192 - 100 and size % 16 == 0 for size in sizes[:-1])
    assert sum(sizes) == 500


def test_a_machine_that_is_quick_enough_cuts_as_without_a_pace() -> None:
    assert paced_steps(8190, token_seconds=2e-4, pair_seconds=1e-9)[0] == [2048, 2048, 2048, 2046]
    assert paced_steps(100, token_seconds=0.0083, pair_seconds=2.4e-6)[0] == [100]


def test_the_pace_follows_a_machine_that_becomes_slower() -> None:
    pace = PromptPace(2.0, 1e-3)

    def turns(count: int, token_seconds: float) -> list[float]:
        times = []
        for _ in range(count):
            tokens = pace.most_tokens(0, 0, 64, 2048)
            times.append(tokens * token_seconds)
            pace.observe(tokens, visible_keys(0, tokens), times[-1])
        return times

    assert max(turns(100, 1e-3)) <= 2.5
    slower = turns(30, 4e-3)
    assert slower[0] > 4  # nobody could know
    assert max(slower[4:]) <= 2.5
    assert max(turns(100, 1e-3)) <= 2.5
    assert pace.most_tokens(0, 0, 64, 2048) > 1500  # and it recovers
