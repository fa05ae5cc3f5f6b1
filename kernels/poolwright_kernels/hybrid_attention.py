"""Batch hybrid attention: prefill chunks and single decodes of one step, over paged KV, in one Triton launch.

One persistent kernel holds two loops: one over large tiles (chunks), one over small tiles (decodes). A program serves
one KV head (`program % kv_heads`) of one lane (`program // kv_heads`), and walks the items that the plan gave its lane.
Which loop an item is in is decided by the plan, so no loop holds a branch, and both keep their software pipelines. A
second, small kernel merges the parts of sequences that were split over lanes.

This module knows plans only as tensors (`attention_plan.AttentionPlan`), and nothing of models, engines or steps.

Ideas: packing the heads of a group as rows of one tile, FlashAttention-2 (arXiv 2307.08691) and FlashInfer (arXiv
2501.01005); persistent programs over a work list with two tile shapes, FlashInfer's BatchAttention; equal shares of
linearised work cut anywhere, Stream-K (arXiv 2301.03598); one page-table look-up per key and static launch grids,
"The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581); merging partial softmax results, Flash-Decoding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poolwright_kernels.attention_plan import AttentionPlan
from poolwright_kernels.attention_reference import check, hybrid_attention_reference
from poolwright_kernels.jit import jit, jit_with_counts, power_of_two_from, tl
from poolwright_kernels.ops import operation

_LOG2_E = 1.4426950408889634
_ITEM_FIELDS = tl.constexpr(8)
_MERGE_FIELDS = tl.constexpr(8)
_RECIPROCAL_BITS = tl.constexpr(16)
# Triton has the assembler allocate registers at level 2, around a fault of its release 13 that it does not describe.
# That release then spills what it could work out again; from level 4 up it does not. Release 12 knows no difference.
_NO_SPILLS = "--regAllocOptLevel=4"
_MERGE_PARTS = 16  # parts that a merge weighs at once
_MERGE_PROGRAMS = 512


@jit
def _tokens_of(rows, group_reciprocal):  # type: ignore[no-untyped-def]
    """rows // group, without a division: exact, since there are 128 at most of either (`reciprocal_of`)."""
    return rows * group_reciprocal >> _RECIPROCAL_BITS


