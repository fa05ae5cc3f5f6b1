"""What was simulated, one line of a file each, so that a search that was stopped goes on from there.

Keys and documents are the planner's. A line that is not whole, as an interruption leaves it, is passed over.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class PlanMemory:
    """Raises OSError where the file cannot be read or written, and ValueError where it is another kind of file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Mapping[str, Any]] = {}
        path.touch()
        text = path.read_text(encoding="utf-8", errors="replace")
        if text and not text.startswith('{"key"'):
            raise ValueError(f"{path} does not keep plans, and is left alone")
        self._cut_off = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            kept = json.loads(line)
            self._known[str(kept["key"])] = dict(kept["found"])
        except (ValueError, TypeError, KeyError):
            return

    def recall(self, key: str) -> Mapping[str, Any] | None:
        return self._known.get(key)

    def all(self) -> Iterator[Mapping[str, Any]]:
        """Whatever was kept, in the order of keeping."""
        yield from self._known.values()

    def keep(self, key: str, found: Mapping[str, Any]) -> None:
        self._known[key] = found
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._cut_off + json.dumps({"key": key, "found": found}) + "\n")
        self._cut_off = False
