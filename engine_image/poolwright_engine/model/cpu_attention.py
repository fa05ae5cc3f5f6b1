"""Causal attention of a mixed batch over the paged KV cache on a CPU: PyTorch's fused attention, and few calls of it.

Owns how rows are put together and when keys need no copy. It reads only slots of tokens that exist and the null block,
so what an unused slot holds, NaN included, cannot reach the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_TOKENS = 256  # queries of a chunk handled at once: bounds a mask to 256 × context
_PADDING_LIMIT = 1.5  # decodes share a padded gather while the longest context is at most this times the shortest
_LONG_CONTEXT_TOKENS = 256  # from here on a call for one row costs less than the copy that lets rows share a call


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Queries at positions [start, start + length) of a sequence; its keys are positions [0, start + length)."""

    start: int
    length: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Rows of one query each that share a call, their keys gathered and padded to one length."""

    queries: Tensor  # (rows,) int64: indices into the batch's tokens
    slots: Tensor  # (rows · context,) int64, slot 0 where there is no key to see
    mask: Tensor | None  # (rows, 1, 1, context) additive, in the dtype of the queries; None: every key is seen
    context: int


@dataclass(frozen=True, slots=True)
class _Tile:
    queries: slice
    keys: slice  # of the span's keys
    mask: Tensor | None  # (queries, keys) additive; None: a causal square, or one query that sees all
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """One row: its keys are a slice of the cache's slots where its blocks lie in one run, else gathered."""

    slots: slice | Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one window see. `whole_batch`: the one group of decodes has all tokens, in order."""

    decodes: tuple[_Decodes, ...]
    spans: tuple[_Span, ...]
    whole_batch: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share. Tokens of the batch are the rows' tokens, in row order."""

    positions: Tensor  # (tokens,) int64
    write_slots: Tensor  # (tokens,) int64: where the step's own keys and values go
    views: Mapping[int | None, _View]  # by window


def plan_attention(
    rows: Sequence[AttentionRow],
    block_size: int,
    dtype: torch.dtype,
    windows: Sequence[int | None] = (None,),
    alone: bool = False,
) -> AttentionPlan:
    """dtype is that of the queries; `windows` are those that layers will ask for. The cost grows with the tokens of
    the step and with the blocks of its rows, not with their contexts. `alone`: no two rows share a call, so that the
    output of a row of one query depends on nothing but its own keys."""
    positions, write_slots = positions_and_slots(rows, block_size)
    return AttentionPlan(
        positions=positions,
        write_slots=write_slots,
        views={window: _view(rows, block_size, dtype, window, alone) for window in windows},
    )


