"""RMSNorm, alone or after the residual addition.

    y = x / sqrt(mean(x²) + epsilon) · weight        (Llama, Qwen: rounded to x's dtype before the product with weight)
    y = x / sqrt(mean(x²) + epsilon) · (1 + weight)  (`plus_one`, Gemma: rounded once)

Sums are float32. The places of rounding are those of Hugging Face's models. Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019.
"""

import torch
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit, power_of_two_from, tl
from poolwright_kernels.ops import operation, widened


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False) -> Tensor:
    """x: (tokens, hidden) float, any row stride, elements of a row adjacent. weight: (hidden,) float, contiguous.
    Returns (tokens, hidden) contiguous in x's dtype. Raises ValueError for shapes that do not fit."""
    _check(x, weight)
    return _normalize(x, weight, epsilon, plus_one)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False
) -> Tensor:
    """residual += x, in place, and the norm of the sum as rounded. x, residual: (tokens, hidden) of one dtype, any row
    strides; otherwise as `rms_norm`."""
    _check(x, weight)
    _check_residual(x, residual)
    residual.copy_(widened(x) + widened(residual))
    return _normalize(residual, weight, epsilon, plus_one)


def rms_norm_triton(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False) -> Tensor:
    _check(x, weight)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, x, weight, y, epsilon, plus_one, add=False)
    return y


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False) -> Tensor:
    _check(x, weight)
    _check_residual(x, residual)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, weight, y, epsilon, plus_one, add=True)
    return y


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    y,
    x_stride,
    residual_stride,
    y_stride,
    epsilon,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two from HIDDEN
    ADD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    values = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    if ADD:
        values += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(residual + token * residual_stride + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values) / HIDDEN + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:  # noqa: SIM108  (Triton types both arms apart)
        scaled = scaled * (1.0 + factor)
    else:
        scaled = scaled.to(dtype).to(tl.float32) * factor
    tl.store(y + token * y_stride + column, scaled.to(dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, y: Tensor, epsilon: float, plus_one: bool, add: bool) -> None:
    tokens, hidden = x.shape
    if tokens == 0:
        return
    block = power_of_two_from(hidden)
    rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        y,
        x.stride(0),
        residual.stride(0),
        y.stride(0),
        epsilon,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=add,
        PLUS_ONE=plus_one,
        num_warps=warps_for(block),
    )


def warps_for(block: int) -> int:
    """8 elements a thread, so that loads are 16 bytes wide, as far as 32 warps go. With 16 elements the assembler of
    some versions spills, to fit one program more."""
    return min(32, max(1, power_of_two_from(ceil_div(block, 32 * 8))))


def _normalize(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Tensor:
    wide = widened(x)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if plus_one:
        return (scaled * (1.0 + widened(weight))).to(x.dtype).contiguous()
    return (scaled.to(x.dtype) * weight.to(x.dtype)).contiguous()


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not (tokens, hidden) and (hidden,)")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the elements of a row must be adjacent")


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} is not like x {tuple(x.shape)} {x.dtype}")


rms_norm = operation(
    "rms_norm",
    reference=rms_norm_reference,
    cuda=rms_norm_triton,
    fake=lambda x, weight, epsilon, plus_one=False: torch.empty_like(x, memory_format=torch.contiguous_format),
)
add_rms_norm = operation(
    "add_rms_norm",
    reference=add_rms_norm_reference,
    cuda=add_rms_norm_triton,
    fake=lambda x, residual, weight, epsilon, plus_one=False: torch.empty_like(
        x, memory_format=torch.contiguous_format
    ),
    mutates=("residual",),
)
