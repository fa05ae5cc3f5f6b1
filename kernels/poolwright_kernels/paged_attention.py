"""Causal attention of a mixed batch (chunks and decodes) over the paged KV cache, in PyTorch.

`plan_attention` does once per step what every layer shares: gather indices and masks. `paged_attention` is the
reference that a kernel must equal, and what the CPU engine runs. It reads only slots of tokens that exist and the null
block, so what an unused slot holds, NaN included, cannot reach the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_kernels.kv_write import slots_of

_TILE_TOKENS = 256  # queries of a chunk handled at once: bounds a mask to 256 × context
_PADDING_LIMIT = 1.5  # decodes share a padded gather while the longest context is at most this times the shortest


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Queries at positions [start, start + length) of a sequence; its keys are positions [0, start + length)."""

    start: int
    length: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Decodes:
    queries: Tensor  # (rows,) int64: indices into the batch's tokens
    slots: Tensor  # (rows · context,) int64, padded with slot 0
    mask: Tensor | None  # (rows, 1, 1, context) additive, in the dtype of the queries; None: nothing is padded
    context: int


@dataclass(frozen=True, slots=True)
class _Tile:
    queries: slice
    keys: slice  # of the chunk's slots
    mask: Tensor | None  # (queries, keys) additive; None: plain causal square


@dataclass(frozen=True, slots=True)
class _Chunk:
    slots: Tensor  # (keys,) int64: of every key that a query of the chunk sees
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one window see."""

    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share. Tokens of the batch are the rows' tokens, in row order."""

    write_slots: Tensor  # (tokens,) int64: where the step's own keys and values go
    views: Mapping[int | None, _View]  # by window


def plan_attention(
    rows: Sequence[AttentionRow], block_size: int, dtype: torch.dtype, windows: Sequence[int | None] = (None,)
) -> AttentionPlan:
    """dtype is that of the queries; `windows` are those that layers will ask for."""
    slots = [slots_of(row.block_ids, 0, row.start + row.length, block_size) for row in rows]
    return AttentionPlan(
        write_slots=torch.cat([of_row[row.start :] for row, of_row in zip(rows, slots, strict=True)]),
        views={window: _view(rows, slots, dtype, window) for window in windows},
    )


def _view(rows: Sequence[AttentionRow], slots: Sequence[Tensor], dtype: torch.dtype, window: int | None) -> _View:
    singles: list[tuple[int, Tensor]] = []
    chunks: list[_Chunk] = []
    first = 0
    for row, of_row in zip(rows, slots, strict=True):
        seen = 0 if window is None else max(0, row.start + 1 - window)  # the first key that the first query sees
        if row.length == 1:
            singles.append((first, of_row[seen:]))
        else:
            chunks.append(_Chunk(of_row[seen:], tuple(_tiles(first, row.start, row.length, dtype, window))))
        first += row.length
    return _View(tuple(_decodes(group, dtype) for group in _alike(singles)), tuple(chunks))


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
    group = heads // kv_heads
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    grouped = query.unflatten(1, (kv_heads, group))
    output = query.new_empty(tokens, kv_heads, group, head_size)

    view = plan.views[window]
    for decodes in view.decodes:
        # One query per sequence: the heads that share a kv head are its query rows, so keys are never repeated.
        shape = (-1, decodes.context, kv_heads, head_size)
        key = keys.index_select(0, decodes.slots).view(shape).transpose(1, 2)
        value = values.index_select(0, decodes.slots).view(shape).transpose(1, 2)
        output[decodes.queries] = _attend(grouped[decodes.queries], key, value, decodes.mask, scale, soft_cap)

    for chunk in view.chunks:
        # kv heads are the batch, and keys are expanded over the group without a copy.
        key = keys.index_select(0, chunk.slots).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        value = values.index_select(0, chunk.slots).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        for tile in chunk.tiles:
            attended = _attend(
                grouped[tile.queries].permute(1, 2, 0, 3),
                key[:, :, tile.keys],
                value[:, :, tile.keys],
                tile.mask,
                scale,
                soft_cap,
                is_causal=tile.mask is None,
            )
            output[tile.queries] = attended.permute(2, 0, 1, 3)
    return output.flatten(1, 2)


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


def _tiles(first: int, start: int, length: int, dtype: torch.dtype, window: int | None) -> list[_Tile]:
    """`first`: index of the row's first query in the batch; `start`: its position."""
    tiles = []
    seen = 0 if window is None else max(0, start + 1 - window)
    for offset in range(0, length, _TILE_TOKENS):
        size = min(_TILE_TOKENS, length - offset)
        position = start + offset  # of the tile's first query
        oldest = 0 if window is None else max(0, position + 1 - window)
        keys = slice(oldest - seen, position + size - seen)
        mask = None
        if position > 0 or (window is not None and size > window):
            mask = torch.zeros(size, position + size - oldest, dtype=dtype)
            mask[:, position - oldest :].fill_(-torch.inf).triu_(1)
            if window is not None:
                before = torch.ones_like(mask, dtype=torch.bool).tril_(position - oldest - window)
                mask.masked_fill_(before, -torch.inf)
        tiles.append(_Tile(slice(first + offset, first + offset + size), keys, mask))
    return tiles


def _alike(singles: list[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """Decodes grouped by context length, so that padding stays a small part of each gather."""
    groups: list[list[tuple[int, Tensor]]] = []
    for single in sorted(singles, key=lambda single: len(single[1])):
        if groups and len(single[1]) <= _PADDING_LIMIT * len(groups[-1][0][1]):
            groups[-1].append(single)
        else:
            groups.append([single])
    return groups


def _decodes(group: list[tuple[int, Tensor]], dtype: torch.dtype) -> _Decodes:
    contexts = torch.tensor([len(slots) for _, slots in group])
    longest = int(contexts.max())
    mask = None
    if int(contexts.min()) < longest:
        mask = torch.zeros(len(group), 1, 1, longest, dtype=dtype)
        mask.masked_fill_((torch.arange(longest) >= contexts[:, None])[:, None, None], -torch.inf)
    return _Decodes(
        queries=torch.tensor([first for first, _ in group]),
        slots=torch.nn.utils.rnn.pad_sequence([slots for _, slots in group], batch_first=True).flatten(),
        mask=mask,
        context=longest,
    )
