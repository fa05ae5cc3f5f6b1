"""The default suite as two sessions of pytest at once: `python scripts/suite.py [arguments of pytest]`.

Most tests compute on one thread, or wait for a process that does, so one session alone leaves a core idle. One session
has the contracts, which start processes and talk to them; the other has all else, the tests on a cluster last. Those
marked `node` measure, and wait until the machine is theirs (`testbed/plugin.py`). Owns how the suite is cut, and the
last line: what both came to. What is printed of the second follows when the first is over.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "not long and not gpu"
CONTRACTS = "tests/contract"
NO_TESTS = 5  # pytest's exit code where nothing was selected
# The variable by which the session with the cluster knows whom its last tests are to wait for.
AFTER = "POOLWRIGHT_TEST_ALONE_AFTER"
_CLOSING = re.compile(r"^=* ?(\d+ [a-z]+(?:, \d+ [a-z]+)*|no tests ran) in [\d.]+s", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    threads = max(1, (os.cpu_count() or 1) // 2)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    command = [sys.executable, "-m", "pytest", "-m", DEFAULT, *arguments]
    with tempfile.TemporaryFile() as later:
        first = subprocess.Popen(
            [*command, CONTRACTS], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        second = subprocess.Popen(
            [*command, "tests", f"--ignore={CONTRACTS}"],
            cwd=ROOT,
            env={**environment, AFTER: str(first.pid)},
            stdout=later,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=first.wait, daemon=True).start()  # or the second would see it even when it has ended
        try:
            outputs = [_shown(first)]
            codes = [first.wait(), second.wait()]
        except KeyboardInterrupt:  # the sessions have heard it too
            codes = [first.wait(), second.wait()]
            outputs = []
        later.seek(0)
        outputs.append(later.read().decode(errors="replace"))
        sys.stdout.write(outputs[-1])
    print(closing(outputs, time.monotonic() - began))
    return exit_code(codes)


def closing(outputs: Iterable[str], seconds: float) -> str:
    """One line of what several sessions came to, as pytest writes that of one."""
    counts: Counter[str] = Counter()
    for output in outputs:
        found = _CLOSING.findall(output)
        for part in found[-1].split(", ") if found else ():
            number, _, kind = part.partition(" ")
            if number.isdecimal():
                counts[kind.removesuffix("s") if kind == "errors" else kind] += int(number)
    failed = counts["failed"] + counts["error"]
    named = {"failed": failed, "passed": counts["passed"], "skipped": counts["skipped"]}
    text = ", ".join(f"{number} {kind}" for kind, number in named.items() if number) or "no tests ran"
    return f" {text} in {seconds:.2f}s ({timedelta(seconds=int(seconds))}) ".center(80, "=")


def exit_code(codes: Sequence[int]) -> int:
    """The first that is no success; a selection may leave one session without tests."""
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def _shown(session: "subprocess.Popen[bytes]") -> str:
    """What it prints, passed on as it comes."""
    parts = []
    if session.stdout is not None:
        while part := session.stdout.read1(4096):  # type: ignore[attr-defined]
            parts.append(part)
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    return b"".join(parts).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
