"""Makes what tests and people need before a bed can start: packages, programs, images.

Owns the order and the names of these steps. A step that cannot be done keeps its reason, and whoever needs it gets
that reason.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from testbed import binaries, images, packages
from testbed.progress import Unavailable

STEPS: dict[str, Callable[[], object]] = {
    "control-plane": binaries.control_plane_assets,
    "node-packages": lambda: packages.ensure(packages.NODE),
    "node": lambda: (binaries.kubernetes(), binaries.testpod()),
    "helm": binaries.helm,
    "images": images.project_images,
}
WANTED_BY_FIXTURE = {
    "api_server": ("control-plane",),
    "lender": ("control-plane",),
    "own_api_server": ("control-plane",),
    "node_cluster": ("control-plane", "node-packages", "node"),
    "helm": ("helm",),
    "project_images": ("images",),
}
_failures: dict[str, Unavailable] = {}
_done: set[str] = set()


def wanted_by(fixtures: Iterable[str]) -> list[str]:
    """The steps that these fixtures need, in order."""
    wanted = {step for fixture in fixtures for step in WANTED_BY_FIXTURE.get(fixture, ())}
    return [step for step in STEPS if step in wanted]


def ensure(steps: Iterable[str]) -> None:
    """Does each step once in this process."""
    for step in steps:
        if step in _done or step in _failures:
            continue
        try:
            STEPS[step]()
            _done.add(step)
        except Unavailable as reason:
            _failures[step] = reason


def need(*steps: str) -> None:
    """Like `ensure`, and raises the first step's reason why it could not be done."""
    ensure(steps)
    for step in steps:
        if step in _failures:
            raise _failures[step]


def in_background(steps: Iterable[str]) -> "subprocess.Popen[bytes]":
    """Starts on the steps in another process; `ensure` then finds them done, or waits for the same lock."""
    return subprocess.Popen(
        ["nice", "-n", "15", sys.executable, "-m", "testbed", "build", *steps],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
