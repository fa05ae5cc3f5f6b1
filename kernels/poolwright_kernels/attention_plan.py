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
Floats = npt.NDArray[np.float64]

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
    def numbers(self) -> Ints:
        """0, 1, … as far as anything is counted."""
        return np.arange(max(self.large_items, self.small_items), dtype=np.int32)

    @cached_property
    def deal(self) -> tuple[Longs, Longs]:
        """Large items go to the lanes there and back: the lane of each, and the items of the first lane, of the second
        …, each lane's in their order."""
        turn = self.numbers[: self.large_items] % (2 * self.lanes)
        lane = np.minimum(turn, 2 * self.lanes - 1 - turn).astype(np.int64)
        return lane, lane.argsort(kind="stable")

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


def _first_keys(positions: Ints, window: int, tile_keys: int) -> Ints:
    """The first key that a tile with its first query at such a position looks at; tiles begin at whole tiles."""
    return np.maximum(positions - (window - 1), 0) // tile_keys * tile_keys


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
    packed = np.empty(layout.offsets[-1], np.int32) if into is None else into
    _, counts_at, large_at, small_at, merges_at, end = layout.offsets
    ranges = packed[:counts_at].reshape(-1, 4)
    if not len(query_lens):
        packed[:large_at] = 0
        return HostPlan(packed, merges_at)
    queries, contexts = query_lens.astype(np.int32, copy=False), context_lens.astype(np.int32, copy=False)
    last_tokens = queries.cumsum()
    if last_tokens[-1] > layout.capacity.tokens:
        raise ValueError(f"{last_tokens[-1]} query tokens in a plan for at most {layout.capacity.tokens}")
    whole = np.empty((len(queries), ITEM_FIELDS), np.int32)  # each sequence as one item, which has no slot
    whole[:, 0] = layout.numbers[: len(queries)]
    whole[:, 1] = last_tokens - queries
    whole[:, 2] = queries
    whole[:, 3] = position = contexts - queries
    whole[:, 4] = _first_keys(position, window, layout.tiles.small_keys) if window else 0
    whole[:, 5] = contexts
    whole[:, 6] = -1
    whole[:, 7] = 0
    if np.minimum.reduce(position) < 0:
        raise ValueError("a sequence has more query tokens than context")

    merges = packed[merges_at:end].reshape(-1, MERGE_FIELDS)
    is_large = queries > layout.small_tokens
    large = is_large.nonzero()[0]
    small = (is_large ^ (queries > 0)).nonzero()[0]
    large_count = small_count = merge_count = 0
    loads = None
    if len(large):
        if not layout.has_chunks:
            raise ValueError(f"a sequence has more than {layout.small_tokens} query tokens in a plan for decodes")
        items = packed[large_at:small_at].reshape(-1, ITEM_FIELDS)
        all_keys = int(np.add.reduce(contexts, dtype=np.int64))
        large_count, merge_count, loads = _plan_large(
            layout, whole.take(large, axis=0, mode="clip"), window, all_keys, ranges, items, merges
        )
    else:
        ranges[:, :2] = 0
    if len(small):
        items = packed[small_at:merges_at].reshape(-1, ITEM_FIELDS)
        small_count, small_merges = _plan_small(
            layout, whole.take(small, axis=0, mode="clip"), loads, ranges, items, merges[merge_count:]
        )
        merge_count += small_merges
    else:
        ranges[:, 2:] = 0
    packed[counts_at:large_at] = (large_count, small_count, merge_count, 0)
    return HostPlan(packed, merges_at + merge_count * MERGE_FIELDS)


