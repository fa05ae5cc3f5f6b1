"""Moving KV blocks: within a cache, to and from host memory, and into and out of the layout of a hand-off.

A cache of all layers is (2, layers, blocks, block_size, kv_heads, head_size): keys, then values. A packed part of it is
the same with a range of layers, the listed blocks and a range of kv heads, contiguous: the bytes of a hand-off. Nothing
here computes with elements, so any bits survive, NaN included.
"""

import torch
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit_with_counts, power_of_two_from, tl
from poolwright_kernels.ops import operation

_PROGRAM_ELEMENTS = 4096


def copy_blocks_reference(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """target[:, :, target_ids[i]] = source[:, :, source_ids[i]] for every i; a pair with an id of -1 is padding.

    source, target:          caches of one dtype and of one shape but for the number of blocks; the same tensor for a
                             copy within a cache, one of them in pinned host memory for a swap
    source_ids, target_ids:  (pairs,) int64 on the accelerator if either cache is; target ids distinct, and none among
                             the source ids of the same cache

    Raises ValueError for caches that do not fit each other.
    """
    _check(source, target, source.shape[1], source.shape[4])
    kept = (source_ids >= 0) & (target_ids >= 0)
    target[:, :, target_ids[kept]] = source[:, :, source_ids[kept]]


def gather_blocks_reference(
    cache: Tensor, block_ids: Tensor, first_layer: int, layers: int, first_head: int, heads: int
) -> Tensor:
    """The part (2, layers, len(block_ids), block_size, heads, head_size) of a cache, packed. block_ids: int64, on the
    cache's device, each of them a block of the cache. Raises ValueError for a range outside the cache."""
    part = _part(cache, first_layer, layers, first_head, heads)
    return part[:, :, block_ids].contiguous()


def scatter_blocks_reference(
    packed: Tensor, cache: Tensor, block_ids: Tensor, first_layer: int, first_head: int
) -> None:
    """The reverse: writes a packed part into the cache, in place. block_ids: int64, on the cache's device,
    distinct; one of -1 is skipped. Raises ValueError for a part that does not fit the cache."""
    part = _part(cache, first_layer, packed.shape[1], first_head, packed.shape[4])
    _check_packed(packed, cache, block_ids)
    kept = block_ids >= 0
    part[:, :, block_ids[kept]] = packed[:, :, kept]


def copy_blocks_triton(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    _check(source, target, source.shape[1], source.shape[4])
    _launch(source, target, source_ids, target_ids)


def gather_blocks_triton(
    cache: Tensor, block_ids: Tensor, first_layer: int, layers: int, first_head: int, heads: int
) -> Tensor:
    part = _part(cache, first_layer, layers, first_head, heads)
    packed = _packed(cache, block_ids, first_layer, layers, first_head, heads)
    _launch(part, packed, block_ids, None)
    return packed


def scatter_blocks_triton(packed: Tensor, cache: Tensor, block_ids: Tensor, first_layer: int, first_head: int) -> None:
    part = _part(cache, first_layer, packed.shape[1], first_head, packed.shape[4])
    _check_packed(packed, cache, block_ids)
    _launch(packed, part, None, block_ids)


@jit_with_counts("layers")
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    source,
    target,
    source_ids,  # None: 0, 1, 2, …
    target_ids,
    layers,
    source_half_stride: tl.int64,
    source_layer_stride: tl.int64,
    source_block_stride,
    source_slot_stride,
    target_half_stride: tl.int64,
    target_layer_stride: tl.int64,
    target_block_stride,
    target_slot_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of the copied heads of one slot, adjacent on both sides
    SLOTS: tl.constexpr,  # slots of one program
    SIZE: tl.constexpr,  # power of two from WIDTH
):
    """One program for each (pair, keys or values of a layer, group of slots). Pairs are the first axis of the grid: the
    other two hold at most 65535. The strides over layers are 64 bits wide for small copies too: else large ones, which
    need them, would be compiled apart."""
    pair = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1) // layers
    layer = (tl.program_id(1) % layers).to(tl.int64)
    from_block = pair
    to_block = pair
    if source_ids is not None:
        from_block = tl.load(source_ids + pair)
    if target_ids is not None:
        to_block = tl.load(target_ids + pair)
    if (from_block >= 0) & (to_block >= 0):
        slot = (tl.program_id(2) * SLOTS + tl.arange(0, SLOTS))[:, None]
        column = tl.arange(0, SIZE)[None, :]
        inside = (slot < BLOCK_SIZE) & (column < WIDTH)
        start = source + half.to(tl.int64) * source_half_stride + layer * source_layer_stride
        start += from_block * source_block_stride
        values = tl.load(start + slot * source_slot_stride + column, mask=inside)
        start = target + half.to(tl.int64) * target_half_stride + layer * target_layer_stride
        start += to_block * target_block_stride
        tl.store(start + slot * target_slot_stride + column, values, mask=inside)


