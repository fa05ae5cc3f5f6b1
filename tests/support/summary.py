"""What a long test wants to say at the end of the run: figures that a reader may quote. See tests/e2e/conftest.py."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from poolwright.local.traffic import percentile

SUMMARIES = pytest.StashKey[list[str]]()


class Summary:
    def __init__(self, title: str) -> None:
        self._title = title
        self._lines: list[str] = []
        self._started = self._lap = time.monotonic()
        self._laps: dict[str, float] = {}

    def say(self, line: str) -> None:
        self._lines.append(line)

    def lap(self, name: str) -> None:
        """What was done since the last lap."""
        now = time.monotonic()
        self._laps[name] = round(now - self._lap, 1)
        self._lap = now

    @property
    def text(self) -> str:
        laps = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._laps.items())
        return "\n".join([self._title, *self._lines, f"Seconds: {laps}; in all {time.monotonic() - self._started:.0f}"])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"title": self._title, "lines": self._lines, "seconds": self._laps}, indent=1))


def milliseconds(values: Sequence[float]) -> str:
    """Percentiles of seconds, as P50/90/99."""
    if not values:
        return "no samples"
    shown = "/".join(f"{(percentile(list(values), p) or 0) * 1000:.0f}" for p in (50, 90, 99))
    return f"{shown} ms (P50/90/99 of {len(values)})"
