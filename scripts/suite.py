"""The default suite as three sessions of pytest at once: `python scripts/suite.py [arguments of pytest]`.

Most tests compute on one thread, or wait for a process that does, so one session alone leaves cores idle. One session
has the contracts, which start processes and talk to them; one the tests on a cluster, which mostly wait; one all else.
A test that measures has the others wait (`testbed/quiet.py`). Owns how the suite is cut, and the last line: what all
came to. What the others print follows when the first is over.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "not long and not gpu"
# What one session has beside its folder is chosen so that both take about as long.
CONTRACTS = ("tests/contract", "tests/kernels")
ON_CLUSTER = ("tests/api", "tests/e2e")
# Of those folders, but in the session of all else: they load transformers, which takes long, or need no cluster.
ELSEWHERE = (
    "tests/contract/test_hugging_face_parity.py",
    "tests/contract/test_same_tokens.py",
    "tests/e2e/test_demo.py",
    "tests/e2e/test_engine_smollm2.py",
)
NO_TESTS = 5  # pytest's exit code where nothing was selected
QUIET = "POOLWRIGHT_TEST_QUIET"  # the folder by which sessions wait for each other
_CLOSING = re.compile(r"^=* ?(\d+ [a-z]+(?:, \d+ [a-z]+)*|no tests ran) in [\d.]+s", re.MULTILINE)


def sessions() -> list[list[str]]:
    """What each has of the tests, as arguments of pytest: folders and files, and which of these not."""
    folders = sorted({f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in files_of_tests()})
    rest = [folder for folder in folders if folder not in (*CONTRACTS, *ON_CLUSTER)]
    without = [f"--ignore={file}" for file in ELSEWHERE]
    return [[*CONTRACTS, *without], [*rest, *ELSEWHERE], [*ON_CLUSTER, *without]]


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    threads = max(1, (os.cpu_count() or 1) // 2)
    command = [sys.executable, "-m", "pytest", "-m", DEFAULT, *arguments]
    with ExitStack() as stack:
        quiet = stack.enter_context(tempfile.TemporaryDirectory(prefix="poolwright-suite-"))
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ, QUIET: quiet}
        first, *others = sessions()

        def start(own: list[str], output: int | IO[bytes]) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                [*command, *own], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

        later = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        processes = [start(first, subprocess.PIPE), *map(start, others, later)]
        outputs = []
        try:
            outputs.append(_shown(processes[0]))
            codes = [process.wait() for process in processes]
        except KeyboardInterrupt:  # the sessions have heard it too
            codes = [process.wait() for process in processes]
        for output in later:
            output.seek(0)
            outputs.append(output.read().decode(errors="replace"))
            sys.stdout.write(outputs[-1])
    print(closing(outputs, time.monotonic() - began))
    return exit_code(codes)


def closing(outputs: Iterable[str], seconds: float) -> str:
    """One line of what several sessions came to, as pytest writes that of one; one without an end is an error."""
    counts: Counter[str] = Counter()
    for output in outputs:
        found = _CLOSING.findall(output)
        counts["error"] += not found  # a session that never came to its end has shown nothing
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
