"""Products with weights of 8 bits: packing a weight, and the one call that multiplies with it.

Owns the order in which a packed weight lies, which int8_product.c reads. Knows nothing of models, nor of who chooses
between this and other products.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.native.library import library

MOST_INPUTS: Final = 2**16
"""Sums are of 32 bits, and products of up to 255 · 127."""

_Call = Callable[[int, int, int, int, int], int]

_PANEL = 32  # as in int8_product.c
_GROUP = 4
_STEP = 64
_ZERO = 128
_HUGE_PAGE_BYTES = 2**21
_SHELF_BYTES = 2**26


class _Weight(ctypes.Structure):
    """int8_weight in int8_product.c."""

    _fields_ = (
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("sets", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class Int8Product:
    """x Wᵀ + b, W of integers of 8 bits with a scale for each output. Raises NoLibrary where there is no C library.

    Rows of x are rounded by themselves, to 8 bits or, `fine`, to 8 bits and what that left out to 8 more. A row with an
    element that is not finite has NaN everywhere.
    """

    __slots__ = ("_address", "_bias", "_calls", "_scales", "_weight", "in_features", "out_features", "packed")

    def __init__(self, levels: Tensor, scales: Tensor, bias: Tensor | None = None, fine: bool = False) -> None:
        """`levels`: (out, in), int8, of ±127; `scales`: (out,), float32."""
        self.out_features, self.in_features = levels.shape
        if self.in_features > MOST_INPUTS:
            raise ValueError(f"{self.in_features} inputs are more than {MOST_INPUTS}")
        self._calls = _calls(library())
        self.packed = packed(levels)
        filled = len(self.packed) * _PANEL - self.out_features
        self._scales = F.pad(scales.float(), (0, filled))
        self._bias = None if bias is None else F.pad(bias.float(), (0, filled))
        self._weight = _Weight(
            self.out_features,
            self.in_features,
            len(self.packed),
            self.packed[0].numel() // _PANEL,
            2 if fine else 1,
            self.packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, in). The result has its type."""
        rows, features = x.shape
        if features != self.in_features:
            raise ValueError(f"rows of {features} for a weight with {self.in_features} inputs")
        call = self._calls.get(x.dtype)
        if call is None:
            return self(x.float()).to(x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(rows, self.out_features)
        if rows and not call(self._address, rows, x.data_ptr(), x.stride(0), y.data_ptr()):
            raise MemoryError(f"no memory for the levels of {rows} rows")
        return y


def packed(levels: Tensor) -> Tensor:
    """(out, in) int8 to (panels, in / 4, 32, 4) uint8, filled up with zeros, 128 added to all."""
    out_features, in_features = levels.shape
    filled = F.pad(levels, (0, -in_features % _STEP, 0, -out_features % _PANEL))
    in_order = filled.view(torch.uint8).view(-1, _PANEL, filled.shape[1] // _GROUP, _GROUP).transpose(1, 2)
    place = _shelves.place(in_order.numel()).view(in_order.shape)
    return place.copy_(in_order).bitwise_xor_(_ZERO)


class _Shelves:
    """Memory in which one weight follows the other. Reading a weight of some 100 KiB that lies by itself takes a third
    longer: most of it is outside of the huge pages that fit into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, size_bytes: int) -> Tensor:
        """Lives as long as anybody has it, and so does the rest of its shelf."""
        with self._lock:
            if len(self._free) < size_bytes:
                self._free = _new_shelf(max(size_bytes, _SHELF_BYTES))
            taken, self._free = self._free[:size_bytes], self._free[size_bytes:]
            return taken


_shelves = _Shelves()


def _new_shelf(size_bytes: int) -> Tensor:
    """Of memory that the system gives when it is written."""
    with torch.inference_mode(mode=False):  # weights may be made in it or not
        memory = torch.empty(size_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _HUGE_PAGE_BYTES :]


@functools.cache
def _calls(compiled: ctypes.CDLL) -> Mapping[torch.dtype, _Call]:
    calls = {torch.float32: compiled.int8_product_float32, torch.bfloat16: compiled.int8_product_bfloat16}
    for call in calls.values():
        call.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        call.restype = ctypes.c_int
    return calls
