"""`CudaRunner`: the ModelRunner of an NVIDIA GPU. All is launched in order on one stream, and nothing is waited for.

A step is: what is new of the batch sent, one CUDA graph replayed (or its operations launched one by one), what the rows
ask for drawn, and one copy of all results back, on a stream of its own. Only a row with a guide makes `submit` wait,
for the step before. Swaps and block copies are on the same stream, so that all order is that of submission.

With a model on a CPU the same runs there, operation by operation, through the references.

Owns the KV cache, the streams and the order. Knows nothing of sequences, queues, clients or text.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poolwright_engine.cuda.batch import NOTHING, DeviceBatch, StepShape, to_device
from poolwright_engine.cuda.graphs import NO_GRAPHS, Graphs, GraphSizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.plans import AttentionPlans
from poolwright_engine.cuda.sampler import (
    HEAD_ROWS,
    NOT_FINITE,
    DeviceSampler,
    Drawn,
    Samples,
    logprob_words,
    read_logprobs,
)
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import Row, Step, StepResult
from poolwright_engine.scheduling.sequence import SamplingParams, TokenLogprobs
from poolwright_kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from poolwright_protocol.kv import blocks_for

T = TypeVar("T")

_RESERVE_BYTES = 2**29  # of the driver, of kernels, of what fragments


class _Mark:
    """A point of the stream, and when it was reached."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record()
        else:
            self._seconds = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "_Mark") -> float:
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1000


