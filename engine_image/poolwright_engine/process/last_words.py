"""Why a process ends before its time: one line on stderr, and where Kubernetes looks for a container's reason."""

import contextlib
import os
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
