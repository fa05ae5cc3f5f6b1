"""How the CPU attention puts rows together, against attention by its definition, with every unused slot poisoned."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine.model import cpu_attention
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_kernels.kv_write import kv_write, slots_of
from support.attention_definition import attention_by_definition

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Cache = tuple[Tensor, Tensor]


def make_rows(
    spans: list[tuple[int, int]], block_size: int, in_runs: bool, kv_heads: int = 2, head_size: int = 8
) -> tuple[list[AttentionRow], Cache]:
    """spans: (start, length) of each row. Blocks of a row lie in one run, or anywhere; what is not written is NaN."""
    counts = [-(-(start + length) // block_size) for start, length in spans]
    order = list(range(1, sum(counts) + 1)) if in_runs else (1 + torch.randperm(sum(counts))).tolist()
    cache = (torch.full((len(order) + 1, block_size, kv_heads, head_size), math.nan) for _ in range(2))
    key_cache, value_cache = cache
    key_cache[0], value_cache[0] = 0.0, 0.0
    rows, first = [], 0
    for (start, length), count in zip(spans, counts, strict=True):
        row = AttentionRow(start, length, order[first : first + count])
        first += count
        key, value = torch.randn(2, start + length, kv_heads, head_size).unbind()
        kv_write(key, value, key_cache, value_cache, slots_of(row.block_ids, 0, start + length, block_size))
        rows.append(row)
    return rows, (key_cache, value_cache)


def check(
    rows: list[AttentionRow],
    cache: Cache,
    block_size: int,
    heads: int = 6,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    query = torch.randn(sum(row.length for row in rows), heads, cache[0].shape[3])
    windows = (None, window)
    plan = cpu_attention.plan_attention(rows, block_size, query.dtype, windows)
    found = cpu_attention.paged_attention(query, *cache, plan, 0.35, window, soft_cap)
    expected = attention_by_definition(rows, query, *cache, 0.35, window, soft_cap)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    slots = [slots_of(row.block_ids, row.start, row.start + row.length, block_size) for row in rows]
    assert torch.equal(plan.write_slots, torch.cat(slots))
    assert plan.positions.tolist() == [p for row in rows for p in range(row.start, row.start + row.length)]


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 9) | st.just(1)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16, 32]),
    in_runs=st.booleans(),
    window=st.none() | st.integers(1, 700),
    soft_cap=st.none() | st.floats(0.5, 50.0),
)
def test_any_batch_equals_the_definition(
    spans: list[tuple[int, int]], block_size: int, in_runs: bool, window: int | None, soft_cap: float | None
) -> None:
    check(*make_rows(spans, block_size, in_runs), block_size, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("in_runs", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 257, 1000])
def test_rows_longer_than_a_tile_and_long_decodes_equal_the_definition(window: int | None, in_runs: bool) -> None:
    rows, cache = make_rows([(40, 513), (0, 270), (700, 1), (699, 1), (7, 1), (300, 2)], 16, in_runs)
    check(rows, cache, 16, window=window)


@pytest.mark.parametrize("in_runs", [True, False])
def test_decodes_of_one_context_length_equal_the_definition(in_runs: bool) -> None:
    rows, cache = make_rows([(31, 1)] * 5, 16, in_runs)
    check(rows, cache, 16)


def test_a_decode_that_reads_a_run_in_place_sees_no_slot_behind_it() -> None:
    rows, cache = make_rows([(300, 1)], 16, in_runs=True)
    assert torch.isnan(cache[0]).any()
    check(rows, cache, 16)


def test_bfloat16_is_near_the_definition() -> None:
    rows, (keys, values) = make_rows([(300, 1), (20, 13), (0, 40), (12, 1), (14, 1)], 16, in_runs=True)
    query = torch.randn(56, 6, 8).bfloat16()
    stored = keys.bfloat16(), values.bfloat16()
    found = cpu_attention.paged_attention(
        query, *stored, cpu_attention.plan_attention(rows, 16, torch.bfloat16), scale=0.35
    )
    assert found.dtype is torch.bfloat16
    expected = attention_by_definition(rows, query, *stored, scale=0.35)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


def test_a_block_table_too_short_for_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens need 2 blocks of 16"):
        cpu_attention.plan_attention([AttentionRow(0, 17, (5,))], 16, torch.float32)
