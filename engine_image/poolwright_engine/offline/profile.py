"""`poolwright-engine profile`: what a step costs on this machine, measured over a grid and fitted.

Owns the measurement and the file it writes; `scheduling.budget` and simulators start from that file. Knows no requests:
steps are submitted to the runner as the loop would, with ids that mean nothing.
"""

import argparse
import itertools
import json
import math
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from poolwright_engine.process import assembly
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.process.last_words import told_when_cut_off
from poolwright_engine.process.progress import Teller, say
from poolwright_engine.scheduling.runner import ModelRunner, Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_protocol.kv import blocks_for
from poolwright_protocol.step_time import PROFILE_FORMAT, StepCost, StepProfile

_ROUNDS = 3
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048)
_CONTEXTS = (16, 256, 1024)  # of decodes, and before a chunk
_MIXED_DECODES = (0, 8)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


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


@dataclass(frozen=True, slots=True)
class Point:
    shape: Shape
    seconds: float


def shapes(most_tokens: int, most_rows: int, most_context: int, most_blocks: int, block_size: int) -> Iterator[Shape]:
    """The grid, as far as such a step can be had."""
    decodes = (Shape(0, rows, context) for rows, context in itertools.product(_DECODE_ROWS, _CONTEXTS))
    mixed = (Shape(*sizes) for sizes in itertools.product(_PREFILL_TOKENS, _MIXED_DECODES, (0, *_CONTEXTS)))
    for shape in itertools.chain(decodes, mixed):
        longest = shape.context + max(1, shape.prefill_tokens)
        rows = shape.decodes + (shape.prefill_tokens > 0)
        if shape.tokens > most_tokens or rows > most_rows or longest > most_context:
            continue
        if rows * blocks_for(longest, block_size) <= most_blocks and not (shape.decodes and shape.context == 0):
            yield shape


def measure(
    runner: ModelRunner,
    wanted: Sequence[Shape],
    rounds: int = _ROUNDS,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """The least of some rounds for each shape; rounds go through all shapes, in another order each time, so that what
    else the machine does falls on all of them alike."""
    best = dict.fromkeys(wanted, math.inf)
    order, number, done = list(best), itertools.count(1), 0
    for _ in range(rounds + 1):  # the first round warms up, and is as good as others where it is the least
        random.Random(next(number)).shuffle(order)
        for shape in order:
            step = Step(next(number), tuple(_rows(shape, runner.block_size)))
            best[shape] = min(best[shape], runner.submit(step).result().busy_seconds)
            done += 1
            tell(f"Measured {done} of {(rounds + 1) * len(order)} steps")
    return [Point(shape, seconds) for shape, seconds in best.items()]


def _rows(shape: Shape, block_size: int) -> Iterator[Row]:
    first = itertools.count(1)

    def row(slot: int, length: int) -> Row:
        blocks = [next(first) for _ in range(blocks_for(shape.context + length, block_size))]
        return Row(slot, shape.context, length, (0,) * length, blocks, True, _GREEDY)

    if shape.prefill_tokens:
        yield row(0, shape.prefill_tokens)
    for index in range(shape.decodes):
        yield row(index + bool(shape.prefill_tokens), 1)


def fit(points: Sequence[Point]) -> StepCost:
    """Least squares of relative errors over (1, tokens, kv tokens), no part of which may be negative."""
    if not points:
        raise ValueError("there is no step to fit")
    features = np.array([(1.0, point.shape.tokens, point.shape.kv_tokens) for point in points])
    features /= np.array([point.seconds for point in points])[:, None]
    best, least = np.zeros(3), math.inf
    for used in itertools.product((False, True), repeat=3):
        columns = [index for index in range(3) if used[index]]
        weights = np.zeros(3)
        if columns:
            weights[columns] = np.linalg.lstsq(features[:, columns], np.ones(len(points)), rcond=None)[0]
        error = float(((features @ weights - 1) ** 2).sum())
        if (weights >= 0).all() and error < least:
            best, least = weights, error
    return StepCost(*best.tolist())


def predicted(cost: StepCost, shape: Shape) -> float:
    return cost.seconds(shape.tokens, shape.kv_tokens)


def fitted(points: Sequence[Point]) -> StepProfile:
    decode = [point for point in points if not point.shape.prefill_tokens]
    return StepProfile(decode=fit(decode), mixed=fit([point for point in points if point.shape.prefill_tokens]))


def document(config: EngineConfig, parts: assembly.Parts, points: Sequence[Point]) -> dict[str, Any]:
    profile = fitted(points)
    return {
        "format": PROFILE_FORMAT,
        "model": config.model,
        "fingerprint": parts.fingerprint,
        "dtype": parts.dtype,
        "quantization": config.quantization,
        "block_size": config.block_size,
        "device": {
            "kind": "cpu",
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": config.cpu_threads,
        },
        **asdict(profile),
        "points": [{**asdict(point.shape), "seconds": point.seconds} for point in points],
    }


def profile(config: EngineConfig, options: argparse.Namespace) -> int:
    """Raises ConfigError where `serve` would."""
    teller = Teller()
    with told_when_cut_off(lambda: say("Cut off: nothing was written, since every shape is measured several times")):
        say(f"Loading {config.model} to measure its steps, for minutes")
        parts = assembly.load(config)
        points = _measured(config, parts, teller.tell)
    found = document(config, parts, points)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        print(table(points))
    return 0


def _measured(config: EngineConfig, parts: assembly.Parts, tell: Callable[[str], None]) -> list[Point]:
    plan, runner = parts.plan, parts.runner
    try:
        limits = plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_model_len, runner.num_blocks - 1
        return measure(runner, list(shapes(*limits, config.block_size)), tell=tell)
    finally:
        runner.close()


def table(points: Sequence[Point]) -> str:
    costs = fitted(points)
    lines = ["prefill  decodes  context   measured ms  predicted ms"]
    for point in points:
        shape = point.shape
        cost = costs.mixed if shape.prefill_tokens else costs.decode
        lines.append(
            f"{shape.prefill_tokens:7}  {shape.decodes:7}  {shape.context:7}   {point.seconds * 1e3:11.2f}  "
            f"{predicted(cost, shape) * 1e3:12.2f}"
        )
    for name, cost in (("decode", costs.decode), ("mixed", costs.mixed)):
        lines.append(
            f"{name}: {cost.fixed_seconds * 1e3:.2f} ms + {cost.token_seconds * 1e6:.1f} µs a token + "
            f"{cost.kv_token_seconds * 1e9:.1f} ns a token of context"
        )
    return "\n".join(lines)
