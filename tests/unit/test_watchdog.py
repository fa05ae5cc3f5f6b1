"""The watchdog tells a machine that works slowly from one that stands still, and ends what cannot end itself."""

import threading
import time
from collections.abc import Callable

import pytest

from poolwright_engine.loop.engine import Heartbeat
from poolwright_engine.process.watchdog import Pulse, Watchdog


def test_a_machine_without_work_is_never_stalled() -> None:
    pulse = Pulse()
    assert [pulse.stalled_seconds(now, Heartbeat(0, owes=False)) for now in (0.0, 100.0, 1000.0)] == [0.0] * 3


def test_work_without_progress_is_counted_from_its_first_sight() -> None:
    pulse = Pulse()
    pulse.stalled_seconds(0.0, Heartbeat(7, owes=False))
    assert [pulse.stalled_seconds(now, Heartbeat(7, owes=True)) for now in (50.0, 55.0, 61.0)] == [0.0, 5.0, 11.0]


def test_each_step_starts_the_count_anew() -> None:
    pulse = Pulse()
    assert pulse.stalled_seconds(0.0, Heartbeat(0, owes=True)) == 0.0
    assert pulse.stalled_seconds(9.0, Heartbeat(0, owes=True)) == 9.0
    assert pulse.stalled_seconds(10.0, Heartbeat(1, owes=True)) == 0.0
    assert pulse.stalled_seconds(12.0, Heartbeat(1, owes=True)) == 2.0


class Life:
    """What a watchdog watches, and what it did."""

    def __init__(self) -> None:
        self.progress = 0
        self.owes = True
        self.step: str | None = None
        self.told: list[object] = []
        self.ended = threading.Event()

    def beat(self) -> Heartbeat:
        return Heartbeat(self.progress, self.owes, self.step)

    def end(self, reason: str) -> None:
        self.told.append(("end", reason))
        self.ended.set()

    def watchdog(self, exit_seconds: float = 30.0, grace_seconds: float = 30.0) -> Watchdog:
        return Watchdog(
            self.beat,
            0.05,
            exit_seconds,
            on_stall=self.told.append,
            give_up=lambda reason: self.told.append(("give up", reason)),
            grace_seconds=grace_seconds,
            end=self.end,
        )


def soon(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stall_is_told_once_and_so_is_its_end() -> None:
    life = Life()
    with life.watchdog():
        soon(lambda: life.told)
        time.sleep(0.1)
        life.progress += 1
        life.owes = False
        soon(lambda: len(life.told) > 1)
    assert life.told == [True, False]


def test_what_stands_still_too_long_is_given_up_and_then_ended() -> None:
    life = Life()
    with life.watchdog(exit_seconds=0.2, grace_seconds=0.2):
        assert life.ended.wait(10)
    assert [each if isinstance(each, bool) else each[0] for each in life.told] == [True, "give up", "end"]  # type: ignore[index]
    assert "made no progress" in life.told[1][1]  # type: ignore[index]


def test_the_last_words_name_the_step_and_what_helps_if_it_is_only_long() -> None:
    life = Life()
    life.step = "step 7: tokens=2048 rows=1 longest_context=8190"
    with life.watchdog(exit_seconds=0.2, grace_seconds=0.2):
        assert life.ended.wait(10)
    reason = life.told[1][1]  # type: ignore[index]
    assert life.step in reason
    assert "--max-num-batched-tokens" in reason
    assert "--stall-exit-seconds" in reason


def test_steady_progress_is_left_alone() -> None:
    life = Life()
    with life.watchdog(exit_seconds=0.5):
        for _ in range(60):
            life.progress += 1
            time.sleep(0.01)
    assert life.told in ([], [True, False] * (len(life.told) // 2))  # a busy machine may skip a beat of this test
    assert not life.ended.is_set()


def test_a_process_that_does_not_end_in_time_is_ended() -> None:
    life = Life()
    life.owes = False
    with life.watchdog() as watchdog:
        watchdog.end_within(0.05, "too slow")
        assert life.ended.wait(10)
    assert life.told == [("end", "too slow")]


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_ends_in_time_is_not(times: int) -> None:
    life = Life()
    life.owes = False
    with life.watchdog() as watchdog:
        for _ in range(times):
            watchdog.end_within(30, "too slow")
    assert life.told == []
