"""The keyed queue, on a clock that the test turns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from poolwright.controller.queue import Backoff, KeyedQueue


@dataclass
class _Call:
    due: float
    callback: Callable[..., object]
    arguments: tuple[Any, ...]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class ManualTimer:
    now: float = 0.0
    calls: list[_Call] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], *arguments: Any) -> _Call:
        self.calls.append(_Call(self.now + delay, callback, arguments))
        return self.calls[-1]

    async def advance(self, seconds: float) -> None:
        """Everything due by then, in order; then whatever follows at once."""
        await settle()
        end = self.now + seconds
        while due := [c for c in self.calls if c.due <= end and not c.cancelled]:
            call = min(due, key=lambda c: c.due)
            self.calls.remove(call)
            self.now = call.due
            call.callback(*call.arguments)
            await settle()
        self.now = end
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Bench:
    """A queue whose runs the test sees, and can hold open or let fail."""

    def __init__(self, answer: Callable[[str], float | None] = lambda key: None, max_parallel: int = 8) -> None:
        self.timer = ManualTimer()
        self.ran: list[tuple[float, str]] = []
        self.running: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
        self._answer = answer
        self.queue: KeyedQueue[str] = KeyedQueue(
            self.work,
            backoff=Backoff(base_seconds=1.0, cap_seconds=8.0, jitter_share=0.0),
            max_parallel=max_parallel,
            seed=7,
            timer=self.timer,
        )

    async def work(self, key: str) -> float | None:
        assert key not in self.running, "two runs of one key at once"
        self.running.add(key)
        self.ran.append((self.timer.now, key))
        try:
            if gate := self.gates.get(key):
                await gate.wait()
            return self._answer(key)
        finally:
            self.running.discard(key)

    @property
    def keys(self) -> list[str]:
        return [key for _, key in self.ran]

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.ran]


@pytest.fixture
async def closing() -> AsyncIterator[Callable[[Bench], Bench]]:
    benches: list[Bench] = []

    def keep(bench: Bench) -> Bench:
        benches.append(bench)
        return bench

    yield keep
    for bench in benches:
        for gate in bench.gates.values():
            gate.set()
        await bench.queue.shutdown(1.0)


Keep = Callable[[Bench], Bench]


async def test_adds_before_a_run_are_one_run(closing: Keep) -> None:
    bench = closing(Bench())
    for _ in range(5):
        bench.queue.add("a")
    await settle()
    assert bench.keys == ["a"]


async def test_adds_during_a_run_make_it_run_once_more_and_never_twice_at_once(closing: Keep) -> None:
    bench = closing(Bench())
    gate = bench.gates["a"] = asyncio.Event()
    bench.queue.add("a")
    await settle()
    for _ in range(5):
        bench.queue.add("a")
    await settle()
    assert bench.keys == ["a"]
    gate.set()
    await settle()
    assert bench.keys == ["a", "a"]


async def test_a_slow_key_does_not_hold_up_another(closing: Keep) -> None:
    bench = closing(Bench())
    bench.gates["slow"] = asyncio.Event()
    bench.queue.add("slow")
    bench.queue.add("quick")
    await settle()
    assert bench.keys == ["slow", "quick"]


async def test_no_more_keys_run_at_once_than_allowed_and_the_oldest_goes_first(closing: Keep) -> None:
    bench = closing(Bench(max_parallel=1))
    gate = bench.gates["a"] = asyncio.Event()
    bench.queue.add("a")
    bench.queue.add("b")
    await bench.timer.advance(3)
    bench.queue.add("c")
    await settle()
    assert bench.keys == ["a"]
    assert bench.queue.oldest_overdue_seconds == 3
    gate.set()
    await settle()
    assert bench.keys == ["a", "b", "c"]
    assert bench.queue.oldest_overdue_seconds == 0


async def test_it_comes_back_after_the_seconds_it_asked_for(closing: Keep) -> None:
    bench = closing(Bench(lambda key: 5.0))
    bench.queue.add("a")
    await settle()
    await bench.timer.advance(14.9)
    assert bench.times == [0, 5, 10]


async def test_an_event_comes_before_the_appointed_time_and_replaces_it(closing: Keep) -> None:
    answers = iter([60.0, None])
    bench = closing(Bench(lambda key: next(answers)))
    bench.queue.add("a")
    await settle()
    await bench.timer.advance(10)
    bench.queue.add("a")
    await bench.timer.advance(200)
    assert bench.times == [0, 10]


async def test_failures_back_off_to_a_cap_and_a_success_forgets_them(closing: Keep) -> None:
    outcomes = iter([True] * 5 + [False, True, False])

    def answer(key: str) -> None:
        if next(outcomes):
            raise RuntimeError("no")

    bench = closing(Bench(answer))
    bench.queue.add("a")
    await settle()
    await bench.timer.advance(23)
    assert bench.times == [0, 1, 3, 7, 15, 23]  # 1, 2, 4, 8, then the cap of 8
    assert bench.queue.failures("a") == 0
    bench.queue.add("a")
    await bench.timer.advance(1)
    assert bench.times[-2:] == [23, 24]


async def test_an_event_overrides_a_back_off(closing: Keep) -> None:
    outcomes = iter([True, False])

    def answer(key: str) -> None:
        if next(outcomes):
            raise RuntimeError("no")

    bench = closing(Bench(answer))
    bench.queue.add("a")
    await bench.timer.advance(0.5)
    bench.queue.add("a")
    await bench.timer.advance(100)
    assert bench.times == [0, 0.5]


async def test_jitter_only_shortens_and_is_the_seeds() -> None:
    backoff = Backoff(base_seconds=1.0, cap_seconds=8.0, jitter_share=0.2)
    assert [backoff.delay_seconds(n, 0.0) for n in (1, 2, 3, 4, 5, 10_000)] == [1, 2, 4, 8, 8, 8]
    assert 6.4 < backoff.delay_seconds(5, 0.99) < 8


async def test_a_forgotten_key_does_not_come_back(closing: Keep) -> None:
    bench = closing(Bench(lambda key: 5.0))
    bench.queue.add("a")
    await settle()
    bench.queue.forget("a")
    await bench.timer.advance(100)
    assert bench.times == [0]


async def test_shutdown_lets_what_runs_finish_and_starts_nothing(closing: Keep) -> None:
    bench = closing(Bench(lambda key: 1.0))
    gate = bench.gates["a"] = asyncio.Event()
    bench.queue.add("a")
    await settle()
    bench.queue.add("a")
    asyncio.get_running_loop().call_later(0.02, gate.set)
    await bench.queue.shutdown(5.0)
    assert bench.running == set()
    bench.queue.add("b")
    await bench.timer.advance(100)
    assert bench.keys == ["a"]


async def test_shutdown_cancels_what_does_not_end_in_time() -> None:
    bench = Bench()
    bench.gates["a"] = asyncio.Event()
    bench.queue.add("a")
    await settle()
    await bench.queue.shutdown(0.01)
    assert bench.running == set()


async def test_it_also_lives_on_the_loops_own_clock() -> None:
    done = asyncio.Event()
    answers = iter([0.01, None])

    async def work(key: str) -> float | None:
        answer = next(answers)
        if answer is None:
            done.set()
        return answer

    queue: KeyedQueue[str] = KeyedQueue(work)
    queue.add("a")
    await asyncio.wait_for(done.wait(), 5)
    await queue.shutdown(1.0)
