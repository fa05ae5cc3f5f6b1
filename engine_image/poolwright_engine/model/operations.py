"""What a layer does beside its products, in two ways: by PyTorch's operations, and by C where a library could be made.

Owns the interface that the model calls and the choice between the two. Both round where Hugging Face's models round, so
they differ by the order of sums only.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from poolwright_engine.model.cpu_attention import (
    AttentionPlan,
    AttentionRow,
    paged_attention,
    plan_attention,
    positions_and_slots,
)
from poolwright_engine.model.model_config import Activation, ModelConfig
from poolwright_engine.model.vml import settle
from poolwright_engine.native.attention import Heads, RowPlan, attend
from poolwright_engine.native.elementwise import DTYPES, Elementwise
from poolwright_engine.native.library import CpuOperations, is_native
from poolwright_kernels.kv_write import kv_write

settle(torch.cos, torch.sin, torch.exp, torch.sqrt, torch.rsqrt, torch.tanh)

_SERIAL_ELEMENTS = 32768  # up to so many, PyTorch keeps an element-wise operation on one thread


class StepAttention(Protocol):
    """Of the rows of one step, in every layer."""

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kind: int, keys: Tensor, values: Tensor) -> Tensor:
        """Norms queries and keys where the model does, rotates them, writes keys and values to the cache and returns
        what the queries attend to: (tokens, heads · head_size), contiguous.

        qkv:          (tokens, (heads + 2 · kv_heads) · head_size), any strides
        qk_norm:      (heads + kv_heads, head_size)
        kind:         index into the model's attention kinds
        keys, values: (blocks, block_size, kv_heads, head_size) of the layer, contiguous
        """
        ...


class Operations(Protocol):
    def step(self, rows: Sequence[AttentionRow], block_size: int) -> StepAttention: ...

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        """hidden += added, in place, if anything is; returns the RMS norm of the sum times `weight`. All rows are
        (tokens, size); those of `added` may have any strides."""
        ...

    def add(self, hidden: Tensor, added: Tensor) -> None:
        """hidden += added, in place."""
        ...

    def gated_unit(self, gate_up: Tensor) -> Tensor:
        """activation(gate) · up: (tokens, width) of (tokens, 2 · width) with any strides."""
        ...


def operations(wanted: CpuOperations, config: ModelConfig, dtype: torch.dtype, invariant: bool = False) -> Operations:
    """`invariant`: a row's numbers hang on nothing but the row. Of another dtype than the native
    ones know, PyTorch's. Raises NoLibrary where native ones are wanted and there is no library."""
    if dtype in DTYPES and is_native(wanted):
        return NativeOperations(config, dtype)
    return TorchOperations(config, dtype, invariant)