class _Copy:
    """A tensor on its way to the host, beside whatever is launched next."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._host = tensor
        self._done: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.copy_(tensor, non_blocking=True)
                self._done = torch.cuda.Event(blocking=True)
                self._done.record()
            tensor.record_stream(stream)

    def numpy(self) -> NDArray[Any]:
        """Waits."""
        if self._done is not None:
            self._done.synchronize()
        array: NDArray[Any] = self._host.numpy()
        return array


class _Done(Generic[T]):
    """A handle whose result is made when it is asked for, once."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T | None = None
        self._error: Exception | None = None

    def result(self) -> T:
        if self._make is not None:
            make, self._make = self._make, None
            try:
                self._value = make()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Words of the log probabilities of some prompt tokens of a row."""

    index: int
    targets: tuple[int, ...]
    words: Tensor


class CudaRunner:
    """max_model_len bounds a sequence, max_num_batched_tokens a step. `eos_token_ids` are what `min_tokens` keeps away;
    without `guides`, a row that asks for one fails alone. `sizes`: shapes that steps are padded to, each a graph on
    CUDA. `decodes_planned`: attention reads the work list also on a CPU, as interpreted kernels do. `cache_dtype`: of
    keys and values, None: the model's; float8_e4m3fn takes half the memory of 16 bits, and needs compute capability
    8.9."""

    def __init__(
        self,
        model: CudaModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        guides: Guides | None = None,
        sizes: GraphSizes = NO_GRAPHS,
        decodes_planned: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a KV cache of {num_blocks} blocks has none beside the null block")
        config, device = model.config, model.device
        is_cuda = device.type == "cuda"
        cache_dtype = cache_dtype or model.dtype
        if is_cuda and cache_dtype.itemsize == 1 and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(f"{torch.cuda.get_device_name(device)} has no numbers of 8 bits for a KV cache")
        self.kv_shape = config.kv_shape(cache_dtype)
        self.vocab_size = config.vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._model = model
        self._device = device
        self._max_num_seqs = max_num_seqs
        shape = self.kv_shape
        block = (block_size, shape.kv_heads, shape.head_size)
        self._cache = torch.zeros(2, shape.layers, num_blocks, *block, dtype=cache_dtype, device=device)
        self._host = torch.zeros(2, shape.layers, num_host_blocks, *block, dtype=cache_dtype, pin_memory=is_cuda)
        self._batch = DeviceBatch(
            max_num_seqs,
            max(max_num_batched_tokens, max_num_seqs, *sizes.mixed_tokens, 0),
            blocks_for(max_model_len, block_size),
            block_size,
            device,
        )
        self._plans = AttentionPlans(
            config,
            block_size,
            max_num_seqs,
            self._batch.max_tokens,
            model.dtype,
            device,
            is_cuda or decodes_planned,
            cache_dtype,
        )
        self._sampler = DeviceSampler(self._batch, self.vocab_size, eos_token_ids, guides)
        self._copy_stream = torch.cuda.Stream(device) if is_cuda else None
        self._sizes = sizes
        self._graphs = Graphs(self._forward)
        if is_cuda:
            self.warm()
            with torch.inference_mode():
                for step_shape in sizes.shapes(max_num_seqs):
                    self._plans.send(NOTHING)
                    self._batch.load(NOTHING, step_shape)
                    self._graphs.capture(step_shape)

    def warm(self) -> None:
        """Every kernel once, over nothing: what there is to compile is compiled now, and not when the first request
        needs it."""
        with torch.inference_mode():
            for decodes in (True, False):
                shape = self._sizes.shape(1, 1, decodes, self._max_num_seqs)
                self._plans.send(NOTHING)
                self._batch.load(NOTHING, shape)
                self._forward(shape)
            self._sampler.warm()
            nowhere, layers, heads = self._ids((-1,)), self.kv_shape.layers, self.kv_shape.kv_heads
            if self.num_host_blocks:
                copy_blocks(self._cache, self._host, nowhere, nowhere)
                copy_blocks(self._host, self._cache, nowhere, nowhere)
            null_block = gather_blocks(self._cache, self._ids((0,)), 0, layers, 0, heads)
            scatter_blocks(null_block, self._cache, nowhere, 0, 0)

    def submit(self, step: Step) -> "_Done[StepResult]":
        try:
            with torch.inference_mode():
                return self._submit(step)
        except Exception as error:
            return _Done(_raising(error))

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> _Done[bytes]:
        self._check(layers, kv_heads, block_ids)
        with torch.inference_mode():
            ids = self._ids(block_ids)
            part = gather_blocks(self._cache, ids, layers.start, len(layers), kv_heads.start, len(kv_heads))
            copy = _Copy(part.flatten().view(torch.uint8), self._copy_stream)
        return _Done(lambda: copy.numpy().tobytes())

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> _Done[None]:
        self._check(layers, kv_heads, block_ids)
        shape = (2, len(layers), len(block_ids), self.block_size, len(kv_heads), self.kv_shape.head_size)
        wanted = int(np.prod(shape)) * self.kv_shape.dtype_bytes
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes for {len(block_ids)} blocks that hold {wanted}")
        with torch.inference_mode():
            sent = to_device(np.frombuffer(bytearray(data), dtype=np.uint8), self._device)
            packed = sent.view(self._cache.dtype).view(shape)
            scatter_blocks(packed, self._cache, self._ids(block_ids), layers.start, kv_heads.start)
            return _Done(_Mark(self._device).wait)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> _Done[None]:
        self._check_pairs(block_ids, host_block_ids)
        return self._copied(self._cache, self._host, block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> _Done[None]:
        self._check_pairs(block_ids, host_block_ids)
        return self._copied(self._host, self._cache, host_block_ids, block_ids)

    def close(self) -> None:
        """Waits for what was submitted."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def _forward(self, shape: StepShape) -> tuple[Tensor, ...]:
        """Of the step loaded last. Decodes: hidden states, logits and plain draws of all rows; mixed: hidden states.
        What a graph holds."""
        inputs = self._batch.inputs(shape)
        if not shape.decodes:
            return (self._model.hidden(inputs, self._plans.mixed(inputs), self._cache),)
        hidden = self._model.hidden(inputs, self._plans.decode(inputs), self._cache)
        logits = self._model.logits(hidden)
        return hidden, logits, self._sampler.draw_plainly(logits, inputs.row_slots, inputs.context_lens.long())

    def _submit(self, step: Step) -> "_Done[StepResult]":
        rows = step.rows
        began = _Mark(self._device)
        if not rows:
            return _Done(lambda: StepResult(step.number, (), (), 0.0))
        self._batch.check(step)
        self._sampler.seat(rows)
        decodes = all(row.length == 1 for row in rows)
        shape = self._sizes.shape(len(rows), step.num_tokens, decodes, self._max_num_seqs)
        if not decodes:
            self._plans.send(step)
        self._batch.load(step, shape)
        results = self._graphs.run(shape)
        if decodes and all(map(self._sampler.is_plain, rows)):
            # A graph's results are overwritten by its next replay, perhaps before they are copied.
            return self._finished(began, results[2].clone(), lambda words: _plain_result(step, words))

        handle: _Done[StepResult]
        drawn: list[Drawn] = []
        hidden, logits = results[0], results[1] if decodes else None
        stops = list(itertools.accumulate(row.length for row in rows))
        for group in self._groups(rows):
            firsts = [stops[index] - 1 - rows[index].num_draft for index in group]
            samples = Samples(step, group, firsts)
            at = to_device(samples.at, self._device)
            chosen = self._model.logits(hidden[at]) if logits is None else logits[at]
            drawn.append(self._sampler.draw(samples, chosen, lambda: handle.result().token_ids))
        parts = [part for index, row in enumerate(rows) for part in self._prompt_parts(index, row, hidden, stops)]
        words = [group.words for group in drawn] + [part.words.flatten() for part in parts]
        sent = torch.cat(words) if words else torch.empty(0, dtype=torch.int32, device=self._device)
        handle = self._finished(began, sent, lambda words: _result(step, words, drawn, parts))
        return handle

    def _finished(
        self, began: _Mark, words: Tensor, read: Callable[[NDArray[np.int32]], StepResult]
    ) -> "_Done[StepResult]":
        ended = _Mark(self._device)
        copy = _Copy(words, self._copy_stream)

        def make() -> StepResult:
            result = read(copy.numpy())
            return StepResult(
                result.number,
                result.token_ids,
                result.logprobs,
                ended.seconds_since(began),
                result.prompt_logprobs,
                result.errors,
            )

        return _Done(make)

    def _groups(self, rows: Sequence[Row]) -> list[list[int]]:
        """Rows that sample, in groups whose logits may exist at once; one row always may."""
        groups: list[list[int]] = []
        size, most = 0, max(self._max_num_seqs, HEAD_ROWS)
        for index, row in enumerate(rows):
            if row.samples:
                if not groups or size + row.num_draft + 1 > most:
                    groups.append([])
                    size = 0
                groups[-1].append(index)
                size += row.num_draft + 1
        return groups

    def _prompt_parts(self, index: int, row: Row, hidden: Tensor, stops: Sequence[int]) -> list[_PromptPart]:
        """Of the tokens after each of the row's, as far as they are known; guesses are none of the prompt's."""
        count = row.params.prompt_logprobs
        if count is None:
            return []
        count = self.vocab_size if count < 0 else min(count, self.vocab_size)
        targets = list(row.token_ids[1 : row.length - row.num_draft])
        if row.next_token_id is not None:
            targets.append(row.next_token_id)
        first = stops[index] - row.length
        parts = []
        for at in range(0, len(targets), HEAD_ROWS):
            own = targets[at : at + HEAD_ROWS]
            logits = self._model.logits(hidden[first + at : first + at + len(own)])
            ids = to_device(np.array(own, dtype=np.int64), self._device)
            parts.append(_PromptPart(index, tuple(own), logprob_words(logits, ids, count)))
        return parts

    def _copied(
        self, source: Tensor, target: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> _Done[None]:
        with torch.inference_mode():
            copy_blocks(source, target, self._ids(source_ids), self._ids(target_ids))
            return _Done(_Mark(self._device).wait)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return to_device(np.array(ids, dtype=np.int64), self._device)

    def _check(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> None:
        """An address from a peer must never reach the null block, or wrap around as a negative index."""
        for name, part, size in (
            ("layers", layers, self.kv_shape.layers),
            ("kv_heads", kv_heads, self.kv_shape.kv_heads),
        ):
            if part.step != 1 or not 0 <= part.start <= part.stop <= size:
                raise ValueError(f"{name} {part} is outside [0, {size})")
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks:
                raise ValueError(f"block {block_id} is outside [1, {self.num_blocks})")

    def _check_pairs(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        self._check(range(0), range(0), block_ids)
        for host_id in host_block_ids:
            if not 0 <= host_id < self.num_host_blocks:
                raise ValueError(f"host block {host_id} is outside [0, {self.num_host_blocks})")
        if len(block_ids) != len(host_block_ids):
            raise ValueError(f"{len(block_ids)} blocks cannot swap with {len(host_block_ids)} host blocks")


def _raising(error: Exception) -> Callable[[], StepResult]:
    def make() -> StepResult:
        raise error

    return make


def _plain_result(step: Step, words: NDArray[np.int32]) -> StepResult:
    """words: ids of all rows of the shape, then whether each was drawn from numbers."""
    rows, size = step.rows, len(words) // 2
    ids, finite = words[:size].tolist(), words[size:].tolist()
    tokens = tuple((ids[i],) if row.samples and finite[i] else () for i, row in enumerate(rows))
    errors = () if all(finite[: len(rows)]) else tuple(
        (i, NOT_FINITE) for i, row in enumerate(rows) if row.samples and not finite[i]
    )  # fmt: skip
    nothing = ((),) * len(rows)
    return StepResult(step.number, tokens, nothing, 0.0, nothing, errors)


def _result(step: Step, words: NDArray[np.int32], drawn: Sequence[Drawn], parts: Sequence[_PromptPart]) -> StepResult:
    """words: of each group of rows drawn, then of each part of a prompt."""
    tokens: list[tuple[int, ...]] = [()] * len(step.rows)
    logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(step.rows)
    errors: list[tuple[int, str]] = []
    first = 0
    for group in drawn:
        own = words[first : first + group.words.numel()]
        first += len(own)
        for index, found, found_logprobs, error in group.tokens(own):
            tokens[index], logprobs[index] = found, found_logprobs
            if error:
                errors.append((index, error))
    prompt: list[list[TokenLogprobs]] = [[] for _ in step.rows]
    for part in parts:
        table = words[first : first + part.words.numel()].reshape(part.words.shape)
        first += part.words.numel()
        count = step.rows[part.index].params.prompt_logprobs
        prompt[part.index] += [
            read_logprobs(row, target, count or 0) for row, target in zip(table, part.targets, strict=True)
        ]
    return StepResult(step.number, tuple(tokens), tuple(logprobs), 0.0, tuple(map(tuple, prompt)), tuple(errors))


def largest_steps(max_num_seqs: int, max_tokens: int, max_model_len: int, block_size: int) -> tuple[Step, Step]:
    """One of chunks and one of decodes that take as much memory as any. All of it in block 1."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    table = [1] * blocks_for(max_model_len, block_size)
    rows: list[Row] = []
    left = max_tokens
    while left > 0 and len(rows) < max_num_seqs:
        length = min(left, max_model_len)
        rows.append(Row(len(rows), length, (0,) * length, table, True, params))
        left -= length
    decodes = tuple(Row(slot, 1, (0,), table, True, params) for slot in range(max_num_seqs))
    return Step(0, tuple(rows), (0,) * len(rows)), Step(1, decodes, (0,) * len(decodes))


def cache_bytes_left(total: int, in_use: int, step_peak: int, share: float) -> int:
    """Of a device of `total` bytes, `share` of which may be used. Graphs keep memory of their own for a step, so that
    is taken twice."""
    return int(total * share) - in_use - 2 * step_peak - _RESERVE_BYTES


def measured_cache_bytes(
    model: CudaModel,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    share: float,
    cache_dtype: torch.dtype | None = None,
) -> int:
    """What is left for the KV cache beside the model and the largest step, which is run to see. Below 0: too little."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    sizes = (block_size, max_num_seqs, max_num_batched_tokens, max_model_len)
    runner = CudaRunner(model, 2, *sizes, cache_dtype=cache_dtype)  # the kernels that will serve
    for step in largest_steps(max_num_seqs, max_num_batched_tokens, max_model_len, block_size):
        runner.submit(step).result()
    runner.close()
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del runner
    torch.cuda.empty_cache()
    return cache_bytes_left(total, total - free, peak, share)
