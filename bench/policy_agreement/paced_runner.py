"""A device that computes nothing: every step takes what a table says it takes, and the tokens mean nothing.

It keeps the order of a real one: steps and reads of KV come behind whatever was submitted before, and the next step
begins when the last one ends, however late the host looks. KV is moved between machines byte for byte.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from bench.policy_agreement.step_work import work_of

from poolwright.sim.step_time import StepTime
from poolwright_engine.scheduling.runner import Step, StepResult
from poolwright_protocol.kv import KVShape

T = TypeVar("T")

# 4 KiB a token: a hand-over takes a while, and two cores can carry those of a pool.
KV_SHAPE = KVShape(layers=8, kv_heads=2, head_size=64, dtype_bytes=2)
_FIRST_ID = 100  # of the tokens that are sampled: no special ones


class PacedRunner:
    """Fulfils `ModelRunner`. `clock` and `sleep` are arguments for tests."""

    def __init__(
        self,
        step_time: StepTime,
        kv_shape: KVShape,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.kv_shape = kv_shape
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.block_size = block_size
        self._step_time = step_time
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        shape = (
            2,
            kv_shape.layers,
            num_blocks,
            block_size,
            kv_shape.kv_heads,
            kv_shape.head_size * kv_shape.dtype_bytes,
        )
        self._cache = np.zeros(shape, dtype=np.uint8)

    def submit(self, step: Step) -> "_Due[StepResult]":
        work = work_of(step)
        seconds = self._step_time.seconds(work.chunks, work.decodes, work.context_tokens)
        self._free_at = max(self._free_at, self._clock()) + seconds
        tokens = tuple(
            (self._token(row.slot, context),) if row.samples else ()
            for context, row in zip(step.contexts, step.rows, strict=True)
        )
        result = StepResult(step.number, tokens, ((),) * len(tokens), seconds)
        return self._due(lambda: result)

    def read_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int]) -> "_Due[bytes]":
        ids = list(block_ids)
        return self._due(lambda: self._part(layers, kv_heads)[:, :, ids].tobytes())

    def write_blocks(self, layers: range, kv_heads: range, block_ids: Sequence[int], data: bytes) -> "_Due[None]":
        part = self._part(layers, kv_heads)
        shape = (*part.shape[:2], len(block_ids), *part.shape[3:])
        part[:, :, list(block_ids)] = np.frombuffer(data, dtype=np.uint8).reshape(shape)
        return self._due(lambda: None)

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> "_Due[None]":
        raise ValueError("this device has no host memory to swap to")

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> "_Due[None]":
        raise ValueError("this device has no host memory to swap from")

    def close(self) -> None:
        """Nothing is held."""

    def _token(self, slot: int, context: int) -> int:
        return _FIRST_ID + (slot * 7919 + context) % (self.vocab_size - _FIRST_ID)

    def _part(self, layers: range, kv_heads: range) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return self._cache[:, layers.start : layers.stop, :, :, kv_heads.start : kv_heads.stop]

    def _due(self, make: Callable[[], T]) -> "_Due[T]":
        return _Due(self._free_at, make, self._clock, self._sleep)


class _Due(Generic[T]):
    """There once the device has come to it."""

    def __init__(
        self, at: float, make: Callable[[], T], clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._at = at
        self._make = make
        self._clock = clock
        self._sleep = sleep

    def result(self) -> T:
        left = self._at - self._clock()
        if left > 0:
            self._sleep(left)
        return self._make()
