"""Norms, gated units and rotations in one pass each: calls of elementwise.c with tensors.

Each is for rows of one dtype, float32 or bfloat16. Shapes are the caller's promise, as in any inner loop: what arrives
here was made by products with weights whose shapes the loader checked.
"""

import ctypes

import torch
from torch import Tensor

from poolwright_engine.native.library import library

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DTYPES = tuple(_SUFFIXES)

_LONG, _POINTER, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class Elementwise:
    """Of one dtype. Raises NoLibrary."""

    def __init__(self, dtype: torch.dtype) -> None:
        suffix, c = _SUFFIXES[dtype], library()
        self._add_norm = c[f"add_norm_{suffix}"]
        self._add_norm.argtypes = (
            *(_LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG),
            *(_POINTER, _FLOAT, _POINTER),
        )
        self._add = c[f"add_{suffix}"]
        self._add.argtypes = (_LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG)
        self._gated_unit = c[f"gated_unit_{suffix}"]
        self._gated_unit.argtypes = (_LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER)
        self._rotate_write = c[f"rotate_write_{suffix}"]
        self._rotate_write.argtypes = (
            *(_LONG, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER, _FLOAT),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        )
        for function in (self._add_norm, self._add, self._gated_unit, self._rotate_write):
            function.restype = None

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """hidden += added, in place; returns the RMS norm of the sum times `weight`, contiguous.

        hidden: (tokens, size), elements of a row adjacent; added: the same shape, any strides; weight: (size,)."""
        tokens, size = hidden.shape
        out = hidden.new_empty(tokens, size)
        address, stride, step = (0, 0, 1) if added is None else (added.data_ptr(), *added.stride())
        self._add_norm(
            *(tokens, size, hidden.data_ptr(), hidden.stride(0), address, stride, step),
            *(weight.data_ptr(), epsilon, out.data_ptr()),
        )
        return out

    def add(self, hidden: Tensor, added: Tensor) -> None:
        """hidden += added, in place; shapes as in `add_norm`."""
        self._add(*hidden.shape, hidden.data_ptr(), hidden.stride(0), added.data_ptr(), *added.stride())

    def gated_unit(self, gate_up: Tensor, is_gelu: bool) -> Tensor:
        """SiLU(gate) · up, or GELU in its tanh form: (tokens, width) that lies as gate_up does.

        gate_up: (tokens, 2 · width), a token's elements adjacent, or tokens adjacent; another is copied first."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        stride, step = gate_up.stride()
        if step != 1 and stride == 1:  # as one row, with what lies between one feature's tokens and the next one's
            out = gate_up.new_empty(width, step).t()[:tokens]
            rows, size, up = 1, (width - 1) * step + tokens, width * step
        else:
            if step != 1:
                gate_up = gate_up.contiguous()
                stride = 2 * width
            out = gate_up.new_empty(tokens, width)
            rows, size, up = tokens, width, width
        gate = gate_up.data_ptr()
        up_at = gate + up * gate_up.element_size()
        self._gated_unit(rows, size, gate, up_at, stride, is_gelu, out.data_ptr())
        return out

    def rotate_write(
        self,
        qkv: Tensor,
        norm: Tensor | None,
        epsilon: float,
        turns: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norms (where a model has it) and rotates queries and keys, writes keys and values to their slots, and returns
        the queries: (tokens, heads, head_size), contiguous.

        qkv:           (tokens, (heads + 2 · kv_heads) · head_size), any strides: all queries, then keys, then values
        norm:          (heads + kv_heads, head_size) contiguous
        turns:         (positions, head_size) float32: cosines, then sines, of the head's halves paired as Hugging Face
                       pairs them; a row for every position that occurs
        positions, slots: (tokens,) int64
        keys, values:  (blocks, block_size, kv_heads, head_size), contiguous
        """
        tokens, features = qkv.shape
        kv_heads, size = keys.shape[2:]
        heads = features // size - 2 * kv_heads
        query = qkv.new_empty(tokens, heads, size)
        self._rotate_write(
            *(tokens, heads, kv_heads, size, qkv.data_ptr(), *qkv.stride()),
            *(0 if norm is None else norm.data_ptr(), epsilon),
            *(turns.data_ptr(), positions.data_ptr(), slots.data_ptr()),
            *(query.data_ptr(), keys.data_ptr(), values.data_ptr()),
        )
        return query