class TorchOperations:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, invariant: bool = False) -> None:
        self._config = config
        self._dtype = dtype
        self._invariant = invariant
        self._epsilon = torch.tensor(config.rms_norm_epsilon)
        self._windows = tuple({kind.window: None for kind in config.attention_kinds})
        self._frequencies = [torch.tensor(kind.inverse_frequencies) for kind in config.attention_kinds]

    def step(self, rows: Sequence[AttentionRow], block_size: int) -> StepAttention:
        plan = plan_attention(rows, block_size, self._dtype, self._windows, alone=self._invariant)
        return _TorchStep(self._config, self._dtype, plan, self._frequencies)

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        """In fewer passes than PyTorch's own norm takes on a CPU; sums and scales in float32."""
        if added is not None:
            hidden.add_(added)
        wide = hidden.float()  # itself in float32
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / hidden.shape[1]).rsqrt_()
        return (wide * scale).to(self._dtype).mul_(weight)

    def add(self, hidden: Tensor, added: Tensor) -> None:
        hidden.add_(added)

    def gated_unit(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        if self._invariant and gate.numel() > _SERIAL_ELEMENTS:
            # The first and last elements of a thread's part may take another code than the rest.
            return torch.cat([self._activated(row) for row in gate.split(1)]).mul_(up)
        return self._activated(gate).mul_(up)

    def _activated(self, gate: Tensor) -> Tensor:
        if self._config.activation is Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh")
        return F.silu(gate)


class _TorchStep:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        plan: AttentionPlan,
        frequencies: Sequence[Tensor],
    ) -> None:
        self._config = config
        self._plan = plan
        self._rotations: list[tuple[Tensor, Tensor]] = []  # cosines, signed sines: (tokens, 1, head_size)
        for of_kind in frequencies:
            angles = plan.positions[:, None, None].float() * of_kind
            cos, sin = angles.cos(), angles.sin()
            self._rotations.append((torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)))

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kind: int, keys: Tensor, values: Tensor) -> Tensor:
        config = self._config
        # A product's columns may be what is contiguous, and PyTorch's fused attention reads heads in one piece.
        heads = qkv.contiguous().unflatten(1, (-1, config.head_size))
        rotated = heads[:, : config.heads + config.kv_heads]
        if qk_norm is not None:
            rotated = F.rms_norm(rotated, (config.head_size,), None, config.rms_norm_epsilon) * qk_norm
        rotated = _rotate(rotated, *self._rotations[kind])
        kv_write(rotated[:, config.heads :], heads[:, -config.kv_heads :], keys, values, self._plan.write_slots)
        attended = paged_attention(
            rotated[:, : config.heads],
            keys,
            values,
            self._plan,
            config.attention_scale,
            config.attention_kinds[kind].window,
            config.attention_soft_cap,
        )
        return attended.flatten(1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves paired as Hugging Face pairs them: element i with i + head_size / 2."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


class NativeOperations:
    """Rows are computed one by one, so all of it is invariant. Raises NoLibrary."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.elementwise = Elementwise(dtype)
        self.heads = Heads(
            *(dtype, config.heads, config.kv_heads, config.head_size),
            *(config.attention_scale, config.attention_soft_cap),
        )
        self.windows = tuple({kind.window: None for kind in config.attention_kinds})
        self._turns = [Turns(kind.inverse_frequencies, dtype) for kind in config.attention_kinds]
        self._is_gelu = config.activation is Activation.GELU_TANH

    def step(self, rows: Sequence[AttentionRow], block_size: int) -> StepAttention:
        longest = max((row.start + row.length for row in rows), default=0)
        return _NativeStep(self, [of_kind.up_to(longest) for of_kind in self._turns], rows, block_size)

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        return self.elementwise.add_norm(hidden, added, weight, self.config.rms_norm_epsilon)

    def add(self, hidden: Tensor, added: Tensor) -> None:
        self.elementwise.add(hidden, added)

    def gated_unit(self, gate_up: Tensor) -> Tensor:
        return self.elementwise.gated_unit(gate_up, self._is_gelu)


class Turns:
    """Cosines and sines of the angles by which positions turn the halves of a head, as the model's dtype rounds them:
    a table that grows as longer sequences come."""

    def __init__(self, inverse_frequencies: Sequence[float], dtype: torch.dtype) -> None:
        self._frequencies = torch.tensor(inverse_frequencies)
        self._dtype = dtype
        self._table = torch.empty(0, 2 * len(inverse_frequencies))

    def up_to(self, positions: int) -> Tensor:
        """(at least that many positions, head_size) float32: cosines, then sines."""
        table = self._table  # read once: a model may serve several threads
        have = len(table)
        if positions > have:
            angles = torch.arange(have, max(positions, 2 * have, 1024))[:, None].float() * self._frequencies
            more = torch.cat((angles.cos(), angles.sin()), 1).to(self._dtype).float()
            self._table = table = torch.cat((table, more))
        return table


class _NativeStep:
    def __init__(
        self, native: "NativeOperations", turns: Sequence[Tensor], rows: Sequence[AttentionRow], block_size: int
    ) -> None:
        self._native = native
        self._turns = turns
        firsts = list(accumulate((row.length for row in rows), initial=0))[:-1]
        starts, lengths = [row.start for row in rows], [row.length for row in rows]
        tables = [row.block_ids for row in rows]
        self._plans = {
            window: RowPlan(native.heads, firsts, starts, lengths, tables, block_size, window)
            for window in native.windows
        }
        self._positions, self._slots = positions_and_slots(rows, block_size)

    def attend(self, qkv: Tensor, qk_norm: Tensor | None, kind: int, keys: Tensor, values: Tensor) -> Tensor:
        config = self._native.config
        query = self._native.elementwise.rotate_write(
            qkv,
            qk_norm,
            config.rms_norm_epsilon,
            self._turns[kind],
            self._positions,
            self._slots,
            keys,
            values,
        )
        attended = torch.empty_like(query)
        attend(query, keys, values, self._plans[config.attention_kinds[kind].window], attended)
        return attended.flatten(1)
