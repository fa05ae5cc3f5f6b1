"""The work list covers every query and key once, its parts are all merged, and its lanes end together. Numbers only."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poolwright_kernels.attention_plan import (
    ITEM_STEPS,
    MIN_SHARE_STEPS,
    AttentionPlan,
    AttentionShape,
    PlanBuffers,
    PlanCapacity,
    PlanLayout,
    plan_on_host,
)
from poolwright_kernels.attention_tiles import Tiles, tiles_for
from poolwright_kernels.decode_plan import plan_on_device

TILES = Tiles(32, 16, 3, 16, 16, 3, warps=4, programs_per_multiprocessor=1)


def layout_of(
    sequences: int, tokens: int, lanes: int, group: int = 4, has_chunks: bool = True, tiles: Tiles = TILES
) -> PlanLayout:
    return PlanLayout(AttentionShape(group * 2, 2, 32, 16), tiles, PlanCapacity(sequences, tokens), lanes, has_chunks)


def buffers_of(
    layout: PlanLayout, query_lens: npt.NDArray, context_lens: npt.NDArray, window: int
) -> tuple[PlanBuffers, AttentionPlan]:
    """Full of rubbish, so that whatever is read was written."""
    buffers = PlanBuffers(layout, "cpu")
    buffers.packed.fill_(10**9)
    starts = torch.from_numpy(np.concatenate(([0], query_lens.cumsum())).astype(np.int32))
    tables = torch.zeros(len(query_lens), 1, dtype=torch.int32)
    return buffers, buffers.plan(starts, torch.from_numpy(context_lens.astype(np.int32)), tables, window)


def items_of(plan: AttentionPlan) -> list[tuple[int, bool, list[int]]]:
    """(lane, is it large, fields) of each item that some lane works on."""
    found = []
    taken: set[tuple[bool, int]] = set()
    for lane, (large, large_end, small, small_end) in enumerate(plan.lane_ranges.tolist()):
        for is_large, items, begin, end in (
            (True, plan.large_items, large, large_end),
            (False, plan.small_items, small, small_end),
        ):
            for index in range(begin, end):
                assert (is_large, index) not in taken
                taken.add((is_large, index))
                found.append((lane, is_large, items[index].tolist()))
    return found


def assert_covers(plan: AttentionPlan, query_lens: npt.NDArray, context_lens: npt.NDArray) -> None:
    """Each visible pair of query and key is in one item, and results of items meet in one output for each token."""
    layout, window = plan.layout, plan.window
    tokens = int(query_lens.sum())
    owner = np.arange(len(query_lens)).repeat(query_lens)
    position = np.concatenate([np.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)])
    key = np.arange(max(int(context_lens.max()), 1))
    times = np.zeros((tokens, len(key)), int)
    written = np.zeros(tokens, int)
    slots: dict[int, int] = {}
    for _, is_large, (sequence, first, count, start, begin, end, slot, zero) in items_of(plan):
        rows = np.arange(first, first + count)
        assert zero == 0
        assert 0 < count <= (layout.large_tokens if is_large else layout.small_tokens)
        assert (owner[rows] == sequence).all()
        assert (position[rows] == start + np.arange(count)).all()
        assert 0 <= begin < end <= context_lens[sequence]
        times[first : first + count, begin:end] += 1
        if slot < 0:
            written[rows] += 1
        for token in range(count if slot >= 0 else 0):
            assert slot + token < layout.slots
            assert slot + token not in slots
            slots[slot + token] = first + token
    for token, opening, continuation, stride, parts in plan.merges[: plan.counts[2], :5].tolist():
        if parts:
            assert parts > 1
            written[token] += 1
            for slot in [opening, *(continuation + part * stride for part in range(parts - 1))]:
                assert slots.pop(slot) == token
    assert not slots
    assert (written == 1).all()
    visible = key <= position[:, None]
    if window:
        visible &= key > position[:, None] - window
    assert (times[visible] == 1).all()
    assert (times <= 1).all()


@st.composite
def steps(draw: st.DrawFn, chunks: bool = True) -> tuple[npt.NDArray, npt.NDArray]:
    query_lens, context_lens = [], []
    for _ in range(draw(st.integers(1, 24))):
        query = (
            draw(st.sampled_from([0, 1, 1, 1, 2, 4])) if not chunks or draw(st.booleans()) else draw(st.integers(0, 90))
        )
        before = draw(st.integers(0, 40) | st.integers(0, 1500))
        query_lens.append(query)
        context_lens.append(query + before if query else 0)
    return np.array(query_lens), np.array(context_lens)


@settings(max_examples=150, deadline=None)
@given(
    step=steps(),
    lanes=st.integers(1, 30),
    group=st.sampled_from([1, 3, 4, 7, 8, 16]),
    window=st.just(0) | st.integers(1, 300),
)
def test_a_plan_of_the_host_covers_every_pair_once(
    step: tuple[npt.NDArray, npt.NDArray], lanes: int, group: int, window: int
) -> None:
    query_lens, context_lens = step
    layout = layout_of(len(query_lens), max(int(query_lens.sum()), 1), lanes, group)
    buffers, plan = buffers_of(layout, query_lens, context_lens, window)
    buffers.upload(plan_on_host(layout, query_lens, context_lens, window))
    if query_lens.any():
        assert_covers(plan, query_lens, context_lens)
    else:
        assert not items_of(plan)


@settings(max_examples=15, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 60) | st.integers(0, 3000), min_size=1, max_size=12),
    tokens=st.integers(1, 4),
    lanes=st.integers(1, 9),
    window=st.just(0) | st.integers(1, 300),
)
def test_a_plan_of_the_device_is_that_of_the_host(contexts: list[int], tokens: int, lanes: int, window: int) -> None:
    context_lens = np.array([max(context, tokens) if context else 0 for context in contexts])
    query_lens = np.where(context_lens > 0, tokens, 0)
    layout = layout_of(len(contexts), len(contexts) * tokens, lanes, has_chunks=False)
    _, plan = buffers_of(layout, np.full(len(contexts), tokens), context_lens, window)
    plan_on_device(plan, tokens)
    buffers, by_host = buffers_of(layout, query_lens, context_lens, window)
    buffers.upload(plan_on_host(layout, query_lens, context_lens, window))
    # Padding rows have query tokens on the device and none for the host: the tokens' numbers differ, nothing else does.
    assert [(lane, item[:1] + item[2:]) for lane, _, item in items_of(plan)] == [
        (lane, item[:1] + item[2:]) for lane, _, item in items_of(by_host)
    ]
    if context_lens.all():
        assert_covers(plan, query_lens, context_lens)


@settings(max_examples=100, deadline=None)
@given(step=steps(), lanes=st.integers(1, 30))
def test_lanes_end_together(step: tuple[npt.NDArray, npt.NDArray], lanes: int) -> None:
    """No lane has more than an even share and the longest large item, in steps."""
    query_lens, context_lens = step
    layout = layout_of(len(query_lens), max(int(query_lens.sum()), 1), lanes)
    buffers, plan = buffers_of(layout, query_lens, context_lens, 0)
    buffers.upload(plan_on_host(layout, query_lens, context_lens))
    loads, longest = np.zeros(lanes), 0
    for lane, is_large, item in items_of(plan):
        cost = -(-(item[5] - item[4]) // 16) + ITEM_STEPS
        loads[lane] += cost
        if is_large:
            longest = max(longest, cost)
    # Besides: rounding of two cuts, the second half of an item cut in two, and shares that are not worth a lane.
    assert loads.max(initial=0) <= loads.sum() / lanes + longest + 2 * ITEM_STEPS + 2 * MIN_SHARE_STEPS


def test_decodes_of_one_length_are_not_split_where_lanes_divide_them() -> None:
    layout = layout_of(64, 64, lanes=16, has_chunks=False)
    ones, contexts = np.ones(64, int), np.full(64, 4096)
    buffers, plan = buffers_of(layout, ones, contexts, 0)
    buffers.upload(plan_on_host(layout, ones, contexts))
    assert plan.counts.tolist() == [0, 64, 0, 0]


def test_one_long_decode_uses_every_lane() -> None:
    layout = layout_of(1, 1, lanes=49, has_chunks=False)
    one, context = np.ones(1, int), np.array([65536])
    buffers, plan = buffers_of(layout, one, context, 0)
    buffers.upload(plan_on_host(layout, one, context))
    lengths = [item[5] - item[4] for _, _, item in items_of(plan)]
    assert len(lengths) == 49
    assert max(lengths) - min(lengths) <= 49 * 16


def test_a_prompt_that_fills_the_lanes_is_not_split() -> None:
    shape = AttentionShape(32, 8, 128, 16)
    layout = PlanLayout(shape, tiles_for(128, 4, has_chunks=True), PlanCapacity(1, 8192), 16, True)
    lens = np.array([8192])
    buffers, plan = buffers_of(layout, lens, lens, 0)
    buffers.upload(plan_on_host(layout, lens, lens))
    assert plan.counts.tolist() == [256, 0, 0, 0]
    loads = np.zeros(16)
    for lane, _, item in items_of(plan):
        loads[lane] += item[5] - item[4]
    assert loads.max() < 1.02 * loads.mean()


def test_a_workspace_is_bounded_however_long_the_sequences_are() -> None:
    shape = AttentionShape(32, 8, 128, 16)
    for has_chunks, limit in ((True, 80e6), (False, 8e6)):
        tiles = tiles_for(128, 4, has_chunks)
        layout = PlanLayout(
            shape, tiles, PlanCapacity(1024, 16384), 132 * tiles.programs_per_multiprocessor // 8, has_chunks
        )
        assert layout.slots * 32 * 128 * 4 < limit


def test_a_step_beyond_the_capacity_is_refused() -> None:
    layout = layout_of(2, 30, lanes=2)
    with pytest.raises(ValueError, match="3 sequences in a plan for at most 2"):
        plan_on_host(layout, np.ones(3, int), np.ones(3, int))
    with pytest.raises(ValueError, match="31 query tokens in a plan for at most 30"):
        plan_on_host(layout, np.array([1, 30]), np.array([1, 30]))
    with pytest.raises(ValueError, match="more query tokens than context"):
        plan_on_host(layout, np.array([1, 5]), np.array([1, 4]))
    decodes = layout_of(2, 30, lanes=2, has_chunks=False)
    with pytest.raises(ValueError, match="more than 4 query tokens in a plan for decodes"):
        plan_on_host(decodes, np.array([1, 5]), np.array([1, 9]))
    _, plan = buffers_of(decodes, np.ones(3, int), np.ones(3, int), 0)
    with pytest.raises(ValueError, match="3 sequences in a plan for at most 2"):
        plan_on_device(plan)
    _, plan = buffers_of(decodes, np.ones(2, int), np.ones(2, int), 0)
    with pytest.raises(ValueError, match="5 query tokens for each sequence in a plan for at most 4"):
        plan_on_device(plan, tokens=5)
    with pytest.raises(ValueError, match="no multiple"):
        AttentionShape(6, 4, 64, 16)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_one_buffer_serves_step_after_step(data: st.DataObject) -> None:
    """What an earlier step left in the buffer does not show in a later one."""
    layout = layout_of(24, 24 * 90, lanes=data.draw(st.integers(1, 9)))
    into = np.full(layout.offsets[-1], 10**9, np.int32)
    for _ in range(3):
        query_lens, context_lens = data.draw(steps())
        fresh = plan_on_host(layout, query_lens, context_lens)
        again = plan_on_host(layout, query_lens, context_lens, into=into)
        assert again.used == fresh.used
        buffers, plan = buffers_of(layout, query_lens, context_lens, 0)
        buffers.upload(again)
        if query_lens.any():
            assert_covers(plan, query_lens, context_lens)
