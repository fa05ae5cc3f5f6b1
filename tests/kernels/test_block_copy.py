"""Copies of KV blocks under the interpreter: bit for bit, and nothing else is touched."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels.block_copy import (
    copy_blocks_reference,
    copy_blocks_triton,
    gather_blocks_reference,
    gather_blocks_triton,
    scatter_blocks_reference,
    scatter_blocks_triton,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def random_bits(*shape: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all: signalling NaNs and denormal numbers too."""
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 3),
    block_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([8, 24]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_parts_packed_are_the_bytes_of_a_hand_off(
    layers: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    cache = random_bits(2, layers, 6, block_size, kv_heads, head_size, dtype=dtype)
    first_layer, first_head = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, kv_heads - 1))
    count_layers = data.draw(st.integers(1, layers - first_layer))
    count_heads = data.draw(st.integers(1, kv_heads - first_head))
    block_ids = torch.tensor(data.draw(st.lists(st.integers(0, 5), unique=True, max_size=5)), dtype=torch.int64)

    part = (first_layer, count_layers, first_head, count_heads)
    packed = gather_blocks_triton(cache, block_ids, *part)

    words = cache.view(torch.uint8) if dtype.itemsize == 1 else cache
    expected = words[
        :, first_layer : first_layer + count_layers, block_ids, :, first_head : first_head + count_heads
    ].contiguous()
    assert packed.is_contiguous()
    assert bytes(bits(packed).numpy()) == bytes(bits(expected).numpy())
    assert torch.equal(bits(gather_blocks_reference(cache, block_ids, *part)), bits(packed))

    # Into another cache, at other blocks: those and no others change, and an id of -1 is skipped.
    target_ids = torch.tensor(data.draw(st.permutations(range(6))), dtype=torch.int64)[: len(block_ids)]
    skipped = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(block_ids), max_size=len(block_ids))), dtype=torch.bool
    )
    target_ids[skipped] = -1
    before = random_bits(*cache.shape, dtype=dtype)
    by_kernel, by_reference = before.clone(), before.clone()
    scatter_blocks_triton(packed, by_kernel, target_ids, first_layer, first_head)
    scatter_blocks_reference(packed, by_reference, target_ids, first_layer, first_head)
    expected_words = bits(before).view(*cache.shape[:5], -1).clone()
    for index, target in enumerate(target_ids.tolist()):
        if target >= 0:
            expected_words[
                :, first_layer : first_layer + count_layers, target, :, first_head : first_head + count_heads
            ] = bits(packed).view(*packed.shape[:5], -1)[:, :, index]
    assert torch.equal(bits(by_kernel).view(expected_words.shape), expected_words)
    assert torch.equal(bits(by_reference).view(expected_words.shape), expected_words)


@settings(max_examples=20, deadline=None)
@given(
    block_size=st.sampled_from([1, 16]),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 7)), unique_by=lambda pair: pair[1], max_size=6),
    copy=st.sampled_from([copy_blocks_triton, copy_blocks_reference]),
    seed=st.integers(0, 2**31),
)
def test_blocks_swap_between_caches_of_different_sizes(block_size, kv_heads, dtype, pairs, copy, seed) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    source = random_bits(2, 2, 5, block_size, kv_heads, 8, dtype=dtype)
    target = random_bits(2, 2, 8, block_size, kv_heads, 8, dtype=dtype)
    expected = bits(target).view(*target.shape[:5], -1).clone()
    for from_block, to_block in pairs:
        if to_block >= 0:
            expected[:, :, to_block] = bits(source).view(*source.shape[:5], -1)[:, :, from_block]
    ids = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    copy(source, target, ids[:, 0].contiguous(), ids[:, 1].contiguous())
    assert torch.equal(bits(target).view(expected.shape), expected)


def test_a_block_is_copied_within_its_own_cache() -> None:
    cache = random_bits(2, 2, 4, 16, 2, 8, dtype=torch.bfloat16)
    expected = bits(cache).view(*cache.shape[:5], -1).clone()
    expected[:, :, 3] = expected[:, :, 1]
    copy_blocks_triton(cache, cache, torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(bits(cache).view(expected.shape), expected)


def test_parts_outside_the_cache_are_refused() -> None:
    cache, ids = torch.zeros(2, 2, 4, 16, 2, 8), torch.tensor([1])
    for part in ((0, 3, 0, 2), (-1, 1, 0, 2), (0, 2, 1, 2)):
        with pytest.raises(ValueError, match="outside"):
            gather_blocks_triton(cache, ids, *part)
    with pytest.raises(ValueError, match="packed"):
        scatter_blocks_triton(torch.zeros(2, 1, 2, 16, 2, 8), cache, ids, 0, 0)
    with pytest.raises(ValueError, match="do not fit"):
        copy_blocks_triton(cache, torch.zeros(2, 2, 4, 16, 2, 8, dtype=torch.float16), ids, ids)
