"""A model of a few lines, for tests of everything around a model. No torch.

The next token is a function of the token history as it is *read back* from every layer and head of a paged KV cache,
and of (seed, position). A wrong block, a lost write, a stale or misplaced transfer or a step out of order changes what
is read, and so the tokens. `expected` computes the same from the ids alone.

Work is done lazily, in submission order, when a result is first waited for: as late as any device may.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from poolwright_engine.scheduling.runner import Row, Step, StepResult
from poolwright_engine.scheduling.sequence import Request, SamplingParams, TokenLogprobs
from poolwright_protocol.kv import KVShape

T = TypeVar("T")

VOCAB_SIZE = 997
EOS = 0
SHAPE = KVShape(layers=3, kv_heads=2, head_size=1, dtype_bytes=4)
_UNWRITTEN = -1


def next_token(history: Iterable[object], params: SamplingParams, position: int) -> int:
    seed = params.seed if params.temperature > 0 else 0
    digest = hashlib.blake2b(f"{list(history)} {seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (params.top_k or VOCAB_SIZE)  # of few tokens, a guess may come true


def expected(request: Request, max_model_len: int = 10_000, eos: int = EOS) -> list[int]:
    """What one machine, alone and undisturbed, answers."""
    history, params = list(request.prompt_ids), request.params
    output: list[int] = []
    while len(output) < params.max_tokens and len(history) < max_model_len:
        token = next_token(history, params, len(history))
        output.append(token)
        history.append(token)
        if (token == eos and not params.ignore_eos) or token in params.stop_token_ids:
            break
    return output


def prompt_logprob(token: int | None, position: int) -> TokenLogprobs:
    """What is said of a prompt's token: enough to tell it from any other."""
    return TokenLogprobs(-1 if token is None else token, -float(position))


class _Lazy:
    def __init__(self, runner: "ScriptedRunner", work: Callable[[], Any]) -> None:
        self._runner = runner
        self.work = work
        self.future: Future[Any] = Future()

    def result(self) -> Any:
        self._runner.run_until(self)
        return self.future.result()


