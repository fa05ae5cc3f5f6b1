"""What a person sees while a command works: a bar on standard error, where that is a terminal, and nothing elsewhere.

Knows no engine: it is told counts.
"""

from collections.abc import Iterator
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


class Bar:
    """Requests done of all, and tokens a second so far."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, rates="")

    def advance(self, requests: int, rates: str) -> None:
        self._progress.update(self._task, advance=requests, rates=rates)


@contextmanager
def request_bar(total: int, shown: bool = True) -> Iterator[Bar]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        yield Bar(progress, total)


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
