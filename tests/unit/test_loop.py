"""The loop over a scripted model: right tokens, one step ahead, and an end for everybody."""

import asyncio
from contextlib import aclosing

import pytest

from poolwright_engine.loop.engine import Refused
from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, TokenBudget
from poolwright_engine.scheduling.sequence import FinishReason
from support.engine_bed import machine, outputs, request, tokens, until
from support.scripted_runner import ScriptedRunner, expected, prompt_logprob


async def test_requests_of_many_lengths_together_get_what_each_gets_alone() -> None:
    async with machine() as here:
        asked = [request(range(1, 1 + n), 9, seed=n, temperature=n % 2) for n in (1, 2, 4, 5, 17, 40, 33, 16, 3, 60)]
        assert await asyncio.gather(*(tokens(here.engine, one) for one in asked)) == [expected(one) for one in asked]
        await here.empty()
        assert max(here.seen.step_tokens) <= 16
        assert here.seen.generated == 90
        assert here.seen.finishes.count((FinishReason.LENGTH, 40, 9)) == 1


async def test_the_next_step_is_submitted_before_the_last_one_is_read() -> None:
    async with machine() as here:
        await tokens(here.engine, request(range(1, 40), 20))
        log = here.runner.log
    for number in range(1, len(here.runner.steps) - 1):
        assert log.index(("submit", number)) < log.index(("read", number - 1))


async def test_a_decode_is_in_every_step_while_prompts_keep_coming() -> None:
    async with machine() as here:
        async with aclosing(here.engine.generate(request([1, 2, 3], 60))) as stream:
            await anext(stream)
            first = len(here.runner.steps)
            rest = [asyncio.create_task(tokens(here.engine, request(range(1, 60), 1))) for _ in range(5)]
            async for _ in stream:
                pass
            last = len(here.runner.steps)
            await asyncio.gather(*rest)
        for step in here.runner.steps[first : last - 2]:
            assert any(r.length == 1 and start < 63 for start, r in zip(step.starts, step.rows, strict=True))
        await here.empty()


async def test_eos_and_stop_ids_end_a_stream() -> None:
    prompt = [5, 6, 7]
    second = expected(request(prompt, 2))[1]
    async with machine(eos=second) as here:
        heard = await outputs(here.engine, request(prompt, 8, ignore_eos=False))
        assert (heard[-1].finish_reason, heard[-1].stop_token_id) == (FinishReason.STOP, None)
        assert len(heard) == 2
    async with machine() as here:
        heard = await outputs(here.engine, request(prompt, 8, stop_token_ids=(second,)))
        assert (heard[-1].finish_reason, heard[-1].stop_token_id) == (FinishReason.STOP, second)
        await here.empty()


async def test_a_closed_stream_frees_its_memory_and_disturbs_nobody() -> None:
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.01)) as here:
        other = request(range(1, 20), 20)
        running = asyncio.create_task(tokens(here.engine, other))
        for depth in (0, 1, 3):
            async with aclosing(here.engine.generate(request(range(1, 30), 90))) as stream:
                for _ in range(depth):
                    await anext(stream)
        assert await running == expected(other)
        await here.empty()
        assert [finish[0] for finish in here.seen.finishes].count(FinishReason.ABORT) == 2  # one was never begun


@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [((), 400, "no tokens"), ((1,) * 200, 400, "context"), ((1, 5000), 400, "token id"), ((-1,), 400, "token id")],
)
async def test_what_can_never_run_is_refused_at_once(prompt: tuple[int, ...], status: int, message: str) -> None:
    async with machine() as here:
        with pytest.raises(Refused, match=message) as refusal:
            await outputs(here.engine, request(prompt))
        assert refusal.value.status == status
        assert await tokens(here.engine, request([1]))


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async with machine(max_waiting=1, max_num_seqs=1, runner=ScriptedRunner(64, 4, step_seconds=0.02)) as here:
        running = [asyncio.create_task(tokens(here.engine, request([1, 2], 100)))]
        await until(lambda: here.engine.stats().running == 1)
        running.append(asyncio.create_task(tokens(here.engine, request([1, 2], 1))))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refusal:
            await outputs(here.engine, request([3]))
        assert refusal.value.status == 429
        assert refusal.value.retry_after_seconds
        await asyncio.gather(*running)
        assert here.seen.refusals == ["queue_full"]


async def test_a_device_that_breaks_ends_every_stream_with_an_error() -> None:
    async with machine(runner=ScriptedRunner(64, 4, fail_at=5)) as here:
        heard = await asyncio.gather(*(outputs(here.engine, request([n, n], 50)) for n in range(1, 12)))
        for stream in heard:
            assert stream[-1].finish_reason is FinishReason.ERROR
            assert "the device broke" in (stream[-1].error or "")
        assert not here.engine.healthy
        with pytest.raises(Refused) as refusal:
            await outputs(here.engine, request([1]))
        assert refusal.value.status == 503
    assert here.runner.closed


async def test_draining_lets_what_runs_finish_and_takes_nothing_new() -> None:
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.01)) as here:
        asked = request([1, 2], 30)
        running = asyncio.create_task(tokens(here.engine, asked))
        await until(lambda: here.seen.generated > 0)
        drained = asyncio.create_task(here.engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as refusal:
            await outputs(here.engine, request([1]))
        assert refusal.value.status == 503
        await drained
        assert await running == expected(asked)


async def test_a_drain_past_its_limit_aborts_the_rest() -> None:
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.02)) as here:
        running = asyncio.create_task(outputs(here.engine, request([1, 2], 100)))
        await until(lambda: here.seen.generated > 0)
        await here.engine.drain(0.05)
        heard = await running
        assert heard[-1].finish_reason is FinishReason.ABORT
        assert len(heard) > 1
        await here.empty()


