"""The results there are: one line of a file for each finished run, so that nothing is computed twice.

A run whose inputs, code or data changed has another key, and its old line is never read again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.policy.runs import Result, Run, key

from poolwright.sim.plan_memory import PlanMemory


class Known:
    """`again`: what was there before is not used, as when times are taken anew. Raises OSError, ValueError."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "runs.jsonl"
        self._memory = PlanMemory(self.path)
        self._again = again
        self._own: dict[str, Result] = {}
        self._took: dict[str, float] | None = None

    def __call__(self, run: Run) -> Result | None:
        name = key(run)
        if name not in self._own and not self._again:
            kept = self._memory.recall(name)
            if kept is not None:
                self._own[name] = _result(kept)
        return self._own.get(name)

    def keep(self, run: Run, result: Result) -> None:
        name = key(run)
        self._own[name] = result
        self._memory.keep(name, {"label": run.label, **result.document()})

    def seconds_per_request(self, label: str) -> float | None:
        """Of CPU, as the last run of that name took, whatever its code was."""
        if self._took is None:
            self._took = {
                str(kept["label"]): kept["cpu_seconds"] / kept["requests"]
                for kept in self._memory.all()
                if kept.get("requests") and kept.get("cpu_seconds")
            }
        return self._took.get(label)

    def value(self, run: Run) -> float | None:
        found = self(run)
        return None if found is None else found.value


def _result(kept: Mapping[str, Any]) -> Result:
    return Result(**{name: value for name, value in kept.items() if name != "label"})