def _launch(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    _, layers, _, block_size, heads, head_size = source.shape
    width = heads * head_size
    if ids.numel() == 0 or layers == 0 or width == 0:
        return
    if source.dtype.itemsize == 1:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    options = launch_options(block_size, width)
    copy_blocks_kernel[(ids.numel(), 2 * layers, ceil_div(block_size, options["SLOTS"]))](
        source,
        target,
        source_ids,
        target_ids,
        layers,
        *source.stride()[:4],
        *target.stride()[:4],
        **options,
    )


def launch_options(block_size: int, width: int) -> dict[str, int]:
    size = power_of_two_from(width)
    slots = min(power_of_two_from(block_size), max(1, _PROGRAM_ELEMENTS // size))
    return {"BLOCK_SIZE": block_size, "WIDTH": width, "SLOTS": slots, "SIZE": size, "num_warps": 4}


def _part(cache: Tensor, first_layer: int, layers: int, first_head: int, heads: int) -> Tensor:
    if cache.dim() != 6 or cache.shape[0] != 2:
        raise ValueError(f"a cache is (2, layers, blocks, block_size, kv_heads, head_size), not {tuple(cache.shape)}")
    if cache.stride(5) != 1 or cache.stride(4) != cache.shape[5]:
        raise ValueError("the heads of a slot must be adjacent")
    for name, first, count, size in (
        ("layers", first_layer, layers, cache.shape[1]),
        ("kv heads", first_head, heads, cache.shape[4]),
    ):
        if first < 0 or count < 0 or first + count > size:
            raise ValueError(f"{name} [{first}, {first + count}) are outside [0, {size})")
    return cache[:, first_layer : first_layer + layers, :, :, first_head : first_head + heads]


def _packed(cache: Tensor, block_ids: Tensor, first_layer: int, layers: int, first_head: int, heads: int) -> Tensor:
    return cache.new_empty(2, layers, block_ids.shape[0], cache.shape[3], heads, cache.shape[5])


def _check(source: Tensor, target: Tensor, layers: int, heads: int) -> None:
    _part(source, 0, layers, 0, heads)
    _part(target, 0, layers, 0, heads)
    if source.shape[3:] != target.shape[3:] or source.shape[1] != target.shape[1] or source.dtype != target.dtype:
        raise ValueError(
            f"caches {tuple(source.shape)} {source.dtype} and {tuple(target.shape)} {target.dtype} do not fit"
        )


def _check_packed(packed: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    wanted = (2, packed.shape[1], block_ids.shape[0], cache.shape[3], packed.shape[4], cache.shape[5])
    if packed.shape != wanted or packed.dtype != cache.dtype or not packed.is_contiguous():
        raise ValueError(f"packed blocks {tuple(packed.shape)} {packed.dtype} are not {wanted} {cache.dtype}")


copy_blocks = operation(
    "copy_blocks",
    reference=copy_blocks_reference,
    cuda=copy_blocks_triton,
    fake=lambda source, target, source_ids, target_ids: None,
    mutates=("target",),
)
gather_blocks = operation("gather_blocks", reference=gather_blocks_reference, cuda=gather_blocks_triton, fake=_packed)
scatter_blocks = operation(
    "scatter_blocks",
    reference=scatter_blocks_reference,
    cuda=scatter_blocks_triton,
    fake=lambda packed, cache, block_ids, first_layer, first_head: None,
    mutates=("cache",),
)
