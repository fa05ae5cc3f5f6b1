"""The batch as a device keeps it from step to step, and the inputs of a forward pass that it makes of it.

By slot it holds the block table, the sampling parameters and the last sampled token; a step brings only what is new:
block ids that were appended, parameters of a sequence that took the slot, and which rows run. Positions, KV slots and
context lengths are computed on the device, by operations of fixed shapes, so that a CUDA graph can hold them.

Knows neither model nor sampler. On a CPU everything is the same, without pinned memory.

Host memory that travels comes from PyTorch's caching allocator of pinned memory, which gives a buffer out again only
when the copies that read it have ended: as many buffers take turns as steps are in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poolwright_engine.scheduling.runner import Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_protocol.kv import blocks_for

_FLOATS = 6  # temperature, top-p, min-p, repetition, presence and frequency penalty
_PARAM_WORDS = 10  # those, top-k, an unused word, and two of the seed
_LARGEST = 1e30  # what a request asks for stays finite in float32
NOTHING = Step(0, (), ())  # for a graph to be made on


class StepShape(NamedTuple):
    """What a forward pass is made for: at least the step's tokens and rows; `decodes`: one token in each row."""

    tokens: int
    rows: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """token_ids, positions, kv_slots: (tokens,) int64; a padding token has slot -1.
    row_slots: (rows,) int64; context_lens: (rows,) int32, 0 for padding; query_starts: (rows + 1,) int32
    block_tables: (rows, blocks) int32"""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    row_slots: Tensor
    context_lens: Tensor
    query_starts: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Of some samples, (samples,) each, as the operations of sampling take them."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    seeds: Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, made in stream order without waiting."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


