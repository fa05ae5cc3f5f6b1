"""What scheduling must not do however long it runs: grow. Its speed is measured by `bench/scheduler_cost.py`."""

import gc
import os
import random
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

from poolwright_engine.scheduling.blocks import BlockPool
from poolwright_engine.scheduling.runner import Step, StepResult
from poolwright_engine.scheduling.scheduler import Scheduler
from poolwright_engine.scheduling.scheduler_config import PreemptionMode, SchedulerConfig, SchedulingPolicy
from poolwright_engine.scheduling.sequence import Request, SamplingParams, Sequence

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import scheduler_cost

WARM_REQUESTS = 2000  # after which caches and tables are as large as they get
# What is held when nobody is there goes up and down by a few cached blocks and their keys.
TOLERATED_OBJECTS = 500
TOLERATED_BYTES = 4 << 20


class Churn:
    """Short answers to many requests, by far too little memory for all that may run: hits under several salts, aborts
    while they wait and run, prompts for other machines, and preemption both ways, since host memory is soon full."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            max_model_len=64,
            max_num_batched_tokens=24,
            max_num_seqs=8,
            scheduling_policy=SchedulingPolicy.PRIORITY,
            preemption=PreemptionMode.SWAP,
            watermark=0.0,
        )
        self.scheduler = Scheduler(config, BlockPool(25, 4, num_host_blocks=6, block_bytes=1), frozenset())
        self.seen: Counter[str] = Counter()
        self._draw = random.Random(1)
        self._prompts = [self._draw.choices(range(100), k=self._draw.randint(1, 24)) for _ in range(40)]
        self._in_flight: deque[Step] = deque()

    def serve(self, requests: int) -> None:
        """Until all have ended."""
        for _ in range(requests):
            while len(self.scheduler.waiting) > 6:
                self._turn()
            self._enter()
            if self._draw.random() < 0.5:
                self._turn()
            if self._draw.random() < 0.05:
                self._abort()
        while self._in_flight or any(self.scheduler.alive()):
            self._turn()
        self.scheduler.check()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.total
        assert self.scheduler.blocks.host.num_free == self.scheduler.blocks.host.total

    def _enter(self) -> None:
        self.seen["requests"] += 1
        number, for_peer = self.seen["requests"], self._draw.random() < 0.05
        request = Request(
            f"r{number}",
            tuple(self._draw.choice(self._prompts)),
            SamplingParams(1 if for_peer else self._draw.randint(1, 16), ignore_eos=True),
            float(number),
            priority=self._draw.randint(0, 2),
            cache_salt=self._draw.choice(["", "a", "b"]),
            relegated=self._draw.random() < 0.1,
        )
        self.scheduler.add(Sequence(request, for_peer=for_peer))

    def _abort(self) -> None:
        alive = list(self.scheduler.alive())
        if alive:
            self.scheduler.release(self._draw.choice(alive))
            self.seen["aborted"] += 1

    def _turn(self) -> None:
        decision = self.scheduler.schedule(self.seen["steps"], now=float(self.seen["requests"]))
        self.seen["hits"] += sum(s.num_cached or 0 for s in decision.admitted if not s.num_preemptions)
        for sequence in decision.preempted:
            self.seen["swapped" if sequence.host_block_ids else "given up"] += 1
        if decision.step is not None:
            self._in_flight.append(decision.step)
            self.seen["steps"] += 1
        if len(self._in_flight) > 1 or (self._in_flight and decision.step is None):
            self.scheduler.update(self._sampled(self._in_flight.popleft()), float(self.seen["requests"]))
        for sequence in tuple(self.scheduler.parked):
            self.scheduler.release(sequence)

    def _sampled(self, step: Step) -> StepResult:
        nothing = ((),) * len(step.rows)
        tokens = tuple((self._draw.randrange(100),) if row.samples else () for row in step.rows)
        return StepResult(step.number, tokens, nothing, 0.01, nothing)


def held() -> tuple[int, int]:
    """Python's objects, and bytes of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return sys.getallocatedblocks(), resident


def assert_all_of_it_happened(churn: Churn) -> None:
    requests = churn.seen["requests"]
    for what in ("aborted", "swapped", "given up"):
        assert churn.seen[what] > requests / 100, churn.seen
    assert churn.seen["hits"] > requests / 10


def test_nothing_is_left_of_a_request() -> None:
    churn = Churn()
    churn.serve(WARM_REQUESTS)
    before, _ = held()
    churn.serve(3000)
    after, _ = held()
    assert after - before < TOLERATED_OBJECTS
    assert_all_of_it_happened(churn)


def test_one_object_left_of_each_request_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    left, finish = [], Scheduler._finish

    def leak(self: Scheduler, sequence: Sequence) -> None:
        left.append(float(sequence.serial))
        finish(self, sequence)

    monkeypatch.setattr(Scheduler, "_finish", leak)
    churn = Churn()
    churn.serve(WARM_REQUESTS)
    before, _ = held()
    churn.serve(3000)
    after, _ = held()
    assert after - before > 2 * TOLERATED_OBJECTS


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_grows_over_a_million_steps() -> None:
    churn = Churn()
    churn.serve(50_000)
    first, steps = held(), churn.seen["steps"]
    while churn.seen["steps"] < steps + 1_000_000:
        churn.serve(50_000)
        objects, resident = held()
        assert objects - first[0] < TOLERATED_OBJECTS
        assert resident - first[1] < TOLERATED_BYTES
    assert_all_of_it_happened(churn)


@pytest.mark.parametrize("running", [1, 8])
def test_a_step_of_decodes_does_not_touch_the_blocks_of_a_context(running: int) -> None:
    """The table travels by reference: rows of later steps hold the very list."""
    load = scheduler_cost.Load(running)
    sequence = load.scheduler.running[0]
    step = load.scheduler.schedule(10**6).step
    assert step is not None
    assert step.rows[0].block_ids is sequence.block_ids
