"""The CPU attention and the KV write against attention written out in float64, with every unused slot poisoned."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine.model.cpu_attention import AttentionRow, paged_attention, plan_attention
from poolwright_kernels.kv_write import kv_write, slots_of
from support import attention_definition

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@dataclass(frozen=True)
class Case:
    """Sequences whose keys and values lie in the caches, and of which the last `length` positions are queried."""

    rows: list[AttentionRow]
    queries: list[Tensor]  # (length, heads, head_size) each
    key_cache: Tensor
    value_cache: Tensor


def make_case(
    spans: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int, head_size: int, seed: int = 0
) -> Case:
    """spans: (start, length) of each row. Block tables are shuffled; what is not written is NaN, block 0 excepted."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-(start + length) // block_size) for start, length in spans]
    order = (1 + torch.randperm(sum(blocks) + 3, generator=generator)).tolist()
    cache_shape = (len(order) + 1, block_size, kv_heads, head_size)
    key_cache, value_cache = torch.full(cache_shape, math.nan), torch.full(cache_shape, math.nan)
    key_cache[0], value_cache[0] = 0.0, 0.0
    rows, queries = [], []
    for (start, length), count in zip(spans, blocks, strict=True):
        row = AttentionRow(start, length, tuple(order.pop() for _ in range(count)))
        key = torch.randn(start + length, kv_heads, head_size, generator=generator)
        value = torch.randn(start + length, kv_heads, head_size, generator=generator)
        kv_write(key, value, key_cache, value_cache, slots_of(row.block_ids, 0, start + length, block_size))
        rows.append(row)
        queries.append(torch.randn(length, heads, head_size, generator=generator))
    return Case(rows, queries, key_cache, value_cache)


def attention_by_definition(
    case: Case, scale: float, window: int | None = None, soft_cap: float | None = None
) -> Tensor:
    return attention_definition.attention_by_definition(
        case.rows, torch.cat(case.queries), case.key_cache, case.value_cache, scale, window, soft_cap
    )


def run(
    case: Case,
    block_size: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    plan = plan_attention(case.rows, block_size, dtype, (None, window))
    query = torch.cat(case.queries).to(dtype)
    return paged_attention(query, case.key_cache.to(dtype), case.value_cache.to(dtype), plan, scale, window, soft_cap)


MIXED = [(0, 5), (37, 1), (20, 13), (0, 1), (64, 1), (15, 1), (16, 1), (3, 2)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_a_mixed_batch_equals_the_definition_whatever_unused_slots_hold(
    block_size: int, heads: int, kv_heads: int
) -> None:
    case = make_case(MIXED, block_size, heads, kv_heads, head_size=16)
    found = run(case, block_size, scale=0.3)
    assert found.shape == (sum(row.length for row in case.rows), heads, 16)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), attention_by_definition(case, 0.3), atol=2e-6, rtol=1e-5)


def test_a_chunk_longer_than_one_tile_equals_the_definition() -> None:
    case = make_case([(40, 300), (0, 270)], 16, heads=2, kv_heads=1, head_size=8)
    expected = attention_by_definition(case, 0.35)
    torch.testing.assert_close(run(case, 16, 0.35).double(), expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding() -> None:
    case = make_case(MIXED, 16, heads=4, kv_heads=2, head_size=16)
    found = run(case, 16, 0.25, torch.bfloat16)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), attention_by_definition(case, 0.25), atol=4e-2, rtol=4e-2)


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    window=st.none() | st.integers(1, 50),
    soft_cap=st.none() | st.floats(0.5, 50.0),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_the_definition(
    spans: list[tuple[int, int]], block_size: int, window: int | None, soft_cap: float | None, seed: int
) -> None:
    case = make_case(spans, block_size, heads=4, kv_heads=2, head_size=8, seed=seed)
    expected = attention_by_definition(case, 0.35, window, soft_cap)
    found = run(case, block_size, 0.35, window=window, soft_cap=soft_cap)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 100, 256, 257, 299, 1000])
def test_a_windowed_chunk_longer_than_one_tile_equals_the_definition(window: int) -> None:
    case = make_case([(40, 300), (0, 270), (300, 1), (7, 1)], 16, heads=2, kv_heads=1, head_size=8)
    expected = attention_by_definition(case, 0.35, window)
    torch.testing.assert_close(run(case, 16, 0.35, window=window).double(), expected, atol=2e-6, rtol=1e-5)


def test_a_write_lands_in_its_slots_and_nowhere_else() -> None:
    key_cache, value_cache = torch.zeros(4, 2, 1, 3), torch.zeros(4, 2, 1, 3)
    slots = slots_of((3, 1), start=1, stop=4, block_size=2)
    assert slots.tolist() == [7, 2, 3]
    kv_write(torch.ones(3, 1, 3), torch.full((3, 1, 3), 2.0), key_cache, value_cache, slots)
    written = torch.zeros(8, dtype=torch.bool).index_fill(0, slots, True)
    assert (key_cache.flatten(0, 1)[:, 0, 0] == written.float()).all()
    assert (value_cache.flatten(0, 1)[:, 0, 0] == 2 * written.float()).all()


def test_a_block_table_too_short_for_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens need 2 blocks of 16, the table has 1"):
        slots_of((5,), 0, 17, 16)
