"""The gated units of the MLP: SiLU(gate) · up and GELU(gate) · up, of one product that holds both.

Activations are float32, rounded to the dtype before the product with `up`, as Hugging Face's models round them. GELU is
its tanh form (Hendrycks and Gimpel, 2016), with ½(1 + tanh t) = sigmoid(2t). Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

import torch.nn.functional as F
from torch import Tensor

from poolwright_kernels.jit import ceil_div, jit, tl
from poolwright_kernels.ops import operation, widened

BLOCK = 1024


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up: (tokens, 2 · width) float, gate then up, any row stride, elements of a row adjacent. Returns
    (tokens, width) contiguous. Raises ValueError for another shape."""
    _check(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(widened(gate)).to(gate.dtype) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """As `silu_mul`, with GELU in its tanh form."""
    _check(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.gelu(widened(gate), approximate="tanh").to(gate.dtype) * up


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, gelu=False)


def gelu_mul_triton(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, gelu=True)


@jit
def gated_unit_kernel(  # type: ignore[no-untyped-def]
    gate_up, y, gate_up_stride, y_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """One program for each (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = gate_up + token * gate_up_stride
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2·sqrt(2/π)
    dtype = y.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    tl.store(y + token * y_stride + column, (active * up).to(dtype), mask=inside)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    y = _like(gate_up)
    tokens, width = y.shape
    if tokens > 0:
        grid = (tokens, ceil_div(width, BLOCK))
        gated_unit_kernel[grid](
            gate_up, y, gate_up.stride(0), y.stride(0), WIDTH=width, BLOCK=BLOCK, GELU=gelu, num_warps=4
        )
    return y


def _like(gate_up: Tensor) -> Tensor:
    _check(gate_up)
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} is not (tokens, 2 · width) with adjacent elements")


silu_mul = operation("silu_mul", reference=silu_mul_reference, cuda=silu_mul_triton, fake=_like)
gelu_mul = operation("gelu_mul", reference=gelu_mul_reference, cuda=gelu_mul_triton, fake=_like)
