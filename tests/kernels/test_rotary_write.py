"""Rotary embedding and KV write under the interpreter against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poolwright_kernels.rotary_write import rotary_write_reference, rotary_write_triton

MAX_POSITION = 50


def table(rotary_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size)
    angles = torch.arange(MAX_POSITION)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


def parts(tokens: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views of one product, as a model hands them over."""
    product = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    query, key, value = product.split((heads, kv_heads, kv_heads), dim=1)
    return query, key, value


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 6),
    group=st.sampled_from([1, 3, 4, 7]),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([16, 24, 64, 96]),
    rotary_share=st.sampled_from([1.0, 0.5]),
    block_size=st.sampled_from([1, 16]),
    normed=st.booleans(),
    plus_one=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_queries_and_cache_equal_float64(
    tokens: int,
    group: int,
    kv_heads: int,
    head_size: int,
    rotary_share: float,
    block_size: int,
    normed: bool,
    plus_one: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    query, key, value = parts(tokens, group * kv_heads, kv_heads, head_size, dtype)
    cos_sin = table(int(head_size * rotary_share))
    positions = torch.randint(MAX_POSITION, (tokens,))
    blocks = 2 + tokens
    slots = block_size + torch.randperm((blocks - 1) * block_size)[:tokens]  # none in the null block
    slots[::3] = -1
    # One layer of a larger cache, as a runner passes it. Every slot is NaN, the null block's too.
    cache = torch.full((2, 3, blocks, block_size, kv_heads, head_size), torch.nan, dtype=dtype)
    norms = (torch.randn(head_size).to(dtype), torch.randn(head_size).to(dtype)) if normed else (None, None)

    rotated = rotary_write_triton(
        query, key, value, cos_sin, positions, slots, cache[0, 1], cache[1, 1], *norms, 1e-6, plus_one
    )

    wide = torch.full(cache.shape, torch.nan, dtype=torch.float64)
    truth = rotary_write_reference(
        query.double(), key.double(), value.double(), cos_sin.double(), positions, slots, wide[0, 1], wide[1, 1],
        *(norm if norm is None else norm.double() for norm in norms), 1e-6, plus_one,
    )  # fmt: skip
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(rotated.double(), truth, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.double(), wide, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert cache[:, :, 0].isnan().all(), "the null block was written"
    assert rotated.is_contiguous()

    again = torch.full_like(cache, torch.nan)
    reference = rotary_write_reference(
        query, key, value, cos_sin, positions, slots, again[0, 1], again[1, 1], *norms, 1e-6, plus_one
    )
    torch.testing.assert_close(rotated, reference, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, again, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("write", [rotary_write_triton, rotary_write_reference])
def test_a_cache_of_eight_bits_holds_value_over_scale(cache_dtype: torch.dtype, write) -> None:  # type: ignore[no-untyped-def]
    """With numbers that eight bits hold exactly: the interpreter rounds others wrongly where a rounding carries into
    the exponent."""
    query, key, value = parts(5, 4, 2, 16, torch.float32)
    scales = torch.tensor([0.25]), torch.tensor([2.0])
    key, value = (x.to(cache_dtype).float() * scale for x, scale in zip((key, value), scales, strict=True))
    limit = torch.finfo(cache_dtype).max
    value[0, 0, :2] = torch.tensor([1e6, -1e6])  # more than eight bits hold: the largest number, never NaN
    caches = [torch.zeros(3, 4, 2, 16, dtype=cache_dtype) for _ in range(2)]
    slots = torch.tensor([4, 5, 6, 7, 11])
    positions = torch.zeros(5, dtype=torch.int64)
    write(query, key, value, table(16), positions, slots, *caches, None, None, 1e-6, False, *scales)

    for cache, written, scale in zip(caches, (key, value), scales, strict=True):
        stored = cache.view(torch.uint8).flatten(0, 1)[slots].view(cache_dtype).float()
        torch.testing.assert_close(stored, (written / scale).clamp(-limit, limit), rtol=0, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    query, key, value = parts(2, 2, 1, 16, torch.float32)
    cache = torch.zeros(2, 4, 1, 16)
    numbers = torch.zeros(2, dtype=torch.int64)
    for bad in (
        (query, key[:1], value, table(16), numbers, numbers, cache, cache),
        (query, key, value, table(32), numbers, numbers, cache, cache),
        (query, key, value, table(16), numbers[:1], numbers, cache, cache),
        (query, key, value, table(16), numbers, numbers, cache, cache[..., :8]),
        (query, key, value, table(16), numbers, numbers, cache, cache, torch.ones(16)),
    ):
        with pytest.raises(ValueError, match=r"fit|rotary|positions|together"):
            rotary_write_triton(*bad)