def _plan_large(
    layout: PlanLayout, chunks: Ints, window: int, all_keys: int, ranges: Ints, items: Ints, merges: Ints
) -> tuple[int, int, Floats]:
    """chunks: each as one item; all_keys: those of all sequences of the step. Returns the count of items, that of
    merges, and the load of every lane in steps."""
    lanes, tile_tokens, keys = layout.lanes, layout.large_tokens, layout.tiles.large_keys
    tiles = (chunks[:, 2] + (tile_tokens - 1)) // tile_tokens
    ends = tiles.cumsum()
    count = int(ends[-1])
    offset = (layout.numbers[:count] - (ends - tiles).repeat(tiles)) * tile_tokens
    table = chunks.repeat(tiles, axis=0)
    position, tokens = table[:, 3], table[:, 2]
    table[:, 1:4:2] += offset[:, None]
    tokens -= offset
    np.minimum(tokens, tile_tokens, out=tokens)
    np.add(position, tokens, out=table[:, 5])
    if window:
        table[:, 4] = _first_keys(position, window, keys)
    steps = (table[:, 5] - table[:, 4] + (keys - 1)) // keys

    merge_count = 0
    # Of the small items, windows aside: it only guides splitting.
    small_steps = (all_keys - int(np.add.reduce(chunks[:, 5]))) // layout.tiles.small_keys
    share = (int(np.add.reduce(steps)) + small_steps) / lanes
    limit = max(MIN_LARGE_PART_STEPS, -int(-share // 4))
    longest = int(np.maximum.reduce(steps))
    if longest > limit and longest > share / 2:
        table, steps, merge_count = _split_large(layout, table, steps, limit, merges)
        count, longest = len(table), int(np.maximum.reduce(steps))

    # Longest bucket first.
    order = (steps // -(longest // 32 + 1)).astype(np.int16).argsort(kind="stable")
    lane_of, dealt = layout.deal
    lane = lane_of[:count]
    table.take(order[dealt[dealt < count]], axis=0, out=items[:count], mode="clip")
    loads = np.bincount(lane, weights=steps[order] + ITEM_STEPS, minlength=lanes)
    ends = np.bincount(lane, minlength=lanes).cumsum()
    ranges[0, 0] = 0
    ranges[1:, 0] = ends[:-1]
    ranges[:, 1] = ends
    return count, merge_count, loads.astype(np.float64, copy=False)


def _split_large(layout: PlanLayout, table: Ints, steps: Ints, limit: int, merges: Ints) -> tuple[Ints, Ints, int]:
    """Cuts items longer than `limit` steps into equal parts. Returns the items, their steps, the count of merges."""
    keys = layout.tiles.large_keys
    part_steps = -(-steps // -(-steps // limit))
    parts = -(-steps // part_steps)
    split = parts > 1
    tokens = table[:, 2]
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
    return table, (table[:, 5] - table[:, 4] + (keys - 1)) // keys, merge_count


def _plan_small(
    layout: PlanLayout, decodes: Ints, loads: Floats | None, ranges: Ints, items: Ints, merges: Ints
) -> tuple[int, int]:
    """decodes: each as one item. loads: what lanes have to do already. Returns the counts of items and merges."""
    lanes, slot_tokens, keys = layout.lanes, layout.small_tokens, layout.tiles.small_keys
    costs = (decodes[:, 5] - decodes[:, 4] + (keys - 1 + keys * ITEM_STEPS)) // keys
    line = np.empty(len(costs) + 1, np.int64)  # sequence s has [line[s], line[s + 1])
    line[0] = 0
    costs.cumsum(out=line[1:])
    cuts = _cuts(int(line[-1]), lanes, loads)  # lane l has [cuts[l], cuts[l + 1])

    # A cut within a sequence's steps splits it, the first of those at one place; at or just after its start none does.
    begins = cuts[1:-1]
    fresh = begins > cuts[:-2]
    sequence = line[1:].searchsorted(begins, side="right")
    since = begins - line[sequence] - ITEM_STEPS
    splits = fresh & (since > 0)
    first_items = sequence + splits.cumsum()
    ranges[0, 2] = 0
    ranges[1:, 2] = first_items
    ranges[:-1, 3] = first_items
    at = splits.nonzero()[0]
    count = len(costs) + len(at)
    ranges[-1, 3] = count
    rows = items[:count]
    if not len(at):
        rows[:] = decodes
        return count, 0
    later = first_items[at]  # items that go on with what the item before them began
    numbers = layout.numbers[:count]
    decodes.take(numbers - later.searchsorted(numbers, side="right"), axis=0, out=rows, mode="clip")
    first_key, last_key, slot = rows[:, 4], rows[:, 5], rows[:, 6]
    first_key[later] = last_key[later - 1] = first_key[later] + since[at] * keys
    # Slots are numbered by the lanes in use, so that the parts of a sequence after its first lie next to each other.
    slots = fresh.cumsum()[at] * slot_tokens
    slot[later] = slots
    owner = sequence[at]
    opens = np.ones(len(at), bool)
    np.not_equal(owner[1:], owner[:-1], out=opens[1:])
    first = opens.nonzero()[0]
    opening = later[first] - 1
    seconds = slots[first]
    slot[opening] = seconds + (lanes - 1) * slot_tokens
    merge = np.empty((len(first), MERGE_FIELDS), np.int32)
    merge[:, :2] = rows[opening, 1::5]  # the token, and the slot of the first part
    merge[:, 2] = seconds
    merge[:, 3] = slot_tokens
    merge[:-1, 4] = first[1:] - first[:-1] + 1
    merge[-1, 4] = len(at) - first[-1] + 1
    return count, _write_merges(merges, merge, rows[opening, 2])


def _write_merges(merges: Ints, first_tokens: Ints, tokens: Ints) -> int:
    """first_tokens: the merge of the first token of each split item; those of its others lie one slot further each."""
    total = int(np.add.reduce(tokens))
    rows = merges[:total]
    if total == len(tokens):
        rows[:] = first_tokens
    else:
        rows[:] = first_tokens.repeat(tokens, axis=0)
        rows[:, :3] += _count_up(tokens, total)[:, None].astype(np.int32)
    return total


def _count_up(counts: npt.NDArray[np.integer], total: int) -> Longs:
    """0 … counts[0] - 1, 0 … counts[1] - 1, and so on; total is their sum."""
    return np.arange(total) - (counts.cumsum() - counts).repeat(counts)


def _cuts(total: int, lanes: int, loads: Floats | None) -> Longs:
    """Where a line of `total` steps is cut, so that lanes end together, with what they have already."""
    most_lanes = min(max(total // MIN_SHARE_STEPS, 1), lanes)
    if loads is None:
        return np.minimum(np.arange(lanes + 1) * -(-total // most_lanes), total)
    # Water runs into the emptiest lanes: with k of them in use it stands at level[k - 1].
    order = loads.argsort(kind="stable")
    depth = loads[order]
    level = (depth.cumsum() + total) / np.arange(1, lanes + 1)
    used = min(int(np.count_nonzero(level > depth)), most_lanes)
    shares = np.zeros(lanes + 1)
    shares[order[:used] + 1] = level[used - 1] - depth[:used]
    cuts = shares.cumsum().round().astype(np.int64)
    cuts[-1] = total
    return cuts
