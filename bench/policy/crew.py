"""Worker processes that perform runs, as many as there are cores: results are kept as they come, whatever ends it.

Knows nothing of what runs mean. Stops starting runs when its time is over; an interruption keeps what was finished.
"""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from types import FrameType

from bench.policy.cells import Cell
from bench.policy.known import Known
from bench.policy.runs import Result, Run, perform
from bench.policy.schedule import MakeStages, missing
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WAIT_SECONDS, WATCH_SECONDS = 0.5, 2.0
# A cell may take so many times its share of the time before others come first; its first stages are never held back.
CELL_SHARE = 2.0
FIRST_STAGES = 3


@dataclass(slots=True)
class _Left:
    """Runs of a cell's stage that are to be started, and how many have not ended."""

    stage: int
    waiting: list[Run]
    unfinished: int


@dataclass(slots=True)
class Crew:
    """`complete`: nothing was left to do. `seconds`: of CPU, by cell, spent in this call."""

    known: Known
    workers: int
    limit_seconds: float
    done: int = 0
    interrupted: bool = False
    complete: bool = True
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def work(self, cells: Mapping[str, Cell], stages: MakeStages) -> None:
        left: dict[str, _Left] = {}
        for cell in cells.values():
            self._next(left, cell, stages)
        ends = time.monotonic() + self.limit_seconds
        budget = CELL_SHARE * self.limit_seconds * self.workers / max(1, len(cells))
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:50.50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
            task = shown.add_task("", total=None)
            order = list(cells)

            def chosen() -> Run | None:
                if time.monotonic() >= ends:
                    return None
                open_ = [
                    (self.seconds[name] > budget and rest.stage >= FIRST_STAGES, rest.stage, order.index(name), name)
                    for name, rest in left.items()
                    if rest.waiting
                ]
                return left[min(open_)[3]].waiting.pop(0) if open_ else None

            def ended(run: Run, result: Result) -> None:
                self.known.keep(run, result)
                self.done += 1
                name = run.cell.name
                self.seconds[name] += result.cpu_seconds
                left[name].unfinished -= 1
                if left[name].unfinished == 0:
                    self._next(left, cells[name], stages)
                open_runs = sum(rest.unfinished for rest in left.values())
                shown.update(task, completed=self.done, total=self.done + open_runs, description=run.label)

            try:
                if self.workers == 1:
                    self._alone(chosen, ended)
                else:
                    self._together(chosen, ended)
            except KeyboardInterrupt:
                self.interrupted = True
        self.complete = not any(rest.unfinished for rest in left.values())

    def _next(self, left: dict[str, _Left], cell: Cell, stages: MakeStages) -> None:
        found = missing(stages(cell), self.known)
        if found is None:
            left.pop(cell.name, None)
        else:
            number, runs = found
            runs = list(dict.fromkeys(runs))
            left[cell.name] = _Left(number, runs, len(runs))

    def _alone(self, chosen: Callable[[], Run | None], ended: Callable[[Run, Result], None]) -> None:
        while (run := chosen()) is not None:
            ended(run, perform(run))

    def _together(self, chosen: Callable[[], Run | None], ended: Callable[[Run, Result], None]) -> None:
        results: queue.SimpleQueue[tuple[Run, Result | BaseException]] = queue.SimpleQueue()
        # A fork would take the threads of the progress bar along.
        pool = multiprocessing.get_context("spawn").Pool(self.workers, _begin, (os.getpid(),))
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            under_way = 0
            while True:
                while under_way < self.workers and (run := chosen()) is not None:
                    _start(pool, run, results)
                    under_way += 1
                if not under_way:
                    return
                try:
                    run, result = results.get(timeout=WAIT_SECONDS)
                except queue.Empty:
                    continue
                under_way -= 1
                if isinstance(result, BaseException):
                    raise result
                ended(run, result)
        finally:
            pool.terminate()
            pool.join()
            signal.signal(signal.SIGTERM, before)


def _start(pool: Pool, run: Run, results: "queue.SimpleQueue[tuple[Run, Result | BaseException]]") -> None:
    pool.apply_async(
        perform,
        (run,),
        callback=lambda result: results.put((run, result)),
        error_callback=lambda error: results.put((run, error)),
    )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _begin(parent: int) -> None:
    """In a worker. The parent is interrupted and ends its workers; should it be killed, they end themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cores() -> int:
    """That this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
