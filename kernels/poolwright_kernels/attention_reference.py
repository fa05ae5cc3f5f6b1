"""Hybrid attention in plain PyTorch: what the Triton kernel must equal, on any device.

It reads the batch itself (query starts, context lengths, block tables) and never the work list, so it also shows
whether the list was right. Slots that hold no token are never read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from poolwright_kernels.ops import widened


def hybrid_attention_reference(
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
    """Writes the attention of every query token to `output`; the step's own keys and values are in the cache already.

    query:                   (tokens, heads, head_size), float32, float16 or bfloat16, adjacent elements; query head h
                             reads KV head h // (heads / kv_heads). Tokens past query_starts[-1] are padding: their
                             output is left as it is
    key_cache, value_cache:  (blocks, page_size, kv_heads, head_size), the query's dtype or float8_e4m3fn, same strides,
                             adjacent elements
    output:                  as query, of its dtype; strides of its own
    query_starts … partial_lse, tiles, has_chunks:  of `attention_plan.AttentionPlan`, made for this window or for none
    scale:                   of the dot products, 1 / sqrt(head_size) in most models
    window:                  a query at position p sees keys at p - window + 1 … p; 0: all up to p
    soft_cap:                scores become soft_cap · tanh(score / soft_cap); 0: they do not (Gemma 2)
    key_scale, value_scale:  (1,) float32: what a float8 cache is multiplied by. None: 1

    Raises ValueError for shapes, strides or dtypes that do not fit.
    """
    check(query, key_cache, value_cache, output, block_tables, partial_output)
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    page_size, kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    for sequence, context in enumerate(contexts):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        keys = torch.arange(context, device=query.device)
        pages = block_tables[sequence].long()[keys // page_size]
        key = _read(key_cache, pages, keys % page_size)  # (context, kv_heads, head_size)
        value = _read(value_cache, pages, keys % page_size)
        if key_scale is not None:
            key = key * key_scale
        if value_scale is not None:
            value = value * value_scale
        q = widened(query[begin:end]).unflatten(1, (kv_heads, group))
        scores = torch.einsum("thgd,khd->hgtk", q, key) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = (context - (end - begin) + torch.arange(end - begin, device=query.device))[:, None] - keys
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[begin:end] = torch.einsum("hgtk,khd->thgd", weights, value).flatten(1, 2).to(output.dtype)


def _read(cache: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
    if cache.dtype.itemsize == 1:  # PyTorch neither gathers nor promotes float8 everywhere
        return cache.view(torch.uint8)[pages, offsets].view(cache.dtype).float()
    return widened(cache[pages, offsets])


def check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor, block_tables: Tensor, partial_output: Tensor
) -> None:
    """Raises ValueError for what the kernel would read or write out of place."""
    if query.dim() != 3 or key_cache.dim() != 4:
        raise ValueError(f"query {tuple(query.shape)}, cache {tuple(key_cache.shape)}: 3 and 4 dimensions are needed")
    heads, head_size = query.shape[1:]
    if key_cache.shape[3] != head_size or heads % key_cache.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} does not fit the cache {tuple(key_cache.shape)}")
    if value_cache.shape != key_cache.shape or value_cache.stride() != key_cache.stride():
        raise ValueError("keys and values are laid out differently")
    if output.shape != query.shape or output.dtype != query.dtype:
        raise ValueError(
            f"output {tuple(output.shape)} {output.dtype} is not like query {tuple(query.shape)} {query.dtype}"
        )
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn) or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"query {query.dtype}, keys {key_cache.dtype} and values {value_cache.dtype} do not go together"
        )
    if any(tensor.stride(-1) != 1 for tensor in (query, key_cache, output, block_tables)):
        raise ValueError("the elements of a head, and the pages of a sequence, must be adjacent")
    if block_tables.dtype != torch.int32:
        raise ValueError(f"block tables are {block_tables.dtype}, not int32")
    if partial_output.shape[1:] != query.shape[1:]:
        raise ValueError(
            f"the plan is for heads {tuple(partial_output.shape[1:])}, the query has {tuple(query.shape[1:])}"
        )
