"""`poolwright-engine profile`: what a step costs on this machine, measured over a grid and fitted.

Owns the grid, the measurement and the file it writes; engines and simulators start from that file. Knows no requests:
its steps are `process.first_steps`'.
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

from poolwright_engine.process import assembly
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.process.first_steps import Shape, possible, step_of
from poolwright_engine.process.last_words import told_when_cut_off
from poolwright_engine.process.progress import Teller, say
from poolwright_engine.scheduling.runner import ModelRunner
from poolwright_protocol.least_squares import cost_weights
from poolwright_protocol.step_time import PROFILE_FORMAT, StepCost, StepProfile

_ROUNDS = 3
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048)
_CONTEXTS = (16, 256, 1024)  # of decodes, and before a chunk
_MIXED_DECODES = (0, 8)


@dataclass(frozen=True, slots=True)
class Point:
    shape: Shape
    seconds: float


def shapes(most_tokens: int, most_rows: int, most_context: int, most_blocks: int, block_size: int) -> Iterator[Shape]:
    """The grid, as far as such a step can be had."""
    decodes = (Shape(0, rows, context) for rows, context in itertools.product(_DECODE_ROWS, _CONTEXTS))
    mixed = (Shape(*sizes) for sizes in itertools.product(_PREFILL_TOKENS, _MIXED_DECODES, (0, *_CONTEXTS)))
    grid = itertools.chain(decodes, mixed)
    return possible(grid, most_tokens, most_rows, most_context, most_blocks, block_size)


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
            step = step_of(next(number), shape, runner.block_size)
            best[shape] = min(best[shape], runner.submit(step).result().busy_seconds)
            done += 1
            tell(f"Measured {done} of {(rounds + 1) * len(order)} steps")
    return [Point(shape, seconds) for shape, seconds in best.items()]


def fit(points: Sequence[Point]) -> StepCost:
    """Over (1, tokens, kv tokens)."""
    features = [(1.0, float(point.shape.tokens), float(point.shape.kv_tokens)) for point in points]
    return StepCost(*cost_weights([(row, point.seconds) for row, point in zip(features, points, strict=True)]))


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
        "kv_dtype": config.kv_dtype(parts.dtype),
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
