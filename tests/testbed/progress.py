"""Says what the test bed is waiting for.

Owns the one place where progress goes; a test run points it at the terminal, past pytest's capture.
"""

import sys
from collections.abc import Callable


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_sink: Callable[[str], None] = _to_stderr


def send_to(sink: Callable[[str], None]) -> None:
    global _sink
    _sink = sink


def say(text: str) -> None:
    _sink(f"testbed: {text}")


class Unavailable(Exception):
    """The bed cannot run on this machine; the text says what is missing and what would help."""
