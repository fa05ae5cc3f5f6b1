"""What work costs: chunks, queues and streams, priced from the time of a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolwright.core.pricing import STEP_MARGIN, MachinePrices
from poolwright_protocol.step_time import StepCost, StepProfile

PRICES = MachinePrices(
    StepProfile(decode=StepCost(0.01, 1e-4, 1e-8), mixed=StepCost(0.012, 1e-4, 1e-8)),
    step_tokens=1000,
    most_streams=512,
    tile_tokens=64,
)


def chunk_by_chunk(prices: MachinePrices, tokens: int, cached: int, chunk: int, decodes: int, kv_tokens: int) -> float:
    """The same prompt step by step: each step by the protocol's formula."""
    total, done = 0.0, cached
    while done < tokens:
        now = min(chunk, tokens - done)
        done += now
        total += prices.profile.mixed.seconds(now + decodes, kv_tokens + done)
        total += now * (done - now / 2) * prices.pair_seconds
    return total


@pytest.mark.parametrize("pair_seconds", [0.0, 1e-9])
@pytest.mark.parametrize(
    ("tokens", "cached", "chunk", "decodes"), [(300, 0, 1000, 0), (9000, 0, 1000, 0), (8000, 4000, 512, 20)]
)
def test_a_prompt_costs_what_its_steps_cost(
    tokens: int, cached: int, chunk: int, decodes: int, pair_seconds: float
) -> None:
    prices = replace(PRICES, pair_seconds=pair_seconds)
    exact = chunk_by_chunk(prices, tokens, cached, chunk, decodes, decodes * 1000)
    priced = prices.prefill_seconds(tokens, cached, step_tokens=chunk, decodes=decodes, kv_tokens=decodes * 1000)
    assert priced == pytest.approx(exact, rel=0.02)


def test_short_prompts_share_their_steps() -> None:
    one, ten = PRICES.prefill_seconds(100), PRICES.queue_seconds(1000, 10 * 100 * 100 / 2)
    assert ten == pytest.approx(10 * one - 9 * 0.012)
    assert PRICES.queue_seconds(0, 0) == 0.0


def test_a_cached_prompt_costs_nothing_and_a_longer_one_more() -> None:
    assert PRICES.prefill_seconds(500, 500) == 0.0
    assert PRICES.prefill_seconds(500, 600) == 0.0
    assert PRICES.prefill_seconds(501) > PRICES.prefill_seconds(500)


@given(st.floats(0.001, 1.0), st.integers(0, 200), st.integers(0, 10**6))
def test_a_chunk_keeps_its_step_within_the_target_or_is_one_tile(target: float, streams: int, kv_tokens: int) -> None:
    chunk = PRICES.chunk_within(target, streams, kv_tokens)
    assert 64 <= chunk <= 1000
    assert chunk % 64 == 0 or chunk == 1000
    step = PRICES.profile.mixed.seconds(streams + chunk, kv_tokens + chunk)
    assert step * STEP_MARGIN <= target * (1 + 1e-9) or chunk == 64


@given(st.floats(0.001, 1.0), st.floats(1, 100_000))
def test_streams_keep_their_step_within_the_target(target: float, context: float) -> None:
    streams = PRICES.streams_within(target, context)
    if streams == 0:
        assert PRICES.decode_seconds(1, context) > target
    else:
        assert PRICES.decode_seconds(streams, streams * context) <= target * (1 + 1e-9)
        assert streams == 512 or PRICES.decode_seconds(streams + 1, (streams + 1) * context) > target


def test_memory_bounds_streams() -> None:
    small = replace(PRICES, kv_capacity_tokens=10_000)
    assert small.streams_within(10.0, 1000) == 10


def test_a_busy_prompt_machines_price_of_a_token_is_that_of_its_full_steps() -> None:
    assert PRICES.prompt_token_seconds(500) == pytest.approx(
        PRICES.queue_seconds(100_000, 100_000 * 500) / 100_000, rel=0.01
    )
