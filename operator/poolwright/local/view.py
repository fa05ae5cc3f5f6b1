"""What the demo shows as it runs: pools, latency against target, moves with their reasons. Draws; measures nothing."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from poolwright.core.machine import Machine
from poolwright_protocol.roles import Role

_STATE_STYLES = {"Met": "green", "Missed": "bold red"}


@dataclass(slots=True)
class Scene:
    """All that is on the screen, replaced piece by piece as it changes."""

    machines: Sequence[Machine] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    phase: str = ""
    remaining_seconds: float | None = None
    sent: int = 0
    failed: int = 0
    in_flight: int = 0
    targets_fit: bool = False  # until then what is missed is missed by targets for another machine
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=8))


class View:
    """A live picture on a terminal; plain lines where there is none, and only when something happened."""

    def __init__(self, console: Console, scene: Scene) -> None:
        self._console = console
        self._scene = scene
        self._live: Live | None = None

    def start(self) -> None:
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def refresh(self) -> None:
        if self._live:
            self._live.update(self._picture())

    def say(self, text: str) -> None:
        """A line that stays."""
        self._scene.notes.append(text)
        self._console.print(text, highlight=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        scene = self._scene
        head = Text(scene.phase, style="bold")
        if scene.remaining_seconds is not None:
            head.append(f"  {max(0.0, scene.remaining_seconds):.0f} s left at most", style="dim")
        head.append(f"  {scene.sent} sent, {scene.in_flight} in flight, {scene.failed} failed", style="dim")
        return Group(head, self._pools(), self._objectives())

    def _pools(self) -> Table:
        table = Table("pool", "machines", box=None, pad_edge=False, header_style="dim")
        for role in Role:
            names = Text()
            for machine in sorted(self._scene.machines, key=lambda m: m.name):
                if machine.effective_role is role:
                    names.append(f"{machine.name} ", style="yellow" if machine.move or not machine.ready else "")
            table.add_row(role.value, names)
        return table

    def _objectives(self) -> Table:
        table = Table("objective", "observed", "target", "state", box=None, pad_edge=False, header_style="dim")
        for objective in self._scene.status.get("objectives", ()):
            observed = objective.get("observedMilliseconds")
            table.add_row(
                objective["name"],
                "–" if observed is None else f"{observed} ms",
                f"{objective['targetMilliseconds']} ms",
                Text(objective["state"], style=_STATE_STYLES.get(objective["state"], "dim")),
            )
        return table
