"""`CpuRunner`: the ModelRunner of a machine without an accelerator. One worker thread runs everything in order.

Owns the KV cache and the last sampled token of each slot. Knows nothing of sequences, queues or clients.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from poolwright_engine.model import KVCache, LlamaModel
from poolwright_engine.runner import Row, Step, StepResult
from poolwright_engine.sampler import sample
from poolwright_engine.sequence import TokenLogprobs
from poolwright_kernels.paged_attention import AttentionRow


class CpuRunner:
    """`duty_percent` below 100 makes a slower machine of this one: after each step the worker rests until the process
    has had at most that share of one core over the step. CPU time counts, not wall time: an engine that waited for a
    busy core has rested already. The rest belongs to the step and is in its busy seconds."""

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        cpu_threads: int | None = None,
        duty_percent: int = 100,
        num_host_blocks: int = 0,
    ) -> None:
        if not 1 <= duty_percent <= 100:
            raise ValueError(f"duty_percent must be in [1, 100], not {duty_percent}")
        self.kv_shape = model.config.kv_shape(model.dtype)
        self.vocab_size = model.config.vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._model = model
        self._cache = KVCache(self.kv_shape, num_blocks, block_size, model.dtype)
        self._host = KVCache(self.kv_shape, max(2, num_host_blocks), block_size, model.dtype)
        self._last_sampled = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._duty = duty_percent / 100
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="cpu-runner", initializer=_set_threads, initargs=(cpu_threads,)
        )

    def submit(self, step: Step) -> Future[StepResult]:
        return self._worker.submit(self._run, step)

    def set_last_sampled(self, slot: int, token_id: int) -> None:
        if not 0 <= slot < len(self._last_sampled):
            raise IndexError(f"slot {slot} is outside [0, {len(self._last_sampled)})")
        self._worker.submit(self._last_sampled.__setitem__, slot, token_id)

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> Future[bytes]:
        self._check(layers, kv_heads, block_ids)
        return self._worker.submit(self._read, layers, kv_heads, tuple(block_ids))

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> Future[None]:
        self._check(layers, kv_heads, block_ids)
        wanted = 2 * len(layers) * len(block_ids) * self.block_size * len(kv_heads)
        wanted *= self.kv_shape.head_size * self.kv_shape.dtype_bytes
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes for {len(block_ids)} blocks that hold {wanted}")
        return self._worker.submit(self._write, layers, kv_heads, tuple(block_ids), data)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> Future[None]:
        self._check(range(0), range(0), block_ids)
        return self._worker.submit(_copy_blocks, self._cache, tuple(block_ids), self._host, tuple(host_block_ids))

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> Future[None]:
        self._check(range(0), range(0), block_ids)
        return self._worker.submit(_copy_blocks, self._host, tuple(host_block_ids), self._cache, tuple(block_ids))

    def close(self) -> None:
        """Waits for the step that runs; what has not begun is cancelled."""
        self._worker.shutdown(wait=True, cancel_futures=True)

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

    def _run(self, step: Step) -> StepResult:
        began, cpu_began = time.perf_counter(), time.process_time()
        token_ids: list[tuple[int, ...]] = [()] * len(step.rows)
        logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(step.rows)
        if step.rows:
            sampling = [index for index, row in enumerate(step.rows) if row.samples]
            logits = self._forward(step.rows, sampling)
            rows = [step.rows[index] for index in sampling]
            sampled = sample(logits, [row.params for row in rows], [row.start + row.length for row in rows])
            for index, row, token in zip(sampling, rows, sampled, strict=True):
                self._last_sampled[row.slot] = token.token_id
                token_ids[index] = (token.token_id,)
                logprobs[index] = (token.logprobs,) if token.logprobs is not None else ()
        if self._duty < 1:
            used = time.process_time() - cpu_began
            time.sleep(max(0.0, used / self._duty - (time.perf_counter() - began)))
        return StepResult(step.number, tuple(token_ids), tuple(logprobs), time.perf_counter() - began)

    def _forward(self, rows: Sequence[Row], sampling: Sequence[int]) -> Tensor:
        inputs: list[int] = []
        last_of_row: list[int] = []
        for row in rows:
            ids = (int(self._last_sampled[row.slot]),) if row.use_last_sampled else row.token_ids
            if len(ids) != row.length:
                raise ValueError(f"a row of {row.length} tokens came with {len(ids)} ids")
            inputs.extend(ids)
            last_of_row.append(len(inputs) - 1)
        attention_rows = [AttentionRow(row.start, row.length, row.block_ids) for row in rows]
        logits_at = [last_of_row[index] for index in sampling]
        return self._model.forward(torch.tensor(inputs, dtype=torch.int64), attention_rows, self._cache, logits_at)

    def _read(self, layers: range, kv_heads: range, block_ids: tuple[int, ...]) -> bytes:
        part = self._part(layers, kv_heads)[:, :, torch.tensor(block_ids, dtype=torch.int64)]
        return bytes(part.contiguous().view(torch.uint8).numpy())

    def _write(self, layers: range, kv_heads: range, block_ids: tuple[int, ...], data: bytes) -> None:
        part = self._part(layers, kv_heads)
        shape = (*part.shape[:2], len(block_ids), *part.shape[3:])
        values = torch.frombuffer(bytearray(data), dtype=self._model.dtype).view(shape)
        part[:, :, torch.tensor(block_ids, dtype=torch.int64)] = values

    def _part(self, layers: range, kv_heads: range) -> Tensor:
        return self._cache.data[:, layers.start : layers.stop, :, :, kv_heads.start : kv_heads.stop]


def _copy_blocks(source: KVCache, source_ids: tuple[int, ...], target: KVCache, target_ids: tuple[int, ...]) -> None:
    target.data[:, :, torch.tensor(target_ids)] = source.data[:, :, torch.tensor(source_ids)]


def _set_threads(cpu_threads: int | None) -> None:
    """OpenMP counts threads per calling thread, so the worker sets its own number."""
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
