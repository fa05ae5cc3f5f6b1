"""Writing new keys and values into the paged cache, and the layout of that cache.

A cache of one layer is `(blocks, block_size, kv_heads, head_size)`. A *slot* is a token's place in it:
`block_id * block_size + offset`. Block 0 is the null block: nothing is ever written there, so it stays zero and may
be read where a batch is padded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def slots_of(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> Tensor:
    """Slots of positions [start, stop) of a sequence with this block table: int64, (stop - start,)."""
    first, last = start // block_size, -(-stop // block_size)
    if last > len(block_ids):
        raise ValueError(f"{stop} tokens need {last} blocks of {block_size}, the table has {len(block_ids)}")
    bases = torch.tensor(block_ids[first:last], dtype=torch.int64) * block_size
    slots = (bases[:, None] + torch.arange(block_size)).flatten()
    return slots[start - first * block_size : stop - first * block_size]


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Reference of the KV write: token i's key and value go to slots[i] of the caches, in place.

    key, value:              (tokens, kv_heads, head_size), any strides
    key_cache, value_cache:  (blocks, block_size, kv_heads, head_size), contiguous
    slots:                   (tokens,) int64, distinct, none of them in block 0
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