class DeviceBatch:
    def __init__(
        self, max_num_seqs: int, max_tokens: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        """max_blocks: of one sequence."""
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_tokens
        self.block_size = block_size
        self.max_blocks = max_blocks
        # Slot max_num_seqs is nobody's: padding reads its null blocks and writes its last token.
        self._width = _PARAM_WORDS + max_blocks
        self._state = torch.zeros(max_num_seqs + 1, self._width, dtype=torch.int32, device=device)
        self.last_sampled = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        rows = max_num_seqs + 1
        self._inputs = torch.zeros(3 * rows + 1 + 2 * max_tokens, dtype=torch.int32, device=device)
        self._sent_tables: list[Sequence[int] | None] = [None] * max_num_seqs
        self._sent_blocks = [0] * max_num_seqs
        self._sent_params: list[SamplingParams | None] = [None] * max_num_seqs

    def check(self, step: Step) -> None:
        """Raises ValueError; nothing was changed then."""
        tokens = 0
        for row, context in zip(step.rows, step.contexts, strict=True):
            if len(row.token_ids) != (0 if row.use_last_sampled else row.length) or row.length < 1:
                raise ValueError(f"a row of {row.length} tokens came with {len(row.token_ids)} ids")
            if not 0 <= row.slot < self.max_num_seqs:
                raise ValueError(f"slot {row.slot} is outside [0, {self.max_num_seqs})")
            needed = blocks_for(context, self.block_size)
            if needed > len(row.block_ids):
                raise ValueError(
                    f"{context} tokens need {needed} blocks of {self.block_size}, the table has {len(row.block_ids)}"
                )
            if needed > self.max_blocks:
                raise ValueError(f"{needed} blocks of a sequence are more than {self.max_blocks}")
            tokens += row.length
        if len(step.rows) > self.max_num_seqs or tokens > self.max_tokens:
            raise ValueError(f"a step of {len(step.rows)} rows and {tokens} tokens is too large")

    def load(self, step: Step, shape: StepShape) -> None:
        """Sends what is new of a step that `check` let pass, or `NOTHING`."""
        self._send_changes(step.rows)
        if shape.decodes:
            self._load_decodes(step, shape)
        else:
            self._load_mixed(step, shape)

    def inputs(self, shape: StepShape) -> BatchInputs:
        """Of the rows loaded for this shape. Only operations on the device, of fixed sizes and places."""
        tokens, count, _ = shape
        rows = self.max_num_seqs + 1
        slots = self._inputs[:rows].long()
        starts = self._inputs[rows : 2 * rows]
        query_starts = self._inputs[2 * rows : 3 * rows + 1]
        pairs = self._inputs[3 * rows + 1 :].view(-1, 2)[:tokens].long()
        row_of, given = pairs[:, 0], pairs[:, 1]
        slot_of = slots[row_of]
        is_padding = slot_of == self.max_num_seqs
        index = torch.arange(tokens, device=self.device)
        positions = torch.where(is_padding, 0, starts[row_of] + index - query_starts[row_of]).long()
        places = slot_of * self._width + _PARAM_WORDS + positions // self.block_size
        blocks = self._state.view(-1)[places].long()
        return BatchInputs(
            token_ids=torch.where(given < 0, self.last_sampled[slot_of], given),
            positions=positions,
            kv_slots=torch.where(is_padding, -1, blocks * self.block_size + positions % self.block_size),
            row_slots=slots[:count],
            context_lens=starts[:count] + query_starts[1 : count + 1] - query_starts[:count],
            query_starts=query_starts[: count + 1],
            block_tables=self._state[:, _PARAM_WORDS:].index_select(0, slots[:count]),
        )

    def params(self, slots: Tensor) -> DrawParams:
        """slots: (samples,) int64."""
        count = slots.shape[0]
        # Every column starts at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
        words = self._state.new_empty(_PARAM_WORDS, -(-count // 4) * 4)[:, :count]
        words.copy_(self._state[:, :_PARAM_WORDS].index_select(0, slots).t())
        low, high = words[_FLOATS + 2].long(), words[_FLOATS + 3].long()
        return DrawParams(
            *words[:_FLOATS].view(torch.float32).unbind(),  # type: ignore[misc]  # as many as the fields before top_k
            top_k=words[_FLOATS],
            seeds=(high << 32) | (low & 0xFFFF_FFFF),
        )

    def _send_changes(self, rows: Sequence[Row]) -> None:
        indices: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        for row in rows:
            slot = row.slot
            first = slot * self._width
            if row.params is not self._sent_params[slot]:
                self._sent_params[slot] = row.params
                indices.append(np.arange(first, first + _PARAM_WORDS))
                values.append(_words(row.params))
            if row.block_ids is not self._sent_tables[slot]:
                self._sent_tables[slot], self._sent_blocks[slot] = row.block_ids, 0
            sent, known = self._sent_blocks[slot], min(len(row.block_ids), self.max_blocks)
            if known > sent:
                self._sent_blocks[slot] = known
                indices.append(np.arange(first + _PARAM_WORDS + sent, first + _PARAM_WORDS + known))
                values.append(np.array(row.block_ids[sent:known], dtype=np.int32))
        if indices:
            # One copy: places and values as pairs of 64 bits.
            both = to_device(np.stack((np.concatenate(indices), np.concatenate(values).astype(np.int64))), self.device)
            self._state.view(-1).index_copy_(0, both[0], both[1].int())

    def _load_decodes(self, step: Step, shape: StepShape) -> None:
        """Row i is token i; a padding row starts at -1, so that it has no context."""
        rows, total = step.rows, self.max_num_seqs + 1
        count = len(rows)
        words = np.zeros(3 * total + 1 + 2 * shape.tokens, dtype=np.int32)
        words[:total] = self.max_num_seqs
        words[total : 2 * total] = -1
        words[:count] = [row.slot for row in rows]
        words[total : total + count] = step.starts
        words[2 * total : 3 * total + 1] = np.arange(total + 1)
        pairs = words[3 * total + 1 :].reshape(-1, 2)
        pairs[:, 0] = np.arange(shape.tokens)
        pairs[:count, 1] = [-1 if row.use_last_sampled else row.token_ids[0] for row in rows]
        self._send(words)

    def _load_mixed(self, step: Step, shape: StepShape) -> None:
        """Padding rows have no tokens; padding tokens belong to the row after the last."""
        rows, total = step.rows, self.max_num_seqs + 1
        count = len(rows)
        lengths = np.array([row.length for row in rows], dtype=np.int32)
        tokens = int(lengths.sum())
        words = np.zeros(3 * total + 1 + 2 * shape.tokens, dtype=np.int32)
        words[:total] = self.max_num_seqs
        words[:count] = [row.slot for row in rows]
        words[total : total + count] = step.starts
        words[2 * total + 1 : 2 * total + 1 + count] = lengths.cumsum()
        words[2 * total + 1 + count : 3 * total + 1] = tokens
        pairs = words[3 * total + 1 :].reshape(-1, 2)
        pairs[:tokens, 0] = np.arange(count).repeat(lengths)
        pairs[tokens:, 0] = self.max_num_seqs
        ids: list[int] = []
        for row in rows:
            ids.extend((-1,) if row.use_last_sampled else row.token_ids)
        pairs[:tokens, 1] = ids
        self._send(words)

    def _send(self, words: NDArray[np.int32]) -> None:
        self._inputs[: len(words)].copy_(to_device(words, self.device))


def _words(params: SamplingParams) -> NDArray[np.int32]:
    words = np.zeros(_PARAM_WORDS, dtype=np.int32)
    words[:_FLOATS].view(np.float32)[:] = np.clip(
        (
            params.temperature,
            params.top_p,
            params.min_p,
            max(params.repetition_penalty, 1 / _LARGEST),
            params.presence_penalty,
            params.frequency_penalty,
        ),
        -_LARGEST,
        _LARGEST,
    )
    words[_FLOATS] = min(params.top_k, 2**31 - 1)
    words[_FLOATS + 2 :].view(np.uint64)[0] = params.seed & 0xFFFF_FFFF_FFFF_FFFF
    return words
