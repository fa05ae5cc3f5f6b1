"""Steps of made-up rows: their shapes, and what a few of them take on this machine before it serves; and what it takes
to swap.

Owns how such a step is made for a runner, as the loop would submit it, with ids that mean nothing. How many of them
`offline.profile` measures, and what is done with what they took, is not known here.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from poolwright_engine.scheduling.budget import StepWork
from poolwright_engine.scheduling.runner import ModelRunner, Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_protocol.kv import blocks_for

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# What it may add to a start. On a slow machine the first few shapes take it all, so each kind of step has two there.
_SECONDS = 2.0
_PASSES = 2
_SWAP_BYTES = 2**24  # one way: enough to be more than the start of a copy, and a few milliseconds


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `prefill_tokens` of one prompt that has `context` tokens before them, and of `decodes` rows that have
    as many."""

    prefill_tokens: int
    decodes: int
    context: int

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    @property
    def kv_tokens(self) -> int:
        prompt = self.context + self.prefill_tokens if self.prefill_tokens else 0
        return prompt + self.decodes * (self.context + 1)

    @property
    def work(self) -> StepWork:
        return StepWork(self.tokens, self.kv_tokens, self.prefill_tokens > 0)


_FIRST = tuple(
    Shape(*sizes)
    for sizes in (
        (0, 1, 16),
        (16, 0, 0),
        (0, 4, 16),
        (64, 0, 0),
        (16, 0, 256),
        (0, 8, 256),
        (256, 0, 0),
        (0, 32, 256),
        (64, 8, 256),
        (512, 0, 512),
        (0, 64, 1024),
        (2048, 0, 0),
        (1024, 0, 2048),
    )
)


def possible(
    shapes: Iterator[Shape] | Sequence[Shape],
    most_tokens: int,
    most_rows: int,
    most_context: int,
    most_blocks: int,
    block_size: int,
) -> Iterator[Shape]:
    """Those that such an engine can hold."""
    for shape in shapes:
        longest = shape.context + max(1, shape.prefill_tokens)
        rows = shape.decodes + (shape.prefill_tokens > 0)
        if shape.tokens > most_tokens or rows > most_rows or longest > most_context:
            continue
        if rows * blocks_for(longest, block_size) <= most_blocks and not (shape.decodes and shape.context == 0):
            yield shape


def step_of(number: int, shape: Shape, block_size: int) -> Step:
    rows = tuple(_rows(shape, block_size))
    return Step(number, rows, (shape.context,) * len(rows))


def _rows(shape: Shape, block_size: int) -> Iterator[Row]:
    first = itertools.count(1)

    def row(slot: int, length: int) -> Row:
        blocks = [next(first) for _ in range(blocks_for(shape.context + length, block_size))]
        return Row(slot, length, (0,) * length, blocks, True, _GREEDY)

    if shape.prefill_tokens:
        yield row(0, shape.prefill_tokens)
    for index in range(shape.decodes):
        yield row(index + bool(shape.prefill_tokens), 1)


def measure_first(
    runner: ModelRunner, most_tokens: int, most_rows: int, most_context: int
) -> tuple[tuple[Shape, float], ...]:
    """Seconds of a few steps, from small to large until the time for it is over, the least of what each took. What they
    leave in the cache is overwritten by use."""
    shapes = list(possible(_FIRST, most_tokens, most_rows, most_context, runner.num_blocks - 1, runner.block_size))
    least: dict[Shape, float] = {}
    spent, numbers = 0.0, itertools.count()
    for shape in shapes * _PASSES:
        if spent >= _SECONDS:
            break
        seconds = runner.submit(step_of(next(numbers), shape, runner.block_size)).result().busy_seconds
        spent += seconds
        least[shape] = min(least.get(shape, seconds), seconds)
    return tuple(least.items())


def measure_swap(runner: ModelRunner) -> float | None:
    """Bytes a second between device and host memory, the mean of both ways; None where there is no such host memory. Of
    two times the shorter: the first also has to find the host's pages. The blocks hold afterwards what they held."""
    block_bytes = runner.kv_shape.bytes_per_block(runner.block_size)
    count = min(runner.num_host_blocks, runner.num_blocks - 1, max(1, _SWAP_BYTES // block_bytes))
    if count < 1:
        return None
    blocks, host_blocks = range(1, 1 + count), range(count)
    seconds = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        runner.swap_out(blocks, host_blocks).result()
        runner.swap_in(host_blocks, blocks).result()
        seconds.append(time.perf_counter() - began)
    return 2 * count * block_bytes / max(min(seconds), 1e-9)
