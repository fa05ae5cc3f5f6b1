"""What scheduling costs: microseconds of `schedule` and `update` for a step of decodes, tensors left out; and whether
anything grows over many steps.

    python bench/scheduler_cost.py [--steps 1000000] [--json FILE]

Times are of the processor, so that what else runs here does not count. Each line is the median over the steps of a
steady run: so many requests decode at contexts of about 4,000 tokens, one step ahead, as the loop does it. Answers end
at the rate at which they do, and others take their place. The garbage collector runs as it does in the engine.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path

from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.runner import Step, StepResult
from poolwright_engine.scheduling.scheduler import Scheduler
from poolwright_engine.scheduling.scheduler_config import SchedulerConfig
from poolwright_engine.scheduling.sequence import Request, SamplingParams, Sequence

CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 16
VOCABULARY = 50_000


_draw = random.Random(1)
_IDS = _draw.choices(range(1, VOCABULARY), [1 / rank for rank in range(1, VOCABULARY)], k=1 << 16)


class Load:
    """`running` requests at all times. Answers take 1,024 to 3,072 tokens, so that ends are spread."""

    def __init__(self, running: int) -> None:
        blocks = 2 + running * (CONTEXT_TOKENS // BLOCK_TOKENS + 2)
        config = SchedulerConfig(max_model_len=CONTEXT_TOKENS, max_num_batched_tokens=2048, max_num_seqs=running)
        self.scheduler = Scheduler(config, BlockPool(blocks, BLOCK_TOKENS), frozenset({0}))
        self._running = running
        self._entered = 0
        self._number = 0
        self._in_flight: deque[Step] = deque()
        while len(self.scheduler.running) < running:
            self.turn()

    def turn(self) -> tuple[float, float, bool]:
        """Seconds of `schedule` and `update`, and whether the step was of decodes alone."""
        while len(self.scheduler.running) + len(self.scheduler.waiting) < self._running:
            self._enter()
        began = time.thread_time()
        decision = self.scheduler.schedule(self._number)
        scheduled = time.thread_time() - began
        if decision.step is not None:
            self._in_flight.append(decision.step)
            self._number += 1
        updated = 0.0
        if len(self._in_flight) > 1:
            result = _sampled(self._in_flight.popleft())
            began = time.thread_time()
            self.scheduler.update(result)
            updated = time.thread_time() - began
        return scheduled, updated, decision.num_prefill_tokens == 0

    def _enter(self) -> None:
        self._entered += 1
        tokens = 1024 + self._entered * 97 % 2048
        prompt = (self._entered, *range(1, CONTEXT_TOKENS - tokens))
        self.scheduler.add(Sequence(Request(str(self._entered), prompt, SamplingParams(tokens), self._entered)))


def _sampled(step: Step) -> StepResult:
    """As a runner's. Ids are as frequent as words are, by Zipf's law."""
    nothing = ((),) * len(step.rows)
    first = step.number * 257 % (len(_IDS) - len(step.rows))
    ids = _IDS[first : first + len(step.rows)]
    tokens = tuple((token_id,) if row.samples else () for token_id, row in zip(ids, step.rows, strict=True))
    return StepResult(step.number, tokens, nothing, 0.0, nothing)


def cost(running: int, steps: int) -> dict[str, float]:
    load = Load(running)
    decodes = [(s, u) for s, u, only in (load.turn() for _ in range(steps)) if only]
    both = [1e6 * (s + u) for s, u in decodes]
    return {
        "running": running,
        "schedule_microseconds": 1e6 * statistics.median(s for s, _ in decodes),
        "update_microseconds": 1e6 * statistics.median(u for _, u in decodes),
        "both_microseconds": statistics.median(both),
        "both_microseconds_p99": statistics.quantiles(both, n=100)[98],
    }


def growth(steps: int, running: int = 8) -> dict[str, int]:
    """The most memory blocks that Python's allocator held in the second quarter of the steps, and in the last."""
    load = Load(running)
    most = [0, 0, 0, 0]
    for number in range(steps):
        load.turn()
        if number % 100 == 0:
            quarter = 4 * number // steps
            most[quarter] = max(most[quarter], sys.getallocatedblocks())
    return {"steps": steps, "allocations_early": most[1], "allocations_late": most[3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run that looks for growth")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the engine does before it serves
    gc.set_threshold(10_000)
    costs = [cost(running, 3000) for running in (8, 64, 256)]
    for line in costs:
        print(
            f"{line['running']:4} decodes: schedule {line['schedule_microseconds']:6.1f} µs, "
            f"update {line['update_microseconds']:6.1f} µs, both {line['both_microseconds']:6.1f} µs "
            f"(p99 {line['both_microseconds_p99']:.1f})"
        )
    grown = growth(arguments.steps)
    print(f"{grown['steps']} steps: {grown['allocations_early']} objects early, {grown['allocations_late']} late")
    if arguments.json:
        arguments.json.write_text(json.dumps({"costs": costs, "growth": grown}, indent=1))


if __name__ == "__main__":
    main()
