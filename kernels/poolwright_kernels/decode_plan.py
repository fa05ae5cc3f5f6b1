"""The plan of a step of nothing but decodes, made on the device from context lengths, so that the host does nothing.

The same cuts as `attention_plan.plan_on_host` makes where there are no chunks. Program l is lane l: it adds up the
costs of all sequences, and writes the items that lie between its two cuts. Where they go needs no other program's
count: sequence s in lane l is item s + l at most, and later lanes start higher. So nothing is sorted, and no program
waits for another.
"""

from typing import Any

import torch

from poolwright_kernels.attention_plan import (
    ITEM_FIELDS,
    ITEM_STEPS,
    MERGE_FIELDS,
    MIN_SHARE_STEPS,
    AttentionPlan,
)
from poolwright_kernels.jit import jit_with_counts, power_of_two_from, tl

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_MERGE_FIELDS = tl.constexpr(MERGE_FIELDS)
_ITEM_STEPS = tl.constexpr(ITEM_STEPS)
_MIN_SHARE_STEPS = tl.constexpr(MIN_SHARE_STEPS)


def plan_on_device(plan: AttentionPlan, tokens: int = 1) -> None:
    """Fills the plan's work list from plan.context_lens, in one launch; plan.query_starts must be multiples of tokens.

    tokens: queries of each sequence, the same for all, as in decoding with drafts. A sequence of context length 0 is
    padding and gets no item. Raises ValueError where the plan cannot hold as many sequences or queries.
    """
    layout = plan.layout
    sequences = plan.context_lens.shape[0]
    if sequences > layout.capacity.sequences:
        raise ValueError(f"{sequences} sequences in a plan for at most {layout.capacity.sequences}")
    if not 0 < tokens <= layout.small_tokens:
        raise ValueError(f"{tokens} query tokens for each sequence in a plan for at most {layout.small_tokens}")
    if plan.context_lens.dtype != torch.int32 or not plan.context_lens.is_contiguous():
        raise ValueError("context lengths must be adjacent int32")
    decode_plan_kernel[(layout.lanes,)](
        plan.context_lens,
        plan.lane_ranges,
        plan.counts,
        plan.small_items,
        plan.merges,
        sequences,
        plan.window,
        layout.lanes,
        layout.small_tokens,
        **plan_options(tokens, layout.tiles.small_keys, layout.capacity.sequences),
    )


def plan_options(tokens: int, keys: int, sequences: int) -> dict[str, Any]:
    """What is compiled into the launch. sequences: the capacity."""
    return {
        "TOKENS": tokens,
        "KEYS": keys,
        "SEQUENCES": power_of_two_from(sequences),
        "TOKENS_PADDED": power_of_two_from(tokens),
        "num_warps": 4,
    }


@jit_with_counts("sequences", "window", "lanes", "slot_tokens")
def decode_plan_kernel(  # type: ignore[no-untyped-def]
    context_lens,
    lane_ranges,
    counts,
    items,
    merges,
    sequences,
    window,
    lanes,
    slot_tokens,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TOKENS_PADDED: tl.constexpr,
):
    lane = tl.program_id(0)
    sequence = tl.arange(0, SEQUENCES)
    context = tl.load(context_lens + sequence, mask=sequence < sequences, other=0)
    position = context - TOKENS
    low = tl.where(window > 0, tl.maximum(position - window + 1, 0) // KEYS * KEYS, 0)
    steps = (context - low + KEYS - 1) // KEYS
    cost = tl.where(context > 0, steps + _ITEM_STEPS, 0)
    end = tl.cumsum(cost, 0)
    start = end - cost
    total = tl.sum(cost, 0)
    used_lanes = tl.minimum(tl.maximum(total // _MIN_SHARE_STEPS, 1), lanes)
    share = tl.maximum((total + used_lanes - 1) // used_lanes, 1)
    cut = lane * share
    next_cut = cut + share

    origin = start + _ITEM_STEPS
    since = tl.maximum(tl.maximum(start, cut) - origin, 0)
    until = tl.minimum(end, next_cut) - origin
    kept = (context > 0) & (until > since)
    opens = since == 0
    closes = until == steps
    slot = tl.where(opens & closes, -1, tl.where(opens, lanes + lane, lane) * slot_tokens)
    kept_count = kept.to(tl.int32)
    first = tl.min(tl.where(kept, sequence, SEQUENCES), 0) + lane
    count = tl.sum(kept_count, 0)
    item = items + (first + tl.cumsum(kept_count, 0) - 1) * _ITEM_FIELDS
    tl.store(item, sequence, mask=kept)
    tl.store(item + 1, sequence * TOKENS, mask=kept)
    tl.store(item + 2, tl.full([SEQUENCES], TOKENS, tl.int32), mask=kept)
    tl.store(item + 3, position, mask=kept)
    tl.store(item + 4, low + since * KEYS, mask=kept)
    tl.store(item + 5, tl.minimum(low + until * KEYS, context), mask=kept)
    tl.store(item + 6, slot, mask=kept)
    tl.store(item + 7, tl.zeros([SEQUENCES], tl.int32), mask=kept)
    ranges = lane_ranges + lane * 4
    tl.store(ranges, 0)
    tl.store(ranges + 1, 0)
    tl.store(ranges + 2, tl.where(count > 0, first, 0))
    tl.store(ranges + 3, tl.where(count > 0, first + count, 0))

    # At most one sequence opens in this lane and goes on in the next.
    goes_on = kept & opens & (until < steps)
    last_lane = (end - 1) // share
    parts = tl.sum(tl.where(goes_on, last_lane - lane + 1, 0), 0)
    owner = tl.sum(tl.where(goes_on, sequence, 0), 0)
    token = tl.arange(0, TOKENS_PADDED)
    inside = token < TOKENS
    merge = merges + (lane * TOKENS + token) * _MERGE_FIELDS
    tl.store(merge, owner * TOKENS + token, mask=inside)
    tl.store(merge + 1, (lanes + lane) * slot_tokens + token, mask=inside)
    tl.store(merge + 2, (lane + 1) * slot_tokens + token, mask=inside)
    tl.store(merge + 3, tl.zeros([TOKENS_PADDED], tl.int32) + slot_tokens, mask=inside)
    tl.store(merge + 4, tl.zeros([TOKENS_PADDED], tl.int32) + parts, mask=inside)
    first_lane = lane == 0
    tl.store(counts, 0, mask=first_lane)
    tl.store(counts + 1, sequences, mask=first_lane)
    tl.store(counts + 2, lanes * TOKENS, mask=first_lane)
