"""`CpuRunner`: the ModelRunner of a machine without an accelerator. One worker thread runs everything in order.

Owns the KV cache and the order of a step: hidden states, logits where they are wanted, tokens. Knows nothing of
sequences, queues, clients or text.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from poolwright_engine.cpu.sampler import Logits, logprobs_of
from poolwright_engine.cpu.seats import RowTokens, Seats
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.linear import choose_forms
from poolwright_engine.model.llama import KVCache, LlamaModel
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import Row, Step, StepResult
from poolwright_engine.scheduling.sequence import TokenLogprobs

_HEAD_ROWS = 256  # logits of so many tokens exist at once: bounds memory when a long prompt asks for all of its own


class CpuRunner:
    """`duty_percent` below 100 makes a slower machine of this one: after each step the worker rests until the process
    has had at most that share of one core over the step. CPU time counts, not wall time: an engine that waited for a
    busy core has rested already. The rest belongs to the step and is in its busy seconds.

    `eos_token_ids` are what `min_tokens` keeps away; without `guides`, a row that asks for one fails alone."""

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        cpu_threads: int | None = None,
        duty_percent: int = 100,
        num_host_blocks: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        guides: Guides | None = None,
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
        self._seats = Seats(
            max_num_seqs, self.vocab_size, eos_token_ids, guides, threads=cpu_threads or torch.get_num_threads()
        )
        self._duty = duty_percent / 100
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="cpu-runner", initializer=_set_threads, initargs=(cpu_threads,)
        )

    def choose_forms(self, form: str) -> None:
        """How products with the weights are made, once and before the first step: measured where steps will run."""
        self._worker.submit(choose_forms, self._model.weights.products(), form).result()

    def submit(self, step: Step) -> Future[StepResult]:
        return self._worker.submit(self._run, step)

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
        pairs = self._pairs(block_ids, host_block_ids)
        return self._worker.submit(_copy_blocks, self._cache, self._host, pairs)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> Future[None]:
        pairs = [(host_id, block_id) for block_id, host_id in self._pairs(block_ids, host_block_ids)]
        return self._worker.submit(_copy_blocks, self._host, self._cache, pairs)

    def close(self) -> None:
        """Waits for the step that runs; what has not begun is cancelled."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._seats.close()

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

    def _pairs(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> list[tuple[int, int]]:
        self._check(range(0), range(0), block_ids)
        for host_id in host_block_ids:
            if not 0 <= host_id < self.num_host_blocks:
                raise ValueError(f"host block {host_id} is outside [0, {self.num_host_blocks})")
        if len(block_ids) != len(host_block_ids):
            raise ValueError(f"{len(block_ids)} blocks cannot swap with {len(host_block_ids)} host blocks")
        return list(zip(block_ids, host_block_ids, strict=True))

    def _run(self, step: Step) -> StepResult:
        began, cpu_began = time.perf_counter(), time.process_time()
        rows = step.rows
        tokens = [RowTokens() for _ in rows]
        prompt_logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(rows)
        if rows:
            hidden = self._hidden(step)
            stops = list(itertools.accumulate(row.length for row in rows))
            contexts = list(step.contexts)
            for group in _groups(rows):
                at = [i for index in group for i in range(stops[index] - rows[index].num_draft - 1, stops[index])]
                firsts = [contexts[index] - rows[index].num_draft for index in group]
                found = self._seats.sample([rows[index] for index in group], firsts, self._logits(hidden, at))
                for index, row_tokens in zip(group, found, strict=True):
                    tokens[index] = row_tokens
            for index, row in enumerate(rows):
                count = row.params.prompt_logprobs
                if count is not None:
                    own = hidden[stops[index] - row.length : stops[index]]
                    prompt_logprobs[index] = self._prompt_logprobs(row, own, count)
        if self._duty < 1:
            used = time.process_time() - cpu_began
            time.sleep(max(0.0, used / self._duty - (time.perf_counter() - began)))
        return StepResult(
            step.number,
            tuple(row.token_ids for row in tokens),
            tuple(row.logprobs for row in tokens),
            time.perf_counter() - began,
            tuple(prompt_logprobs),
            tuple((index, row.error) for index, row in enumerate(tokens) if row.error is not None),
        )

    def _hidden(self, step: Step) -> Tensor:
        """(tokens, hidden_size), the rows' tokens in row order."""
        inputs: list[int] = []
        for row in step.rows:
            ids = (self._seats.last_sampled[row.slot],) if row.use_last_sampled else row.token_ids
            if len(ids) != row.length:
                raise ValueError(f"a row of {row.length} tokens came with {len(ids)} ids")
            inputs.extend(ids)
            self._seats.take(row)
        attention_rows = [
            AttentionRow(start, row.length, row.table(start, self.block_size))
            for start, row in zip(step.starts, step.rows, strict=True)
        ]
        return self._model.hidden(torch.tensor(inputs, dtype=torch.int64), attention_rows, self._cache)

    def _logits(self, hidden: Tensor, at: Sequence[int]) -> Logits:
        """(len(at), vocab_size)."""
        logits: Logits = self._model.logits(hidden[torch.tensor(at, dtype=torch.int64)]).numpy()
        return logits

    def _prompt_logprobs(self, row: Row, hidden: Tensor, count: int) -> tuple[TokenLogprobs, ...]:
        """Of the tokens after each of the row's, as far as they are known; guesses are none of the prompt's."""
        targets = list(row.token_ids[1 : row.length - row.num_draft])
        if row.next_token_id is not None:
            targets.append(row.next_token_id)
        entries: list[TokenLogprobs] = []
        for first in range(0, len(targets), _HEAD_ROWS):
            part = targets[first : first + _HEAD_ROWS]
            logits = self._logits(hidden, range(first, first + len(part)))
            entries.extend(logprobs_of(row, target, count) for row, target in zip(logits, part, strict=True))
        return tuple(entries)

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


def _groups(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Indices of the rows that sample, in order, in groups whose logits may exist at once; one row always may."""
    group: list[int] = []
    size = 0
    for index, row in enumerate(rows):
        if row.samples:
            if group and size + row.num_draft + 1 > _HEAD_ROWS:
                yield group
                group, size = [], 0
            group.append(index)
            size += row.num_draft + 1
    if group:
        yield group


def _copy_blocks(source: KVCache, target: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Runs of consecutive blocks at once, and nothing is copied twice."""
    for _, run in itertools.groupby(enumerate(pairs), lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        ids = [pair for _, pair in run]
        (source_id, target_id), count = ids[0], len(ids)
        target.data[:, :, target_id : target_id + count] = source.data[:, :, source_id : source_id + count]


def _set_threads(cpu_threads: int | None) -> None:
    """OpenMP counts threads per calling thread, so the worker sets its own number."""
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
