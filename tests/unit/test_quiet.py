"""While one session of the suite measures, the others wait before their next module, and nobody waits for the dead."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import quiet
from testbed.quiet import Quiet

TESTS = Path(__file__).parent.parent
ONE, TWO = Path("test_one.py"), Path("test_two.py")


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[tuple[Quiet, Quiet]]:
    both = Quiet(tmp_path), Quiet(tmp_path)
    yield both
    for session in both:
        session.close()


def test_modules_run_beside_each_other(sessions: tuple[Quiet, Quiet]) -> None:
    for session in sessions:
        session.begin(ONE)
        session.begin(TWO)


def test_who_measures_waits_for_a_module_that_runs_and_keeps_the_next_from_beginning(
    sessions: tuple[Quiet, Quiet],
) -> None:
    measuring, other = sessions
    seen: list[str] = []
    inside, measured = threading.Event(), threading.Event()

    def measure() -> None:
        measuring.begin(ONE)
        with measuring.alone():
            seen.append("measures")
            inside.set()
            measured.wait(30)
            seen.append("has measured")

    other.begin(ONE)
    thread = threading.Thread(target=measure)
    thread.start()
    assert not inside.wait(0.2)
    other.begin(ONE)  # the next test of the same module
    assert not inside.is_set()
    threading.Timer(0.2, measured.set).start()
    other.begin(TWO)
    seen.append("next module")
    thread.join()
    assert seen == ["measures", "has measured", "next module"]


def test_two_who_measure_do_so_one_after_the_other(sessions: tuple[Quiet, Quiet]) -> None:
    within: list[int] = []
    most: list[int] = []

    def measure(session: Quiet) -> None:
        session.begin(ONE)
        with session.alone():
            within.append(1)
            most.append(len(within))
            within.pop()
        session.close()  # its test and its module end

    threads = [threading.Thread(target=measure, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert most == [1, 1]


def test_nobody_waits_for_a_session_that_died(tmp_path: Path, sessions: tuple[Quiet, Quiet]) -> None:
    program = (
        "import os, sys; from pathlib import Path; from testbed.quiet import Quiet;"
        "q = Quiet(Path(sys.argv[1])); q.begin(Path('x'));"
        "within = q.alone(); within.__enter__(); print('alone', flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    died = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, check=False)
    assert (died.stdout, died.returncode) == (b"alone\n", -9)
    with sessions[0].alone():
        pass


def test_without_other_sessions_there_is_none_and_children_are_of_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(quiet.FOLDER, raising=False)
    assert quiet.of_this_suite() is None
    monkeypatch.setenv(quiet.FOLDER, str(tmp_path))
    found = quiet.of_this_suite()
    assert found is not None
    found.close()
    assert quiet.FOLDER not in os.environ
