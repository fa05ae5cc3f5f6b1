"""Attention in C against attention by its definition, with every slot poisoned that no query of a row sees; and that a
row's output is its own, bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.native.attention import Heads, RowPlan, attend
from poolwright_engine.native.library import NoLibrary, library
from poolwright_kernels.kv_write import kv_write, slots_of
from support.attention_definition import attention_by_definition

pytestmark = pytest.mark.usefixtures("one_torch_thread", "compiled")

Cache = tuple[Tensor, Tensor]
Spans = list[tuple[int, int]]  # (start, length) of each row
SCALE = 0.21


@pytest.fixture(scope="module")
def compiled() -> None:
    try:
        library()
    except NoLibrary as e:
        pytest.skip(f"no library: {e}")


def make_rows(
    spans: Spans, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, window: int | None = None
) -> tuple[list[AttentionRow], Cache]:
    """Blocks lie anywhere; what no query sees, the null block included, is NaN."""
    counts = [-(-(start + length) // block_size) for start, length in spans]
    order = (1 + torch.randperm(sum(counts))).tolist()
    cache = tuple(
        torch.full((len(order) + 1, block_size, kv_heads, head_size), math.nan, dtype=dtype) for _ in range(2)
    )
    rows, first = [], 0
    for (start, length), count in zip(spans, counts, strict=True):
        row = AttentionRow(start, length, order[first : first + count])
        first += count
        seen = 0 if window is None else max(0, start + 1 - window)
        key, value = torch.randn(2, start + length - seen, kv_heads, head_size).to(dtype).unbind()
        kv_write(key, value, cache[0], cache[1], slots_of(row.block_ids, seen, start + length, block_size))
        rows.append(row)
    return rows, (cache[0], cache[1])


def attended(
    rows: list[AttentionRow],
    query: Tensor,
    cache: Cache,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    _, block_size, kv_heads, head_size = cache[0].shape
    heads = Heads(query.dtype, query.shape[1], kv_heads, head_size, SCALE, soft_cap)
    firsts = [sum(row.length for row in rows[:i]) for i in range(len(rows))]
    starts, lengths, tables = zip(*((row.start, row.length, row.block_ids) for row in rows), strict=True)
    plan = RowPlan(heads, firsts, starts, lengths, tables, block_size, window)
    out = torch.full_like(query, math.nan)
    attend(query, *cache, plan, out)
    return out


def misses(
    found: Tensor,
    rows: list[AttentionRow],
    query: Tensor,
    cache: Cache,
    window: int | None = None,
    soft_cap: float | None = None,
) -> float:
    """The largest difference from the definition, as a part of what rounding may cause: of bfloat16, of weights and of
    the output, half a unit of the last of eight bits; of float32, 1e-5 of the largest that values could sum to."""
    keys, values = (stored.nan_to_num() for stored in cache)  # the definition multiplies what is not seen by zero
    wanted, sizes = (
        attention_by_definition(rows, query, keys, of, SCALE, window, soft_cap) for of in (values, values.abs())
    )
    allowed = 1e-5 * sizes
    if query.dtype == torch.bfloat16:
        allowed += 2**-8 * (sizes + wanted.abs())
    return ((found.double() - wanted).abs() / allowed).max().item()


def check(
    spans: Spans,
    block_size: int,
    kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    rows, cache = make_rows(spans, block_size, kv_heads, head_size, dtype, window)
    query = torch.randn(sum(row.length for row in rows), kv_heads * group, head_size).to(dtype)
    assert misses(attended(rows, query, cache, window, soft_cap), rows, query, cache, window, soft_cap) < 1


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 700), st.just(1) | st.integers(1, 9) | st.integers(1, 90)), min_size=1, max_size=5
    ),
    block_size=st.sampled_from([3, 16, 32]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    head_size=st.sampled_from([8, 64, 72, 80, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 800),
    soft_cap=st.none() | st.floats(0.5, 50.0),
)
def test_any_batch_equals_the_definition(
    spans: Spans,
    block_size: int,
    kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
) -> None:
    check(spans, block_size, kv_heads, group, head_size, dtype, window, soft_cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 512, 700])
def test_contexts_of_several_pieces_and_chunks_of_several_tasks_equal_the_definition(
    window: int | None, dtype: torch.dtype
) -> None:
    check([(1100, 1), (511, 1), (512, 1), (2047, 3), (1023, 130), (0, 200)], 16, 2, 3, 64, dtype, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_far_apart_are_no_trouble(dtype: torch.dtype) -> None:
    rows, cache = make_rows([(600, 1), (130, 40)], 16, 1, 64, dtype)
    cache[0].mul_(30)
    query = torch.randn(41, 3, 64).to(dtype)
    assert misses(attended(rows, query, cache), rows, query, cache) < 10  # scores around fifty, in float32


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 1200), st.sampled_from([1, 1, 4, 50])), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 800),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(spans: Spans, dtype: torch.dtype, window: int | None) -> None:
    rows, cache = make_rows(spans, 16, 2, 64, dtype, window)
    query = torch.randn(sum(row.length for row in rows), 6, 64).to(dtype)
    together = attended(rows, query, cache, window).split([row.length for row in rows])
    for row, own, beside in zip(rows, query.split([row.length for row in rows]), together, strict=True):
        assert torch.equal(attended([row], own.clone(), cache, window), beside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    rows, cache = make_rows([(1700, 1), (300, 1), (900, 5), (200, 150)], 16, 3, 64, dtype)
    query = torch.randn(157, 9, 64).to(dtype)
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(attended(rows, query, cache))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_depend_on_how_many_share_its_call_within_short_rows(dtype: torch.dtype) -> None:
    (row,), cache = make_rows([(1300, 6)], 16, 2, 64, dtype)
    query = torch.randn(6, 6, 64).to(dtype)
    together = attended([row], query, cache)
    for i in range(6):
        alone = attended([AttentionRow(1300 + i, 1, row.block_ids)], query[i : i + 1].clone(), cache)
        assert torch.equal(alone[0], together[i])


def test_other_rows_of_the_output_stay() -> None:
    (row,), cache = make_rows([(40, 2)], 16, 1, 64, torch.float32)
    query = torch.randn(5, 1, 64)
    out = torch.zeros_like(query)
    heads = Heads(torch.float32, 1, 1, 64, SCALE)
    attend(query, *cache, RowPlan(heads, [2], [40], [2], [row.block_ids], 16), out)
    assert misses(out[2:4], [row], query[2:4], cache) < 1
    assert not out[[0, 1, 4]].any()


def test_a_table_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens need 2 blocks of 16, not 1"):
        RowPlan(Heads(torch.float32, 1, 1, 64, SCALE), [0], [16], [1], [[3]], 16)


def test_no_rows_are_no_work() -> None:
    out = torch.zeros(0, 1, 64)
    attend(out, out, out, RowPlan(Heads(torch.float32, 1, 1, 64, SCALE), [], [], [], [], 16), out)
