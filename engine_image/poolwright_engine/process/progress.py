"""What a person sees while a command works: a bar on standard error, where that is a terminal; elsewhere nothing, or
lines now and then.

Knows no engine: it is told counts.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SAY_SECONDS = 10.0


def say(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)


class Teller:
    """Says how far something has come, but not often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = clock()

    def tell(self, text: str) -> None:
        now = self._clock()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            say(text)


class Bar:
    """Requests done of all, and tokens a second so far. `teller`: says so where no bar is seen."""

    def __init__(self, progress: Progress, total: int, teller: Teller | None = None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, rates="")
        self._done, self._total, self._teller = 0, total, teller

    def advance(self, requests: int, rates: str) -> None:
        self._done += requests
        self._progress.update(self._task, advance=requests, rates=rates)
        if self._teller is not None:
            self._teller.tell(f"Answered {self._done} of {self._total}, {rates}")


@contextmanager
def request_bar(total: int, shown: bool = True, told: bool = False) -> Iterator[Bar]:
    """`told`: by lines where standard error is no terminal."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        yield Bar(progress, total, Teller() if told and not console.is_terminal else None)


@contextmanager
def download_bar() -> Iterator["_Download"]:
    """What it gives is a `source.Progress`. The bar appears with the first report: a model on disk has none."""
    columns = (TextColumn("model"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Download(progress)


class _Download:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False)

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes, total=total_bytes, visible=True)