class ScriptedRunner:
    """`step_seconds`: how long a step takes. `fail_at`: number of the step that the device breaks at."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        step_seconds: float = 0.0,
        fail_at: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.kv_shape = SHAPE
        self.vocab_size = VOCAB_SIZE
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.step_seconds = step_seconds
        self.fail_at = fail_at
        self.closed = False
        self.log: list[tuple[str, int]] = []  # ("submit" | "read", step number), in order
        self.steps: list[Step] = []
        shape = (2, SHAPE.layers, num_blocks, block_size, SHAPE.kv_heads, SHAPE.head_size)
        self._cache = np.full(shape, _UNWRITTEN, dtype=np.int32)
        self._host = np.full((2, SHAPE.layers, num_host_blocks, *shape[3:]), _UNWRITTEN, dtype=np.int32)
        self._last_sampled: dict[int, int] = {}
        self._seats: dict[int, list[object]] = {}  # what a sampler with a memory would know
        self._queue: deque[_Lazy] = deque()
        self._lock = threading.Lock()

    # The protocol.

    def submit(self, step: Step) -> "_Handle":
        self.log.append(("submit", step.number))
        self.steps.append(step)
        return _Handle(self, step.number, self._enqueue(lambda: self._run(step)))

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> _Lazy:
        ids = self._checked(block_ids)
        return self._enqueue(lambda: self._part(layers, kv_heads)[:, :, ids].tobytes())

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> _Lazy:
        ids = self._checked(block_ids)
        shape = (2, len(layers), len(ids), self.block_size, len(kv_heads), SHAPE.head_size)
        values = np.frombuffer(data, dtype=np.int32).reshape(shape)

        def write() -> None:
            self._part(layers, kv_heads)[:, :, ids] = values

        return self._enqueue(write)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> _Lazy:
        ids, host_ids = self._checked(block_ids), list(host_block_ids)

        def copy() -> None:
            self._host[:, :, host_ids] = self._cache[:, :, ids]

        return self._enqueue(copy)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> _Lazy:
        ids, host_ids = self._checked(block_ids), list(host_block_ids)

        def copy() -> None:
            self._cache[:, :, ids] = self._host[:, :, host_ids]

        return self._enqueue(copy)

    def close(self) -> None:
        self.closed = True

    def contents(self) -> bytes:
        """All of the cache, with everything done that was asked so far."""
        everything = self._enqueue(self._cache.tobytes)
        data: bytes = everything.result()
        return data

    # The device.

    def run_until(self, wanted: _Lazy) -> None:
        with self._lock:
            while not wanted.future.done():
                lazy = self._queue.popleft()
                try:
                    lazy.future.set_result(lazy.work())
                except Exception as error:
                    lazy.future.set_exception(error)

    def _enqueue(self, work: Callable[[], Any]) -> _Lazy:
        lazy = _Lazy(self, work)
        with self._lock:
            self._queue.append(lazy)
        return lazy

    def _run(self, step: Step) -> StepResult:
        if step.number == self.fail_at:
            raise RuntimeError("the device broke")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        placed = list(zip(step.starts, step.rows, strict=True))
        tokens = tuple(self._run_row(start, row) for start, row in placed)
        prompt_logprobs = tuple(self._prompt_logprobs(start, row) for start, row in placed)
        return StepResult(step.number, tokens, ((),) * len(tokens), self.step_seconds, prompt_logprobs)

    def _run_row(self, start: int, row: Row) -> tuple[int, ...]:
        token_ids = (self._last_sampled[row.slot],) if row.use_last_sampled else row.token_ids
        if len(token_ids) != row.length or row.length < 1:
            raise ValueError(f"{len(token_ids)} ids for a row of {row.length}")
        table = row.table(start, self.block_size)
        if len(table) * self.block_size < start + row.length or 0 in table:
            raise ValueError("the block table is too short, or holds the null block")
        if row.seat is not None:
            self._seats[row.slot] = [*row.seat.prompt_ids, *row.seat.output_ids]
        layers, heads = np.arange(SHAPE.layers)[:, None], np.arange(SHAPE.kv_heads)[None, :]
        for position, token in enumerate(token_ids, start):
            block, offset = table[position // self.block_size], position % self.block_size
            # K says which token it is, V where it stands; both differ from layer to layer and head to head.
            self._cache[0, :, block, offset, :, 0] = token * 31 + layers * 7 + heads
            self._cache[1, :, block, offset, :, 0] = position * 31 + layers * 7 + heads
        if not row.samples:
            return ()
        sampled: list[int] = []
        for guess in (*token_ids[row.length - row.num_draft :], None):
            length = start + row.length - row.num_draft + len(sampled)
            history = self._cache[:, :, list(table)].reshape(2, SHAPE.layers, -1, SHAPE.kv_heads)[:, :, :length]
            read = self._decode(history)
            if row.params.needs_history and read != self._seats.get(row.slot):
                read = ["the seat remembers something else"]
            sampled.append(next_token(read, row.params, length))
            if row.params.needs_history:
                self._seats[row.slot].append(sampled[-1])
            if sampled[-1] != guess:
                break
        self._last_sampled[row.slot] = sampled[-1]
        return tuple(sampled)

    def _prompt_logprobs(self, start: int, row: Row) -> tuple[TokenLogprobs, ...]:
        if row.params.prompt_logprobs is None or row.use_last_sampled:
            return ()
        ids = row.token_ids[1:] if row.samples else (*row.token_ids[1:], row.next_token_id)
        return tuple(prompt_logprob(token, position) for position, token in enumerate(ids, start + 1))

    def _decode(self, history: Any) -> list[object]:
        """Token ids, where every layer and head agree on token and position; otherwise what was found there."""
        offset = (np.arange(SHAPE.layers)[:, None] * 7 + np.arange(SHAPE.kv_heads)[None, :])[:, None, :]
        values, remainder = np.divmod(history - offset, 31)
        tokens, positions = values[0, 0, :, 0], np.arange(history.shape[2])
        right = (remainder == 0).all(axis=(0, 1, 3))
        right &= (values[0] == tokens[None, :, None]).all(axis=(0, 2))
        right &= (values[1] == positions[None, :, None]).all(axis=(0, 2))
        return [int(t) if ok else f"wrong at {i}" for i, (t, ok) in enumerate(zip(tokens, right, strict=True))]

    def _part(self, layers: range, kv_heads: range) -> Any:
        return self._cache[:, layers.start : layers.stop, :, :, kv_heads.start : kv_heads.stop]

    def _checked(self, block_ids: Sequence[int]) -> list[int]:
        for block_id in block_ids:
            if not 0 < block_id < self.num_blocks:
                raise ValueError(f"block {block_id} is outside [1, {self.num_blocks})")
        return list(block_ids)


class _Handle:
    def __init__(self, runner: ScriptedRunner, number: int, lazy: _Lazy) -> None:
        self._runner = runner
        self._number = number
        self._lazy = lazy

    def result(self) -> StepResult:
        self._runner.log.append(("read", self._number))
        result: StepResult = self._lazy.result()
        return result