def positions_and_slots(rows: Sequence[AttentionRow], block_size: int) -> tuple[Tensor, Tensor]:
    """Of every token of the rows, where it stands in its sequence and where its key and value go: (tokens,) int64."""
    positions: list[int] = []
    slots: list[int] = []
    for row in rows:
        stop = row.start + row.length
        needed, given = -(-stop // block_size), len(row.block_ids)
        if needed > given:
            raise ValueError(f"{stop} tokens need {needed} blocks of {block_size}, the table has {given}")
        for position in range(row.start, stop):
            positions.append(position)
            slots.append(row.block_ids[position // block_size] * block_size + position % block_size)
    return torch.tensor(positions, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention output of every token of the batch; the step's own keys and values must be in the cache already.

    query:                   (tokens, heads, head_size), any strides
    key_cache, value_cache:  (blocks, block_size, kv_heads, head_size), contiguous; heads is a multiple of kv_heads,
                             and query head h reads kv head h // (heads / kv_heads)
    window:                  a query sees that many keys at most, itself included; one that the plan was made for
    soft_cap:                scores become soft_cap · tanh(score / soft_cap)
    returns                  (tokens, heads, head_size), contiguous
    """
    tokens, heads, head_size = query.shape
    kv_heads = key_cache.shape[2]
    keys, values = key_cache.view(-1, kv_heads, head_size), value_cache.view(-1, kv_heads, head_size)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    view = plan.views[window]
    if view.whole_batch:
        return _decode(grouped, keys, values, view.decodes[0], scale, soft_cap).reshape(tokens, heads, head_size)

    output = query.new_empty(tokens, kv_heads, heads // kv_heads, head_size)
    for decodes in view.decodes:
        output[decodes.queries] = _decode(grouped[decodes.queries], keys, values, decodes, scale, soft_cap)
    for span in view.spans:
        # kv heads are the batch, and keys are expanded over the group without a copy.
        key, value = (
            (stored[span.slots] if isinstance(span.slots, slice) else stored.index_select(0, span.slots))
            .transpose(0, 1)
            .unsqueeze(1)
            for stored in (keys, values)
        )
        for tile in span.tiles:
            own, own_key, own_value = grouped[tile.queries], key[:, :, tile.keys], value[:, :, tile.keys]
            if len(own) == 1:  # the heads that share a kv head are the query rows
                output[tile.queries] = _attend(
                    own.transpose(0, 1), own_key, own_value, tile.mask, scale, soft_cap
                ).transpose(0, 1)
            else:
                shape = (-1, own.shape[2], -1, -1)
                output[tile.queries] = _attend(
                    own.permute(1, 2, 0, 3),
                    own_key.expand(shape),
                    own_value.expand(shape),
                    tile.mask,
                    scale,
                    soft_cap,
                    tile.is_causal,
                ).permute(2, 0, 1, 3)
    return output.flatten(1, 2)


def _decode(
    grouped: Tensor, keys: Tensor, values: Tensor, decodes: _Decodes, scale: float, soft_cap: float | None
) -> Tensor:
    """(rows, kv_heads, group, head_size): the heads that share a kv head are its query rows."""
    shape = (-1, decodes.context, *keys.shape[1:])
    key = keys.index_select(0, decodes.slots).view(shape).transpose(1, 2)
    value = values.index_select(0, decodes.slots).view(shape).transpose(1, 2)
    return _attend(grouped, key, value, decodes.mask, scale, soft_cap)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    is_causal: bool = False,
) -> Tensor:
    if soft_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = soft_cap * torch.tanh((query @ key.transpose(-2, -1)).float() * (scale / soft_cap))
    if is_causal:
        mask = torch.full(scores.shape[-2:], -torch.inf).triu_(1)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(value.dtype) @ value


def _view(rows: Sequence[AttentionRow], block_size: int, dtype: torch.dtype, window: int | None, alone: bool) -> _View:
    singles: list[tuple[int, AttentionRow, int]] = []
    spans: list[_Span] = []
    first = 0  # index of the row's first query in the batch
    for row in rows:
        seen = 0 if window is None else max(0, row.start + 1 - window)  # the first key that the first query sees
        stop = row.start + row.length
        blocks = row.block_ids[seen // block_size : -(-stop // block_size)]
        is_run = all(after == before + 1 for before, after in pairwise(blocks))
        if row.length == 1 and not alone and not (is_run and stop - seen >= _LONG_CONTEXT_TOKENS):
            singles.append((first, row, seen))
        else:
            at = blocks[0] * block_size + seen % block_size
            slots = slice(at, at + stop - seen) if is_run else _slots(blocks, block_size, seen, stop)
            spans.append(_Span(slots, tuple(_tiles(first, row.start, row.length, dtype, window))))
        first += row.length
    groups = [_decodes(group, block_size, dtype) for group in _alike(singles)]
    return _View(tuple(groups), tuple(spans), whole_batch=not spans and len(groups) == 1)


def _slots(blocks: Sequence[int], block_size: int, seen: int, stop: int) -> Tensor:
    """Slots of positions [seen, stop), the first of which lies in the first of these blocks."""
    bases = torch.tensor(blocks, dtype=torch.int64) * block_size
    skipped = seen % block_size
    return (bases[:, None] + torch.arange(block_size)).flatten()[skipped : skipped + stop - seen]


def _tiles(first: int, start: int, length: int, dtype: torch.dtype, window: int | None) -> list[_Tile]:
    """`first`: index of the row's first query in the batch; `start`: its position."""
    tiles = []
    seen = 0 if window is None else max(0, start + 1 - window)
    for offset in range(0, length, _TILE_TOKENS):
        size = min(_TILE_TOKENS, length - offset)
        position = start + offset  # of the tile's first query
        oldest = 0 if window is None else max(0, position + 1 - window)
        is_square = position == 0 and (window is None or size <= window)
        mask = None
        if not is_square and size > 1:
            mask = torch.zeros(size, position + size - oldest, dtype=dtype)
            mask[:, position - oldest :].fill_(-torch.inf).triu_(1)
            if window is not None:
                before = torch.ones_like(mask, dtype=torch.bool).tril_(position - oldest - window)
                mask.masked_fill_(before, -torch.inf)
        keys = slice(oldest - seen, position + size - seen)
        tiles.append(_Tile(slice(first + offset, first + offset + size), keys, mask, is_square and size > 1))
    return tiles


def _alike(singles: list[tuple[int, AttentionRow, int]]) -> list[list[tuple[int, AttentionRow, int]]]:
    """Decodes grouped by how many keys they see, so that padding stays a small part of each gather; each group in the
    order of the batch."""

    def keys_of(single: tuple[int, AttentionRow, int]) -> int:
        return single[1].start + 1 - single[2]

    groups: list[list[tuple[int, AttentionRow, int]]] = []
    for single in sorted(singles, key=keys_of):
        if groups and keys_of(single) <= _PADDING_LIMIT * keys_of(groups[-1][0]):
            groups[-1].append(single)
        else:
            groups.append([single])
    for group in groups:
        group.sort(key=lambda single: single[0])
    return groups


def _decodes(group: list[tuple[int, AttentionRow, int]], block_size: int, dtype: torch.dtype) -> _Decodes:
    """Blocks are gathered whole from the one that holds the first key seen; what is not to be seen becomes slot 0."""
    skipped = [seen % block_size for _, _, seen in group]
    stops = [row.start + 1 - seen + skip for (_, row, seen), skip in zip(group, skipped, strict=True)]
    context = max(stops)
    width = -(-context // block_size)
    table: list[int] = []
    for (_, row, seen), stop in zip(group, stops, strict=True):
        first, count = seen // block_size, -(-stop // block_size)
        table.extend(row.block_ids[first : first + count])
        table.extend([0] * (width - count))
    bases = torch.tensor(table, dtype=torch.int64).view(len(group), width, 1) * block_size
    slots = (bases + torch.arange(block_size)).flatten(1)[:, :context]
    mask = None
    if min(stops) < context or any(skipped):
        places = torch.arange(context)
        unseen = (places >= torch.tensor(stops)[:, None]) | (places < torch.tensor(skipped)[:, None])
        slots = slots.masked_fill(unseen, 0)
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)[:, None, None]
    queries = torch.tensor([first for first, _, _ in group], dtype=torch.int64)
    return _Decodes(queries, slots.reshape(-1), mask, context)