async def test_closing_gives_an_open_stream_a_last_word() -> None:
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.02)) as here:
        running = asyncio.create_task(outputs(here.engine, request([1, 2], 100)))
        await until(lambda: here.seen.generated > 0)
        await here.engine.close()
        assert (await running)[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(Refused):
            await outputs(here.engine, request([1]))


async def test_stats_tell_of_work_and_return_to_nothing() -> None:
    async with machine(max_num_seqs=1, runner=ScriptedRunner(64, 4, step_seconds=0.02)) as here:
        streams = [asyncio.create_task(tokens(here.engine, request(range(1, 20), 60))) for _ in range(3)]
        await until(lambda: here.seen.generated > 0)
        stats = here.engine.stats()
        assert (stats.running, stats.waiting, stats.waiting_prompt_tokens) == (1, 2, 38)
        assert stats.oldest_waiting_seconds > 0.02
        assert 0 < stats.kv_usage < 1
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await here.empty()
        await until(lambda: here.engine.stats().running == 0)
        stats = here.engine.stats()
        assert (stats.waiting, stats.kv_usage, stats.waiting_prompt_tokens, stats.oldest_waiting_seconds) == (
            0,
            0,
            0,
            0,
        )


async def test_cached_tokens_come_with_the_first_token_and_are_counted_once() -> None:
    async with machine() as here:
        for cached in (0, 16):
            heard = await outputs(here.engine, request(range(1, 20), 3))
            assert [output.num_cached_tokens for output in heard] == [cached, None, None]
        await here.empty()
        assert here.seen.lookups == [(19, 0), (19, 16)]
        assert here.seen.cached_tokens == 16


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
async def test_memory_that_ends_costs_time_and_no_token(mode: PreemptionMode) -> None:
    async with machine(runner=ScriptedRunner(25, 4, num_host_blocks=50), preemption=mode, watermark=0) as here:
        asked = [request(range(100 * n, 100 * n + 9), 60, seed=n, temperature=1.0) for n in range(1, 6)]
        assert await asyncio.gather(*(tokens(here.engine, one) for one in asked)) == [expected(one) for one in asked]
        await here.empty()
        assert here.seen.preemptions
        assert set(here.seen.preemptions) == {mode is PreemptionMode.SWAP}
        assert sum(here.seen.preemptions_of_requests) == len(here.seen.preemptions)
        there, back = here.seen.swapped_blocks[1], here.seen.swapped_blocks[0]
        assert there == back
        assert bool(there) == (mode is PreemptionMode.SWAP)


@pytest.mark.parametrize("batching", Batching)
async def test_every_strategy_serves(batching: Batching) -> None:
    async with machine(batching=batching, max_num_batched_tokens=128, static_window_seconds=0.05) as here:
        asked = [request(range(n, 3 * n), 9, seed=n, temperature=1.0) for n in range(1, 14)]
        assert await asyncio.gather(*(tokens(here.engine, one) for one in asked)) == [expected(one) for one in asked]
        await here.empty()
        assert bool(here.seen.padded_tokens) == (batching is Batching.STATIC)


async def test_a_static_batch_of_one_begins_when_its_window_ends_with_nobody_to_wake_the_loop() -> None:
    async with machine(batching=Batching.STATIC, max_num_batched_tokens=128, static_window_seconds=0.2) as here:
        began = asyncio.get_running_loop().time()
        await tokens(here.engine, request([1, 2], 1))
        assert 0.2 <= asyncio.get_running_loop().time() - began < 10


async def test_guesses_change_no_token_and_come_as_one_output() -> None:
    async with machine(speculative_ngram_tokens=4, max_num_batched_tokens=32) as here:
        asked = [request([1, 2, 0] * 6, 30, seed=n, temperature=1.0, top_k=3) for n in range(6)]
        heard = await asyncio.gather(*(outputs(here.engine, one) for one in asked))
        assert [[t for output in stream for t in output.token_ids] for stream in heard] == [expected(a) for a in asked]
        assert max(len(output.token_ids) for stream in heard for output in stream) > 1
        assert here.seen.generated == 180
        await here.empty()


async def test_a_budget_from_targets_serves_and_learns() -> None:
    config = {"token_budget": TokenBudget.AUTO, "tbt_target_seconds": 0.001, "tile_tokens": 4}
    async with machine(runner=ScriptedRunner(64, 4, step_seconds=0.002), **config) as here:
        asked = [request(range(1, 50), 9, seed=n, temperature=1.0) for n in range(4)]
        assert await asyncio.gather(*(tokens(here.engine, one) for one in asked)) == [expected(one) for one in asked]
        assert here.engine.scheduler.predictor.prefill_token_seconds is not None
        assert min(here.seen.step_tokens) < 16


async def test_log_probabilities_of_a_prompt_are_collected_over_its_chunks() -> None:
    async with machine() as here:
        asked = request(range(100, 140), 3, prompt_logprobs=0)
        heard = await outputs(here.engine, asked)
        assert heard[0].prompt_logprobs == tuple(prompt_logprob(100 + i, i) for i in range(1, 40))
        assert all(output.prompt_logprobs is None for output in heard[1:])


async def test_books_that_do_not_balance_end_the_engine_when_it_is_idle() -> None:
    async with machine() as here:
        await tokens(here.engine, request([1, 2], 2))
        here.engine.post(lambda: here.engine.scheduler.blocks.allocate(1) and None)
        here.engine.post(lambda: setattr(here.engine, "_checked_seconds", 0.0))
        await until(lambda: not here.engine.healthy)
        with pytest.raises(Refused, match="references"):
            await outputs(here.engine, request([1]))
