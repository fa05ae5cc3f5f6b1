"""Causal attention of a mixed batch straight from the paged KV cache. Owns the arrays that the C code reads: made once
a step, shared by its layers. Reads only slots of tokens that a query of the row sees.

A row's output depends on its own queries and keys alone, bit for bit: not on the rows beside it, nor on threads. Rows
of few queries and chunks are computed in different ways: what a query gets may differ by rounding between the two.
"""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from poolwright_engine.native.library import library

_POINTERS = ("first", "start", "length", "table", "blocks")


class _Plan(ctypes.Structure):
    """`Plan` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "size", "block_size")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_int64) for name in ("tasks", "task_bytes", "partial_bytes", "work", "has_tiles")),
        *((name, ctypes.c_void_p) for name in ("task", "partial")),
    )


class Heads:
    """What the layers of a model have in common. Raises NoLibrary."""

    def __init__(
        self,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        head_size: int,
        scale: float,
        soft_cap: float | None = None,
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} heads do not share {kv_heads} kv heads evenly")
        if scale <= 0:
            raise ValueError(f"a scale of {scale}")
        names = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
        if dtype not in names:
            raise ValueError(f"no attention in C for {dtype}")
        self.dtype, self.heads, self.kv_heads, self.head_size = dtype, heads, kv_heads, head_size
        self.scale, self.soft_cap = scale, soft_cap or 0.0
        self.tasks = library().attention_tasks
        self.tasks.argtypes, self.tasks.restype = (ctypes.c_void_p,), None
        self.attend = getattr(library(), names[dtype])
        self.attend.argtypes, self.attend.restype = (ctypes.c_void_p,) * 5, None


class RowPlan:
    """Rows of a step, for layers of one window (None: a query sees all keys up to itself).

    Row i has `lengths[i]` queries at positions from `starts[i]` on, which are tokens of the batch from `firsts[i]` on;
    its keys are in the blocks of `tables[i]`, the first of which has positions [0, block_size).
    """

    def __init__(
        self,
        heads: Heads,
        firsts: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        block_size: int,
        window: int | None = None,
    ) -> None:
        places, blocks = array("q"), array("q")
        for start, length, table in zip(starts, lengths, tables, strict=True):
            needed = -(-(start + length) // block_size)
            if needed > len(table):
                raise ValueError(f"{start + length} tokens need {needed} blocks of {block_size}, not {len(table)}")
            places.append(len(blocks))
            blocks.extend(table[:needed])
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} keys")
        arrays = (array("q", firsts), array("q", starts), array("q", lengths), places, blocks)
        plan = _Plan(len(places), heads.heads, heads.kv_heads, heads.head_size, block_size)
        for name, values in zip(_POINTERS, arrays, strict=True):
            setattr(plan, name, values.buffer_info()[0])
        plan.window, plan.scale, plan.soft_cap = window or 0, heads.scale, heads.soft_cap
        self.address = ctypes.addressof(plan)
        heads.tasks(self.address)
        task = ctypes.create_string_buffer(plan.task_bytes)
        partial = torch.empty(plan.partial_bytes, dtype=torch.uint8)
        plan.task, plan.partial = ctypes.addressof(task), partial.data_ptr()
        heads.tasks(self.address)
        self._held = (plan, arrays, task, partial)  # the addresses are theirs
        self.attend = heads.attend


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: RowPlan, out: Tensor) -> None:
    """Writes the output of the plan's rows; the step's own keys and values are in the cache already. One call of a plan
    at a time. All contiguous and of the dtype of its `Heads`; the caller sees to it.

    query, out:    (tokens, heads, head_size); query head h reads kv head h // (heads / kv_heads)
    keys, values:  (slots, kv_heads, head_size) of one layer, or (blocks, block_size, kv_heads, head_size)
    """
    plan.attend(plan.address, query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr())
