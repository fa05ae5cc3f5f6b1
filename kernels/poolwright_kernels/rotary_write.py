"""Rotary embedding of a step's queries and keys, and the write of its keys and values into the paged cache, in one.

Keys go to the cache only: attention reads them there. Queries and keys may be normed by head first (Qwen 3, Gemma 3). A
cache of fewer bits than the model holds value / scale, so that a reader multiplies by the scale. Rotation pairs element
i with i + rotary_size / 2, as Hugging Face does; elements from rotary_size up stay. Su et al., "RoFormer", 2021.
"""

from typing import Any

import torch
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit, power_of_two_from, tl
from poolwright_kernels.ops import operation, widened

_PROGRAM_ELEMENTS = 1024  # of one token: 8 for each thread of 4 warps


def rotary_write_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Returns the rotated queries, (tokens, heads, head_size) contiguous; writes key_cache and value_cache.

    query, key, value:       (tokens, heads or kv_heads, head_size) of one dtype, any strides but adjacent elements:
                             the three parts of one product are read where they are
    cos_sin:                 (positions, rotary_size) float32: of each position the cosines, then the sines
    positions:               (tokens,) int32 or int64, rows of cos_sin
    slots:                   (tokens,) int64, block · block_size + offset, distinct; -1: a padding token, not written
    key_cache, value_cache:  (blocks, block_size, kv_heads, head_size), any strides but adjacent elements; float8 too
    query_norm, key_norm:    (head_size,): RMSNorm of each head before its rotation, with `epsilon` and `plus_one` as in
                             rms_norm. Both or none
    key_scale, value_scale:  (1,) float32. None: 1

    Raises ValueError for shapes that do not fit.
    """
    _check(query, key, value, cos_sin, positions, slots, key_cache, value_cache, query_norm, key_norm)
    angles = cos_sin[positions.long()][:, None]
    rotated = _rotate(_norm(query, query_norm, epsilon, plus_one), angles).to(query.dtype)
    new_key = _rotate(_norm(key, key_norm, epsilon, plus_one), angles)
    written = slots >= 0
    places = slots[written]
    block_size = key_cache.shape[1]
    for cache, new, scale in ((key_cache, new_key, key_scale), (value_cache, widened(value), value_scale)):
        if scale is not None:
            new = new / scale
        if cache.dtype.itemsize == 1:
            limit = torch.finfo(cache.dtype).max
            new = new.clamp(-limit, limit)
        cache[places // block_size, places % block_size] = new[written].to(cache.dtype)
    return rotated.contiguous()


def rotary_write_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 1e-6,
    plus_one: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    _check(query, key, value, cos_sin, positions, slots, key_cache, value_cache, query_norm, key_norm)
    tokens, heads, head_size = query.shape
    kv_heads = key.shape[1]
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    if tokens == 0:
        return rotated
    options = launch_options(heads, kv_heads, head_size, cos_sin.shape[1], key_cache.shape[1], key_cache.dtype)
    grid = (tokens, ceil_div(heads, options["HEADS"]) + ceil_div(kv_heads, options["HEADS"]))
    rotary_write_kernel[grid](
        query,
        key,
        value,
        rotated,
        cos_sin,
        positions,
        slots,
        key_cache,
        value_cache,
        query_norm,
        key_norm,
        key_scale,
        value_scale,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos_sin.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(1),
        value_cache.stride(2),
        epsilon,
        PLUS_ONE=plus_one,
        **options,
    )
    return rotated


@jit
def rotary_write_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    rotated,
    cos_sin,
    positions,
    slots,
    key_cache,
    value_cache,
    query_norm,  # None: no norm
    key_norm,
    key_scale,  # None: 1
    value_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,  # largest number of a one-byte cache; 0: a cache that needs no clamp
    PLUS_ONE: tl.constexpr,
    HEADS: tl.constexpr,  # heads of one program
    SIZE: tl.constexpr,  # power of two from HEAD_SIZE
):
    """One program for each (token, group of heads): first the groups of queries, then those of keys and values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    position = tl.load(positions + token).to(tl.int64)
    angles = cos_sin + position * angle_stride
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        source = query + token * query_token_stride
        turned = _rotated_heads(
            source, query_head_stride, head, angles, query_norm, epsilon,
            NUM_HEADS, HEAD_SIZE, ROTARY_SIZE, PLUS_ONE, SIZE,
        )  # fmt: skip
        column = tl.arange(0, SIZE)
        inside = (head < NUM_HEADS)[:, None] & (column < HEAD_SIZE)[None, :]
        target = rotated + (token * NUM_HEADS + head[:, None]) * HEAD_SIZE + column[None, :]
        tl.store(target, turned.to(rotated.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
            column = tl.arange(0, SIZE)
            inside = (head < KV_HEADS)[:, None] & (column < HEAD_SIZE)[None, :]
            new_key = _rotated_heads(
                key + token * key_token_stride, key_head_stride, head, angles, key_norm, epsilon,
                KV_HEADS, HEAD_SIZE, ROTARY_SIZE, PLUS_ONE, SIZE,
            )  # fmt: skip
            source = value + token * value_token_stride + head[:, None] * value_head_stride + column[None, :]
            new_value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            place = key_cache + block * key_block_stride + offset * key_slot_stride
            place += head[:, None] * key_cache_head_stride + column[None, :]
            tl.store(place, _stored(new_key, key_scale, LIMIT, key_cache.dtype.element_ty), mask=inside)
            place = value_cache + block * value_block_stride + offset * value_slot_stride
            place += head[:, None] * value_cache_head_stride + column[None, :]
            tl.store(place, _stored(new_value, value_scale, LIMIT, value_cache.dtype.element_ty), mask=inside)


@jit
def _rotated_heads(  # type: ignore[no-untyped-def]
    source, head_stride, head, angles, norm, epsilon,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, PLUS_ONE: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """(HEADS, SIZE) float32. Each element's partner is loaded from the cache line that its own load brought."""
    half: tl.constexpr = ROTARY_SIZE // 2
    column = tl.arange(0, SIZE)
    partner = tl.where(column < half, column + half, tl.where(column < ROTARY_SIZE, column - half, column))
    known = (head < NUM_HEADS)[:, None] & (column < HEAD_SIZE)[None, :]
    dtype = source.dtype.element_ty
    row = source + head[:, None] * head_stride
    own = tl.load(row + column[None, :], mask=known, other=0.0).to(tl.float32)
    other = tl.load(row + partner[None, :], mask=known, other=0.0).to(tl.float32)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_SIZE + epsilon)[:, None]
        own_factor = tl.load(norm + column, mask=column < HEAD_SIZE, other=0.0).to(tl.float32)[None, :]
        other_factor = tl.load(norm + partner, mask=column < HEAD_SIZE, other=0.0).to(tl.float32)[None, :]
        if PLUS_ONE:
            own = (own * inverse * (1.0 + own_factor)).to(dtype).to(tl.float32)
            other = (other * inverse * (1.0 + other_factor)).to(dtype).to(tl.float32)
        else:
            own = ((own * inverse).to(dtype).to(tl.float32) * own_factor).to(dtype).to(tl.float32)
            other = ((other * inverse).to(dtype).to(tl.float32) * other_factor).to(dtype).to(tl.float32)
    turns = column < ROTARY_SIZE
    cosine = tl.load(angles + column % half, mask=turns, other=1.0)[None, :]
    sine = tl.load(angles + half + column % half, mask=turns, other=0.0)[None, :]
    return own * cosine + other * tl.where(column < half, -sine, sine)


@jit
def _stored(x, scale, LIMIT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if scale is not None:
        x = x / tl.load(scale)
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x.to(dtype)


def launch_options(
    heads: int, kv_heads: int, head_size: int, rotary_size: int, block_size: int, cache_dtype: torch.dtype
) -> dict[str, Any]:
    size = power_of_two_from(head_size)
    together = min(power_of_two_from(max(heads, kv_heads)), max(1, _PROGRAM_ELEMENTS // size))
    return {
        "NUM_HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_SIZE": head_size,
        "ROTARY_SIZE": rotary_size,
        "BLOCK_SIZE": block_size,
        "LIMIT": torch.finfo(cache_dtype).max if cache_dtype.itemsize == 1 else 0.0,
        "HEADS": together,
        "SIZE": size,
        "num_warps": min(4, max(1, together * size // 256)),
    }


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, plus_one: bool) -> Tensor:
    wide = widened(x)
    if weight is None:
        return wide
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if plus_one:
        return widened((scaled * (1.0 + widened(weight))).to(x.dtype))
    return widened((widened(scaled.to(x.dtype)) * widened(weight)).to(x.dtype))


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    cosine, sine = angles.chunk(2, dim=-1)
    half = cosine.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> None:
    tokens, _, head_size = query.shape
    kv_heads = key.shape[1]
    if key.shape != (tokens, kv_heads, head_size) or value.shape != key.shape:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if key_cache.shape[2:] != key.shape[1:] or value_cache.shape != key_cache.shape:
        raise ValueError(f"caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)} do not fit {tuple(key.shape)}")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(f"{tokens} tokens, {tuple(positions.shape)} positions, {tuple(slots.shape)} slots")
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_size:
        raise ValueError(f"rotary size {cos_sin.shape[1]} is odd or above the head size {head_size}")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("the norms of queries and keys come together")
    if any(x.stride(-1) != 1 for x in (query, key, value, cos_sin, key_cache, value_cache)):
        raise ValueError("the elements of a head must be adjacent")


rotary_write = operation(
    "rotary_write",
    reference=rotary_write_reference,
    cuda=rotary_write_triton,
    fake=lambda query, *others, **options: torch.empty_like(query, memory_format=torch.contiguous_format),
    mutates=("key_cache", "value_cache"),
)
