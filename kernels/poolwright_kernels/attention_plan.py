"""The work list of hybrid attention: which program attends which keys, made once per step and read by every layer.

Work is counted in tile steps: a tile's step over its width of keys costs about the same for a large tile, which
computes, as for a small one, which waits for memory. Each item costs its steps and `ITEM_STEPS` more.

- Large items (tiles of chunks) are long where the context is long: in buckets, longest first, they go to the lanes
  there and back, so that every lane gets its share of long and short ones. They are split along the keys only where
  there are too few of them to fill the lanes.
- Small items (decodes) fill what the large ones left. The steps of all decodes lie on one line, which is cut where a
  lane is full; a sequence on a cut is split, its parts are merged. So at most two parts of a lane need merging,
  however long or many the sequences are, and the workspace does not grow with them.

Items hold no KV head: program p works for KV head `p % kv_heads` of lane `p // kv_heads`. Here are only numbers; what
attends is `hybrid_attention`, and steps of nothing but decodes are planned on the device by `decode_plan`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poolwright_kernels.attention_tiles import Tiles

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

ITEM_FIELDS = 8  # sequence, first token, tokens, position of the first token, first key, end of keys, slot, 0
MERGE_FIELDS = 8  # token, slot of the first part, slot of the second, slots between two, parts, unused
ITEM_STEPS = 1  # what an item costs beside its tile steps: its queries, its result, filling the pipeline
MIN_SHARE_STEPS = 4  # fewer lanes are used rather than giving one less than this
MIN_LARGE_PART_STEPS = 16  # a part of a large tile leaves 64 KiB of partial result: it must be worth it
LARGE_PARTS_PER_LANE = 8


@dataclass(frozen=True, slots=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_size: int
    page_size: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} KV heads")

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """What a plan must be able to hold; its buffers keep their size and place, so a CUDA graph can replay over them."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class PlanLayout:
    """Where each part of a plan lies in one int32 buffer, which travels to the device in one copy."""

    shape: AttentionShape
    tiles: Tiles
    capacity: PlanCapacity
    lanes: int
    has_chunks: bool

    @cached_property
    def large_tokens(self) -> int:
        return self.tiles.large_tokens(self.shape.group)

    @cached_property
    def small_tokens(self) -> int:
        return self.tiles.small_tokens(self.shape.group)

    @cached_property
    def large_items(self) -> int:
        if not self.has_chunks:
            return 0
        chunks = min(self.capacity.sequences, self.capacity.tokens // (self.small_tokens + 1))
        return self.capacity.tokens // self.large_tokens + chunks + LARGE_PARTS_PER_LANE * self.lanes

    @cached_property
    def small_items(self) -> int:
        return self.capacity.sequences + self.lanes

    @cached_property
    def merges(self) -> int:
        return self.lanes * self.small_tokens + (self.capacity.tokens if self.has_chunks else 0)

    @cached_property
    def slots(self) -> int:
        """Token slots of the workspace of partial results."""
        large = LARGE_PARTS_PER_LANE * self.lanes * self.large_tokens if self.has_chunks else 0
        return 2 * self.lanes * self.small_tokens + large

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Of lane ranges, counts, large items, small items, merges, and the end; each a multiple of 4 (16 bytes)."""
        counts = 4 * self.lanes
        large = counts + 4
        small = large + ITEM_FIELDS * self.large_items
        merges = small + ITEM_FIELDS * self.small_items
        return 0, counts, large, small, merges, merges + MERGE_FIELDS * self.merges


class HostPlan(NamedTuple):
    packed: Ints  # of PlanLayout.offsets
    used: int  # elements of `packed` that must reach the device


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A plan on the device, as `hybrid_attention` takes it. Tensors keep their addresses from step to step.

    query_starts:    (sequences + 1,) int32: sequence s has the query tokens [query_starts[s], query_starts[s + 1])
    context_lens:    (sequences,) int32: keys of each sequence, those of this step included; 0 for a padding row
    block_tables:    (sequences, pages) int32, rows of any stride: page p holds keys from p · page_size on
    lane_ranges:     (lanes, 4) int32: begin and end of the lane's large items, then of its small items
    large_items, small_items:  (capacity, 8) int32
    merges:          (capacity, 8) int32; counts: (4,) int32: large items, small items, merges, 0
    partial_output:  (slots, heads, head_size) float32; partial_lse: (slots, heads) float32, in base 2: the workspace
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    lane_ranges: Tensor
    counts: Tensor
    large_items: Tensor
    small_items: Tensor
    merges: Tensor
    partial_output: Tensor
    partial_lse: Tensor
    layout: PlanLayout
    window: int  # keys outside of it were left out; 0: none were


class PlanBuffers:
    """The device memory of a plan and its workspace, allocated once."""

    def __init__(self, layout: PlanLayout, device: torch.device | str) -> None:
        self.layout = layout
        self.packed = torch.zeros(layout.offsets[-1], dtype=torch.int32, device=device)
        heads, head_size = layout.shape.heads, layout.shape.head_size
        self.partial_output = torch.empty(layout.slots, heads, head_size, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(layout.slots, heads, dtype=torch.float32, device=device)

    def upload(self, host: HostPlan) -> None:
        self.packed[: host.used].copy_(torch.from_numpy(host.packed[: host.used]), non_blocking=True)

    def plan(self, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor, window: int = 0) -> AttentionPlan:
        """Views only: made once per set of input tensors, and valid for whatever is uploaded later."""
        ranges, counts, large, small, merges, end = self.layout.offsets
        return AttentionPlan(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            lane_ranges=self.packed[ranges:counts].view(-1, 4),
            counts=self.packed[counts:large],
            large_items=self.packed[large:small].view(-1, ITEM_FIELDS),
            small_items=self.packed[small:merges].view(-1, ITEM_FIELDS),
            merges=self.packed[merges:end].view(-1, MERGE_FIELDS),
            partial_output=self.partial_output,
            partial_lse=self.partial_lse,
            layout=self.layout,
            window=window,
        )


def lanes_of(shape: AttentionShape, programs: int) -> int:
    """programs: how many the device runs at once. Every lane needs one for each KV head."""
    return max(1, programs // shape.kv_heads)


class _Step(NamedTuple):
    layout: PlanLayout
    query_lens: Longs
    context_lens: Longs
    first_tokens: Longs
    window: int

    def first_keys(self, positions: Longs, tile_keys: int) -> Longs:
        """The first key that a tile with its first query at such a position looks at; tiles begin at whole tiles."""
        if not self.window:
            return np.zeros(len(positions), np.int64)
        return np.maximum(positions - (self.window - 1), 0) // tile_keys * tile_keys


def plan_on_host(
    layout: PlanLayout,
    query_lens: npt.NDArray[np.integer],
    context_lens: npt.NDArray[np.integer],
    window: int = 0,
    into: Ints | None = None,
) -> HostPlan:
    """The plan of one step. Sequence s attends its query_lens[s] last tokens to all context_lens[s] of them.

    into: a buffer of layout.offsets[-1] elements to write to, pinned memory say. Raises ValueError where the step is
    larger than the capacity, or a sequence has more queries than context.
    """
    if len(query_lens) > layout.capacity.sequences:
        raise ValueError(f"{len(query_lens)} sequences in a plan for at most {layout.capacity.sequences}")
    queries, contexts = query_lens.astype(np.int64), context_lens.astype(np.int64)
    last_tokens = queries.cumsum()
    if len(queries) and last_tokens[-1] > layout.capacity.tokens:
        raise ValueError(f"{last_tokens[-1]} query tokens in a plan for at most {layout.capacity.tokens}")
    if (queries > contexts).any():
        raise ValueError("a sequence has more query tokens than context")
    step = _Step(layout, queries, contexts, last_tokens - queries, window)

    packed = np.empty(layout.offsets[-1], np.int32) if into is None else into
    _, counts_at, large_at, small_at, merges_at, end = layout.offsets
    ranges = packed[:counts_at].reshape(-1, 4)
    merges = packed[merges_at:end].reshape(-1, MERGE_FIELDS)
    is_large = queries > layout.small_tokens
    large = is_large.nonzero()[0]
    small = ((queries > 0) & ~is_large).nonzero()[0]
    large_count = small_count = merge_count = 0
    loads = None
    if len(large):
        if not layout.has_chunks:
            raise ValueError(f"a sequence has more than {layout.small_tokens} query tokens in a plan for decodes")
        small_steps = int(contexts[small].sum()) // layout.tiles.small_keys  # windows aside: it only guides splitting
        items = packed[large_at:small_at].reshape(-1, ITEM_FIELDS)
        large_count, merge_count, loads = _plan_large(step, large, small_steps, ranges, items, merges)
    else:
        ranges[:, :2] = 0
    if len(small):
        items = packed[small_at:merges_at].reshape(-1, ITEM_FIELDS)
        small_count, small_merges = _plan_small(step, small, loads, ranges, items, merges[merge_count:])
        merge_count += small_merges
    else:
        ranges[:, 2:] = 0
    packed[counts_at:large_at] = (large_count, small_count, merge_count, 0)
    return HostPlan(packed, merges_at + merge_count * MERGE_FIELDS)


def _plan_large(
    step: _Step, chosen: Longs, small_steps: int, ranges: Ints, items: Ints, merges: Ints
) -> tuple[int, int, Longs]:
    """Returns the count of items, that of merges, and the load of every lane in steps."""
    layout = step.layout
    lanes, tile_tokens, keys = layout.lanes, layout.large_tokens, layout.tiles.large_keys
    query_lens = step.query_lens[chosen]
    tiles = -(-query_lens // tile_tokens)
    count = int(tiles.sum())
    owner = chosen.repeat(tiles)
    offset = _count_up(tiles, count) * tile_tokens
    tokens = np.minimum(step.query_lens[owner] - offset, tile_tokens)
    position = (step.context_lens - step.query_lens)[owner] + offset
    end = position + tokens
    begin = step.first_keys(position, keys)
    steps = (end - begin + (keys - 1)) // keys
    table = _table(count, owner, step.first_tokens[owner] + offset, tokens, position, begin, end)

    merge_count = 0
    share = (int(steps.sum()) + small_steps) / lanes
    limit = max(MIN_LARGE_PART_STEPS, -int(-share // 4))
    longest = int(steps.max())
    if longest > limit and longest > share / 2:
        table, steps, merge_count = _split_large(layout, table, steps, limit, merges)
        count, longest = len(table), int(steps.max())

    # Longest bucket first, and there and back over the lanes.
    order = (steps // -(longest // 32 + 1)).astype(np.int16).argsort(kind="stable")
    turn = np.arange(count) % (2 * lanes)
    lane = np.minimum(turn, 2 * lanes - 1 - turn)
    loads = np.bincount(lane, weights=steps[order] + ITEM_STEPS, minlength=lanes)
    table.take(order[lane.astype(np.int16).argsort(kind="stable")], axis=0, out=items[:count])
    ends = np.bincount(lane, minlength=lanes).cumsum()
    ranges[0, 0] = 0
    ranges[1:, 0] = ends[:-1]
    ranges[:, 1] = ends
    return count, merge_count, loads.astype(np.int64)


def _split_large(layout: PlanLayout, table: Ints, steps: Longs, limit: int, merges: Ints) -> tuple[Ints, Longs, int]:
    """Cuts items longer than `limit` steps into equal parts. Returns the items, their steps, the count of merges."""
    keys = layout.tiles.large_keys
    part_steps = -(-steps // -(-steps // limit))
    parts = -(-steps // part_steps)
    split = parts > 1
    tokens = table[:, 2].astype(np.int64)
    slots = np.where(split, parts * tokens, 0)
    base = 2 * layout.lanes * layout.small_tokens + slots.cumsum() - slots

    merge = np.empty((int(split.sum()), MERGE_FIELDS), np.int32)
    merge[:, 0] = table[split, 1]
    merge[:, 1] = base[split]
    merge[:, 3] = tokens[split]
    merge[:, 2] = merge[:, 1] + merge[:, 3]
    merge[:, 4] = parts[split]
    merge_count = _write_merges(merges, merge, tokens[split])

    count = int(parts.sum())
    part = _count_up(parts, count)
    table = table.repeat(parts, axis=0)
    length = (part_steps * keys).repeat(parts)
    table[:, 4] += part * length
    table[:, 5] = np.minimum(table[:, 5], table[:, 4] + length)
    table[:, 6] = np.where(split.repeat(parts), base.repeat(parts) + part * table[:, 2], -1)
    return table, -(-(table[:, 5] - table[:, 4]).astype(np.int64) // keys), merge_count


def _plan_small(
    step: _Step, chosen: Longs, loads: Longs | None, ranges: Ints, items: Ints, merges: Ints
) -> tuple[int, int]:
    """loads: what lanes have to do already. Returns the counts of items and merges."""
    layout = step.layout
    lanes, slot_tokens, keys = layout.lanes, layout.small_tokens, layout.tiles.small_keys
    context, tokens = step.context_lens[chosen], step.query_lens[chosen]
    position = context - tokens
    low = step.first_keys(position, keys)
    steps = (context - low + (keys - 1)) // keys
    ends = (steps + ITEM_STEPS).cumsum()
    starts = ends - steps - ITEM_STEPS
    cuts = _cuts(int(ends[-1]), lanes, loads)  # lane l has [cuts[l], cuts[l + 1]) of the line

    # Pieces lie between the points where a sequence or a lane begins, the sequence first where both do.
    points = np.concatenate((starts, cuts[:-1]))
    order = points.argsort(kind="stable")
    points = points[order]
    sequence = (order < len(starts)).cumsum() - 1
    lane = np.arange(-1, len(points) - 1) - sequence
    origin = starts[sequence] + ITEM_STEPS
    since = np.maximum(points - origin, 0)
    until = np.empty_like(points)
    until[:-1] = points[1:]
    until[-1] = ends[-1]
    until -= origin
    kept = (until > since).nonzero()[0]  # not an empty lane, nor a cut at or just after a sequence's start
    sequence, lane, since, until = sequence[kept], lane[kept], since[kept], until[kept]

    table = _table(len(chosen), chosen, step.first_tokens[chosen], tokens, position, low, context)
    count = len(sequence)
    rows = items[:count]
    table.take(sequence, axis=0, out=rows)
    lane_ends = np.bincount(lane, minlength=lanes).cumsum()
    ranges[0, 2] = 0
    ranges[1:, 2] = lane_ends[:-1]
    ranges[:, 3] = lane_ends

    opens, closes = since == 0, until == steps[sequence]
    cut = (~(opens & closes)).nonzero()[0]
    if not len(cut):
        return count, 0
    # Slots are numbered by the lanes in use, so that the parts of a sequence after its first lie next to each other.
    rank = ((cuts[1:] > cuts[:-1]).cumsum() - 1)[lane[cut]]
    opens, closes, sequence = opens[cut], closes[cut], sequence[cut]
    bottom = low[sequence]
    rows[cut, 4] = bottom + since[cut] * keys
    rows[cut, 5] = np.minimum(bottom + until[cut] * keys, context[sequence])
    rows[cut, 6] = (rank + opens * lanes) * slot_tokens
    first, last = rank[opens], rank[closes]
    opening = cut[opens]
    merge = np.empty((len(first), MERGE_FIELDS), np.int32)
    merge[:, :2] = rows[opening, 1::5]  # the token, and the slot of the first part
    merge[:, 2] = (first + 1) * slot_tokens
    merge[:, 3] = slot_tokens
    merge[:, 4] = last - first + 1
    return count, _write_merges(merges, merge, tokens[sequence[opens]])


def _write_merges(merges: Ints, first_tokens: Ints, tokens: Longs) -> int:
    """first_tokens: the merge of the first token of each split item; those of its others lie one slot further each."""
    total = int(tokens.sum())
    rows = merges[:total]
    if total == len(tokens):
        rows[:] = first_tokens
    else:
        rows[:] = first_tokens.repeat(tokens, axis=0)
        rows[:, :3] += _count_up(tokens, total)[:, None].astype(np.int32)
    return total


def _table(count: int, *columns: Longs) -> Ints:
    """Items that hold all keys of their queries: they have no slot."""
    table = np.empty((count, ITEM_FIELDS), np.int32)
    for field, column in enumerate(columns):
        table[:, field] = column
    table[:, 6] = -1
    table[:, 7] = 0
    return table


def _count_up(counts: Longs, total: int) -> Longs:
    """0 … counts[0] - 1, 0 … counts[1] - 1, and so on; total is their sum."""
    return np.arange(total) - (counts.cumsum() - counts).repeat(counts)


def _cuts(total: int, lanes: int, loads: Longs | None) -> Longs:
    """Where a line of `total` steps is cut, so that lanes end together, with what they have already."""
    most_lanes = min(max(total // MIN_SHARE_STEPS, 1), lanes)
    if loads is None:
        return np.minimum(np.arange(lanes + 1) * -(-total // most_lanes), total)
    # Water runs into the emptiest lanes: with k of them in use it stands at level[k - 1].
    order = loads.argsort(kind="stable")
    depth = loads[order]
    level = (total + depth.cumsum()) / np.arange(1, lanes + 1)
    used = min(int((level > depth).sum()), most_lanes)
    shares = np.zeros(lanes)
    shares[order[:used]] = np.maximum(level[used - 1] - depth[:used], 0)
    cuts = np.zeros(lanes + 1, np.int64)
    cuts[1:] = shares.cumsum().round()
    cuts[-1] = total
    return cuts
