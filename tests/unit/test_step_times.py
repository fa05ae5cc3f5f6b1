"""What steps take is fitted over all kinds of steps there were, and follows the machine."""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from poolwright_engine.process import assembly
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.process.first_steps import measure_first, measure_swap, possible, step_of
from poolwright_engine.scheduling.budget import StepWork
from poolwright_engine.scheduling.scheduler_config import GUESSED_SWAP_BYTES_PER_SECOND
from poolwright_engine.scheduling.step_times import StepTimes
from poolwright_protocol.step_time import StepCost, StepProfile
from support.engine_bed import machine, request, tokens, until
from support.scripted_runner import ScriptedRunner
from support.tiny_llama import write_tiny_llama

DECODE, MIXED = StepCost(0.02, 2e-4, 1e-7), StepCost(0.03, 4e-4, 2e-7)


def serve(times: StepTimes, cost: StepCost, works: list[StepWork], noise: float = 0.0, seed: int = 1) -> None:
    draw = random.Random(seed)
    for work in works:
        times.observe(work, cost.seconds(work.tokens, work.kv_tokens) * (1 + draw.uniform(-noise, noise)))


def decodes(*rows: int, context: int = 300) -> list[StepWork]:
    return [StepWork(n, n * context, False) for n in rows]


def prompts(*lengths: int) -> list[StepWork]:
    return [StepWork(n, n, True) for n in lengths]


def close(cost: StepCost | None, to: StepCost, rel: float = 1e-6) -> bool:
    assert cost is not None
    works = ((1, 300), (8, 2400), (40, 12000), (256, 300))
    return all(cost.seconds(*w) == pytest.approx(to.seconds(*w), rel=rel) for w in works)


def test_nothing_is_known_of_a_kind_of_step_that_never_was_or_never_varied() -> None:
    times = StepTimes()
    assert (times.decode, times.mixed) == (None, None)
    serve(times, DECODE, decodes(1, 1, 2, 2, 3))
    assert times.decode is None
    serve(times, DECODE, decodes(8, context=40) + decodes(30, context=900))
    assert close(times.decode, DECODE)
    assert times.mixed is None


def test_a_busy_hour_of_two_streams_forgets_nothing_of_forty() -> None:
    times = StepTimes()
    serve(times, DECODE, decodes(1, 4, 10, 40) + decodes(2, 20, context=1000))
    serve(times, DECODE, decodes(2, context=310) * 3000, noise=0.1)
    assert close(times.decode, DECODE, rel=0.05)


def test_a_machine_that_became_slower_is_priced_slower() -> None:
    times = StepTimes()
    slower = StepCost(*(2 * s for s in (DECODE.fixed_seconds, DECODE.token_seconds, DECODE.kv_token_seconds)))
    works = decodes(1, 4, 10, 40) + decodes(2, 20, context=1000)
    serve(times, DECODE, works * 5)
    serve(times, slower, works * 60)
    assert close(times.decode, slower, rel=0.1)


def test_a_pause_of_the_process_is_no_price() -> None:
    times = StepTimes()
    serve(times, DECODE, decodes(1, 4, 10, 40) * 5)
    times.observe(StepWork(4, 1200, False), 30.0)
    assert close(times.decode, DECODE, rel=0.3)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        times.observe(StepWork(4, 1200, False), seconds)
    assert close(times.decode, DECODE, rel=0.3)


def test_a_profile_that_is_given_is_said_until_steps_say_otherwise() -> None:
    times = StepTimes()
    times.begin_with_profile(StepProfile(DECODE, MIXED))
    assert close(times.decode, DECODE)
    assert close(times.mixed, MIXED)
    half = StepCost(*(s / 2 for s in (MIXED.fixed_seconds, MIXED.token_seconds, MIXED.kv_token_seconds)))
    serve(times, half, prompts(16, 70, 300, 1000) * 4)
    assert close(times.decode, StepCost(*(s / 2 for s in (DECODE.fixed_seconds, 2e-4, 1e-7))), rel=0.3)
    said = times.mixed
    assert said is not None
    assert said.seconds(256, 300) == pytest.approx(half.seconds(256, 300), rel=0.25)


def test_a_start_beside_others_is_mended_for_steps_that_are_not_served_too() -> None:
    times = StepTimes()
    for work in decodes(1, 8, context=20) + prompts(16, 64):
        cost = MIXED if work.has_prefill else DECODE
        times.begin_with(work, 3 * cost.seconds(work.tokens, work.kv_tokens))
    serve(times, MIXED, prompts(70) * 20)
    said = times.decode
    assert said is not None
    assert said.seconds(8, 160) == pytest.approx(DECODE.seconds(8, 160), rel=0.1)


