"""Causal attention over a paged cache by its definition: float64, every score written out, one head at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_kernels.kv_write import slots_of


def attention_by_definition(
    rows: Sequence[AttentionRow],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """query: (tokens, heads, head_size), the rows' tokens in row order. Reads only slots that hold a row's tokens."""
    block_size, outputs = key_cache.shape[1], []
    for row, of_row in zip(rows, query.split([row.length for row in rows]), strict=True):
        slots = slots_of(row.block_ids, 0, row.start + row.length, block_size)
        key, value = key_cache.flatten(0, 1)[slots], value_cache.flatten(0, 1)[slots]
        group = query.shape[1] // key.shape[1]
        ahead = torch.arange(row.start + row.length) - torch.arange(row.start, row.start + row.length)[:, None]
        unseen = (ahead > 0) | (ahead <= -(window or math.inf))
        heads = []
        for head in range(query.shape[1]):
            scores = of_row[:, head].double() @ key[:, head // group].double().T * scale
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            heads.append(scores.masked_fill(unseen, -math.inf).softmax(1) @ value[:, head // group].double())
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)
