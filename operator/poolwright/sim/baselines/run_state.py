"""One memory for the router and the scaler of a run, which the simulator asks for one after the other."""

from collections.abc import Callable
from typing import Generic, TypeVar

from poolwright.sim.policy import Setting

Memory = TypeVar("Memory")


class PerRun(Generic[Memory]):
    """Each side takes the memory of a run once; a side that asks again, or another setting, begins the next run."""

    def __init__(self, begin: Callable[[Setting], Memory]) -> None:
        self._begin = begin
        self._setting: Setting | None = None
        self._taken: set[str] = set()
        self._memory: Memory | None = None

    def router(self, setting: Setting) -> Memory:
        return self._take("router", setting)

    def scaler(self, setting: Setting) -> Memory:
        return self._take("scaler", setting)

    def _take(self, side: str, setting: Setting) -> Memory:
        if self._memory is None or self._setting is not setting or side in self._taken:
            self._memory, self._setting, self._taken = self._begin(setting), setting, set()
        self._taken.add(side)
        return self._memory