@jit
def _masked_scores(scores, keys, positions, kv_end, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    visible = (keys[None, :] <= positions[:, None]) & (keys[None, :] < kv_end)
    if HAS_WINDOW:
        visible &= keys[None, :] > positions[:, None] - window
    return tl.where(visible, scores, float("-inf"))


@jit
def _keys_and_values(  # type: ignore[no-untyped-def]
    key_cache,
    value_cache,
    table,
    keys,
    kv_end,
    dims,
    page_stride,
    token_stride,
    page_bits,
    page_mask,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The keys and values at positions `keys`. Masked: what lies at or past kv_end is never read, and is 0."""
    stored = keys < kv_end
    if MASKED:
        pages = tl.load(table + (keys >> page_bits), mask=stored, other=0)
    else:
        pages = tl.load(table + (keys >> page_bits))
    places = (pages.to(tl.int64) * page_stride + (keys & page_mask) * token_stride)[:, None] + dims[None, :]
    if MASKED:
        mask = stored[:, None] & (dims < HEAD)[None, :]
        key = tl.load(key_cache + places, mask=mask, other=0.0)
        value = tl.load(value_cache + places, mask=mask, other=0.0)
    elif HEAD != HEAD_PADDED:
        mask = (dims < HEAD)[None, :]
        key = tl.load(key_cache + places, mask=mask, other=0.0)
        value = tl.load(value_cache + places, mask=mask, other=0.0)
    else:
        key = tl.load(key_cache + places)
        value = tl.load(value_cache + places)
    return key, value


@jit
def _attend_keys(  # type: ignore[no-untyped-def]
    first,
    last,
    q,
    accumulator,
    maximum,
    total,
    positions,
    kv_end,
    key_cache,
    value_cache,
    table,
    dims,
    page_stride,
    token_stride,
    score_scale,
    window,
    soft_cap,
    page_bits,
    page_mask,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Online softmax over the key tiles in [first, last). score_scale turns a dot product into base-2 units, or with a
    soft cap into the argument of tanh, times two and in base 2; soft_cap is then the cap in base-2 units."""
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = start + tl.arange(0, KEYS)
        key, value = _keys_and_values(
            key_cache, value_cache, table, keys, kv_end, dims, page_stride, token_stride,
            page_bits, page_mask, HEAD, HEAD_PADDED, MASKED,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision=precision) * score_scale
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1): the exponential may overflow to infinity, the result may not.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            scores = _masked_scores(scores, keys, positions, kv_end, window, HAS_WINDOW)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row may have seen no key yet; -inf minus -inf is NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        weights = tl.exp2(scores - reference[:, None])
        correction = tl.exp2(maximum - reference)
        total = total * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        accumulator = tl.dot(weights.to(q.dtype), value.to(q.dtype), accumulator, input_precision=precision)
        maximum = new_maximum
    return accumulator, maximum, total


@jit
def _attend_item(  # type: ignore[no-untyped-def]
    item,
    kv_head,
    query,
    key_cache,
    value_cache,
    block_tables,
    partial_output,
    partial_lse,
    output,
    query_token_stride,
    query_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    output_token_stride,
    output_head_stride,
    score_scale,
    value_factor,
    window,
    soft_cap,
    kv_heads,
    group,
    group_reciprocal,
    page_bits,
    page_mask,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    sequence = tl.load(item)
    first_token = tl.load(item + 1)
    tokens = tl.load(item + 2)
    position = tl.load(item + 3)
    kv_begin = tl.load(item + 4)
    kv_end = tl.load(item + 5)
    slot = tl.load(item + 6)  # below zero: the item holds all keys of its queries, and writes the output itself

    # A zero that the compiler does not know, sequences being no less than 0: else what depends on rows alone is worked
    # out once for all items, and its registers are taken from the loops below.
    rows = tl.arange(0, ROWS) + (sequence >> 31)
    dims = tl.arange(0, HEAD_PADDED)
    token = _tokens_of(rows, group_reciprocal)
    head = kv_head * group + rows - token * group
    row_mask = rows < tokens * group  # the plan gives at most ROWS // group tokens to a tile
    mask = row_mask[:, None]
    if HEAD != HEAD_PADDED:
        mask = mask & (dims < HEAD)[None, :]
    query_rows = (first_token + token).to(tl.int64)
    q = tl.load(
        query + (query_rows * query_token_stride + head * query_head_stride)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    positions = position + token
    table = block_tables + sequence.to(tl.int64) * table_stride
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride

    accumulator = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)

    # [kv_begin, front): a window's edge crosses the tiles; [front, middle): each query sees each key;
    # [middle, kv_end): the causal edge, or the end of what is stored, does.
    front = kv_begin
    middle = kv_begin
    if not ALL_MASKED:
        if HAS_WINDOW:
            hidden = position + tokens - window  # keys below are hidden from the tile's last query
            front = tl.minimum(kv_begin + tl.cdiv(tl.maximum(hidden - kv_begin, 0), KEYS) * KEYS, kv_end)
            accumulator, maximum, total = _attend_keys(
                kv_begin, front, q, accumulator, maximum, total, positions, kv_end, key_head, value_head, table, dims,
                page_stride, token_stride, score_scale, window, soft_cap,
                page_bits, page_mask, HEAD, HEAD_PADDED, KEYS, STAGES, True, HAS_WINDOW, HAS_SOFT_CAP,
            )  # fmt: skip
        seen_by_all = tl.minimum(position + 1, kv_end)
        middle = front + tl.maximum(seen_by_all - front, 0) // KEYS * KEYS
        accumulator, maximum, total = _attend_keys(
            front, middle, q, accumulator, maximum, total, positions, kv_end, key_head, value_head, table, dims,
            page_stride, token_stride, score_scale, window, soft_cap,
            page_bits, page_mask, HEAD, HEAD_PADDED, KEYS, STAGES, False, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
    accumulator, maximum, total = _attend_keys(
        middle, kv_end, q, accumulator, maximum, total, positions, kv_end, key_head, value_head, table, dims,
        page_stride, token_stride, score_scale, window, soft_cap,
        page_bits, page_mask, HEAD, HEAD_PADDED, KEYS, STAGES, True, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip

    # Another, the item's last field: so rows are worked out again here, and occupy no register in the loops above.
    rows = tl.arange(0, ROWS) + tl.load(item + 7)
    token = _tokens_of(rows, group_reciprocal)
    head = kv_head * group + rows - token * group
    row_mask = rows < tokens * group
    mask = row_mask[:, None]
    if HEAD != HEAD_PADDED:
        mask = mask & (dims < HEAD)[None, :]
    result = accumulator * (value_factor / tl.where(total > 0, total, 1.0))[:, None]
    if slot < 0:
        output_rows = (first_token + token).to(tl.int64) * output_token_stride + head * output_head_stride
        tl.store(output + output_rows[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask)
    else:
        partial_rows = (slot + token).to(tl.int64) * (kv_heads * group) + head
        tl.store(partial_output + partial_rows[:, None] * HEAD + dims[None, :], result, mask=mask)
        lse = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + partial_rows, lse, mask=row_mask)


@jit_with_counts("window", "table_stride", "kv_heads", "group", "group_reciprocal", "page_bits", "page_mask")
def hybrid_attention_kernel(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    block_tables,
    lane_ranges,
    large_items,
    small_items,
    partial_output,
    partial_lse,
    key_scale,
    value_scale,
    output,
    query_token_stride,
    query_head_stride,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    output_token_stride,
    output_head_stride,
    score_scale,
    window,
    soft_cap,
    kv_heads,
    group,
    group_reciprocal,
    page_bits,
    page_mask,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    LARGE_ROWS: tl.constexpr,
    LARGE_KEYS: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
    LARGE_MASKED: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    SMALL_KEYS: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    HAS_LARGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = program % kv_heads
    ranges = lane_ranges + (program // kv_heads) * 4
    if key_scale is not None:
        score_scale *= tl.load(key_scale)
    value_factor = 1.0
    if value_scale is not None:
        value_factor = tl.load(value_scale)

    if HAS_LARGE:
        for index in range(tl.load(ranges), tl.load(ranges + 1)):
            _attend_item(
                large_items + index * _ITEM_FIELDS, kv_head, query, key_cache, value_cache, block_tables,
                partial_output, partial_lse, output, query_token_stride, query_head_stride,
                page_stride, token_stride, head_stride, table_stride, output_token_stride, output_head_stride,
                score_scale, value_factor, window, soft_cap, kv_heads, group, group_reciprocal, page_bits, page_mask,
                HEAD, HEAD_PADDED, LARGE_ROWS, LARGE_KEYS, LARGE_STAGES, LARGE_MASKED, HAS_WINDOW, HAS_SOFT_CAP,
            )  # fmt: skip
    for index in range(tl.load(ranges + 2), tl.load(ranges + 3)):
        _attend_item(
            small_items + index * _ITEM_FIELDS, kv_head, query, key_cache, value_cache, block_tables,
            partial_output, partial_lse, output, query_token_stride, query_head_stride,
            page_stride, token_stride, head_stride, table_stride, output_token_stride, output_head_stride,
            score_scale, value_factor, window, soft_cap, kv_heads, group, group_reciprocal, page_bits, page_mask,
            HEAD, HEAD_PADDED, SMALL_ROWS, SMALL_KEYS, SMALL_STAGES, True, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip


@jit_with_counts("heads")
def merge_kernel(  # type: ignore[no-untyped-def]
    merges,
    counts,
    partial_output,
    partial_lse,
    output,
    output_token_stride,
    output_head_stride,
    heads,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Each unit is one query head of one merge: parts whose softmaxes ran apart, weighed by their log-sum-exp."""
    dims = tl.arange(0, HEAD_PADDED)
    dim_mask = dims < HEAD
    for unit in range(tl.program_id(0), tl.load(counts + 2) * heads, tl.num_programs(0)):
        merge = merges + (unit // heads) * _MERGE_FIELDS
        head = unit % heads
        token = tl.load(merge).to(tl.int64)
        opening = tl.load(merge + 1)
        continuation = tl.load(merge + 2)
        stride = tl.load(merge + 3)
        count = tl.load(merge + 4)
        maximum = tl.full([1], float("-inf"), dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        accumulator = tl.zeros([HEAD_PADDED], dtype=tl.float32)
        for start in range(0, count, PARTS):
            parts = start + tl.arange(0, PARTS)
            mask = parts < count
            slots = tl.where(parts == 0, opening, continuation + (parts - 1) * stride)
            places = slots.to(tl.int64) * heads + head
            lse = tl.load(partial_lse + places, mask=mask, other=float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(lse, 0, keep_dims=True))
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(lse - reference)
            correction = tl.exp2(maximum - reference)
            values = tl.load(
                partial_output + places[:, None] * HEAD + dims[None, :],
                mask=mask[:, None] & dim_mask[None, :],
                other=0.0,
            )
            accumulator = accumulator * correction + tl.sum(values * weights[:, None], 0)
            total = total * correction + tl.sum(weights, 0, keep_dims=True)
            maximum = new_maximum
        result = accumulator / tl.where(total > 0, total, 1.0)
        tl.store(
            output + token * output_token_stride + head * output_head_stride + dims,
            result.to(output.dtype.element_ty),
            mask=dim_mask & (count > 0),
        )


def hybrid_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    lane_ranges: Tensor,
    counts: Tensor,
    large_items: Tensor,
    small_items: Tensor,
    merges: Tensor,
    partial_output: Tensor,
    partial_lse: Tensor,
    tiles: Sequence[int],
    has_chunks: bool,
    scale: float,
    window: int,
    soft_cap: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """As `attention_reference.hybrid_attention_reference`, by the work list. Raises ValueError also for pages that are
    no power of 2."""
    check(query, key_cache, value_cache, output, block_tables, partial_output)
    heads, head_size = query.shape[1:]
    page_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    if page_size & (page_size - 1):
        raise ValueError(f"pages of {page_size} tokens: the kernel needs a power of 2")
    if soft_cap:
        score_scale, cap = 2 * _LOG2_E * scale / soft_cap, soft_cap * _LOG2_E
    else:
        score_scale, cap = _LOG2_E * scale, 0.0
    hybrid_attention_kernel[(lane_ranges.shape[0] * kv_heads,)](
        query,
        key_cache,
        value_cache,
        block_tables,
        lane_ranges,
        large_items,
        small_items,
        partial_output,
        partial_lse,
        key_scale,
        value_scale,
        output,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        output.stride(0),
        output.stride(1),
        score_scale,
        window,
        cap,
        kv_heads,
        group,
        reciprocal_of(group),
        page_size.bit_length() - 1,
        page_size - 1,
        **attention_options(head_size, tiles, has_chunks, window > 0, soft_cap > 0),
    )
    merge_kernel[(min(_MERGE_PROGRAMS, merges.shape[0] * heads),)](
        merges,
        counts,
        partial_output,
        partial_lse,
        output,
        output.stride(0),
        output.stride(1),
        heads,
        **merge_options(head_size),
    )


def reciprocal_of(group: int) -> int:
    """What a row of a tile is multiplied by, and shifted right, where it would be divided by the group."""
    return -(-(1 << 16) // group)


def attention_options(
    head_size: int, tiles: Sequence[int], has_chunks: bool, has_window: bool, has_soft_cap: bool
) -> dict[str, Any]:
    """What is compiled into a launch: nothing here differs from step to step of one kind, nor between models whose
    heads have one size, however many there are of them and of their groups, or between sizes of pages."""
    large_rows, large_keys, large_stages, small_rows, small_keys, small_stages, warps, registers, one_loop = tiles
    return {
        "HEAD": head_size,
        "HEAD_PADDED": _padded(head_size),
        "LARGE_ROWS": large_rows,
        "LARGE_KEYS": large_keys,
        "LARGE_STAGES": large_stages,
        "LARGE_MASKED": bool(one_loop),
        "SMALL_ROWS": small_rows,
        "SMALL_KEYS": small_keys,
        "SMALL_STAGES": small_stages,
        "HAS_LARGE": has_chunks,
        "HAS_WINDOW": has_window,
        "HAS_SOFT_CAP": has_soft_cap,
        "num_warps": warps,
        "maxnreg": registers,
        "ptx_options": _NO_SPILLS,
    }


def merge_options(head_size: int) -> dict[str, Any]:
    return {
        "HEAD": head_size,
        "HEAD_PADDED": _padded(head_size),
        "PARTS": _MERGE_PARTS,
        "num_warps": 4,
    }


def _padded(head_size: int) -> int:
    """Matrix instructions take 16 elements or more, and Triton powers of two."""
    return max(16, power_of_two_from(head_size))


_operation = operation(
    "hybrid_attention",
    reference=hybrid_attention_reference,
    cuda=hybrid_attention_triton,
    fake=lambda *args, **options: None,
    mutates=("output", "partial_output", "partial_lse"),
)


def hybrid_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    output: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Attention of a step, as `hybrid_attention_reference` says, into `output` or a new tensor; through torch.library.

    Raises ValueError, beside what that one raises, where the plan left out keys that this window shows.
    """
    if plan.window and not 0 < window <= plan.window:
        raise ValueError(f"the plan holds the last {plan.window} keys only, the window is {window or 'open'}")
    if plan.layout.shape.page_size != key_cache.shape[1] or plan.layout.shape.kv_heads != key_cache.shape[2]:
        raise ValueError(f"the plan is for {plan.layout.shape}, the cache is {tuple(key_cache.shape)}")
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    _operation(
        query,
        key_cache,
        value_cache,
        output,
        plan.query_starts,
        plan.context_lens,
        plan.block_tables,
        plan.lane_ranges,
        plan.counts,
        plan.large_items,
        plan.small_items,
        plan.merges,
        plan.partial_output,
        plan.partial_lse,
        plan.layout.tiles.launch,
        plan.layout.has_chunks,
        scale,
        window,
        soft_cap,
        key_scale,
        value_scale,
    )
    return output