def test_what_a_context_costs_is_not_guessed_from_prompts_that_have_none() -> None:
    times = StepTimes()
    serve(times, MIXED, prompts(16, 40, 64, 90, 200) * 4, noise=0.2)
    said = times.mixed
    assert said is not None
    assert said.kv_token_seconds == 0
    assert said.seconds(64, 64) == pytest.approx(MIXED.seconds(64, 64), rel=0.2)
    serve(times, MIXED, [StepWork(16, 1016, True), StepWork(64, 3000, True), StepWork(16, 4016, True)])
    assert close(times.mixed, MIXED, rel=0.2)


def test_prompts_that_seem_to_cost_nothing_are_not_known_yet() -> None:
    times = StepTimes()
    serve(times, StepCost(0.05, 0.0, 0.0), prompts(16, 64, 256))
    assert times.mixed is None


def test_first_steps_keep_to_what_the_engine_can_hold_and_to_their_time() -> None:
    quick = measure_first(ScriptedRunner(num_blocks=40, step_seconds=1e-4), 64, 8, 100)
    assert {shape.prefill_tokens > 0 for shape, _ in quick} == {True, False}
    for shape, seconds in quick:
        assert shape.tokens <= 64
        assert sum(len(row.block_ids) for row in step_of(0, shape, 4).rows) <= 39
        assert seconds > 0
    assert [shape for shape, _ in quick] == list(possible([s for s, _ in quick], 64, 8, 100, 39, 4))


def test_a_slow_machine_measures_few_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolwright_engine.process.first_steps._SECONDS", 0.03)
    slow = measure_first(ScriptedRunner(num_blocks=200, step_seconds=0.02), 512, 32, 500)
    assert 1 <= len(slow) <= 2


class SlowToSwap(ScriptedRunner):
    """Each of its copies takes 10 ms, and what it copies is kept count of."""

    copied = 0

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> Any:
        self._enqueue(lambda: time.sleep(0.01))
        self.copied += len(block_ids)
        return super().swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> Any:
        self._enqueue(lambda: time.sleep(0.01))
        return super().swap_in(host_block_ids, block_ids)


def test_a_swap_is_measured_both_ways_over_blocks_that_hold_afterwards_what_they_held() -> None:
    runner = SlowToSwap(num_blocks=9, num_host_blocks=6)
    data = runner.read_blocks(range(3), range(2), [1]).result()
    runner.write_blocks(range(3), range(2), [5], bytes(len(data))).result()
    before = runner.contents()
    speed = measure_swap(runner)
    assert runner.contents() == before
    assert runner.copied == 2 * 6
    moved = 2 * 6 * runner.kv_shape.bytes_per_block(runner.block_size)
    assert speed is not None
    assert 0 < speed <= moved / 0.02
    assert measure_swap(ScriptedRunner(num_blocks=9, num_host_blocks=0)) is None


@pytest.mark.parametrize("gibibytes", [0, 0.001])
def test_an_engine_that_may_swap_goes_by_what_a_copy_took_here(tmp_path: Path, gibibytes: float) -> None:
    config = EngineConfig(
        model=str(write_tiny_llama(tmp_path)),
        served_model_names=("m",),
        device="cpu",
        kv_cache_mebibytes=1,
        swap_space_gibibytes=gibibytes,
        cpu_threads=1,
        cpu_linear_form="rows",
    )
    parts = assembly.load(config)
    try:
        used = assembly.engine_loop(config, parts).scheduler.config.swap_bytes_per_second
    finally:
        parts.runner.close()
    if gibibytes:
        assert used == parts.swap_bytes_per_second != GUESSED_SWAP_BYTES_PER_SECOND
        assert used > 0
    else:
        assert parts.swap_bytes_per_second is None
        assert used == GUESSED_SWAP_BYTES_PER_SECOND


async def test_an_engine_says_what_its_steps_took_and_what_its_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poolwright_engine.loop.engine_loop._FIT_SECONDS", 0.0)
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.002)) as here:
        assert here.engine.role_state().step_profile is None
        await tokens(here.engine, request([1, 2], 6))
        await asyncio.gather(*(tokens(here.engine, request([3, n], 12)) for n in range(8)))
        await until(lambda: here.engine.role_state().step_profile is not None)
        said = here.engine.role_state().step_profile
        assert said is not None
        pool = here.engine.scheduler.blocks
        assert said.kv_capacity_tokens == pool.total * pool.block_size
        assert said.kv_bytes_per_token == here.runner.kv_shape.bytes_per_token
        assert said.max_sequences == here.engine.scheduler.config.max_num_seqs
        assert said.decode is not None
        assert said.decode.seconds(4, 40) >= 0.001
