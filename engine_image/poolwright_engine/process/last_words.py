"""Why a process ends before its time: one line on stderr, and where Kubernetes looks for a container's reason."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

EXIT_ENGINE_DIED = 1
EXIT_CONFIG = 2
EXIT_SOME_FAILED = 3  # of a batch: every request has its answer, and some are errors
EXIT_INTERRUPTED = 130  # as a shell writes a death by SIGINT: 128 + 2
_TERMINATION_LOG = Path("/dev/termination-log")


def fail(message: str, code: int = EXIT_CONFIG) -> int:
    """Returns the exit code."""
    line = f"poolwright-engine: {' '.join(message.split())}"
    os.write(2, f"{line}\n".encode())
    if _TERMINATION_LOG.exists():  # Kubernetes makes it; elsewhere there is none to write to
        with contextlib.suppress(OSError):
            _TERMINATION_LOG.write_text(line, encoding="utf-8")
    return code


@contextlib.contextmanager
def told_when_cut_off(tell: Callable[[], None]) -> Iterator[None]:
    """SIGINT ends what runs inside as ever, SIGTERM alike with 143; either time `tell` is called on the way out."""

    def terminate(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # Only there may handlers be set, and only there does Python run them.
    handles = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if handles else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        tell()
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before)
